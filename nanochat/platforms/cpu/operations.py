"""Operators for CPUs: C++ kernels, matrices in oneDNN's layout, and blocked attention.

Shapes: B batch, T time, H heads, D head dimension, C channels.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from nanochat.common import appendix, base_dir, tr
from nanochat.linear import Linear
from nanochat.loss import HIDDEN, SOFTCAP, Criterion, chunked_loss
from nanochat.platforms import host
from nanochat.platforms.blocked_attention import BlockedAttention
from nanochat.platforms.cpu import gradients
from nanochat.platforms.cpu.decoding import by_products, one_query
from nanochat.platforms.cpu.gradients import Product8, Trained
from nanochat.platforms.cpu.kernels import EPSILON, MANY_QUERIES, SUFFIXES, Kernels, kernels
from nanochat.platforms.cpu.panels import MEASURED, Panels, serve_here
from nanochat.platforms.cpu.stored import Packed, Packed8, store, store_int8
from nanochat.platforms.cpu.training import products_int8, takes_attention
from nanochat.platforms.operations import Matrices, Operations, multiplied

# In decoding, two products are faster than torch's operator if rows times keys are at least the
# first number, and if all keys have at most the second number of elements.
DECODED_KEYS = 256
DECODED_NUMBERS = 1 << 24
LOGIT_ROWS = 256  # with fewer, rounding the head to 8 bits takes longer than it saves


class CpuOperations(Operations):
    """Operators that use C++ kernels, or plain torch where the kernels are missing or do not apply.

    Where the kernels do not take bf16, compiled models compute attention without grouped heads in
    blocks, which takes less than half the time of torch's own.
    """

    loss_logits = 1 << 24
    # malloc reuses buffers of this size; larger ones take three to four times as long
    capped_logits = 1 << 21
    skips_masked = True

    def __init__(
        self,
        stacks_matrices: bool = True,
        compiles: bool = True,
    ):
        """With `compiles`, the C++ kernels are compiled on first use; without it, none are used."""
        super().__init__(stacks_matrices)
        self.fuses_layers = compiles
        self._compiles = compiles
        self._kernels: Kernels | None = None  # set when a model is served
        self._compiled_formats: tuple[torch.dtype, ...] = ()  # in which layers call our attention
        # Shapes of matrices whose layout has been checked.
        self._compared: set[torch.Size] = set()

    # --- which kernels ---------------------------------------------------------------------------

    @functools.cached_property
    def _library(self) -> Kernels | None:
        """The kernels for inference, or None if there are no C++ kernels."""
        if not self._compiles:
            return None
        return kernels(host.use_compile_cache(base_dir()))

    @functools.cached_property
    def _trained(self) -> Trained | None:
        """The kernels for training, or None if there are no C++ kernels.

        Passes without gradients do not use them, so that validation rounds in the same way before
        and after the first training step.
        """
        if self._library is None:
            return None
        gradient_kernels = gradients.attention_kernels()
        if gradient_kernels is None:
            return None
        return Trained(self._library, gradient_kernels)

    def _train(self, *tensors: Tensor) -> Trained | None:
        """Return the kernels for training, or None if they cannot be used with these tensors.

        The kernels need enabled gradients, uncompiled code, and host tensors that are all fp32 or
        all bf16.
        """
        if is_compiling() or not torch.is_grad_enabled():
            return None
        dtype = tensors[0].dtype
        if dtype not in SUFFIXES:
            return None
        for x in tensors:
            if x.dtype != dtype or not x.is_cpu:
                return None
        return self._trained

    def _train_with(self, matrices: Sequence[nn.Module], *tensors: Tensor) -> Trained | None:
        """Return the kernels for training with these matrices, or None if they cannot be used.

        The kernels multiply in 8 bits if the first matrix is set to do so. _own() must accept all
        matrices, and _train() the tensors.
        """
        use = self._train(*tensors)
        if use is None or not all(map(_own, matrices)):
            return None
        slot = cast(Linear, matrices[0]).multiply
        return use if slot is None else cast(Product8, slot).use

    def in_int8(self) -> Trained | None:
        """Return the kernels for training, set to multiply in 8 bits, or None if there are none."""
        if self._trained is None:
            return None
        products = products_int8(host.use_compile_cache(base_dir()))
        return None if products is None else replace(self._trained, int8=products)

    def _fast(self, *tensors: Tensor) -> Kernels | None:
        """Return the kernels for inference, or None if they cannot be used with these tensors.

        The kernels are used only after serve(), with gradients disabled, in uncompiled code, and
        with tensors that are all fp32 or all bf16.
        """
        if is_compiling():  # compiled code must not depend on _kernels
            return None
        if self._kernels is None or torch.is_grad_enabled():
            return None
        dtype = tensors[0].dtype
        if dtype not in SUFFIXES:
            return None
        for x in tensors:
            if x.dtype != dtype:
                return None
        return self._kernels

    # --- what a user is told ---------------------------------------------------------------------

    def needs_no_compiler(self, head_dim: int, dtype: torch.dtype) -> str:
        """Implement Operations.needs_no_compiler for processors with AVX512 or AVX2.

        No others have been measured.
        """
        if dtype not in SUFFIXES or not MEASURED & host.cpu_flags():
            return ""
        use = self._trained
        if use is None:
            return ""
        if dtype == torch.bfloat16:
            query = torch.empty(1, 1, 1, head_dim, dtype=dtype)
            if not use.training.takes(query):
                return ""
        return tr("kernels in C++ make an uncompiled step at least as fast")

    # --- serving ---------------------------------------------------------------------------------

    @torch.no_grad()
    def serve(self, model: nn.Module) -> None:
        """Implement Operations.serve, and let passes without gradients use the C++ kernels, if any.

        Matrices are stored in a layout from which a few rows are multiplied at the speed of memory,
        with the same result up to rounding: Panels for a model that computes in fp32, and oneDNN's
        layout for bf16 if oneDNN supports bf16 here. oneDNN's layout for fp32 is not used, because
        its rounding depends on how many rows are multiplied together. Published models get a
        Decoder.
        """
        self._kernels = self._library
        for module in model.modules():
            settle = getattr(module, "settle", None)
            if settle is not None:
                settle()
        dtype = getattr(model, "dtype", None)
        if dtype is not None and self._kernels is not None and serve_here(dtype):
            panels = functools.partial(Panels, self._kernels)
            store(model, panels, torch.float32)
            store_int8(model, panels)
        if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            packed = functools.partial(Packed, kernels=self._kernels, compared=self._compared)
            store(model, packed, torch.bfloat16)
            if dtype == torch.bfloat16 and self._kernels is not None and self._kernels.has_blocks:
                store_int8(model, functools.partial(Packed8, kernels=self._kernels))
        if self._kernels is not None and hasattr(model, "decoder"):  # a published model
            decoder = appendix("nanochat.platforms.cpu.decoder")
            model.decoder = decoder.Decoder.of(self._kernels, model)

    # --- norms -----------------------------------------------------------------------------------

    def norm(self, x: Tensor) -> Tensor:
        """Implement Operations.norm with a C++ kernel."""
        use = self._train(x)
        if use is not None:
            return gradients.Norm.apply(use, x, None)[0]
        kernels = self._fast(x)
        if kernels is None:
            return super().norm(x)
        return kernels.norm(x, None, EPSILON)[0]

    def norm_and_keep(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Implement Operations.norm_and_keep with a C++ kernel in training."""
        use = self._train(x)
        if use is None:
            return super().norm_and_keep(x)
        return gradients.Norm.apply(use, x, None)

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Implement Operations.add_norm with a single C++ kernel."""
        use = self._train(x, y)
        if use is not None:
            return gradients.Norm.apply(use, x, y)
        kernels = self._fast(x, y)
        if kernels is None:
            return super().add_norm(x, y)
        return kernels.norm(x, None, EPSILON, y)

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """Implement Operations.weighted_norm with a C++ kernel in inference.

        If gradients are disabled and the kernel does not apply, torch's own norm is used, which is
        cheaper than an autograd function.
        """
        kernels = self._fast(x) if weight.dim() == 1 else None
        if kernels is not None:
            return kernels.norm(x, weight, epsilon)[0]
        if torch.is_grad_enabled():
            return super().weighted_norm(x, weight, epsilon)
        wide = F.rms_norm(x.float(), (x.size(-1),), eps=epsilon)
        return wide.mul_(weight).to(x.dtype)

    def add_weighted_norm(
        self,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """Implement Operations.add_weighted_norm with a single C++ kernel in inference."""
        kernels = self._fast(x, y)
        if kernels is None:
            return super().add_weighted_norm(x, y, weight, epsilon)
        return kernels.norm(x, weight, epsilon, y)

    # --- heads -----------------------------------------------------------------------------------

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Implement Operations.rotary with a C++ kernel in inference."""
        kernels = self._fast(x, cos)
        if kernels is None:
            return super().rotary(x, cos, sin)
        return kernels.turn(x, None, cos, sin, epsilon=None)

    def normed_heads(
        self,
        x: Tensor,  # (B, T, H, D)
        weight: Tensor,  # (H, D) fp32
        epsilon: float,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Implement Operations.normed_heads with a single C++ kernel in inference."""
        kernels = self._fast(x, cos)
        if kernels is None:
            return super().normed_heads(x, weight, epsilon, cos, sin)
        return kernels.turn(x, weight, cos, sin, epsilon)

    def heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Matrices,
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        sharpen: float,
        joined_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement Operations.heads with C++ kernels.

        The kernels normalize before they rotate, with the same result up to rounding, because
        rotating a head keeps its norm.
        """
        trained = self._trained_heads(x, matrices, head_dim, cos, sin, sharpen)
        if trained is not None:
            return trained
        kernels = self._fast(x, cos)
        if kernels is None:
            return super().heads(x, matrices, head_dim, cos, sin, sharpen, joined_weight)
        q, k, v = multiplied(x, matrices, head_dim)
        q = kernels.turn(q, None, cos, sin, EPSILON, sharpen)
        k = kernels.turn(k, None, cos, sin, EPSILON, sharpen)
        return q, k, v

    def gated_heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Matrices,
        gate: nn.Module,
        value: Tensor,  # (B, T, Hkv * D)
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        sharpen: float,
        cast_weights: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement Operations.gated_heads with C++ kernels in training."""
        trained = self._trained_heads(x, matrices, head_dim, cos, sin, sharpen, gate, value)
        if trained is not None:
            return trained
        return super().gated_heads(
            x,
            matrices,
            gate,
            value,
            head_dim,
            cos,
            sin,
            sharpen,
            cast_weights,
        )

    def _trained_heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Matrices,
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        sharpen: float,
        gate: nn.Module | None = None,
        value_embedding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return heads(), or gated_heads() if there is a gate, computed by the training kernels.

        Returns None if the kernels do not support the matrices, the tensors or the rotation.
        """
        if callable(matrices) or head_dim != 2 * cos.size(-1):
            return None
        if gate is not None and not _own(gate):
            return None
        inputs = (x, cos, sin) if value_embedding is None else (x, cos, sin, value_embedding)
        use = self._train_with(matrices, *inputs)
        if use is None:
            return None
        gate_weight = None if gate is None else cast(Linear, gate).weight
        weights = [cast(Linear, matrix).weight for matrix in matrices]
        return gradients.Heads.apply(
            use, x, cos, sin, sharpen, gate_weight, value_embedding, *weights
        )

    def offset_keys(self, k: Tensor) -> Tensor:
        """Implement Operations.offset_keys with a C++ kernel in training."""
        use = self._train(k)
        if use is None:
            return super().offset_keys(k)
        return gradients.Offset.apply(use, k)

    def exclude_own(
        self,
        y: Tensor,  # (B, T, H, D)
        v: Tensor,  # (B, T, Hkv, D)
    ) -> Tensor:  # (B, T, H, D)
        """Implement Operations.exclude_own with a C++ kernel in training."""
        use = self._train(y, v)
        if use is None:
            return super().exclude_own(y, v)
        return gradients.Exclude.apply(use, y, v)

    def project(
        self,
        x: Tensor,  # (..., inputs)
        matrix: nn.Module,
        cast_weight: Tensor | None,
    ) -> Tensor:
        """Implement Operations.project with one autograd function in training."""
        use = self._train_with([matrix], x)
        if use is None:
            return super().project(x, matrix, cast_weight)
        return gradients.Product.apply(use, x, cast(Linear, matrix).weight)

    # --- the rest of a layer ---------------------------------------------------------------------

    def mlp(
        self,
        x: Tensor,  # (..., C)
        into: nn.Module,
        out: nn.Module,
        cast_weights: Sequence[Tensor | None],
    ) -> Tensor:
        """Implement Operations.mlp with one autograd function in training."""
        use = self._train_with([into, out], x)
        if use is None:
            return super().mlp(x, into, out, cast_weights)
        into_weight = cast(Linear, into).weight
        out_weight = cast(Linear, out).weight
        return gradients.SquaredReluMlp.apply(use, x, into_weight, out_weight)

    def squared_relu(self, x: Tensor) -> Tensor:
        """Implement Operations.squared_relu with a C++ kernel in inference."""
        kernels = self._fast(x)
        if kernels is None:
            return super().squared_relu(x)
        return kernels.squared_relu(x)

    def swiglu(self, x: Tensor) -> Tensor:
        """Implement Operations.swiglu with a C++ kernel in inference."""
        kernels = self._fast(x)
        if kernels is None:
            return super().swiglu(x)
        return kernels.swiglu(x)

    # --- between layers --------------------------------------------------------------------------

    def smear(
        self,
        x: Tensor,  # (B, T, C)
        previous: Tensor | None,
        gate: nn.Module,
        smear_lambda: Tensor,  # (1,) fp32
    ) -> Tensor:
        """Implement Operations.smear with a C++ kernel in training on whole sequences."""
        use = self._train(x) if previous is None and _own(gate) else None
        if use is None:
            return super().smear(x, previous, gate, smear_lambda)
        gate_weight = cast(Linear, gate).weight[0]
        return gradients.Smear.apply(use, x, gate_weight, smear_lambda)

    def mix(
        self,
        x: Tensor,  # (B, T, C)
        x0: Tensor,  # (B, T, C)
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:
        """Implement Operations.mix with a C++ kernel."""
        use = self._train(x, x0, a, b)
        if use is not None:
            return gradients.Mix.apply(use, x, x0, a, b)
        kernels = self._fast(x, x0, a, b)
        if kernels is None:
            return super().mix(x, x0, a, b)
        return kernels.mix(x, x0, a, b), x0

    def backout(
        self,
        x: Tensor,  # (B, T, C)
        middle: Tensor,  # (B, T, C)
        share: Tensor,  # (1,) fp32
    ) -> Tensor:
        """Implement Operations.backout with a C++ kernel in training."""
        use = self._train(x, middle)
        if use is None:
            return super().backout(x, middle, share)
        all_of_x = x.new_ones(())
        remainder, _ = gradients.Mix.apply(use, x, middle, all_of_x, -share.to(x.dtype))
        return remainder

    # --- logits and loss -------------------------------------------------------------------------

    def softcap(self, logits: Tensor) -> Tensor:
        """Implement Operations.softcap with a C++ kernel in inference."""
        kernels = self._fast(logits)
        if kernels is None:
            return super().softcap(logits)
        return kernels.softcap(logits, SOFTCAP)

    def log_totals(self, logits: Tensor) -> Tensor | None:
        """Implement Operations.log_totals with a C++ kernel in inference, or return None."""
        kernels = self._fast(logits)
        if kernels is None:
            return None
        return kernels.log_totals(logits)

    def loss(
        self,
        x: Tensor,  # (N, C)
        head: Tensor,  # (V', C)
        targets: Tensor,  # (N,)
        criterion: Criterion,
        weights: Tensor | None,  # (N,)
        chunk: int,
        use8: Trained | None = None,  # in training, computes the logits of many tokens in 8 bits
    ) -> Tensor:
        """Implement Operations.loss, if `use8` is set with a head that is rounded to 8 bits."""
        x, targets, weights = self.with_targets(x, targets, weights)
        if len(x) < LOGIT_ROWS or not torch.is_grad_enabled():
            use8 = None
        criterion = self.fused(criterion, x, head, use8)
        return chunked_loss(x, head, targets, criterion, weights, chunk)

    def fused(
        self,
        criterion: Criterion,
        x: Tensor,  # (N, C)
        head: Tensor | None = None,  # (V', C), needed with `use8`
        use8: Trained | None = None,  # computes the logits in 8 bits
    ) -> Criterion:
        """Implement Operations.fused with a C++ kernel that computes losses and gradient.

        Compiled code uses plain torch instead, because torch's compiler fuses the loss itself.
        """
        if is_compiling() or x.dtype not in SUFFIXES or self._library is None:
            return criterion
        multiply = None
        if use8 is not None and head is not None:
            multiply = use8.matrix([head], x).times
        return gradients.Fused(criterion, self._library.loss, multiply)

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:
        """Implement Operations.square_sums with a C++ kernel for contiguous fp32 gradients."""
        if self._trained is None:
            return super().square_sums(gradients)
        for gradient in gradients:
            if gradient.dtype != torch.float32 or not gradient.is_contiguous():
                return super().square_sums(gradients)
        return self._trained.training.square_sums(gradients)

    # --- attention -------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Implement PlainAttention.attend with C++ kernels.

        Compiled bf16 models use BlockedAttention where the kernels do not take bf16, unless heads
        are grouped or `scale` is given.
        """
        B, _, H, D = q.shape
        factor = D**-0.5 if scale is None else scale
        if self._trains_attention(q, k, v):
            return gradients.Attention.apply(q, k, v, None, window, factor)  # type: ignore[no-any-return]
        kernels = self._fast(q, k, v)
        if kernels is not None and _many(q, kernels):
            first = torch.zeros(B, dtype=torch.long)
            return kernels.attend_many(q, k, v, first, window, factor)
        is_plain = k.size(2) == H and scale is None
        if is_compiling() and q.dtype == torch.bfloat16 and is_plain:
            return BlockedAttention.apply(q, k, v, window, HIDDEN)  # type: ignore[no-any-return]
        return super().attend(q, k, v, window, scale)

    def by_documents(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        positions: Tensor,  # (B, T)
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:  # (B, T, H, D)
        """Implement PlainAttention.by_documents with C++ kernels in training."""
        if not self._trains_attention(q, k, v):
            return None
        factor = q.size(3) ** -0.5 if scale is None else scale
        return gradients.Attention.apply(q, k, v, positions, window, factor)  # type: ignore[no-any-return]

    def prepare_compiling(self) -> None:
        """Compile the C++ kernels that compiled layers call."""
        if self._trained is not None:
            self._compiled_formats = self._trained.training.attention_formats

    def _trains_attention(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether gradients.Attention computes attention with its gradients here."""
        if is_compiling():
            return torch.is_grad_enabled() and takes_attention(q, self._compiled_formats)
        use = self._train(q, k, v)
        return use is not None and use.training.takes(q)

    def masked(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        visible: Tensor,  # (B, 1, T, K)
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Implement PlainAttention.masked with faster operators for bf16.

        For a single query per head, torch's operator multiplies one number at a time, which takes 2
        to 10 times as long. So heads that share their keys are passed as several queries of one
        head. Ungrouped heads are computed with two products per row, or with the query doubled. If
        they have several queries that need gradients, products take less than half the time of
        torch's operator.
        """
        B, T, H, D = q.shape
        K = k.size(1)
        Hkv = k.size(2)
        group = H // Hkv
        if not q.dtype == k.dtype == torch.bfloat16:
            return super().masked(q, k, v, visible, scale)
        if T > 1:
            if q.requires_grad and group == 1:
                return by_products(q, k, v, visible, scale)
            return super().masked(q, k, v, visible, scale)
        if group == 1 and B * K >= DECODED_KEYS and k.numel() <= DECODED_NUMBERS:
            return one_query(q, k, v, visible, scale)
        queries = q.reshape(B, Hkv, group, D)
        if group == 1:  # twice, because a single query is multiplied one number at a time
            queries = queries.expand(-1, -1, 2, -1)
        y = F.scaled_dot_product_attention(
            queries,
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=visible,
            scale=scale,
        )  # (B, Hkv, queries, D)
        return y[:, :, :group].reshape(B, 1, H, D)

    def extend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        cached_k: Tensor,  # (B, K, Hkv, D)
        cached_v: Tensor,  # (B, K, Hkv, D)
        positions: Tensor,  # (B, T)
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:  # (B, T, H, D)
        """Implement PlainAttention.extend with C++ kernels.

        A few queries per row, as in a pass with drafts, are computed one after another, so that
        they are rounded as they are alone. Returns None if _fast() does, or if there are more
        queries per row and _many() does not accept them.
        """
        B, T, _, D = q.shape
        kernels = self._fast(q, cached_k)
        if kernels is None:
            return None
        factor = D**-0.5 if scale is None else scale
        if T == 1:
            return kernels.attend(q, k, v, cached_k, cached_v, positions, window, factor)
        if T < MANY_QUERIES:
            ys = []
            for t in range(T):
                new_q, new_k, new_v = (x[:, t : t + 1] for x in (q, k, v))
                position = positions[:, t : t + 1].contiguous()
                ys.append(
                    kernels.attend(
                        new_q, new_k, new_v, cached_k, cached_v, position, window, factor
                    )
                )
            return torch.cat(ys, dim=1)
        if not _many(q, kernels):
            return None
        rows = torch.arange(B)[:, None]
        cached_k[rows, positions] = k  # raises IndexError for positions beyond the cache
        cached_v[rows, positions] = v
        first = positions[:, 0]
        return kernels.attend_many(q, cached_k, cached_v, first, window, factor)


def _own(matrix: nn.Module) -> TypeGuard[Linear]:
    """Return whether the training kernels can stand in for the module `matrix`.

    The module must be a Linear of this project without a bias or an adapter, and multiply only by
    its own weight, rounded to the format of the activations or to 8 bits.
    """
    if type(matrix) is not Linear or type(matrix.weight) is not nn.Parameter:
        return False
    is_known = matrix.multiply is None or isinstance(matrix.multiply, Product8)
    return is_known and matrix.adapter is None and not matrix.has_bias


def _many(q: Tensor, kernels: Kernels) -> bool:  # (B, T, H, D)
    """Return whether attend_many() supports these queries and is faster than torch's own."""
    return q.size(1) >= MANY_QUERIES and kernels.takes_many(q)

"""How CPUs compute what models ask for: with C++ kernels, oneDNN's layout of matrices, and blocked attention."""

import functools
from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from nanochat.common import base_dir
from nanochat.gpt import Head
from nanochat.linear import Linear
from nanochat.loss import HIDDEN, SOFTCAP, chunked_loss, token_weights
from nanochat.platforms import host
from nanochat.platforms.blocked_attention import BlockedAttention
from nanochat.platforms.cpu import gradients
from nanochat.platforms.cpu.decoding import by_products, one_query
from nanochat.platforms.cpu.gradients import Trained
from nanochat.platforms.cpu.kernels import EPSILON, SUFFIXES, Kernels, kernels
from nanochat.platforms.cpu.training import training
from nanochat.platforms.operations import Matrices, Operations, multiplied

# Two products beat torch's operator in a decoding pass of so many rows times keys, and of so many numbers in all keys.
DECODED_KEYS, DECODED_NUMBERS = 256, 1 << 24
FEW_ROWS = (
    32  # that are multiplied with a matrix faster by our own loop than by oneDNN, on one thread
)
MEASURED = {"avx512f", "avx2"}  # on which kernels beat torch's compiler
LOGIT_ROWS = 256  # of which the head's integers are worth making
MANY_QUERIES = 8  # of a row, for which keys and values are laid out anew


class _Packed:
    """A bf16 matrix in the layout of oneDNN."""

    def __init__(
        self, weight: Tensor, kernels: Kernels | None, compared: set[torch.Size] | None = None
    ):
        """`weight` is (outputs, inputs). `compared` gathers the shapes whose layout is known to be as expected."""
        weight, compared = weight.detach(), set() if compared is None else compared
        self._shape, self._kernels = weight.shape, kernels
        self._laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        compare = weight.shape not in compared
        self._place = (
            None if kernels is None else kernels.reads(self._laid_out, weight.contiguous(), compare)
        )
        if self._place is not None:
            compared.add(weight.shape)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Multiply x (..., inputs); fills the slot `multiply` of a Linear, whose weight is not needed."""
        if (
            self._place is not None
            and x.numel() <= FEW_ROWS * self._shape[1]
            and torch.get_num_threads() == 1
        ):
            assert self._kernels is not None
            return self._kernels.multiply(x, self._place, self._shape[0])
        return self._multiply(x, self._laid_out, None, "none", [], "")


class CpuOperations(Operations):
    """C++ kernels where they can be compiled, with and without gradients, else plain torch; and blocked attention in
    bf16 models that torch.compile compiles, where it takes less than half the time."""

    loss_logits = 1 << 24
    # malloc keeps buffers of this size; larger ones take three to four times as long
    capped_logits = 1 << 21
    skips_masked = True

    def __init__(self, stacks_matrices: bool = True, compiles: bool = True, int8: str = ""):
        """`compiles`: models that are held or trained use C++ kernels, which are compiled at their first use. `int8`:
        why these multiply activations of bf16 in integers of 8 bits in training, "" if they do not; see int8.py."""
        super().__init__(stacks_matrices)
        self.fuses_layers = compiles
        self._compiles, self._int8 = compiles, int8
        self._kernels: Kernels | None = None  # once a model is served
        self._compared: set[torch.Size] = (
            set()
        )  # shapes of matrices whose layout needs no second look

    @functools.cached_property
    def _library(self) -> Kernels | None:
        """The kernels of this machine, or None if they cannot or shall not be compiled. Looked for once: a loss asks in
        every pass."""
        return kernels(host.use_compile_cache(base_dir())) if self._compiles else None

    @functools.cached_property
    def _trained(self) -> Trained | None:
        """The kernels of training on this machine, or None if they cannot or shall not be compiled. Passes without
        gradients do not use them, so that a validation rounds alike before and after the first step of training."""
        kernels = (
            training(host.use_compile_cache(base_dir())) if self._library is not None else None
        )
        if self._library is None or kernels is None:
            return None
        return Trained(self._library, kernels, bool(self._int8))

    def _train(self, *tensors: Tensor) -> Trained | None:
        """The kernels of training, if gradients are wanted and the kernels can compute with these tensors."""
        if is_compiling() or not torch.is_grad_enabled():
            return None
        dtype = tensors[0].dtype
        return (
            self._trained
            if dtype in SUFFIXES and all(x.dtype == dtype and x.is_cpu for x in tensors)
            else None
        )

    def coarser(self, dtype: torch.dtype) -> str:
        """See Operations.coarser. Products in 8 bits need the kernels of training."""
        wants_int8 = self._compiles and self._int8 and dtype == torch.bfloat16
        return f"int8 ({self._int8})" if wants_int8 and self._trained is not None else ""

    def needs_no_compiler(self, head_dim: int, dtype: torch.dtype) -> str:
        """See Operations.needs_no_compiler. Only processors with AVX512 or AVX2 were measured."""
        if (
            dtype not in SUFFIXES
            or not MEASURED & host.cpu_flags()
            or (use := self._trained) is None
        ):
            return ""
        if dtype == torch.bfloat16 and not use.training.takes(
            torch.empty(1, 1, 1, head_dim, dtype=dtype)
        ):
            return ""
        return "kernels in C++ make an uncompiled step at least as fast"

    @torch.no_grad()
    def serve(self, model: nn.Module) -> None:
        """See Operations.serve. A matrix of bf16 is laid out for oneDNN once instead of in every product: one row is
        multiplied in half the time, at the speed of the memory, with the same result up to rounding. fp32 stays as it
        is, since there the rounding would depend on how many rows are multiplied together. From here on whatever is
        computed without gradients uses compiled kernels for small operators."""
        self._kernels = self._library
        for module in model.modules():
            if (settle := getattr(module, "settle", None)) is not None:
                settle()
        if (
            not torch.backends.mkldnn.is_available()
            or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            return
        pack = functools.partial(_Packed, kernels=self._kernels, compared=self._compared)
        for module in model.modules():
            if (join := getattr(module, "join", None)) is not None:
                join(pack, torch.bfloat16)
            weight = getattr(module, "weight", None)
            if not hasattr(module, "multiply") or not isinstance(weight, nn.Parameter):
                continue
            if module.multiply is not None:
                continue  # it multiplies another way already
            if weight.dtype != torch.bfloat16 or not weight.numel():
                continue
            setattr(module, "multiply", pack(weight))  # noqa: B010 - not an attribute of every module
            if isinstance(module, Linear) and not isinstance(module, Head):
                # The weights of heads and vocabularies are read otherwise too
                module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """See Operations.weighted_norm. Without gradients the operators are called one by one, which costs less."""
        if weight.dim() == 1 and (kernels := self._fast(x)) is not None:
            return kernels.norm(x, weight, epsilon)[0]
        if torch.is_grad_enabled():
            return super().weighted_norm(x, weight, epsilon)
        wide = F.rms_norm(x.float(), (x.size(-1),), eps=epsilon)
        return wide.mul_(weight).to(x.dtype)

    def _fast(self, *tensors: Tensor) -> Kernels | None:
        """The compiled kernels, if they can compute with these tensors."""
        if (
            is_compiling() or self._kernels is None or torch.is_grad_enabled()
        ):  # compiled code must not watch _kernels
            return None
        dtype = tensors[0].dtype
        return (
            self._kernels if dtype in SUFFIXES and all(x.dtype == dtype for x in tensors) else None
        )

    def norm(self, x: Tensor) -> Tensor:
        """See Operations.norm."""
        if (use := self._train(x)) is not None:
            return gradients.Norm.apply(use, x, None)[0]
        kernels = self._fast(x)
        return super().norm(x) if kernels is None else kernels.norm(x, None, EPSILON)[0]

    def norm_and_keep(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See Operations.norm_and_keep."""
        use = self._train(x)
        return super().norm_and_keep(x) if use is None else gradients.Norm.apply(use, x, None)

    def smear(
        self, x: Tensor, before: Tensor | None, gate: nn.Module, smear_lambda: Tensor
    ) -> Tensor:
        """See Operations.smear."""
        if before is not None or not _own(gate) or (use := self._train(x)) is None:
            return super().smear(x, before, gate, smear_lambda)
        return gradients.Smear.apply(use, x, gate.weight[0], smear_lambda)

    def offset_keys(self, k: Tensor) -> Tensor:
        """See Operations.offset_keys."""
        use = self._train(k)
        return super().offset_keys(k) if use is None else gradients.Offset.apply(use, k)

    def backout(self, x: Tensor, middle: Tensor, share: Tensor) -> Tensor:
        """See Operations.backout."""
        if (use := self._train(x, middle)) is None:
            return super().backout(x, middle, share)
        return gradients.Mix.apply(use, x, middle, x.new_ones(()), -share.to(x.dtype))[0]

    def mlp(
        self, x: Tensor, into: nn.Module, out: nn.Module, cast_weights: Sequence[Tensor | None]
    ) -> Tensor:
        """See Operations.mlp."""
        if not (_own(into) and _own(out)) or (use := self._train(x)) is None:
            return super().mlp(x, into, out, cast_weights)
        return gradients.SquaredReluMlp.apply(use, x, into.weight, out.weight)

    def project(self, x: Tensor, matrix: nn.Module, cast_weight: Tensor | None) -> Tensor:
        """See Operations.project."""
        if not _own(matrix) or (use := self._train(x)) is None:
            return super().project(x, matrix, cast_weight)
        return gradients.Product.apply(use, x, matrix.weight)

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """See Operations.add_norm."""
        if (use := self._train(x, y)) is not None:
            return gradients.Norm.apply(use, x, y)
        kernels = self._fast(x, y)
        return super().add_norm(x, y) if kernels is None else kernels.norm(x, None, EPSILON, y)

    def add_weighted_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """See Operations.add_weighted_norm."""
        kernels = self._fast(x, y)
        return (
            super().add_weighted_norm(x, y, weight, epsilon)
            if kernels is None
            else kernels.norm(x, weight, epsilon, y)
        )

    def normed_heads(
        self, x: Tensor, weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """See Operations.normed_heads."""
        if (kernels := self._fast(x, cos)) is None:
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
        """See Operations.heads. Rotating keeps the norm of a head, so it does not matter what comes first."""
        if (trained := self._trained_heads(x, matrices, head_dim, cos, sin, sharpen)) is not None:
            return trained
        if (kernels := self._fast(x, cos)) is None:
            return super().heads(x, matrices, head_dim, cos, sin, sharpen, joined_weight)
        q, k, v = multiplied(x, matrices, head_dim)
        q, k = (kernels.turn(head, None, cos, sin, EPSILON, sharpen) for head in (q, k))
        return q, k, v

    def _trained_heads(
        self,
        x: Tensor,
        matrices: Matrices,
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        sharpen: float,
        gate: nn.Module | None = None,
        value: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """heads(), or gated_heads(), by the kernels of training; None if they do not take part."""
        if callable(matrices) or not all(map(_own, (*matrices, *([] if gate is None else [gate])))):
            return None
        if (
            head_dim != 2 * cos.size(-1)
            or (use := self._train(x, cos, sin, *([] if value is None else [value]))) is None
        ):
            return None
        weights = [matrix.weight for matrix in matrices]
        return gradients.Heads.apply(
            use, x, cos, sin, sharpen, None if gate is None else gate.weight, value, *weights
        )

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
        """See Operations.gated_heads."""
        heads = self._trained_heads(x, matrices, head_dim, cos, sin, sharpen, gate, value)
        return heads or super().gated_heads(
            x, matrices, gate, value, head_dim, cos, sin, sharpen, cast_weights
        )

    def mix(self, x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See Operations.mix."""
        if (use := self._train(x, x0, a, b)) is not None:
            return gradients.Mix.apply(use, x, x0, a, b)
        kernels = self._fast(x, x0, a, b)
        return super().mix(x, x0, a, b) if kernels is None else (kernels.mix(x, x0, a, b), x0)

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:
        """See Operations.square_sums."""
        if self._trained is None or not all(
            g.dtype == torch.float32 and g.is_contiguous() for g in gradients
        ):
            return super().square_sums(gradients)
        return self._trained.training.square_sums(gradients)

    def squared_relu(self, x: Tensor) -> Tensor:
        """See Operations.squared_relu."""
        kernels = self._fast(x)
        return super().squared_relu(x) if kernels is None else kernels.squared_relu(x)

    def swiglu(self, x: Tensor) -> Tensor:
        """See Operations.swiglu."""
        kernels = self._fast(x)
        return super().swiglu(x) if kernels is None else kernels.swiglu(x)

    def softcap(self, logits: Tensor) -> Tensor:
        """See Operations.softcap."""
        kernels = self._fast(logits)
        return super().softcap(logits) if kernels is None else kernels.softcap(logits, SOFTCAP)

    def log_totals(self, logits: Tensor) -> Tensor | None:
        """See Operations.log_totals."""
        kernels = self._fast(logits)
        return None if kernels is None else kernels.log_totals(logits)

    def loss(
        self,
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        vocab: int,
        weights: Tensor | None,
        chunk: int,
        capped: bool = True,
    ) -> Tensor:
        """See Operations.loss. torch's compiler makes a fused loss itself."""
        x, targets, weights = self.with_targets(x, targets, weights)
        if is_compiling() or x.dtype not in SUFFIXES or self._library is None:
            return chunked_loss(x, head, targets, vocab, weights, chunk, capped)
        multiply = None
        use = self._train(x)
        # For few rows, making integers of the head would take longer than it saves
        if capped and use is not None and len(x) >= LOGIT_ROWS and use.takes_int8([head], x):
            multiply = use.matrix([head], x).times
        scale = token_weights(targets, weights)
        return gradients.Loss.apply(
            x,
            head,
            targets,
            scale,
            vocab,
            min(chunk, x.size(0)),
            SOFTCAP if capped else 0.0,
            self._library.loss,
            multiply,
        )

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
        """See PlainAttention.extend."""
        kernels = self._fast(q, cached_k)
        if kernels is None or (q.size(1) > 1 and not _many(q, kernels)):
            return None
        factor = q.size(3) ** -0.5 if scale is None else scale
        if q.size(1) == 1:
            return kernels.attend(q, k, v, cached_k, cached_v, positions, window, factor)
        rows = torch.arange(q.size(0))[:, None]
        cached_k[rows, positions] = k  # which refuses positions beyond the cache
        cached_v[rows, positions] = v
        return kernels.attend_many(q, cached_k, cached_v, positions[:, 0], window, factor)

    def masked(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        visible: Tensor,  # (B, 1, T, K)
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See PlainAttention.masked.

        In bf16, torch's operator multiplies a single query number by number, which takes 2 to 10 times as long as what
        is done instead: heads that share their keys become queries of one head, and others become two products for each
        row. With gradients, products take less than half the time of torch's operator with a mask.
        """
        B, T, H, D = q.shape
        groups = H // k.size(2)
        if not q.dtype == k.dtype == torch.bfloat16:
            return super().masked(q, k, v, visible, scale)
        if T > 1:
            products = q.requires_grad and groups == 1
            return (
                by_products(q, k, v, visible, scale)
                if products
                else super().masked(q, k, v, visible, scale)
            )
        if groups == 1 and B * k.size(1) >= DECODED_KEYS and k.numel() <= DECODED_NUMBERS:
            return one_query(q, k, v, visible, scale)
        several = q.reshape(B, k.size(2), groups, D)
        if groups == 1:
            several = several.expand(-1, -1, 2, -1)
        y = F.scaled_dot_product_attention(
            several, k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible, scale=scale
        )  # (B, Hkv, queries, D)
        return y[:, :, :groups].reshape(B, 1, H, D)

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See PlainAttention.attend."""
        if (use := self._train(q, k, v)) is not None and use.training.takes(q):
            return gradients.Attention.apply(
                use, q, k, v, window, q.size(3) ** -0.5 if scale is None else scale
            )
        kernels, grouped = self._fast(q, k, v), k.size(2) != q.size(2)
        if kernels is not None and _many(q, kernels):
            first = torch.zeros(q.size(0), dtype=torch.long)
            return kernels.attend_many(
                q, k, v, first, window, q.size(3) ** -0.5 if scale is None else scale
            )
        if is_compiling() and q.dtype == torch.bfloat16 and not grouped:
            return BlockedAttention.apply(q, k, v, window, HIDDEN)  # type: ignore[no-any-return]
        return super().attend(q, k, v, window, scale)


def _own(matrix: nn.Module) -> TypeGuard[Linear]:
    """Whether a matrix is one of ours without adapters, and multiplies with its whole weight."""
    plain = type(matrix) is Linear and matrix.multiply is None and matrix.adapter is None
    return plain and type(matrix.weight) is nn.Parameter


def _many(q: Tensor, kernels: Kernels) -> bool:  # (B, T, H, D)
    """Whether attend_many() takes less time than torch's operators."""
    return q.size(1) >= MANY_QUERIES and kernels.takes_many(q)

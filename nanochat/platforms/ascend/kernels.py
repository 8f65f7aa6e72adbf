"""How Ascend NPUs compute: by torch's own operators, by blocks of matmuls, or by fused operators.

The fused operators are torch_npu's, which is imported where it is used, that is, only where a
tensor lies on an NPU. Its masks are True where a key is hidden. Shapes: B batch, T time, H heads,
Hkv heads of keys and values, D head dimension, C channels, K keys.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import TensorCache, cache_mask
from nanochat.loss import HIDDEN
from nanochat.platforms import few_launches
from nanochat.platforms.blocked_attention import BlockedAttention, ungrouped
from nanochat.platforms.muon import ForeachMuon, FusedMuon
from nanochat.platforms.operations import Operations, finite_mask
from nanochat.platforms.together import HasUnits, cast_together

EPSILON = 2.0**-23  # of fp32: what F.rms_norm adds where none is given, for every format
WHOLE = 2147483647  # a window without end
# The operators of torch_npu that each kind of chip computes with.
NEEDS = {
    "fused": (
        "npu_fusion_attention",
        "npu_fused_infer_attention_score",
        "npu_rms_norm",
        "npu_rms_norm_backward",
        "npu_add_rms_norm",
        "npu_rotary_mul",
    ),
    "chunked": (),
    "inference": ("npu_prompt_flash_attention", "npu_incre_flash_attention"),
}


def missing(operators: Sequence[str]) -> list[str]:
    """Return those of the operators that this torch_npu lacks."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return [name for name in operators if not hasattr(torch_npu, name)]


# --- torch's own operators -----------------------------------------------------------------------


class AscendPlain(Operations):
    """torch's own operators on an NPU."""

    name = "plain"
    grain = 64
    muon_class = ForeachMuon

    def __init__(self, stacks_matrices: bool = True, saturates: bool = False):
        """`saturates`: the chip would take the inf of an fp16 mask for an overflow."""
        super().__init__(stacks_matrices)
        self.saturates = saturates
        self.constants = TensorCache(16)  # masks, and vectors of zeros and ones

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """See PlainAttention.mask."""
        if self._needs_finite_mask(dtype):
            return finite_mask(visible, dtype)
        return visible

    def causal(
        self,
        q: Tensor,  # (B, H, T, D)
        k: Tensor,  # (B, Hkv, T, D)
        v: Tensor,  # (B, Hkv, T, D)
        scale: float | None,
    ) -> Tensor:
        """See PlainAttention.causal."""
        if not self._needs_finite_mask(q.dtype):
            return super().causal(q, k, v, scale)
        T = q.size(2)
        dtype = q.dtype
        device = q.device

        def triangle() -> Tensor:  # (T, T) which keys each query sees
            visible = torch.ones(T, T, dtype=torch.bool, device=device).tril()
            return finite_mask(visible, dtype)

        mask = self.constants.get(("triangle", T, device, dtype), triangle)
        is_grouped = k.size(1) != q.size(1)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            scale=scale,
            enable_gqa=is_grouped,
        )

    def _needs_finite_mask(self, dtype: torch.dtype) -> bool:
        """Return whether attention must mask with a large negative number instead of -inf."""
        return self.saturates and dtype == torch.float16


# --- 910A: no fused operators --------------------------------------------------------------------


class AscendChunked(AscendPlain):
    """For chips without fused attention (910A): attention by matmuls, and few launches elsewhere."""

    name = "chunked"
    fuses_layers = True
    loss_chunk = 2048
    muon_class = FusedMuon

    def cast_together(
        self,
        layers: Sequence[HasUnits],
        dtype: torch.dtype,
    ) -> list[list[Tensor]] | None:
        """See Operations.cast_together.

        Without gradients parameters mostly have the compute dtype already.
        """
        if not torch.is_grad_enabled():
            return None
        units = [layer.units() for layer in layers]
        return cast_together(units, dtype)

    def heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Sequence[nn.Module],
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        sharpen: float,
        joined_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
        """See Operations.heads.

        One matmul makes all heads, and queries and keys are rotated and normed together.
        """
        weights = [cast(Tensor, matrix.weight) for matrix in matrices]
        H, Hkv, _ = (len(weight) // head_dim for weight in weights)
        if joined_weight is None:
            joined_weight = torch.cat([weight.to(x.dtype) for weight in weights])
        heads = F.linear(x, joined_weight).unflatten(-1, (-1, head_dim))
        qk, v = heads.split((H + Hkv, Hkv), dim=2)
        qk = self.norm(self.rotary(qk, cos, sin))
        qk = self.sharpened(qk, sharpen)
        q, k = qk.split((H, Hkv), dim=2)
        return q, k, v

    def gated_heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Sequence[nn.Module],
        gate: nn.Module,
        value: Tensor,  # (B, T, Hkv * D)
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        sharpen: float,
        cast_weights: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
        """See Operations.gated_heads."""
        if cast_weights is None:
            qkv_weight = None
            gate_weight = cast(Tensor, gate.weight).to(x.dtype)
        else:
            qkv_weight, gate_weight = cast_weights
        x, logits = few_launches.narrow(x, gate_weight)
        q, k, v = self.heads(x, matrices, head_dim, cos, sin, sharpen, qkv_weight)
        return q, k, few_launches.add_values(v, value.view_as(v), logits)

    def sharpened(self, qk: Tensor, sharpen: float) -> Tensor:
        """Return queries and keys times `sharpen`."""
        return qk * sharpen

    def mix(
        self,
        x: Tensor,  # (B, T, C)
        x0: Tensor,  # (B, T, C)
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:
        """See Operations.mix."""
        return few_launches.mix(x, x0, a, b)

    def offset_keys(self, k: Tensor) -> Tensor:  # (B, T, Hkv, D)
        """See Operations.offset_keys."""
        B, _, Hkv, D = k.shape
        zeros = self._zeros((B, 1, Hkv, 2, D // 4), k)
        return few_launches.offset_keys(k, zeros)

    def squared_relu(self, x: Tensor) -> Tensor:
        """See Operations.squared_relu."""
        return few_launches.squared_relu(x, self._zeros((), x))

    def _zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return zeros of the format and device of a tensor, which are made once."""
        dtype = like.dtype
        device = like.device

        def make() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return self.constants.get(("zeros", shape, dtype, device), make)

    def loss(
        self,
        x: Tensor,  # (N, C)
        head: Tensor,  # (V', C)
        targets: Tensor,  # (N,)
        vocab: int,
        weights: Tensor | None,  # (N,)
        chunk: int,
        capped: bool = True,
    ) -> Tensor:
        """See Operations.loss."""
        if not capped:
            return super().loss(x, head, targets, vocab, weights, chunk, capped)
        return few_launches.chunked_loss(x, head, targets, vocab, weights, chunk, HIDDEN)

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
        """See Operations.square_sums."""
        return few_launches.square_sums(gradients)

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See PlainAttention.attend."""
        k, v = ungrouped(q, k, v)
        if scale is not None:  # the matmuls in blocks divide by sqrt(D)
            q = q * (scale * q.size(3) ** 0.5)
        return BlockedAttention.apply(q, k, v, window, HIDDEN)  # type: ignore[no-any-return]


# --- 310P: inference -----------------------------------------------------------------------------


class AscendInference(AscendChunked):
    """For inference cards (310P), by their own attention operators: no gradients, fp16, no grouped heads."""

    name = "inference"

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See PlainAttention.attend."""
        if q.dtype != torch.float16:
            return super().attend(q, k, v, window, scale)
        T = q.size(1)
        device = q.device

        def causal() -> Tensor:  # (1, 1, T, T) which keys each query sees
            positions = torch.arange(T, device=device)
            return cache_mask(positions[None], T, window)

        visible = self.constants.get((T, window, device), causal)
        return prompt(q, k, v, visible, scale)

    def masked(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        visible: Tensor,  # (B, 1, T, K)
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See PlainAttention.masked."""
        if q.dtype == torch.float16:
            return prompt(q, k, v, visible, scale)
        return super().masked(q, k, v, visible, scale)

    def by_lengths(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        new: Sequence[int],
        ends: Sequence[int],
        recent: Callable[[], Tensor],
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:  # (B, T, H, D)
        """See PlainAttention.by_lengths.

        The card's operator multiplies 16-bit numbers of one query, in units of 16 channels.
        """
        if q.size(1) > 1 or not _in_units(q):
            return None
        k, v, ends = _last_keys(k, v, ends, recent, window)
        return decode(q, k, v, ends, scale)


def prompt(
    q: Tensor,  # (B, T, H, D) fp16
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    visible: Tensor,  # (1 or B, 1, T, K) bool, True = visible
    scale: float | None = None,
) -> Tensor:  # (B, T, H, D)
    """Return attention of many queries on an inference card, which takes whole masks only."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    scale = _scale(q, scale)
    k, v = ungrouped(q, k, v)
    return torch_npu.npu_prompt_flash_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        atten_mask=~visible,
        num_heads=q.size(2),
        scale_value=scale,
        next_tokens=WHOLE,
        input_layout="BSND",
    )


def decode(
    q: Tensor,  # (B, 1, H, D) fp16
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    ends: Sequence[int],
    scale: float | None = None,
) -> Tensor:  # (B, 1, H, D)
    """Return attention of one query a row over the first `ends` keys, on an inference card."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    scale = _scale(q, scale)
    longest = max(ends)
    k, v = ungrouped(q, k[:, :longest], v[:, :longest])
    return torch_npu.npu_incre_flash_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        actual_seq_lengths=list(ends),
        num_heads=q.size(2),
        scale_value=scale,
        input_layout="BSND",
    )


# --- 910B and 910C: fused operators --------------------------------------------------------------


class AddNorm(torch.autograd.Function):
    """norm(x + y) and x + y in one operator.

    torch_npu gives that operator no gradient; the gradient of its plain norm is used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
        ones: Tensor,  # (C,)
    ) -> tuple[Tensor, Tensor]:
        import torch_npu  # pyright: ignore[reportMissingImports]

        normed, factors, total = torch_npu.npu_add_rms_norm(x, y, ones, EPSILON)
        ctx.save_for_backward(total, ones, factors)
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        import torch_npu  # pyright: ignore[reportMissingImports]

        normed_grad, total_grad = grads
        if normed_grad is None:
            return total_grad, total_grad, None
        total, ones, factors = ctx.saved_tensors
        grad = torch_npu.npu_rms_norm_backward(normed_grad, total, ones, factors)[0]
        if total_grad is not None:
            grad.add_(total_grad)
        return grad, grad, None


class AscendFused(AscendChunked):
    """For the second generation (910B, 910C), by torch_npu's fused operators."""

    name = "fused"

    def causal_mask(self, device: torch.device) -> Tensor:
        """Return (2048, 2048) bool, True above the diagonal.

        One mask serves causal and banded attention of any length.
        """

        def make() -> Tensor:
            places = torch.arange(2048, device=device)
            return places[None] > places[:, None]

        return self.constants.get(device, make)

    # --- norms -----------------------------------------------------------------------------------

    def norm(self, x: Tensor) -> Tensor:
        """See Operations.norm."""
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu_rms_norm(x, self.ones(x), EPSILON)[0]

    def ones(self, x: Tensor) -> Tensor:
        """Return the factors of a norm over the last dimension of x, all 1."""
        C = x.size(-1)
        dtype = x.dtype
        device = x.device

        def make() -> Tensor:
            return torch.ones(C, dtype=dtype, device=device)

        return self.constants.get((C, dtype, device), make)

    def add_norm(
        self,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
    ) -> tuple[Tensor, Tensor]:
        """See Operations.add_norm."""
        return AddNorm.apply(x, y, self.ones(x))  # type: ignore[no-any-return]

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """See Operations.weighted_norm."""
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu_rms_norm(x, weight.to(x.dtype), epsilon)[0]

    # --- rotary embedding ------------------------------------------------------------------------

    def rotary_tables(
        self,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        base: float = 100_000,
    ) -> tuple[Tensor, Tensor]:  # (length, D) each
        """Return cosines, and sines negated, both halves alike, as the fused operator reads them."""
        cos, sin = super().rotary_tables(length, head_dim, device, dtype, base)
        both_cos = torch.cat((cos, cos), dim=-1)
        both_sin = torch.cat((sin, sin), dim=-1)
        return both_cos, -both_sin

    def rotary(
        self,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D), from rotary_tables
        sin: Tensor,  # (1 or B, T, 1, D)
    ) -> Tensor:
        """See Operations.rotary. The operator gives cos * x + sin * (-second half, first half)."""
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu_rotary_mul(x, cos, sin)

    # --- attention -------------------------------------------------------------------------------

    def sharpened(self, qk: Tensor, sharpen: float) -> Tensor:
        """Return queries and keys as they are: softmax_scale() sharpens the scores."""
        return qk

    def softmax_scale(self, head_dim: int, sharpen: float) -> float | None:
        """See Operations.softmax_scale."""
        return sharpen**2 * head_dim**-0.5

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """See PlainAttention.attend. A window is a band of the mask that ends at the diagonal."""
        import torch_npu  # pyright: ignore[reportMissingImports]

        T = k.size(1)
        H = q.size(2)
        is_short = window < T - 1
        options = {
            "atten_mask": self.causal_mask(q.device),
            "scale": _scale(q, scale),
            "next_tockens": 0,
            "pre_tockens": window if is_short else WHOLE,
            "sparse_mode": 4 if is_short else 3,
        }
        if not torch_npu.npu.is_current_stream_capturing():
            return torch_npu.npu_fusion_attention(q, k, v, H, "BSND", **options)[0]
        # The first version forks to a stream that no graph has, and no other layout can be captured.
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        y = torch_npu.npu_fusion_attention_v3(q, k, v, H, "BNSD", **options)[0]
        return y.transpose(1, 2)

    def by_lengths(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        new: Sequence[int],
        ends: Sequence[int],
        recent: Callable[[], Tensor],
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:  # (B, T, H, D)
        """See PlainAttention.by_lengths.

        The operator multiplies 16-bit numbers, in units of 16 channels. With one query it knows no
        window, and is given the last W + 1 keys alone.
        """
        if not _in_units(q):
            return None
        import torch_npu  # pyright: ignore[reportMissingImports]

        is_single = q.size(1) == 1
        if is_single:
            k, v, ends = _last_keys(k, v, ends, recent, window)
        cache_options: dict[str, Any] = {
            "num_heads": q.size(2),
            "num_key_value_heads": k.size(2),
            "scale": _scale(q, scale),
            "input_layout": "BSND",
            "actual_seq_lengths_kv": list(ends),
        }
        if not is_single:
            is_short = window < max(ends) - 1
            cache_options |= {
                "atten_mask": self.causal_mask(q.device),
                "actual_seq_lengths": list(new),
                "pre_tokens": window if is_short else WHOLE,
                "next_tokens": 0,
                "sparse_mode": 4 if is_short else 3,
            }
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()
        return torch_npu.npu_fused_infer_attention_score(q, k, v, **cache_options)[0]


KINDS: dict[str, type[AscendPlain]] = {
    "plain": AscendPlain,
    "chunked": AscendChunked,
    "inference": AscendInference,
    "fused": AscendFused,
}


def _scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of the scores, 1/sqrt(D) by default."""
    return q.size(3) ** -0.5 if scale is None else scale


def _in_units(q: Tensor) -> bool:  # (B, T, H, D)
    """Return whether queries have 16 bits and heads of a multiple of 16 channels."""
    return q.element_size() == 2 and q.size(3) % 16 == 0


def _last_keys(
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    ends: Sequence[int],
    recent: Callable[[], Tensor],
    window: int,
) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Return keys, values and their counts, cut to the window of one query.

    They stay as they are where no row is longer than the window.
    """
    if max(ends) <= window + 1:
        return k, v, ends
    rows = torch.arange(k.size(0), device=k.device)[:, None]
    places = recent()
    counts = [min(end, window + 1) for end in ends]
    return k[rows, places], v[rows, places], counts

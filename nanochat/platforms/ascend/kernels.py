"""Operators for Ascend NPUs: torch's own, attention by matmuls over blocks, and fused operators.

torch_npu has the fused operators. It is imported only where it is used. Its masks are True where a
key is hidden. Shapes: B batch, T time, H heads, Hkv heads of keys and values, D head dimension, C
channels, K keys.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import TensorCache, cache_mask
from nanochat.loss import HIDDEN, Criterion, Softcapped
from nanochat.platforms import few_launches
from nanochat.platforms.blocked_attention import BlockedAttention, ungrouped
from nanochat.platforms.muon import ForeachMuon, FusedMuon
from nanochat.platforms.operations import Operations, finite_mask
from nanochat.platforms.together import HasUnits, cast_together

EPSILON = 2.0**-23  # fp32's epsilon, which F.rms_norm adds by default in every format
WHOLE = 2147483647  # an unlimited window
# The torch_npu operators that each kind of chip needs.
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
    """Return a list of those `operators` that this torch_npu does not have."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return [name for name in operators if not hasattr(torch_npu, name)]


# --- torch's own operators -----------------------------------------------------------------------


class AscendPlain(Operations):
    """Computes with torch's own operators on an NPU."""

    name = "plain"
    grain = 64
    muon_class = ForeachMuon

    def __init__(self, stacks_matrices: bool = True, saturates: bool = False):
        """`saturates` means that the chip reports the inf of an fp16 mask as an overflow."""
        super().__init__(stacks_matrices)
        self.saturates = saturates
        self.constants = TensorCache(16)  # masks, and vectors of zeros and ones

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Implement PlainAttention.mask, without inf if the chip would report it as an overflow."""
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
        """Implement PlainAttention.causal, without inf where mask() avoids it."""
        if not self._needs_finite_mask(q.dtype):
            return super().causal(q, k, v, scale)
        T = q.size(2)
        dtype = q.dtype
        device = q.device

        def triangle() -> Tensor:  # (T, T) mask of the keys that each query sees
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
        """Return whether attention must mask keys with a large negative number instead of -inf."""
        return self.saturates and dtype == torch.float16


# --- 910A: no fused operators --------------------------------------------------------------------


class AscendChunked(AscendPlain):
    """Computes attention with matmuls and the rest with few launches.

    This is for chips without fused attention, such as the 910A.
    """

    name = "chunked"
    fuses_layers = True
    loss_chunk = 2048
    muon_class = FusedMuon

    def cast_together(
        self,
        layers: Sequence[HasUnits],
        dtype: torch.dtype,
    ) -> list[list[Tensor]] | None:
        """Implement Operations.cast_together, but return None if gradients are disabled.

        In inference, most parameters already have the compute dtype.
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
        """Implement Operations.heads with one matmul for all heads.

        Queries and keys are also rotated and normalized together.
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
        """Implement Operations.gated_heads with the operators of few_launches.py."""
        if cast_weights is None:
            qkv_weight = None
            gate_weight = cast(Tensor, gate.weight).to(x.dtype)
        else:
            qkv_weight, gate_weight = cast_weights
        x, logits = few_launches.narrow(x, gate_weight)
        q, k, v = self.heads(x, matrices, head_dim, cos, sin, sharpen, qkv_weight)
        return q, k, few_launches.add_values(v, value.view_as(v), logits)

    def sharpened(self, qk: Tensor, sharpen: float) -> Tensor:
        """Return queries and keys, multiplied by `sharpen`."""
        return qk * sharpen

    def mix(
        self,
        x: Tensor,  # (B, T, C)
        x0: Tensor,  # (B, T, C)
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:
        """Implement Operations.mix with the operators of few_launches.py."""
        return few_launches.mix(x, x0, a, b)

    def offset_keys(self, k: Tensor) -> Tensor:  # (B, T, Hkv, D)
        """Implement Operations.offset_keys with the operators of few_launches.py."""
        B, _, Hkv, D = k.shape
        zeros = self._zeros((B, 1, Hkv, 2, D // 4), k)
        return few_launches.offset_keys(k, zeros)

    def exclude_own(
        self,
        y: Tensor,  # (B, T, H, D)
        v: Tensor,  # (B, T, Hkv, D)
    ) -> Tensor:  # (B, T, H, D)
        """Implement Operations.exclude_own with the operators of few_launches.py."""
        if y.shape != v.shape:
            return super().exclude_own(y, v)
        return few_launches.exclude_own(y, self.norm(v), self._zeros((), y))

    def squared_relu(self, x: Tensor) -> Tensor:
        """Implement Operations.squared_relu with the operators of few_launches.py."""
        return few_launches.squared_relu(x, self._zeros((), x))

    def _zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return cached zeros with the dtype and device of `like`."""
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
        criterion: Criterion,
        weights: Tensor | None,  # (N,)
        chunk: int,
    ) -> Tensor:
        """Implement Operations.loss with few_launches.chunked_loss() for softcapped logits."""
        if not isinstance(criterion, Softcapped):
            return super().loss(x, head, targets, criterion, weights, chunk)
        vocab = criterion.vocab
        return few_launches.chunked_loss(x, head, targets, vocab, weights, chunk, HIDDEN)

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
        """Implement Operations.square_sums with a single norm operator."""
        return few_launches.square_sums(gradients)

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Implement PlainAttention.attend with matmuls over a few blocks of queries."""
        k, v = ungrouped(q, k, v)
        if scale is not None:  # BlockedAttention divides scores by sqrt(D)
            q = q * (scale * q.size(3) ** 0.5)
        return BlockedAttention.apply(q, k, v, window, HIDDEN)  # type: ignore[no-any-return]


# --- 310P: inference -----------------------------------------------------------------------------


class AscendInference(AscendChunked):
    """Computes fp16 attention with the operators of inference cards such as the 310P.

    These operators support neither gradients nor grouped heads.
    """

    name = "inference"

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Implement PlainAttention.attend with prompt() for fp16 queries."""
        if q.dtype != torch.float16:
            return super().attend(q, k, v, window, scale)
        T = q.size(1)
        device = q.device

        def causal() -> Tensor:  # (1, 1, T, T) mask of the keys that each query sees
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
        """Implement PlainAttention.masked with prompt() for fp16 queries."""
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
        """Implement PlainAttention.by_lengths with decode() for one 16-bit query per row.

        Returns None for other queries, or if the head dimension is not a multiple of 16, which the
        card's operator requires.
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
    """Return attention to the `visible` keys, on an inference card.

    The card's operator supports no window, only a mask over all keys for each query.
    """
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
    """Return the attention of each row's query to the row's first keys, on an inference card.

    `ends` holds the number of these keys for each row.
    """
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
    """Computes norm(x + y) and x + y with one operator.

    torch_npu has no gradient for this operator, so the backward pass is that of its plain norm.
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
    """Computes with torch_npu's fused operators, on chips of the second generation (910B, 910C)."""

    name = "fused"

    def causal_mask(self, device: torch.device) -> Tensor:
        """Return a bool mask of shape (2048, 2048) that is True above the diagonal.

        The fused operators use this mask for causal and windowed attention of any length.
        """

        def make() -> Tensor:
            positions = torch.arange(2048, device=device)
            return positions[None] > positions[:, None]

        return self.constants.get(device, make)

    # --- norms -----------------------------------------------------------------------------------

    def norm(self, x: Tensor) -> Tensor:
        """Implement Operations.norm with npu_rms_norm."""
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu_rms_norm(x, self.ones(x), EPSILON)[0]

    def ones(self, x: Tensor) -> Tensor:
        """Return cached norm weights of 1 for the last dimension of x."""
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
        """Implement Operations.add_norm with npu_add_rms_norm."""
        return AddNorm.apply(x, y, self.ones(x))  # type: ignore[no-any-return]

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """Implement Operations.weighted_norm with npu_rms_norm."""
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
        divisors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # (length, D) each
        """Return cosines and negated sines, in the layout that npu_rotary_mul reads.

        Each row holds its D/2 numbers twice.
        """
        cos, sin = super().rotary_tables(length, head_dim, device, dtype, base, divisors)
        both_cos = torch.cat((cos, cos), dim=-1)
        both_sin = torch.cat((sin, sin), dim=-1)
        return both_cos, -both_sin

    def rotary(
        self,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D), from rotary_tables
        sin: Tensor,  # (1 or B, T, 1, D)
    ) -> Tensor:
        """Implement Operations.rotary with npu_rotary_mul.

        The operator computes cos * x + sin * concat(-x2, x1), where x1 and x2 are the halves of x
        along D.
        """
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu_rotary_mul(x, cos, sin)

    # --- attention -------------------------------------------------------------------------------

    def sharpened(self, qk: Tensor, sharpen: float) -> Tensor:
        """Return queries and keys unchanged, because softmax_scale() includes the factor."""
        return qk

    def softmax_scale(self, head_dim: int, sharpen: float) -> float | None:
        """Return the factor for the scores, `sharpen` squared (for both q and k) over sqrt(D)."""
        return sharpen**2 * head_dim**-0.5

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Implement PlainAttention.attend with npu_fusion_attention.

        If the window hides keys, a query sees a band of the mask that ends at the diagonal.
        """
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
        # npu_fusion_attention uses a second stream, which a graph does not include, and v3 can only
        # be captured in the layout BNSD.
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
        """Implement PlainAttention.by_lengths with npu_fused_infer_attention_score.

        Returns None unless queries have 16 bits and a head dimension that is a multiple of 16, as
        the operator requires. The operator supports no window for a single query, which therefore
        gets only the last `window` + 1 keys.
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
    """Return `scale`, the factor for the scores, or its default 1/sqrt(D) if it is None."""
    return q.size(3) ** -0.5 if scale is None else scale


def _in_units(q: Tensor) -> bool:  # (B, T, H, D)
    """Return whether q has 16-bit numbers and a head dimension that is a multiple of 16."""
    return q.element_size() == 2 and q.size(3) % 16 == 0


def _last_keys(
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    ends: Sequence[int],
    recent: Callable[[], Tensor],
    window: int,
) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Return the keys and values that a single query per row sees, and their count in each row.

    If no row has more than `window` + 1 keys, `k`, `v` and `ends` are returned unchanged.
    """
    if max(ends) <= window + 1:
        return k, v, ends
    rows = torch.arange(k.size(0), device=k.device)[:, None]
    positions = recent()
    counts = [min(end, window + 1) for end in ends]
    return k[rows, positions], v[rows, positions], counts

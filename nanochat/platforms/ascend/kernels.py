"""How Ascend NPUs compute: with torch's own operators, in blocks of matmuls, or with torch_npu's fused operators.

torch_npu is imported where it is used, that is, only where a tensor lies on an NPU. Its masks are True where a key is
hidden.
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
from nanochat.platforms.together import Unit, cast_together

EPSILON = 2.0**-23  # of fp32: what F.rms_norm adds where none is given, for every format
WHOLE = 2147483647  # a window without end
NEEDS = {  # the operators of torch_npu that each kind of chip computes with
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
    """Those of the operators that this torch_npu lacks."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return [name for name in operators if not hasattr(torch_npu, name)]


class AscendPlain(Operations):
    """torch's own operators on an NPU."""

    name = "plain"
    grain = 64
    muon_class = ForeachMuon

    def __init__(self, stacks_matrices: bool = True, saturates: bool = False):
        """`saturates`: the chip would take the inf of an fp16 mask for an overflow."""
        super().__init__(stacks_matrices)
        self.saturates = saturates
        self.kept = TensorCache(16)  # masks and vectors of ones

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """See PlainAttention.mask."""
        return finite_mask(visible, dtype) if self._finite(dtype) else visible

    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """See PlainAttention.causal."""
        if not self._finite(q.dtype):
            return super().causal(q, k, v, scale)
        length, device, dtype = q.size(2), q.device, q.dtype

        def triangle() -> Tensor:  # (T, T) which keys each query sees
            visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            return finite_mask(visible, dtype)

        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.kept.get(("triangle", length, device, dtype), triangle),
            scale=scale,
            enable_gqa=k.size(1) != q.size(1),
        )

    def _finite(self, dtype: torch.dtype) -> bool:
        """Whether attention must mask with a large negative number instead of -inf."""
        return self.saturates and dtype == torch.float16


class AscendChunked(AscendPlain):
    """For chips without fused attention (910A): attention is made of matmuls, and launches are saved elsewhere."""

    name = "chunked"
    fuses_layers = True
    loss_chunk = 2048
    fewest_launches = True
    muon_class = FusedMuon

    def cast_together(
        self, layers: Sequence[Sequence[Unit]], dtype: torch.dtype
    ) -> list[list[Tensor]] | None:
        """See Operations.cast_together. Without gradients parameters mostly have the compute dtype already."""
        return cast_together(layers, dtype) if torch.is_grad_enabled() else None

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
        """See Operations.heads. One matmul makes all heads, and queries and keys are rotated and normed together."""
        weights = [cast(Tensor, matrix.weight) for matrix in matrices]
        counts = [weight.size(0) // head_dim for weight in weights]
        if joined_weight is None:
            joined_weight = torch.cat([weight.to(x.dtype) for weight in weights])
        q_and_k = F.linear(x, joined_weight).unflatten(-1, (-1, head_dim))
        qk, v = q_and_k.split((counts[0] + counts[1], counts[2]), dim=2)
        q, k = self.sharpened(self.norm(self.rotary(qk, cos, sin)), sharpen).split(
            (counts[0], counts[1]), dim=2
        )
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
        joined_weight, narrow = cast_weights or (None, cast(Tensor, gate.weight).to(x.dtype))
        x, logits = few_launches.narrow(x, narrow)
        q, k, v = self.heads(x, matrices, head_dim, cos, sin, sharpen, joined_weight)
        return q, k, few_launches.add_values(v, value.view_as(v), logits)

    def sharpened(self, qk: Tensor, sharpen: float) -> Tensor:
        """Queries and keys times `sharpen`."""
        return qk * sharpen

    def mix(self, x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See Operations.mix."""
        return few_launches.mix(x, x0, a, b)

    def offset_keys(self, k: Tensor) -> Tensor:
        """See Operations.offset_keys."""
        shape, dtype, device = (k.size(0), 1, k.size(2), 2, k.size(3) // 4), k.dtype, k.device
        none = self.kept.get(
            ("zeros", shape, dtype, device), lambda: torch.zeros(shape, dtype=dtype, device=device)
        )
        return few_launches.offset_keys(k, none)

    def squared_relu(self, x: Tensor) -> Tensor:
        """See Operations.squared_relu."""
        dtype, device = x.dtype, x.device
        zero = self.kept.get(
            ("zero", dtype, device), lambda: torch.zeros((), dtype=dtype, device=device)
        )
        return few_launches.squared_relu(x, zero)

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
        return BlockedAttention.apply(q, k, v, window, HIDDEN)  # type: ignore[no-any-return]


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
        length, device = q.size(1), q.device

        def causal() -> Tensor:  # (1, 1, T, T) which keys each query sees
            return cache_mask(torch.arange(length, device=device)[None], length, window)

        return prompt(q, k, v, self.kept.get((length, window, device), causal))

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
            return prompt(q, k, v, visible)
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
        return decode(q, *_last_keys(k, v, ends, recent, window))


class AddNorm(torch.autograd.Function):
    """norm(x + y) and x + y in one operator, which torch_npu gives no gradient; the norm's own has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, ones: Tensor) -> tuple[Tensor, Tensor]:
        import torch_npu  # pyright: ignore[reportMissingImports]

        normed, factors, total = torch_npu.npu_add_rms_norm(x, y, ones, EPSILON)
        ctx.save_for_backward(total, ones, factors)
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        import torch_npu  # pyright: ignore[reportMissingImports]

        of_norm, of_total = grads
        if of_norm is None:
            return of_total, of_total, None
        grad = torch_npu.npu_rms_norm_backward(of_norm, *ctx.saved_tensors)[0]
        if of_total is not None:
            grad.add_(of_total)
        return grad, grad, None


class AscendFused(AscendChunked):
    """For the second generation (910B, 910C), by torch_npu's fused operators."""

    name = "fused"

    def causal_mask(self, device: torch.device) -> Tensor:
        """(2048, 2048) bool, True above the diagonal: one mask for causal and banded attention of any length."""

        def make() -> Tensor:
            places = torch.arange(2048, device=device)
            return places[None] > places[:, None]

        return self.kept.get(device, make)

    def norm(self, x: Tensor) -> Tensor:
        """See Operations.norm."""
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu_rms_norm(x, self.ones(x), EPSILON)[0]

    def ones(self, x: Tensor) -> Tensor:
        """The factors of a norm over the last dimension of x, all 1."""
        size, dtype, device = x.size(-1), x.dtype, x.device
        return self.kept.get(
            (size, dtype, device), lambda: torch.ones(size, dtype=dtype, device=device)
        )

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """See Operations.add_norm."""
        return AddNorm.apply(x, y, self.ones(x))  # type: ignore[no-any-return]

    def weighted_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See Operations.weighted_norm."""
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu_rms_norm(x, weight.to(x.dtype), epsilon)[0]

    def rotary_tables(
        self,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        base: float = 100_000,
    ) -> tuple[Tensor, Tensor]:
        """Cosines, and sines negated, each (length, D) with both halves alike, as the fused operator reads them."""
        cos, sin = super().rotary_tables(length, head_dim, device, dtype, base)
        return torch.cat((cos, cos), dim=-1), -torch.cat((sin, sin), dim=-1)

    def rotary(
        self,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D), from rotary_tables
        sin: Tensor,  # (1 or B, T, 1, D)
    ) -> Tensor:
        """See Operations.rotary. The operator gives cos * x + sin * (-second half, first half)."""
        import torch_npu  # pyright: ignore[reportMissingImports]

        return torch_npu.npu_rotary_mul(x, cos, sin)

    def sharpened(self, qk: Tensor, sharpen: float) -> Tensor:
        """Queries and keys as they are: softmax_scale() sharpens the scores."""
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

        short = window < k.size(1) - 1
        how = {
            "atten_mask": self.causal_mask(q.device),
            "scale": _scale(q, scale),
            "next_tockens": 0,
            "pre_tockens": window if short else WHOLE,
            "sparse_mode": 4 if short else 3,
        }
        if (
            torch_npu.npu.is_current_stream_capturing()
        ):  # the first version forks to a stream that no graph has
            q, k, v = (
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
            )  # no other layout can be captured
            return torch_npu.npu_fusion_attention_v3(q, k, v, q.size(1), "BNSD", **how)[
                0
            ].transpose(1, 2)
        return torch_npu.npu_fusion_attention(q, k, v, q.size(2), "BSND", **how)[0]

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

        The operator multiplies 16-bit numbers, in units of 16 channels. With one query it knows no window, and is given
        the last W + 1 keys alone.
        """
        if not _in_units(q):
            return None
        import torch_npu  # pyright: ignore[reportMissingImports]

        if q.size(1) == 1:
            k, v, ends = _last_keys(k, v, ends, recent, window)
        scale = _scale(q, scale)
        heads = {
            "num_heads": q.size(2),
            "num_key_value_heads": k.size(2),
            "scale": scale,
            "input_layout": "BSND",
        }
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if q.size(1) == 1:
            return torch_npu.npu_fused_infer_attention_score(
                q, k, v, actual_seq_lengths_kv=list(ends), **heads
            )[0]
        short = window < max(ends) - 1
        return torch_npu.npu_fused_infer_attention_score(
            q,
            k,
            v,
            atten_mask=self.causal_mask(q.device),
            actual_seq_lengths=list(new),
            actual_seq_lengths_kv=list(ends),
            pre_tokens=window if short else WHOLE,
            next_tokens=0,
            sparse_mode=4 if short else 3,
            **heads,
        )[0]


KINDS: dict[str, type[AscendPlain]] = {
    kind.name: kind for kind in (AscendPlain, AscendChunked, AscendInference, AscendFused)
}


def _scale(q: Tensor, scale: float | None) -> float:
    """The factor of the scores, 1/sqrt(D) by default."""
    return q.size(3) ** -0.5 if scale is None else scale


def _in_units(q: Tensor) -> bool:  # (B, T, H, D)
    """Whether queries have 16 bits and heads of a multiple of 16 channels."""
    return q.element_size() == 2 and not q.size(3) % 16


def _last_keys(
    k: Tensor, v: Tensor, ends: Sequence[int], recent: Callable[[], Tensor], window: int
) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Return keys, values and their counts, cut to the window of one query where that is shorter than the rows."""
    if max(ends) <= window + 1:
        return k, v, ends
    rows = torch.arange(k.size(0), device=k.device)[:, None]
    places = recent()
    return k[rows, places], v[rows, places], [min(end, window + 1) for end in ends]


def prompt(
    q: Tensor,  # (B, T, H, D) fp16
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    visible: Tensor,  # (1 or B, 1, T, K) bool, True = seen
) -> Tensor:  # (B, T, H, D)
    """Attention of many queries on an inference card, which takes whole masks only."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    k, v = ungrouped(q, k, v)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return torch_npu.npu_prompt_flash_attention(
        q,
        k,
        v,
        atten_mask=~visible,
        num_heads=q.size(2),
        scale_value=q.size(3) ** -0.5,
        next_tokens=WHOLE,
        input_layout="BSND",
    )


def decode(
    q: Tensor,  # (B, 1, H, D) fp16
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    ends: Sequence[int],
) -> Tensor:  # (B, 1, H, D)
    """Attention of one query a row over the first `ends` keys, on an inference card."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    longest = max(ends)
    k, v = ungrouped(q, k[:, :longest], v[:, :longest])
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return torch_npu.npu_incre_flash_attention(
        q,
        k,
        v,
        actual_seq_lengths=list(ends),
        num_heads=q.size(2),
        scale_value=q.size(3) ** -0.5,
        input_layout="BSND",
    )

"""What Ascend NPUs compute with operators of their own: attention, norm, rotary embedding; chosen in kernels.py.

torch_npu is imported where it is used: only where a tensor lies on an NPU. Its masks are True where a key is hidden.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

EPSILON = 2.0**-23  # of fp32: what F.rms_norm adds where none is given, for every format
WHOLE = 2147483647  # a window without end
NEEDS = {  # the operators that each kind of chip computes with, of torch_npu
    "fused": ("npu_fusion_attention", "npu_fused_infer_attention_score", "npu_rms_norm", "npu_rotary_mul"),
    "chunked": (),
    "inference": ("npu_prompt_flash_attention", "npu_incre_flash_attention"),
}


def missing(kind: str) -> list[str]:
    """Operators that this kind of chip computes with and this torch_npu lacks."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return [name for name in NEEDS[kind] if not hasattr(torch_npu, name)]


@lru_cache(maxsize=4)
def causal_mask(device: torch.device) -> Tensor:
    """(2048, 2048) bool, True above the diagonal: the one mask of all causal and banded attention, at any length."""
    with torch.inference_mode(False):  # made while sampling, it must serve training too
        places = torch.arange(2048, device=device)
        return places[None] > places[:, None]


@lru_cache(maxsize=8)
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(size, dtype=dtype, device=device)


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without parameters."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu.npu_rms_norm(x, _ones(x.size(-1), x.dtype, x.device), EPSILON)[0]


def rotary(
    x: Tensor,  # (B, T, H, D)
    cos: Tensor,  # (1 or B, T, 1, D) both halves alike
    minus_sin: Tensor,  # (1 or B, T, 1, D)
) -> Tensor:
    """Rotate by -theta: the operator gives cos * x + sin * (-second half, first half)."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu.npu_rotary_mul(x, cos, minus_sin)


def attend(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    window: int,
    scale: float,
) -> Tensor:  # (B, T, H, D)
    """Causal attention with a backward pass; a window is a band of the mask that ends at the diagonal."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    short = window < k.size(1) - 1
    return torch_npu.npu_fusion_attention(
        q, k, v, q.size(2), "BSND", atten_mask=causal_mask(q.device), scale=scale,
        pre_tockens=window if short else WHOLE, next_tockens=0, sparse_mode=4 if short else 3,
    )[0]  # fmt: skip


def attend_lengths(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, K, Hkv, D) cached keys
    v: Tensor,  # (B, K, Hkv, D)
    fresh: Sequence[int],  # of each row, how many of the T queries are real
    ends: Sequence[int],  # of each row, how many keys it holds, the new ones included
    window: int,
    scale: float,
) -> Tensor:  # (B, T, H, D)
    """Attention over a cache of rows of different lengths, without gradient.

    With one query the operator knows no window: the caller gives the last W + 1 keys alone.
    """
    import torch_npu  # pyright: ignore[reportMissingImports]

    heads = {"num_heads": q.size(2), "num_key_value_heads": k.size(2), "scale": scale, "input_layout": "BSND"}
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if q.size(1) == 1:
        return torch_npu.npu_fused_infer_attention_score(q, k, v, actual_seq_lengths_kv=list(ends), **heads)[0]
    short = window < max(ends) - 1
    return torch_npu.npu_fused_infer_attention_score(
        q, k, v, atten_mask=causal_mask(q.device), actual_seq_lengths=list(fresh), actual_seq_lengths_kv=list(ends),
        pre_tokens=window if short else WHOLE, next_tokens=0, sparse_mode=4 if short else 3, **heads,
    )[0]  # fmt: skip


def _ungroup(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A key head for every query head: inference cards know no groups."""
    group = q.size(2) // k.size(2)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    return q.contiguous(), k.contiguous(), v.contiguous()


def prompt(
    q: Tensor,  # (B, T, H, D) fp16
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    seen: Tensor,  # (1 or B, 1, T, K) bool, True = seen
) -> Tensor:  # (B, T, H, D)
    """Attention of many queries on an inference card, which takes whole masks only."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    q, k, v = _ungroup(q, k, v)
    return torch_npu.npu_prompt_flash_attention(
        q, k, v, atten_mask=~seen, num_heads=q.size(2), scale_value=q.size(3) ** -0.5, next_tokens=WHOLE,
        input_layout="BSND",
    )  # fmt: skip


def decode(
    q: Tensor,  # (B, 1, H, D) fp16
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    ends: Sequence[int],
) -> Tensor:  # (B, 1, H, D)
    """Attention of one query a row over the first `ends` keys, on an inference card."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    longest = max(ends)
    q, k, v = _ungroup(q, k[:, :longest], v[:, :longest])
    return torch_npu.npu_incre_flash_attention(
        q, k, v, actual_seq_lengths=list(ends), num_heads=q.size(2), scale_value=q.size(3) ** -0.5,
        input_layout="BSND",
    )  # fmt: skip

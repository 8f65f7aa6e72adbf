"""Attention by torch's own operator, on every device; kernels.py says where."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN = -3e4  # a score that no fp16 softmax sees, and that stays finite with any other added to it


def attend(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    window: int,
    scale: float | None,  # of the scores, default 1/sqrt(D)
    finite: bool,  # mask with numbers instead of inf
) -> Tensor:  # (B, T, H, D)
    """Causal attention in which a query also sees at most `window` keys before its own.

    A short window is computed in blocks of W queries against 2W keys, so that neither time nor any mask grows
    with T squared; the one (W, 2W) mask is shared by all blocks and layers.
    """
    B, T, H, _ = q.shape
    grouped = k.size(2) != H
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    if window >= T - 1:
        return _causal(q, k, v, scale, grouped, finite).transpose(1, 2)
    W = window
    blocks = -(-T // W)
    if pad := blocks * W - T:  # padded keys come after every real query, so causality hides them
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    first = _causal(q[:, :, :W], k[:, :, :W], v[:, :, :W], scale, grouped, finite)

    def later(x: Tensor) -> Tensor:  # blocks 1.. as a batch: (B * (blocks - 1), H, W, D)
        return x[:, :, W:].unflatten(2, (blocks - 1, W)).transpose(1, 2).flatten(0, 1)

    def pairs(x: Tensor) -> Tensor:  # each later block behind the one before it: (B * (blocks - 1), H, 2W, D)
        x = x.unflatten(2, (blocks, W))
        return torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3).transpose(1, 2).flatten(0, 1)

    mask = scores(_band(W, q.device), q.dtype) if finite else _band(W, q.device)
    rest = F.scaled_dot_product_attention(later(q), pairs(k), pairs(v), attn_mask=mask, scale=scale, enable_gqa=grouped)
    rest = rest.unflatten(0, (B, blocks - 1)).transpose(1, 2).flatten(2, 3)  # (B, H, T - W, D)
    return torch.cat((first, rest), dim=2)[:, :, :T].transpose(1, 2)


def masked(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    mask: Tensor,  # (B, 1, T, K) bool, True = seen
    scale: float | None,
    finite: bool,
) -> Tensor:  # (B, T, H, D)
    """Attention of queries over the keys that a mask leaves them."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale, enable_gqa=k.size(2) != q.size(2),
        attn_mask=scores(mask, q.dtype) if finite else mask,
    )  # fmt: skip
    return out.transpose(1, 2)


def scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores to hide what is not seen: 0 or a large negative number, never inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, HIDDEN)


def _causal(
    q: Tensor,  # (B, H, T, D)
    k: Tensor,  # (B, Hkv, T, D)
    v: Tensor,  # (B, Hkv, T, D)
    scale: float | None,
    grouped: bool,
    finite: bool,
) -> Tensor:  # (B, H, T, D)
    if not finite:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = _lower_triangle(q.size(2), q.device, q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


@lru_cache(maxsize=4)
def _lower_triangle(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(T, T), shared by all layers."""
    return scores(torch.ones(length, length, dtype=torch.bool, device=device).tril(), dtype)


@lru_cache(maxsize=16)
def _band(window: int, device: torch.device) -> Tensor:
    """(W, 2W): query r of a block sees keys r .. r + W of the previous block and its own, W + 1 keys."""
    offset = torch.arange(2 * window, device=device)[None] - torch.arange(window, device=device)[:, None]
    return (offset >= 0) & (offset <= window)

"""Masked attention as matrix products, where torch's own operator is slower."""

import torch
from torch import Tensor

from nanochat.platforms.operations import finite_mask


def one_query(
    q: Tensor,  # (B, 1, H, D)
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    mask: Tensor,  # (B, 1, 1, K) bool, True = visible
    scale: float | None,
) -> Tensor:  # (B, 1, H, D)
    """Return masked attention for one query per row, computed as two matrix products per row.

    Keys and values are read in the layout of the cache. Each query is multiplied by the keys of all
    heads, with zeros for the heads that are not its own. That is more arithmetic, but no key is
    moved.
    """
    B, _, H, D = q.shape
    J = k.size(2)
    group = H // J
    same_head = torch.eye(J, dtype=q.dtype, device=q.device)
    same_head = same_head.view(1, J, 1, J, 1)
    grouped = q.reshape(B, J, group, D).transpose(2, 3)  # (B, Hkv, D, group)
    spread = grouped[:, :, :, None] * same_head  # (B, Hkv, D, Hkv, group)
    spread = spread.reshape(B, J * D, H)

    scores = torch.bmm(k.flatten(2), spread)  # (B, K, H)
    scores = scores.transpose(1, 2).float()
    factor = D**-0.5 if scale is None else scale
    scores.mul_(factor)
    scores.masked_fill_(~mask[:, 0], float("-inf"))
    weights = scores.softmax(dim=2).to(v.dtype)

    y = torch.bmm(weights, v.flatten(2))  # (B, H, Hkv * D)
    y = y.view(B, J, group, J, D)
    own_head = y.diagonal(dim1=1, dim2=3)  # (B, group, D, Hkv)
    own_head = own_head.permute(0, 3, 1, 2)
    return own_head.reshape(B, 1, H, D)


def by_products(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, K, H, D)
    v: Tensor,  # (B, K, H, D)
    mask: Tensor,  # (B, 1, T, K) bool, True = visible
    scale: float | None,
) -> Tensor:  # (B, T, H, D)
    """Return masked attention, computed as two products with a softmax between them.

    The scores of all heads are in memory at the same time.
    """
    B, T, H, D = q.shape
    K = k.size(1)
    hidden = finite_mask(mask, q.dtype)
    hidden = hidden.expand(B, H, T, K).flatten(0, 1)
    q = _heads_first(q)
    k = _heads_first(k)
    v = _heads_first(v)
    factor = D**-0.5 if scale is None else scale
    scores = torch.baddbmm(hidden, q, k.mT, alpha=factor)
    weights = scores.softmax(dim=2)
    y = torch.bmm(weights, v).unflatten(0, (B, H))
    return y.transpose(1, 2)


def _heads_first(x: Tensor) -> Tensor:  # (B, T, H, D) -> (B * H, T, D)
    return x.transpose(1, 2).flatten(0, 1)

"""Attention under a mask as products of matrices, where those take less time on a CPU than torch's own operator."""

import torch
from torch import Tensor

from nanochat.platforms.operations import finite_mask


def one_query(
    q: Tensor,  # (B, 1, H, D)
    k: Tensor,  # (B, K, Hkv, D)
    v: Tensor,  # (B, K, Hkv, D)
    mask: Tensor,  # (B, 1, 1, K) bool, True = seen
    scale: float | None,
) -> Tensor:  # (B, 1, H, D)
    """masked() for one query a row, as two products for each row, over keys and values as the cache holds them.

    Each query is multiplied with the keys of all heads, and the other heads' products meet zeros. That is more
    arithmetic, but no key is moved.
    """
    B, _, H, D = q.shape
    J = k.size(2)
    diagonal = torch.eye(J, dtype=q.dtype, device=q.device).view(1, J, 1, J, 1)
    spread = (
        q.unflatten(2, (J, -1)).squeeze(1).transpose(2, 3)[:, :, :, None] * diagonal
    )  # (B, Hkv, D, Hkv, H / Hkv)
    products = (
        torch.bmm(k.flatten(2), spread.reshape(B, J * D, H)).transpose(1, 2).float()
    )  # (B, H, K)
    products.mul_(D**-0.5 if scale is None else scale).masked_fill_(~mask[:, 0], float("-inf"))
    y = torch.bmm(products.softmax(dim=2).to(v.dtype), v.flatten(2))  # (B, H, Hkv * D)
    return (
        y.view(B, J, H // J, J, D).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(B, 1, H, D)
    )


def by_products(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, K, H, D)
    v: Tensor,  # (B, K, H, D)
    mask: Tensor,  # (B, 1, T, K) bool, True = seen
    scale: float | None,
) -> Tensor:  # (B, T, H, D)
    """masked() as two products with a softmax between them: the scores of all heads are in memory at the same time."""
    B, T, H, D = q.shape
    hidden = finite_mask(mask, q.dtype).expand(B, H, T, k.size(1)).flatten(0, 1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B * H, T, D)
    shares = torch.baddbmm(hidden, q, k.mT, alpha=D**-0.5 if scale is None else scale).softmax(
        dim=2
    )
    return torch.bmm(shares, v).unflatten(0, (B, H)).transpose(1, 2)

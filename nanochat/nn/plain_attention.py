"""Attention by torch's own operator, which every device has, and the masks that it needs."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

HIDDEN = (
    -3e4
)  # a score that no fp16 softmax sees, and that stays finite when another score is added to it


class Kept:
    """The last `most` tensors that were asked for, by key, such as masks, so that many layers share each.

    The one unused for longest is evicted first.
    """

    def __init__(self, most: int):
        self.most = most
        self._tensors: OrderedDict[Hashable, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of a key, made now if it is not kept.

        While a model is being compiled nothing is kept: the tensor becomes part of the compiled code.
        """
        if is_compiling():
            return make()
        if key not in self._tensors:
            with torch.inference_mode(
                False
            ):  # a tensor made while sampling must serve training too
                self._tensors[key] = make()
            if len(self._tensors) > self.most:
                self._tensors.popitem(last=False)
        self._tensors.move_to_end(key)
        return self._tensors[key]


class Masks:
    """The masks of causal and windowed attention, each made once and shared by all layers."""

    def __init__(self) -> None:
        self.bands = Kept(16)
        self.triangles = Kept(4)

    def band(self, window: int, device: torch.device) -> Tensor:
        """(W, 2W) bool: query r of a block sees keys r .. r + W of the block before and its own, W + 1 keys."""

        def make() -> Tensor:
            offset = (
                torch.arange(2 * window, device=device)[None]
                - torch.arange(window, device=device)[:, None]
            )
            return (offset >= 0) & (offset <= window)

        return self.bands.get((window, device), make)

    def lower_triangle(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(T, T) finite scores that hide every key after the query."""

        def make() -> Tensor:
            return scores(torch.ones(length, length, dtype=torch.bool, device=device).tril(), dtype)

        return self.triangles.get((length, device, dtype), make)


def attend(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, T, Hkv, D)
    v: Tensor,  # (B, T, Hkv, D)
    window: int,
    scale: float | None,  # of the scores, default 1/sqrt(D)
    masks: Masks,
    finite: bool,  # mask with numbers instead of -inf
) -> Tensor:  # (B, T, H, D)
    """Causal attention in which a query also sees at most `window` keys before its own.

    A short window is computed in blocks of W queries against 2W keys, so that neither the time nor any mask grows with
    T squared. All blocks and layers share one (W, 2W) mask.
    """
    B, T, H, _ = q.shape
    grouped = k.size(2) != H
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    if window >= T - 1:
        return _causal(q, k, v, scale, grouped, masks, finite).transpose(1, 2)
    W = window
    blocks = -(-T // W)
    if (
        pad := blocks * W - T
    ):  # padded keys come after every real query, so that causality hides them
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    first = _causal(q[:, :, :W], k[:, :, :W], v[:, :, :W], scale, grouped, masks, finite)

    def later(x: Tensor) -> Tensor:  # blocks 1.. as a batch: (B * (blocks - 1), H, W, D)
        return x[:, :, W:].unflatten(2, (blocks - 1, W)).transpose(1, 2).flatten(0, 1)

    def pairs(
        x: Tensor,
    ) -> Tensor:  # each later block behind the one before it: (B * (blocks - 1), H, 2W, D)
        x = x.unflatten(2, (blocks, W))
        return torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3).transpose(1, 2).flatten(0, 1)

    seen = masks.band(W, q.device)
    mask = scores(seen, q.dtype) if finite else seen
    rest = F.scaled_dot_product_attention(
        later(q), pairs(k), pairs(v), attn_mask=mask, scale=scale, enable_gqa=grouped
    )
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
    """Attention of queries over the keys that a mask lets them see."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        scale=scale,
        enable_gqa=k.size(2) != q.size(2),
        attn_mask=scores(mask, q.dtype) if finite else mask,
    )
    return out.transpose(1, 2)


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
    own = torch.eye(J, dtype=q.dtype, device=q.device).view(1, J, 1, J, 1)
    spread = (
        q.unflatten(2, (J, -1)).squeeze(1).transpose(2, 3)[:, :, :, None] * own
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
    hidden = scores(mask, q.dtype).expand(B, H, T, k.size(1)).flatten(0, 1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B * H, T, D)
    shares = torch.baddbmm(hidden, q, k.mT, alpha=D**-0.5 if scale is None else scale).softmax(
        dim=2
    )
    return torch.bmm(shares, v).unflatten(0, (B, H)).transpose(1, 2)


def cache_mask(
    positions: Tensor,  # (B, T) the place of each query in its sequence
    keys: int,  # how many places of the cache attention reads
    window: int,
) -> Tensor:  # (B, 1, T, keys) bool, True = seen
    """Which cached keys each query sees: none after its own place, at most `window` before it."""
    distance = positions[:, :, None] - torch.arange(keys, device=positions.device)
    return ((distance >= 0) & (distance <= window))[:, None]


def scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: 0 where a key is seen, and a large negative number, never -inf, where it is not."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, HIDDEN)


def _causal(
    q: Tensor,  # (B, H, T, D)
    k: Tensor,  # (B, Hkv, T, D)
    v: Tensor,  # (B, Hkv, T, D)
    scale: float | None,
    grouped: bool,
    masks: Masks,
    finite: bool,
) -> Tensor:  # (B, H, T, D)
    if not finite:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    mask = masks.lower_triangle(q.size(2), q.device, q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)

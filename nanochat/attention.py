"""Attention built from torch's own operators, and the masks that it needs.

A model has one PlainAttention, or a platform's subclass that overrides what its device computes
faster, and every Context (context.py) calls it. Shapes: B batch, T time, H heads, Hkv heads of keys
and values, D head dimension, K keys.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling


class TensorCache:
    """Keeps the most recently used tensors by key, such as masks that all layers share.

    It holds at most `size` tensors, and evicts the one that has been unused for longest.
    """

    def __init__(self, size: int):
        self.size = size
        self._tensors: OrderedDict[Hashable, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor for a key, calling `make` if the cache does not hold it.

        While a model is being compiled, `make` is always called and nothing is stored, because the
        tensor becomes part of the compiled code.
        """
        if is_compiling():
            return make()
        if key not in self._tensors:
            # a tensor made while sampling must serve training too
            with torch.inference_mode(False):
                self._tensors[key] = make()
            if len(self._tensors) > self.size:
                self._tensors.popitem(last=False)
        self._tensors.move_to_end(key)
        return self._tensors[key]


class PlainAttention:
    """Causal attention by torch's scaled_dot_product_attention, which runs on every device."""

    name = "torch's own"
    # On devices where a new shape costs a compilation, lengths are rounded up to a multiple of this.
    grain = 1

    def __init__(self) -> None:
        self.bands = TensorCache(16)

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,  # multiplies the scores; default 1/sqrt(D)
    ) -> Tensor:  # (B, T, H, D)
        """Compute causal attention in which a query sees at most `window` keys before its own.

        If the window is shorter than the sequence, attention is computed in blocks of W = `window`
        queries against 2W keys, so that neither the time nor any mask grows with T squared. All
        blocks and layers share one (W, 2W) mask.
        """
        B, T, _, _ = q.shape
        W = window
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
        if W >= T - 1:
            return self.causal(q, k, v, scale).transpose(1, 2)
        blocks = -(-T // W)
        padding = blocks * W - T
        if padding:  # padded keys come after every real query, so that causality hides them
            q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
        first = self.causal(q[:, :, :W], k[:, :, :W], v[:, :, :W], scale)

        def later(x: Tensor) -> Tensor:  # all blocks but the first: (B * (blocks - 1), H, W, D)
            return x[:, :, W:].unflatten(2, (blocks - 1, W)).transpose(1, 2).flatten(0, 1)

        def pairs(x: Tensor) -> Tensor:  # each of these after its predecessor: (..., H, 2W, D)
            x = x.unflatten(2, (blocks, W))
            return torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3).transpose(1, 2).flatten(0, 1)

        later_blocks = F.scaled_dot_product_attention(
            later(q),
            pairs(k),
            pairs(v),
            attn_mask=self.mask(self._band(W, q.device), q.dtype),
            scale=scale,
            enable_gqa=k.size(1) != q.size(1),
        )
        later_blocks = (
            later_blocks.unflatten(0, (B, blocks - 1)).transpose(1, 2).flatten(2, 3)
        )  # (B, H, T - W, D)
        return torch.cat((first, later_blocks), dim=2)[:, :, :T].transpose(1, 2)

    def masked(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D)
        v: Tensor,  # (B, K, Hkv, D)
        visible: Tensor,  # (B, 1, T, K) bool, True where a query sees a key
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Compute attention in which each query sees the keys that `visible` marks."""
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self.mask(visible, q.dtype),
            scale=scale,
            enable_gqa=k.size(2) != q.size(2),
        )
        return y.transpose(1, 2)

    def by_documents(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        positions: Tensor,  # (B, T) the position of each token in its document
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:  # (B, T, H, D)
        """Compute causal attention within the window and each document of a row, without a mask.

        Returns None if the device needs a mask.
        """
        return None

    def extend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        cached_k: Tensor,  # (B, K, Hkv, D) rows of the cache, overwritten at `positions`
        cached_v: Tensor,  # (B, K, Hkv, D)
        positions: Tensor,  # (B, T) consecutive positions of the new tokens in their row
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:  # (B, T, H, D)
        """Write new keys and values into a cache and compute attention to it, in one operator.

        Returns None, with nothing written, if the device has no such operator.
        """
        return None

    def by_lengths(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D) rows of the cache, including the new keys
        v: Tensor,  # (B, K, Hkv, D)
        new: Sequence[int],  # for each row, how many of the T tokens are real
        ends: Sequence[int],  # for each row, how many keys it holds
        # with one query per row: the positions (B, W + 1) of the last keys of each row
        recent: Callable[[], Tensor],
        window: int,
        scale: float | None = None,
    ) -> Tensor | None:  # (B, T, H, D)
        """Compute attention to a cache from the lengths of its rows, without a mask.

        Returns None if the device needs a mask.
        """
        return None

    def causal(
        self,
        q: Tensor,  # (B, H, T, D)
        k: Tensor,  # (B, Hkv, T, D)
        v: Tensor,  # (B, Hkv, T, D)
        scale: float | None,
    ) -> Tensor:  # (B, H, T, D)
        """Compute attention in which a query sees every key up to and including its own."""
        grouped = k.size(1) != q.size(1)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a boolean visibility mask in the form that the attention operator reads.

        `dtype` is the format of the queries. In plain torch the mask needs no conversion.
        """
        return visible

    def _band(self, window: int, device: torch.device) -> Tensor:
        """Return a (W, 2W) mask of the keys that each query sees in its block and the one before.

        Query r sees the W + 1 keys r .. r + W, counted from the start of the block before.
        """

        def make() -> Tensor:
            keys = torch.arange(2 * window, device=device)[None]
            queries = torch.arange(window, device=device)[:, None]
            offset = keys - queries
            return (offset >= 0) & (offset <= window)

        return self.bands.get((window, device), make)


def cache_mask(
    positions: Tensor,  # (B, T) position of each query in its sequence
    keys: int,  # K, the number of cache positions that attention reads
    window: int,
) -> Tensor:  # (B, 1, T, K) bool
    """Return a mask of the cached keys that each query sees.

    A query sees its own key and at most `window` keys before it, but none after it.
    """
    distance = positions[:, :, None] - torch.arange(keys, device=positions.device)
    return ((distance >= 0) & (distance <= window))[:, None]

"""The context of a forward pass: which sequences its tokens belong to, and what came before them.

There is one class for each kind of pass: Context for whole rows, Packed for rows of several
documents, and Cached for new tokens of the sequences in a cache. rl/trees.py adds Tree, for replies
that share a prompt.

The caller creates one context per pass, and every layer asks it for the token before each token,
for attention, and for the state that a recurrent layer keeps. Nothing else in a model depends on
the kind of pass. Shapes: B batch, T time, C channels, H heads, Hkv heads of keys and values, D head
dimension.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from nanochat.attention import PlainAttention, cache_mask
from nanochat.cache import Cache


class Embeds(Protocol):
    """The part of a model that a context uses (Protocol)."""

    @property
    def attention(self) -> PlainAttention:
        """The attention operators of the model's device."""
        ...

    def embed(self, idx: Tensor) -> Tensor:
        """Return the embeddings (..., C) of token ids (...)."""
        ...


class Context:
    """The context of rows that hold one whole sequence each, and the base of the other contexts."""

    positions: Tensor | None = None
    """the position (B, T) of each token in its sequence; None if every row has 0 .. T-1"""
    documents: Tensor | None = None
    """the index (B, T) of each token's document; None if rows are not split into documents"""
    lengths: Tensor | None = None
    """the number (B,) of real tokens in each row; None if no row has padding to be skipped"""
    targets_at: Tensor | None = None
    """the indices (N,), over all rows, of the tokens that predict targets; None if all do"""
    longest: int | None = None
    """an upper bound on the length of every sequence; None if it is the length of a row"""

    def bind(self, model: Embeds) -> None:
        """Take the attention operators, and anything else the pass needs, from a model.

        The model calls this before its first layer.
        """
        self.attention = model.attention

    def previous(self, x: Tensor) -> Tensor:
        """Return the entry of x for the token before each token, or 0 where a sequence begins.

        x holds token ids (B, T) or embeddings (B, T, C).
        """
        return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)

    def previous_keys(self, layer: int, k: Tensor) -> Tensor:
        """Return the key (B, T, Hkv, D) of the token before each token.

        It is zero where a sequence begins. Only the half that offset_keys() takes is reliable.
        """
        return self.previous(k)

    def attend(
        self,
        layer: int,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Compute a layer's attention; PlainAttention.attend() describes the arguments."""
        return self.attention.attend(q, k, v, window, scale)

    def read(self, name: str, layer: int) -> Tensor | None:
        """Return the state `name` of a recurrent layer, as it is before the pass.

        Returns None if every sequence begins with this pass.
        """
        return None

    def write(self, name: str, layer: int, state: Tensor) -> None:
        """Store the state `name` of a recurrent layer after the last real token of the pass.

        Without a cache, it is discarded.
        """

    def finish(self) -> None:
        """Record in the cache, if there is one, the tokens that its sequences have gained.

        The model calls this after its last layer.
        """


class Packed(Context):
    """The context of rows that hold several documents, which do not see each other."""

    def __init__(
        self,
        documents: Tensor,  # (B, T) the index of each token's document, rising along a row
    ):
        T = documents.size(1)
        index = torch.arange(T, device=documents.device).expand_as(documents)
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = (index * begins).cummax(dim=1).values  # where each token's document begins
        of_query = documents[:, :, None]
        of_key = documents[:, None, :]
        is_same = (of_query == of_key)[:, None]  # (B, 1, T, T)
        self.documents = documents
        self.positions: Tensor = index - starts
        self.seen = is_same & cache_mask(index, T, T)  # (B, 1, T, T) True where a query sees a key
        self._masks: dict[int, Tensor] = {}  # window -> the same within a window

    def previous(self, x: Tensor) -> Tensor:
        """Return x shifted right by one token, with zeros where a document begins."""
        begins = self.positions == 0
        return super().previous(x).masked_fill(trailing(begins, x), 0)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None
    ) -> Tensor:
        """Compute causal attention within each document and the window."""
        y = self.attention.by_documents(q, k, v, self.positions, window, scale)
        if y is not None:
            return y
        T = q.size(1)
        if window >= T - 1:
            return self.attention.masked(q, k, v, self.seen, scale)
        if window not in self._masks:
            index = torch.arange(T, device=q.device)[None]
            self._masks[window] = self.seen & cache_mask(index, T, window)
        return self.attention.masked(q, k, v, self._masks[window], scale)


class Cached(Context):
    """The context of new tokens in B contiguous slots of a cache."""

    def __init__(
        self,
        cache: Cache,
        idx: Tensor,  # (B, T) the new tokens
        slots: slice | None = None,  # B slots of the cache; None: the first B
        lengths: Tensor | None = None,  # (B,) how many of the T tokens are real; None: all
        cached: Sequence[int] | None = None,  # tokens of each row before; None: ask the device
        new: Sequence[int] | None = None,  # real tokens of each row; needed if `cached` is given
        keys: int | None = None,  # for graphs: the cache positions that attention reads, by mask
    ):
        self.cache = cache
        self.slots = slots or slice(0, idx.size(0))
        self.lengths = lengths
        self.longest = cache.length
        offsets = torch.arange(idx.size(1), device=idx.device)
        self.positions: Tensor = cache.positions[self.slots, None] + offsets  # (B, T)
        self.cached = cached
        self.new = new
        self.keys = keys
        self._idx = idx
        self._keeps_last = False  # whether the model has asked for the token before each token
        # A graph reads the lengths on the device, in a mask, since they differ when it is replayed.
        self._by_lengths = keys is None and cached is not None
        self._row = torch.arange(idx.size(0), device=idx.device)[:, None]
        self._masks: dict[int, Tensor] = {}  # window -> (B, 1, T, K) True where a query sees a key
        # window -> (B, W + 1) positions of the last keys of each row
        self._recent: dict[int, Tensor] = {}

    def bind(self, model: Embeds) -> None:
        """Take the model's attention operators, and choose how many cache positions they read.

        An explicit `keys` is kept.
        """
        self.attention = model.attention
        self._embed = model.embed
        if self.keys is None:
            if self.cached:
                longest = max(self.cached)
            else:
                longest = int(self.cache.positions[self.slots].max())
            end = longest + self.positions.size(1)
            grain = self.attention.grain
            grains = -(-end // grain)
            self.keys = min(grains * grain, self.cache.length)

    def previous(self, x: Tensor) -> Tensor:
        """Return x shifted right by one token, with each slot's last cached token in front.

        If x holds embeddings, that token's embedding is put there. An empty slot gives 0.
        """
        self._keeps_last = True
        first = self.cache.last[self.slots, None]
        if x.is_floating_point():
            has_tokens = self.cache.positions[self.slots, None, None] > 0
            first = self._embed(first) * has_tokens
        return torch.cat((first, x[:, :-1]), dim=1)

    def previous_keys(self, layer: int, k: Tensor) -> Tensor:
        """Return the keys shifted right by one token.

        For the first new token, only the half of the key that offset_keys() takes is reliable. It
        comes from the cache, where every pass stores its last key once more, one position further
        on.
        """
        cached_k = self.cache.k[layer, self.slots]
        # Nothing is ever stored in advance at position 0, so the half that is used is zero there.
        first = cached_k[self._row, self.positions[:, :1]]
        next_position = self.positions[:, -1:] + 1
        cached_k[self._row, next_position] = k[:, -1:].to(cached_k.dtype)
        return torch.cat((first.to(k.dtype), k[:, :-1]), dim=1)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None
    ) -> Tensor:
        """Write the new keys and values to the cache, and compute attention to its slots."""
        cached_k = self.cache.k[layer, self.slots]
        cached_v = self.cache.v[layer, self.slots]
        y = self.attention.extend(q, k, v, cached_k, cached_v, self.positions, window, scale)
        if y is not None:
            return y
        cached_k[self._row, self.positions] = k
        cached_v[self._row, self.positions] = v
        if self._by_lengths:
            assert self.cached is not None and self.new is not None
            ends = [cached + new for cached, new in zip(self.cached, self.new, strict=True)]
            recent = partial(self._recent_keys, window, cached_k.size(1))
            y = self.attention.by_lengths(
                q, cached_k, cached_v, self.new, ends, recent, window, scale
            )
            if y is not None:
                return y
        assert self.keys is not None
        if window not in self._masks:
            self._masks[window] = cache_mask(self.positions, self.keys, window)
        k = cached_k[:, : self.keys]
        v = cached_v[:, : self.keys]
        return self.attention.masked(q, k, v, self._masks[window], scale)

    def _recent_keys(self, window: int, length: int) -> Tensor:  # (B, W + 1)
        """Return the positions from which attention reads each row's last W + 1 keys.

        There must be one query per row. For a row with fewer keys, the positions begin at 0 and run
        past its last key.
        """
        if window not in self._recent:
            first = (self.positions - window).clamp_min(0)
            recent = torch.arange(min(window + 1, length), device=first.device)
            self._recent[window] = first + recent
        return self._recent[window]

    def read(self, name: str, layer: int) -> Tensor | None:
        """Return the state of a recurrent layer for the slots of this pass."""
        return self.cache.named_states[name][self.slots, layer]

    def write(self, name: str, layer: int, state: Tensor) -> None:
        """Store the state of a recurrent layer for the slots of this pass."""
        self.cache.named_states[name][self.slots, layer] = state

    def finish(self) -> None:
        """Advance the length of each slot, and store its last token if the model reads it."""
        new_tokens = self._idx.size(1) if self.lengths is None else self.lengths
        self.cache.positions[self.slots] += new_tokens
        if not self._keeps_last:
            return
        last = self._idx[:, -1]
        if self.lengths is not None:
            last = self._idx.gather(1, self.lengths[:, None] - 1)[:, 0]
        self.cache.last[self.slots] = last


def trailing(x: Tensor, like: Tensor) -> Tensor:
    """Return x (B, T) in a shape that broadcasts with `like` (B, T, ...)."""
    return x.view(*x.shape, *[1] * (like.dim() - 2))


def whole_rows(context: Context) -> bool:
    """Return whether every row is one sequence, for which devices have faster operators."""
    return type(context) is Context

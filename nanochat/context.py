"""What a forward pass knows beside its tokens.

A pass reads whole rows, packed rows, trees of replies, or new tokens of a cache.

The caller makes one context for a pass, and every layer asks the same context: for the token before
each token, for attention, and for the state that a recurrent layer keeps. Nothing else in a model
depends on the kind of the pass. Shapes: B batch, T time, C channels, H heads, Hkv heads of keys and
values, D head dimension.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nanochat.attention import PlainAttention, cache_mask
from nanochat.cache import Cache


class Embeds(Protocol):
    """What a context asks of the model that a pass runs through."""

    @property
    def attention(self) -> PlainAttention:
        """How the device attends."""
        ...

    def embed(self, idx: Tensor) -> Tensor:
        """Return the embeddings (..., C) of token ids (...)."""
        ...


class Context(Protocol):
    """The members of every context."""

    @property
    def positions(self) -> Tensor | None:
        """(B, T) position of each token in its sequence; None: 0 .. T-1 in every row."""
        ...

    @property
    def documents(self) -> Tensor | None:
        """(B, T) number of each token's document, where a row holds several."""
        ...

    @property
    def lengths(self) -> Tensor | None:
        """(B,) how many of the T tokens are real, where rows end with padding."""
        ...

    @property
    def targets_at(self) -> Tensor | None:
        """(N,) indices in all rows of the tokens that predict targets; None: all."""
        ...

    @property
    def longest(self) -> int | None:
        """A bound for all positions; None where the number of tokens of a row is the bound."""
        ...

    def bind(self, model: Embeds) -> None:
        """Take what the pass needs of the model that it runs through.

        The model calls this first.
        """
        ...

    def previous(self, x: Tensor) -> Tensor:
        """Return x of the token before each token: token ids (B, T), or embeddings (B, T, C).

        Zeros stand where a sequence begins.
        """
        ...

    def previous_keys(self, layer: int, k: Tensor) -> Tensor:
        """Return the key (B, T, Hkv, D) of the token before each token.

        It is zero where a sequence begins.
        """
        ...

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None
    ) -> Tensor:  # (B, T, H, D)
        """Return the attended values. Shapes and scale are those of Operations.attend."""
        ...

    def read(self, name: str, layer: int) -> Tensor | None:
        """Return the state of a recurrent layer before the first token.

        None where every sequence begins here.
        """
        ...

    def write(self, name: str, layer: int, state: Tensor) -> None:
        """Store the state of a recurrent layer after the last real token."""
        ...

    def finish(self) -> None:
        """Count the tokens that the sequences of a cache have gained.

        The model calls this after its last layer.
        """
        ...


class Rows:
    """Whole sequences: every row begins at position 0."""

    positions: Tensor | None = None
    documents: Tensor | None = None
    lengths: Tensor | None = None
    targets_at: Tensor | None = None
    longest: int | None = None

    def bind(self, model: Embeds) -> None:
        """Take the model's attention."""
        self.attention = model.attention

    def previous(self, x: Tensor) -> Tensor:
        """Return x shifted by one token."""
        return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)

    def previous_keys(self, layer: int, k: Tensor) -> Tensor:
        """Return the keys shifted by one token."""
        return self.previous(k)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None
    ) -> Tensor:
        """Attend causally within each row."""
        return self.attention.attend(q, k, v, window, scale)

    def read(self, name: str, layer: int) -> Tensor | None:
        """Return None: every sequence begins here."""
        return None

    def write(self, name: str, layer: int, state: Tensor) -> None:
        """Drop the state: the next pass begins new sequences."""

    def finish(self) -> None:
        """Do nothing: no cache has gained tokens."""


class Packed(Rows):
    """Rows that hold several documents, none of which sees another."""

    def __init__(
        self, documents: Tensor
    ):  # (B, T) the number of each token's document, rising along a row
        T = documents.size(1)
        index = torch.arange(T, device=documents.device).expand_as(documents)
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = (index * begins).cummax(dim=1).values
        same = (documents[:, :, None] == documents[:, None, :])[:, None]
        self.documents = documents
        self.positions: Tensor = index - starts
        self.seen = same & cache_mask(index, T, T)  # (B, 1, T, T) which keys each query sees

    def previous(self, x: Tensor) -> Tensor:
        """Return x shifted by one token, with zeros where a document begins."""
        begins = self.positions == 0
        return super().previous(x).masked_fill(_trailing(begins, x), 0)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None
    ) -> Tensor:
        """Attend causally within each document; the window is that of the whole row."""
        return self.attention.masked(q, k, v, self.seen, scale)


class Tree(Rows):
    """Rows whose tokens form trees: sequences share the tokens of a common beginning.

    A row may hold several trees, and padding: tokens that see themselves only.
    """

    def __init__(
        self,
        parents: Tensor,  # (B, T) index in the row of the token before each token; its own where a sequence begins
        visible: Tensor,  # (B, T, T) bool, True where a token (dim 1) sees another one: itself and those before it
        targets_at: Tensor,  # (N,) index in all rows, one after the other, of the token that predicts each target
    ):
        self.parents = parents
        self.seen = visible
        self.targets_at = targets_at
        self.positions: Tensor = visible.sum(dim=2) - 1
        self._masks: dict[int, Tensor] = {}  # window -> (B, 1, T, T) which keys each query sees

    def previous(self, x: Tensor) -> Tensor:
        """Return what the parent of each token has in x."""
        begins = self.parents == torch.arange(self.parents.size(1), device=self.parents.device)
        parents = _trailing(self.parents, x).expand_as(x)
        return x.gather(1, parents).masked_fill(_trailing(begins, x), 0)

    def previous_keys(self, layer: int, k: Tensor) -> Tensor:
        """Return the key of each token's parent."""
        return self.previous(k.flatten(2)).view_as(k)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None
    ) -> Tensor:
        """Attend to the tokens on the way from the root to each token."""
        if window not in self._masks:
            near = self.positions[:, :, None] - self.positions[:, None] <= window
            self._masks[window] = (self.seen & near)[:, None]
        return self.attention.masked(q, k, v, self._masks[window], scale)


class Cached:
    """New tokens of the sequences in a cache: a pass over B contiguous slots."""

    documents: Tensor | None = None
    targets_at: Tensor | None = None

    def __init__(
        self,
        cache: Cache,
        idx: Tensor,  # (B, T) the new tokens
        slots: slice | None = None,  # B slots of the cache; None: the first ones
        lengths: Tensor
        | None = None,  # (B,) how many of the T tokens are real; the rest is padding. None: all
        cached: Sequence[int]
        | None = None,  # tokens that each row held before. None: the host must ask the device
        new: Sequence[int] | None = None,  # real tokens of each row, where `cached` is known too
        keys: int
        | None = None,  # positions that attention reads by mask, whatever the rows hold: for graphs
    ):
        self.cache = cache
        self.slots = slots or slice(0, idx.size(0))
        self.lengths = lengths
        self.longest = cache.length
        self.positions = cache.positions[self.slots, None] + torch.arange(
            idx.size(1), device=idx.device
        )
        self.cached = cached
        self.new = new
        self.keys = keys
        self._idx = idx
        self._keeps_last = False  # whether the model asks for the token before each token
        self._by_lengths = keys is None and cached is not None
        self._row = torch.arange(idx.size(0), device=idx.device)[:, None]
        self._masks: dict[int, Tensor] = {}  # window -> (B, 1, T, K) which keys each query sees
        self._recent: dict[
            int, Tensor
        ] = {}  # window -> (B, W + 1) positions of each row's last keys

    def bind(self, model: Embeds) -> None:
        """Take the model's attention, and choose how much of the cache it reads."""
        self.attention = model.attention
        self._embed = model.embed
        if self.keys is None:
            longest = (
                max(self.cached) if self.cached else int(self.cache.positions[self.slots].max())
            )
            grain = self.attention.grain
            self.keys = min(
                -(-(longest + self.positions.size(1)) // grain) * grain, self.cache.length
            )

    def previous(self, x: Tensor) -> Tensor:
        """Return x shifted by one token, the last token of a slot first."""
        self._keeps_last = True
        first = self.cache.last[self.slots, None]
        if x.is_floating_point():
            first = self._embed(first) * (self.cache.positions[self.slots, None, None] > 0)
        return torch.cat((first, x[:, :-1]), dim=1)

    def previous_keys(self, layer: int, k: Tensor) -> Tensor:
        """Return the keys shifted by one token.

        Only the half of a key that offset_keys() takes can be relied on in the first new token's:
        the cache holds it in the place of the next key, which the last new token begins.
        """
        keys = self.cache.k[layer, self.slots]
        first = keys[
            self._row, self.positions[:, :1]
        ]  # nothing begins the key at position 0, so it is zero there
        keys[self._row, self.positions[:, -1:] + 1] = k[:, -1:].to(keys.dtype)
        return torch.cat((first.to(k.dtype), k[:, :-1]), dim=1)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None
    ) -> Tensor:
        """Write the new keys and values, and attend to all that the slots then hold."""
        cached_k, cached_v = self.cache.k[layer, self.slots], self.cache.v[layer, self.slots]
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
        k, v = cached_k[:, : self.keys], cached_v[:, : self.keys]
        return self.attention.masked(q, k, v, self._masks[window], scale)

    def _recent_keys(self, window: int, length: int) -> Tensor:  # (B, W + 1)
        """Return the positions of the last keys of each row."""
        if window not in self._recent:
            first = (self.positions - window).clamp_min(0)
            recent = torch.arange(min(window + 1, length), device=first.device)
            self._recent[window] = first + recent
        return self._recent[window]

    def read(self, name: str, layer: int) -> Tensor | None:
        """Return the slots' state of a recurrent layer."""
        return self.cache.named_states[name][self.slots, layer]

    def write(self, name: str, layer: int, state: Tensor) -> None:
        """Store the slots' state of a recurrent layer."""
        self.cache.named_states[name][self.slots, layer] = state

    def finish(self) -> None:
        """Count the tokens that each slot has gained, and store the last one if need be."""
        if self._keeps_last:
            last = (
                self._idx[:, -1]
                if self.lengths is None
                else self._idx.gather(1, self.lengths[:, None] - 1)[:, 0]
            )
            self.cache.last[self.slots] = last
        self.cache.positions[self.slots] += (
            self._idx.size(1) if self.lengths is None else self.lengths
        )


def _trailing(x: Tensor, like: Tensor) -> Tensor:
    """Return x (B, T) in a shape that broadcasts with `like` (B, T, ...)."""
    return x.view(*x.shape, *[1] * (like.dim() - 2))


TREE = ("parents", "seen", "targets_at")  # the tensors of a Tree, in its order


def model_arguments(extras: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the further arguments of a model from the named tensors of a micro-batch.

    `documents` become a Packed context, the tensors of TREE a Tree, and `weights` stay what they
    are.
    """
    arguments: dict[str, Any] = {
        name: extras[name] for name in extras if name not in ("documents", *TREE)
    }
    if "documents" in extras:
        arguments["context"] = Packed(extras["documents"])
    if TREE[0] in extras:
        arguments["context"] = Tree(*(extras[name] for name in TREE))
    return arguments


def whole_rows(context: Context) -> bool:
    """Whether every row is one sequence, for which devices have faster operators."""
    return type(context) is Rows

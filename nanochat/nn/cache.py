"""The key-value cache: keys and values of the sequences that a model is generating."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanochat.nn.operations import Operations
from nanochat.nn.plain_attention import cache_mask


class Cache:
    """Keys, values and lengths of the sequences in flight, one sequence in each slot.

    k and v are [layers, slots, T, Hkv, D]. `positions` (slots,) counts the tokens that a slot holds, and `last`
    (slots,) is the id of the slot's last token, 0 for an empty slot. `states` lists every tensor that has one row per
    slot and changes with each token, whatever the slot's length; a family of models may append its own. A forward pass
    reads and writes a contiguous range of slots. With `begun`, a slot that holds n tokens has n + 1 keys: its last
    token has begun the key of the next one.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        begun: bool = False,
    ):
        self.begun = int(begun)
        shape = (layers, slots, length + self.begun, kv_heads, head_dim)
        self.k, self.v = (zeros_on_demand(shape, device, dtype) for _ in range(2))
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)
        self.last = torch.zeros(slots, dtype=torch.long, device=device)
        self.states = [self.positions, self.last]
        self.named: dict[str, Tensor] = {}
        self.length = length

    @property
    def bytes(self) -> int:
        """The size of the whole cache."""
        return sum(held.numel() * held.element_size() for held in (self.k, self.v, *self.states))

    @property
    def cuts_anywhere(self) -> bool:
        """Whether cut() can shorten a slot: its states follow from the length and the last token alone."""
        return len(self.states) == 2

    def cut(self, slot: int, tokens: int, last: int) -> None:
        """Let a slot hold only its first `tokens` tokens, of which `last` is the last one."""
        assert self.cuts_anywhere
        self.positions[slot] = tokens
        self.last[slot] = last

    def add_state(self, name: str, state: Tensor) -> None:
        """Keep one more tensor with one row per slot, which changes with each token; `named[name]` finds it."""
        self.named[name] = state
        self.states.append(state)

    def clear(self, slots: slice) -> None:
        """Forget what the slots held."""
        for state in self.states:
            state[slots] = 0

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Make a slot hold what another one holds, which is so many tokens."""
        for entries in (self.k, self.v):
            entries[:, target, : tokens + self.begun] = entries[:, source, : tokens + self.begun]
        for state in self.states:
            state[target] = state[source]

    def move(self, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Make each target slot hold the first `tokens` tokens of what its source slot held before."""
        here = self.positions.device
        read, write = (torch.tensor(slots).to(here, non_blocking=True) for slots in (sources, targets))
        for entries in (self.k, self.v):
            held = entries[:, :, : tokens + self.begun]
            held.index_copy_(1, write, held.index_select(1, read))
        for state in self.states:
            state.index_copy_(0, write, state.index_select(0, read))

    def take(self, slot: int, tokens: int) -> list[Tensor]:
        """A copy of all that a slot holds, which is so many tokens, for put()."""
        entries = [held[:, slot, : tokens + self.begun].clone() for held in (self.k, self.v)]
        return [*entries, *(state[slot].clone() for state in self.states)]

    def put(self, slot: int, taken: list[Tensor]) -> None:
        """Make a slot hold what take() returned."""
        for held, entries in zip((self.k, self.v), taken[:2], strict=True):
            held[:, slot, : entries.size(1)] = entries
        for state, values in zip(self.states, taken[2:], strict=True):
            state[slot] = values

    def kept(self, slots: slice) -> list[Tensor]:
        """Copies of the slots' states, for restore()."""
        return [state[slots].clone() for state in self.states]

    def restore(self, slots: slice, kept: list[Tensor]) -> None:
        """Give the slots the states that kept() returned."""
        for state, values in zip(self.states, kept, strict=True):
            state[slots] = values


def zeros_on_demand(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros. On a CPU its pages take memory only once they are written.

    torch.zeros() writes every page, and most slots of a cache never grow to their full length.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size or not torch.empty(0, device=device).is_cpu:
        return torch.zeros(shape, device=device, dtype=dtype)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(shape)


@dataclass(frozen=True)
class Spans:
    """What the host knows about the rows of a pass: how many tokens each row held before, and how many it gains."""

    held: Sequence[int]
    fresh: Sequence[int]
    keys: int | None = None  # places of the cache that attention reads by mask, whatever the rows hold: for graphs


@dataclass
class CacheCall:
    """What the layers of a model share in one forward pass over a cache."""

    cache: Cache
    slots: slice
    rows: Tensor  # (B, 1) 0, 1, ... B - 1
    places: Tensor  # (B, T) where each new token goes
    keys: int  # K, how many places of the cache attention reads
    spans: Spans | None
    operations: Operations
    lengths: Tensor | None = None  # (B,) how many of the T tokens are real; None: all
    masks: dict[int, Tensor] = field(default_factory=dict)  # window -> (B, 1, T, K) which keys each query sees
    last: dict[int, Tensor] = field(default_factory=dict)  # window -> (B, W + 1) places of each row's last keys

    @classmethod
    def begin(
        cls,
        idx: Tensor,  # (B, T)
        cache: Cache,
        slots: slice,
        lengths: Tensor | None,
        spans: Spans | None,
        operations: Operations,
    ) -> "CacheCall":
        """Where the tokens of a pass go in the cache, and which keys they see."""
        T = idx.size(1)
        places = cache.positions[slots, None] + torch.arange(T, device=idx.device)
        if spans is not None and spans.keys is not None:
            keys = spans.keys
        else:
            held = max(spans.held) if spans else int(cache.positions[slots].max())  # the latter waits for the device
            grain = operations.shape_grain
            keys = min(-(-(held + T) // grain) * grain, cache.length)
        rows = torch.arange(idx.size(0), device=idx.device)[:, None]
        return cls(cache, slots, rows, places, keys, spans, operations, lengths)

    def finish(self) -> None:
        """Count the tokens that each slot has gained."""
        self.cache.positions[self.slots] += self.places.size(1) if self.lengths is None else self.lengths

    def keys_before(self, layer: int, k: Tensor) -> Tensor:  # (B, T, Hkv, D), as the result
        """The key of the token before each new token, zeros for a sequence's first. Only what with_offset() takes of
        the first one can be relied on: it comes from the cache, where the last new token begins the next key."""
        held = self.cache.k[layer, self.slots]
        first = held[self.rows, self.places[:, :1]]  # nothing begins the key at place 0, so it is zero there
        held[self.rows, self.places[:, -1:] + 1] = k[:, -1:].to(held.dtype)
        return torch.cat((first.to(k.dtype), k[:, :-1]), dim=1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
        """Write the new keys and values, then attend to all that the rows hold; shapes as in Operations.attend."""
        held_k, held_v = self.cache.k[layer, self.slots], self.cache.v[layer, self.slots]
        if self.operations.extends(q, held_k):
            return self.operations.extend(q, k, v, held_k, held_v, self.places, window, scale)
        held_k[self.rows, self.places] = k
        held_v[self.rows, self.places] = v
        if self.spans is None or self.spans.keys is not None or not self.operations.takes_lengths(q):
            if window not in self.masks:
                self.masks[window] = cache_mask(self.places, self.keys, window)
            k, v = held_k[:, : self.keys], held_v[:, : self.keys]
            return self.operations.attend_cached(q, k, v, self.masks[window], scale)
        if q.size(1) == 1 and window not in self.last:
            first = (self.places - window).clamp_min(0)
            self.last[window] = first + torch.arange(min(window + 1, held_k.size(1)), device=q.device)
        ends = [held + fresh for held, fresh in zip(self.spans.held, self.spans.fresh, strict=True)]
        last = self.last.get(window)
        return self.operations.attend_lengths(q, held_k, held_v, self.spans.fresh, ends, last, window, scale)

"""The key-value cache: keys and values of the sequences that a model is generating."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanochat.nn.operations import Operations
from nanochat.nn.plain_attention import cache_mask


class Cache:
    """Keys, values and lengths of the sequences in flight, one sequence in each slot.

    k and v are [layers, slots, T, Hkv, D]. `positions` (slots,) counts the tokens that a slot holds, and `previous`
    (slots, C) is the embedding of the slot's last token before smearing. A forward pass reads and writes a contiguous
    range of slots.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        channels: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        shape = (layers, slots, length, kv_heads, head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)
        self.previous = torch.zeros(slots, channels, device=device, dtype=dtype)
        self.length = length

    def clear(self, slots: slice) -> None:
        """Forget what the slots held."""
        self.positions[slots] = 0
        self.previous[slots] = 0


@dataclass(frozen=True)
class Spans:
    """What the host knows about the rows of a pass: how many tokens each row held before, and how many it gains."""

    held: Sequence[int]
    fresh: Sequence[int]


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
    masks: dict[int, Tensor] = field(default_factory=dict)  # window -> (B, 1, T, K) which keys each query sees
    last: dict[int, Tensor] = field(default_factory=dict)  # window -> (B, W + 1) places of each row's last keys

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
        """Write the new keys and values, then attend to all that the rows hold; shapes as in Operations.attend."""
        held_k, held_v = self.cache.k[layer, self.slots], self.cache.v[layer, self.slots]
        held_k[self.rows, self.places] = k
        held_v[self.rows, self.places] = v
        if self.spans is None or not self.operations.takes_lengths(q):
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

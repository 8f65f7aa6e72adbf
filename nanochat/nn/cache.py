"""The key-value cache: what a model keeps of the sequences in flight."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanochat.nn import kernels


class Cache:
    """Keys, values and places of the sequences in flight: one slot each, of different lengths.

    k and v are [layers, slots, T, Hkv, D]; `positions` (slots,) counts the tokens a slot holds; `previous` (slots, C)
    is the embedding of its last token before smearing. A forward pass reads and writes a contiguous range of slots.
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
    """What the host knows of the rows of a pass: the tokens that each held before, and how many it gains."""

    held: Sequence[int]
    fresh: Sequence[int]


@dataclass
class CacheCall:
    """What one forward pass over a cache shares between layers."""

    cache: Cache
    slots: slice
    rows: Tensor  # (B, 1) 0, 1, ... B - 1
    places: Tensor  # (B, T) where each new token goes
    keys: int  # K, how much of the cache is looked at
    spans: Spans | None
    masks: dict[int, Tensor] = field(default_factory=dict)  # window -> (B, 1, T, K) which keys are seen
    last: dict[int, Tensor] = field(default_factory=dict)  # window -> (B, W + 1) places of the last keys

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
        """Write new keys and values, and attend to what the rows then hold; shapes as in kernels.attend."""
        held_k, held_v = self.cache.k[layer, self.slots], self.cache.v[layer, self.slots]
        held_k[self.rows, self.places] = k
        held_v[self.rows, self.places] = v
        if self.spans is None or not kernels.takes_lengths(q):
            if window not in self.masks:
                self.masks[window] = kernels.cache_mask(self.places, self.keys, window)
            k, v = held_k[:, : self.keys], held_v[:, : self.keys]
            return kernels.attend_cached(q, k, v, self.masks[window], scale)
        if q.size(1) == 1 and window not in self.last:
            first = (self.places - window).clamp_min(0)
            self.last[window] = first + torch.arange(min(window + 1, held_k.size(1)), device=q.device)
        ends = [held + fresh for held, fresh in zip(self.spans.held, self.spans.fresh, strict=True)]
        return kernels.attend_lengths(q, held_k, held_v, self.spans.fresh, ends, self.last.get(window), window, scale)

"""The key-value cache: keys and values of the sequences that a model is generating."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


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
        read, write = (
            torch.tensor(slots).to(here, non_blocking=True) for slots in (sources, targets)
        )
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
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    return torch.frombuffer(mmap.mmap(-1, size, **private), dtype=dtype).view(shape)

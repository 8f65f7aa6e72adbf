"""The key-value cache: the keys and values of the sequences that a model is generating."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


class Cache:
    """Holds the keys, values and lengths of sequences, one sequence per slot.

    `k` and `v` are (layers, slots, length + extra_keys, Hkv, D). `positions` (slots,) counts the
    tokens in each slot. `last` (slots,) holds the ID of each slot's last token, or 0 if the slot is
    empty or the model does not read it. `states` lists the tensors that have one row per slot and
    change with each token, but do not grow; a model family may add more. A forward pass reads and
    writes a contiguous range of slots. If `extra_keys` is 1, a slot with n tokens has n + 1 keys,
    because half of the next token's key is taken from the last token and stored in advance.
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
        extra_keys: int = 0,
    ):
        self.extra_keys = extra_keys
        self.length = length
        shape = (layers, slots, length + extra_keys, kv_heads, head_dim)
        self.k = zeros_on_demand(shape, device, dtype)
        self.v = zeros_on_demand(shape, device, dtype)
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)
        self.last = torch.zeros(slots, dtype=torch.long, device=device)
        self.states = [self.positions, self.last]
        self.named_states: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """The size of the whole cache in bytes."""
        return sum(tensor.nbytes for tensor in (self.k, self.v, *self.states))

    @property
    def cuts_anywhere(self) -> bool:
        """True if cut() can shorten a slot to any length.

        This holds if the states of a slot follow from its length and its last token alone.
        """
        return len(self.states) == 2  # the positions and the last tokens

    def cut(self, slot: int, tokens: int, last: int) -> None:
        """Shorten a slot to its first `tokens` tokens; `last` is the ID of the last one kept."""
        assert self.cuts_anywhere
        self.positions[slot] = tokens
        self.last[slot] = last

    def add_state(self, name: str, state: Tensor) -> None:
        """Register a tensor with one row per slot that changes with each token.

        The tensor is then available as `named_states[name]`.
        """
        self.named_states[name] = state
        self.states.append(state)

    def clear(self, slots: slice) -> None:
        """Empty a range of slots."""
        for state in self.states:
            state[slots] = 0

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a slot, and its states, to another slot."""
        keys = tokens + self.extra_keys
        self.k[:, target, :keys] = self.k[:, source, :keys]
        self.v[:, target, :keys] = self.v[:, source, :keys]
        for state in self.states:
            state[target] = state[source]

    def move(self, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` tokens and the states of each source slot to its target slot.

        A slot may be both a source and a target, because all sources are read before any target is
        written.
        """
        device = self.positions.device
        source_slots = torch.tensor(sources).to(device, non_blocking=True)
        target_slots = torch.tensor(targets).to(device, non_blocking=True)
        keys = tokens + self.extra_keys
        for entries in (self.k, self.v):
            used_entries = entries[:, :, :keys]
            copies = used_entries.index_select(1, source_slots)  # (layers, sources, keys, Hkv, D)
            used_entries.index_copy_(1, target_slots, copies)
        for state in self.states:
            copies = state.index_select(0, source_slots)
            state.index_copy_(0, target_slots, copies)

    def take(self, slot: int, tokens: int) -> list[Tensor]:
        """Return copies of the contents of a slot that holds `tokens` tokens, for put()."""
        keys = tokens + self.extra_keys
        k = self.k[:, slot, :keys].clone()  # (layers, keys, Hkv, D)
        v = self.v[:, slot, :keys].clone()
        states = [state[slot].clone() for state in self.states]
        return [k, v, *states]

    def put(self, slot: int, contents: list[Tensor]) -> None:
        """Fill a slot with the copies that take() returned."""
        k, v, *slot_states = contents
        keys = k.size(1)
        self.k[:, slot, :keys] = k
        self.v[:, slot, :keys] = v
        for state, values in zip(self.states, slot_states, strict=True):
            state[slot] = values

    def copy_states(self, slots: slice) -> list[Tensor]:
        """Return copies of the states of a range of slots, for restore()."""
        return [state[slots].clone() for state in self.states]

    def restore(self, slots: slice, saved_states: list[Tensor]) -> None:
        """Set the states of a range of slots to the copies that copy_states() returned."""
        for state, values in zip(self.states, saved_states, strict=True):
            state[slots] = values


def zeros_on_demand(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros that, on a CPU, takes up memory page by page only as it is written.

    torch.zeros() writes every page, but most slots of a cache never grow to their full length.
    """
    size = math.prod(shape) * dtype.itemsize
    is_cpu = torch.empty(0, device=device).is_cpu
    if size == 0 or not is_cpu:
        return torch.zeros(shape, device=device, dtype=dtype)
    if hasattr(mmap, "MAP_PRIVATE"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:  # on Windows
        pages = mmap.mmap(-1, size)
    return torch.frombuffer(pages, dtype=dtype).view(shape)

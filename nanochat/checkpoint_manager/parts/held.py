"""What one rank holds of a step, and copies of that on the host, which training leaves as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.device import Compute
from nanochat.platforms import host
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Part

State = dict[
    str, tuple[Tensor, tuple[int, ...], int]
]  # name -> (tensor held here, whole shape, its first row)
SHARE = 0.5  # of the host's free memory that copies may take; on a host of several ranks each rank takes its share


class Optimizers(Protocol):
    """What a checkpoint needs of the optimizers; train/optim.py has them."""

    def state(self) -> State:
        """Every tensor that a resume needs, as this rank holds it; filled in place when a checkpoint is read."""
        ...

    def saved(self) -> State:
        """The part of state() that this rank writes."""
        ...

    def restored(self) -> None:
        """Called once the tensors of state() are filled."""
        ...


@dataclass(frozen=True)
class Held:
    """What one rank holds of a step: its rows of the parameters, and its share of the optimizer state."""

    parameters: dict[str, Part]
    state: State

    @staticmethod
    def of(model: nn.Module, optimizers: Optimizers) -> Held:
        """What this rank holds now; nothing is copied or gathered."""
        return Held(parallel.parts(model), optimizers.saved())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that this rank holds; no two have the same name."""
        parameters = {f"parameter {name}": part.here for name, part in self.parameters.items()}
        return parameters | {
            f"state {name}": value.detach() for name, (value, _, _) in self.state.items()
        }


class HostMemory:
    """Memory of the host that holds a copy of what a rank holds. Each copy overwrites the one before it."""

    def __init__(self, compute: Compute):
        self.compute = compute
        self._copies: dict[str, Tensor] = {}

    def has_room(self, held: Held) -> bool:
        """Whether the host has memory for a copy, beside what its processes need."""
        needed = sum(value.nbytes for value in held.tensors().values())
        there = sum(copy.nbytes for copy in self._copies.values())
        return needed <= there or needed <= SHARE * host.memory_free() / parallel.ranks_per_host(
            self.compute
        )

    def copy(self, held: Held) -> Held:
        """A copy on the host; on an accelerator made beside what the device computes."""
        with self.compute.platform.beside():
            for name, value in held.tensors().items():
                self._memory(name, value).copy_(value, non_blocking=True)
        copies = self._copies
        return Held(
            {
                name: replace(part, here=copies[f"parameter {name}"])
                for name, part in held.parameters.items()
            },
            {
                name: (copies[f"state {name}"], shape, first)
                for name, (_, shape, first) in held.state.items()
            },
        )

    def _memory(self, name: str, like: Tensor) -> Tensor:
        known = self._copies.get(name)
        if known is None or known.shape != like.shape or known.dtype != like.dtype:
            pinned = not self.compute.platform.is_host
            known = self._copies[name] = torch.empty(
                like.shape, dtype=like.dtype, pin_memory=pinned
            )
        return known

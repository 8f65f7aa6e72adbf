"""One rank's part of a step, and copies of it in host memory that training does not change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.device import Compute
from nanochat.platforms import host
from nanochat.runtime import parallel
from nanochat.runtime.parallel import ParameterShard, State

MEMORY_SHARE = 0.5  # share of the host's free memory for the copies of all its ranks


class Optimizers(Protocol):
    """The interface that checkpoints need from the optimizers; optim.py implements it."""

    def state(self) -> State:
        """Return all tensors of this rank that a resumed run fills in place."""
        ...

    def saved(self) -> State:
        """Return the tensors of state() that this rank writes to a checkpoint."""
        ...

    def restored(self) -> None:
        """Finish a restore, once the tensors of state() have been filled."""
        ...


@dataclass(frozen=True)
class RankState:
    """One rank's part of a step: its rows of the parameters and of the optimizer state."""

    parameters: dict[str, ParameterShard]
    optimizer: State

    @staticmethod
    def of(model: nn.Module, optimizers: Optimizers) -> RankState:
        """Return the part of the current state that this rank saves, without copying it."""
        return RankState(parallel.parameter_shards(model), optimizers.saved())

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of this rank, each under a unique name."""
        tensors = {f"parameter {name}": shard.rows for name, shard in self.parameters.items()}
        for name, (tensor, _, _) in self.optimizer.items():
            tensors[f"state {name}"] = tensor.detach()
        return tensors


class HostMemory:
    """Host memory that holds a copy of a rank's state. Each copy overwrites the one before it."""

    def __init__(self, compute: Compute):
        self.compute = compute
        self._copies: dict[str, Tensor] = {}

    def has_room(self, state: RankState) -> bool:
        """Return whether the host has enough memory for a copy of this rank's state.

        The copies of all ranks on the host may take half of its free memory (MEMORY_SHARE). A copy
        that is no larger than the one before it always has room.
        """
        needed_bytes = sum(tensor.nbytes for tensor in state.tensors().values())
        allocated_bytes = sum(copy.nbytes for copy in self._copies.values())
        if needed_bytes <= allocated_bytes:
            return True
        ranks = parallel.ranks_per_host(self.compute)
        return needed_bytes <= MEMORY_SHARE * host.memory_free() / ranks

    def copy(self, state: RankState) -> RankState:
        """Copy a rank's state to host memory while the device computes, and return the copy."""
        copies = {}
        with self.compute.platform.beside():
            for name, tensor in state.tensors().items():
                copies[name] = self._memory_like(name, tensor)
                copies[name].copy_(tensor, non_blocking=True)
        parameters = {
            name: replace(shard, rows=copies[f"parameter {name}"])
            for name, shard in state.parameters.items()
        }
        optimizer = {
            name: (copies[f"state {name}"], shape, first_row)
            for name, (_, shape, first_row) in state.optimizer.items()
        }
        return RankState(parameters, optimizer)

    def _memory_like(self, name: str, tensor: Tensor) -> Tensor:
        """Return memory for a tensor: that of its last copy if shape and dtype match, else new."""
        memory = self._copies.get(name)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            pinned = self.compute.platform.pins_memory
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._copies[name] = memory
        return memory

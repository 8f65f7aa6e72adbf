"""Which rows of a parameter this rank holds, and which ranks hold the others or the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Place:
    """Share `shard` of `shards` along dimension 0, as copy `replica` of `replicas`; one rank alone has 0 of 1."""

    shards: int = 1
    shard: int = 0
    shard_group: ProcessGroup | None = None  # the ranks that together hold the whole
    replicas: int = 1
    replica: int = 0
    replica_group: ProcessGroup | None = None  # the ranks that hold the same rows

    def row_counts(self, rows: int) -> list[int]:
        """Rows of each share. FSDP2 cuts as torch.chunk does: the last ones may have fewer, or none."""
        share = -(-rows // self.shards)
        return [max(min(share, rows - number * share), 0) for number in range(self.shards)]

    def first_row(self, rows: int) -> int:
        """Where this rank's rows begin."""
        return sum(self.row_counts(rows)[: self.shard])


def place_of(tensor: Tensor) -> Place:
    """Where a parameter lies: over a mesh of ranks, (shards,) or (replicas, shards), or whole on this one."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Place()
    *outer, inner = range(mesh.ndim)
    place = Place(mesh.size(inner), mesh.get_local_rank(inner), mesh.get_group(inner))
    if not outer:
        return place
    return Place(place.shards, place.shard, place.shard_group, mesh.size(0), mesh.get_local_rank(0), mesh.get_group(0))

"""Many ranks: FSDP2 sharding, sums over ranks, whole tensors for checkpoints, unsharded copies to sample from.

FSDP2 and DTensor are imported where they are used: importing them takes two seconds, which one rank alone can save.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeGuard

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError, log
from nanochat.device import Compute, is_sharded, local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule


Sharding = Literal["none", "grad", "full"]
_EVERY_PASS = "reduces_in_every_pass"  # an attribute that shard() gives the model


@dataclass(frozen=True)
class Place:
    """Where a rank's rows of a parameter lie: shard `shard` of `shards`, in replica `replica` of `replicas`.

    A rank that holds the whole parameter has shard 0 of 1.
    """

    shards: int = 1
    shard: int = 0
    shard_group: ProcessGroup | None = None  # the ranks that together hold the whole
    replicas: int = 1
    replica: int = 0
    replica_group: ProcessGroup | None = None  # the ranks that hold the same rows

    def row_counts(self, rows: int) -> list[int]:
        """How many rows each shard has. FSDP2 splits as torch.chunk does: the last shards may have fewer, or none."""
        share = -(-rows // self.shards)
        return [max(min(share, rows - number * share), 0) for number in range(self.shards)]

    def first_row(self, rows: int) -> int:
        """The first row that this rank holds."""
        return sum(self.row_counts(rows)[: self.shard])


def place_of(tensor: Tensor) -> Place:
    """Where a parameter lies: over a mesh of ranks, (shards,) or (replicas, shards), or whole on this rank."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Place()
    *outer, inner = range(mesh.ndim)
    place = Place(mesh.size(inner), mesh.get_local_rank(inner), mesh.get_group(inner))
    if not outer:
        return place
    return Place(
        place.shards,
        place.shard,
        place.shard_group,
        mesh.size(0),
        mesh.get_local_rank(0),
        mesh.get_group(0),
    )


def ranks_per_host(compute: Compute) -> int:
    """How many ranks the launcher started on this host."""
    here = os.environ.get("LOCAL_WORLD_SIZE") if compute.world_size > 1 else None
    return int(here or compute.world_size)


def mesh_shape(mode: Sharding, compute: Compute) -> tuple[int, int]:
    """(replicas, shards): how many copies of the parameters there are, and how many ranks share one copy.

    With several hosts each host holds a copy (HSDP), so that only gradients cross the network, once a step. If every
    host has one rank, one copy is sharded over all ranks.
    """
    if mode == "none":
        return compute.world_size, 1
    here = ranks_per_host(compute)
    if 1 < here < compute.world_size and compute.world_size % here == 0:
        return compute.world_size // here, here
    return 1, compute.world_size


def shard(
    model: nn.Module, groups: list[nn.Module], compute: Compute, mode: Sharding = "grad"
) -> None:
    """Shard a model over the ranks, in place; a single rank keeps everything.

    "none" holds everything on every rank. "grad" shards masters, gradients and optimizer state (ZeRO-2): parameters are
    gathered once a step and gradients reduced once a step. "full" frees gathered parameters after every use and reduces
    gradients in every pass (ZeRO-3), so that no rank ever holds either whole. `groups` are the modules whose parameters
    are gathered and reduced together, from model.shard_groups(). Parameters stay fp32 masters: they are gathered in the
    compute dtype, and gradients are reduced in fp32 while the backward pass is still running. Frozen parameters, such
    as those below adapters, stay whole on every rank unless the mode is "full". A table of which a step reads few rows
    stays whole on CPUs, where ranks exchange these rows alone; see average_rows().
    """
    if compute.world_size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicas, shards = mesh_shape(mode, compute)
    log(f"parameters: --shard={mode}, {replicas} replica(s) of {shards} shard(s)")
    dims = {"replicate": replicas, "shard": shards} if replicas > 1 else {"shard": shards}
    mesh = init_device_mesh(compute.device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    mixed = compute.dtype != torch.float32
    # Inputs are not cast: models cast what they use, and the token weights of RL must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute.dtype if mixed else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    compute.platform.prepare_sharding()
    # Frozen parameters need no gradients, so only --shard=full splits them. Small ones stay whole, since sharding would
    # cast them, and norms are fp32 on one device.
    whole = {
        p for p in model.parameters() if not p.requires_grad and (mode != "full" or p.dim() == 1)
    }
    if compute.platform.is_host:
        whole |= {
            p
            for module in model.modules()
            if getattr(module, "few_rows", False)
            for p in module.parameters()
        }
    for module in [*(group for group in groups if not whole.issuperset(group.parameters())), model]:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=mode == "full",
            ignored_params=whole,
        )
    setattr(model, _EVERY_PASS, mode == "full")


def _is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    return hasattr(module, "set_requires_gradient_sync")


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Reduce gradients over ranks and free gathered parameters only in the last pass of a step; see shard()."""
    if _is_fsdp(model) and not getattr(model, _EVERY_PASS):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


@torch.no_grad()
def average_rows(model: nn.Module, compute: Compute) -> None:
    """Average over the ranks the gradients of tables that all of them hold whole; see shard(). What crosses the network
    are the rows that a rank met. Every rank gets the same sparse gradient, so that all tables stay the same."""
    if compute.world_size == 1:
        return
    for _, table in trained(model):
        if not is_sharded(table):
            table.grad = _averaged(table, compute.world_size)


def _averaged(table: Tensor, ranks: int) -> Tensor:  # (R, C)
    indices, values = (
        met(table.grad) if table.grad is not None else (torch.empty(0).long(), table[:0])
    )
    lengths = [int(length) for length in gathered(torch.tensor([len(indices)]), ranks)]
    at, numbers = (
        torch.zeros(max(lengths), dtype=torch.int64),
        table.new_zeros(max(lengths), *table.shape[1:]),
    )
    at[: len(indices)], numbers[: len(indices)] = indices, values
    parts = zip(gathered(at, ranks), gathered(numbers, ranks), lengths, strict=True)
    rows, sums = map(
        torch.cat, zip(*((at[:length], part[:length]) for at, part, length in parts), strict=True)
    )
    return torch.sparse_coo_tensor(
        rows[None], sums / ranks, table.shape, check_invariants=False
    ).coalesce()


def gathered(tensor: Tensor, ranks: int, group: ProcessGroup | None = None) -> list[Tensor]:
    """The tensors of one shape that the `ranks` ranks of a group hold, in order; without a group, those of all."""
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(parts, tensor, group=group)
    return parts


def met(g: Tensor) -> tuple[Tensor, Tensor]:  # (R, C) -> (n,), (n, C)
    """The rows of a gradient that are not zero, and what stands there."""
    if g.is_sparse:
        g = g.coalesce()
        return g.indices()[0], g.values()
    rows = g.any(dim=1).nonzero()[:, 0]
    return rows, g[rows]


def _reshard(model: nn.Module) -> None:
    """Free parameters that a pass without backward left gathered: they are in the compute dtype, not the masters."""
    for module in model.modules():
        if _is_fsdp(module):
            module.reshard()


def total(values: list[float], compute: Compute) -> list[float]:
    """The sum of each number over all ranks, in float64 and over the host's collectives."""
    if compute.world_size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def least(value: int, compute: Compute) -> int:
    """The smallest number of all ranks, on every rank."""
    if compute.world_size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor.item())


def agree(value: int, compute: Compute) -> int:
    """Rank 0's number, on every rank."""
    if compute.world_size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor.item())


@contextlib.contextmanager
def together(name: str, compute: Compute) -> Iterator[None]:
    """Raise a UserError on every rank if this block raises one on any rank, so that all ranks skip the task `name`.

    Every rank must enter the block, and inside it a rank must not wait for another one.
    """
    broken: UserError | None = None
    try:
        yield
    except UserError as failure:
        broken = failure
    if least(int(broken is None), compute) == 0:
        raise broken or UserError(f"{name} is broken on another rank, whose message says why")


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The name of every parameter that is not frozen, and the parameter: what a checkpoint keeps."""
    return (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )


def whole(value: Tensor) -> Tensor:
    """All rows of a tensor that may be sharded; every rank must call this."""
    return value.full_tensor() if is_sharded(value) else value


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The name and the whole value of every parameter, gathered one at a time; every rank must iterate to the end."""
    _reshard(model)
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach())


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter, and which ranks hold the rest of the same copy."""

    here: Tensor  # the rows of this rank; none if it belongs to another copy than rank 0
    shape: tuple[int, ...]  # of the whole parameter
    owners: tuple[
        tuple[int, int], ...
    ]  # (rank, number of rows that it holds), in the order of the rows

    @property
    def size(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * self.here.dtype.itemsize


def parts(model: nn.Module) -> dict[str, Part]:
    """This rank's part of every trained parameter, by name. Together the owners hold one copy of the model, rank 0's;
    nothing is gathered."""
    _reshard(model)
    return {name: _part(parameter) for name, parameter in trained(model)}


def _part(parameter: Tensor) -> Part:
    here, shape = local(parameter.detach()), tuple(parameter.shape)
    mesh, place = getattr(parameter, "device_mesh", None), place_of(parameter)
    ranks = (
        [0] if mesh is None else mesh.mesh.reshape(-1, place.shards)[0].tolist()
    )  # of the first replica
    counts = [shape[0]] if place.shards == 1 else place.row_counts(shape[0])
    other_copy = dist.is_initialized() and dist.get_rank() not in ranks
    return Part(here[:0] if other_copy else here, shape, tuple(zip(ranks, counts, strict=True)))


class Rows(Protocol):
    """The whole of a tensor, of which some rows can be had; a Tensor is one."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


@torch.no_grad()
def load_whole(model: nn.Module, values: Mapping[str, Rows]) -> None:
    """Copy whole tensors into a model's trained parameters, sharded or not. Each rank reads only the rows that it
    holds.

    UserError if names or shapes differ.
    """
    _reshard(model)
    check_shapes(model, values)
    for name, parameter in trained(model):
        here = local(parameter)
        first = place_of(parameter).first_row(parameter.shape[0])
        here.copy_(values[name][first : first + here.shape[0]])


def check_shapes(model: nn.Module, values: Mapping[str, Rows]) -> None:
    """UserError if the tensors and the model's trained parameters differ in names or whole shapes."""
    shapes = {name: tuple(parameter.shape) for name, parameter in trained(model)}
    given = {name: tuple(value.shape) for name, value in values.items()}
    wrong = [
        f"{name}: {given.get(name, 'missing')} given, {shapes.get(name, 'none')} in the model"
        for name in sorted({*shapes, *given})
        if shapes.get(name) != given.get(name)
    ]
    if wrong:
        raise UserError(
            f"the parameters do not fit the model: {'; '.join(wrong[:3])}. They belong to a model of another "
            "shape: load this model's own checkpoint, or build the model from the meta.json beside the parameters."
        )


@torch.no_grad()
def refresh(replica: nn.Module, model: nn.Module) -> None:
    """Copy the parameters of a sharded model into an unsharded one, cast to its formats; every rank must call this."""
    targets = dict(replica.named_parameters())
    for name, value in whole_parameters(model):
        targets[name].copy_(value)

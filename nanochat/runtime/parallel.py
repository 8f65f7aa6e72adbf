"""Shards models over ranks with FSDP2, sums values over ranks, and gathers whole tensors.

FSDP2 and DTensor are imported only where they are used, because the import takes two seconds, and a
single rank does not need them.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeGuard

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError, log, tr
from nanochat.device import Compute, is_sharded, local
from nanochat.runtime import signals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule

Sharding = Literal["none", "grad", "full"]
# The optimizer state of a rank, by name: (this rank's rows of a tensor, the shape of the whole
# tensor, the index of the first of these rows).
State = dict[str, tuple[Tensor, tuple[int, ...], int]]
_EVERY_PASS = "reduces_in_every_pass"  # the attribute that shard() sets on the model


# --- which rank holds which rows -----------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The position of a rank among the shards and replicas of a parameter.

    There are `replicas` copies of the parameter, each split by rows into `shards` shards. The
    defaults describe a parameter that is whole on this rank.
    """

    shards: int = 1
    shard: int = 0
    shard_group: ProcessGroup | None = None  # the ranks that together hold the whole parameter
    replicas: int = 1
    replica: int = 0
    replica_group: ProcessGroup | None = None  # the ranks that hold the same rows

    def row_counts(self, rows: int) -> list[int]:
        """Return the number of rows in each shard of a parameter with `rows` rows.

        FSDP2 splits rows like torch.chunk, so the last shards may have fewer rows, or none.
        """
        share = -(-rows // self.shards)
        first_rows = [min(share * shard, rows) for shard in range(self.shards)]
        return [min(share, rows - first_row) for first_row in first_rows]

    def first_row(self, rows: int) -> int:
        """Return the index at which this rank's rows begin in a parameter with `rows` rows."""
        return sum(self.row_counts(rows)[: self.shard])


def place_of(tensor: Tensor) -> Place:
    """Return this rank's position among the shards and replicas of a parameter.

    The parameter's device mesh is (shards,) or (replicas, shards); a parameter without a mesh is
    whole on this rank.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Place()
    inner = mesh.ndim - 1
    place = Place(
        shards=mesh.size(inner),
        shard=mesh.get_local_rank(inner),
        shard_group=mesh.get_group(inner),
    )
    if inner == 0:
        return place
    return replace(
        place,
        replicas=mesh.size(0),
        replica=mesh.get_local_rank(0),
        replica_group=mesh.get_group(0),
    )


def ranks_per_host(compute: Compute) -> int:
    """Return the number of ranks on this host.

    If the launcher has not set LOCAL_WORLD_SIZE, all ranks are assumed to be here.
    """
    launched = os.environ.get("LOCAL_WORLD_SIZE") if compute.world_size > 1 else None
    return int(launched or compute.world_size)


def ranks_in_memory(compute: Compute) -> int:
    """Return how many ranks share the memory that this rank uses.

    That is 1 if each device has its own memory, and otherwise the number of ranks on this host.
    """
    return 1 if compute.platform.has_own_memory else ranks_per_host(compute)


def mesh_shape(
    mode: Sharding, compute: Compute, ranks_on_host: int | None = None
) -> tuple[int, int]:
    """Return the number of copies of the model, and the number of ranks that share each copy.

    In mode "none", every rank has a copy. Otherwise, each host has one (HSDP), so that parameters
    are not gathered across the network; but if a host has a single rank, or a number of ranks that
    does not divide the world size, all ranks share a single copy. `ranks_on_host` is the number of
    ranks on each host, by default that of this one.
    """
    if mode == "none":
        return compute.world_size, 1
    on_host = ranks_on_host or ranks_per_host(compute)
    if 1 < on_host < compute.world_size and compute.world_size % on_host == 0:
        return compute.world_size // on_host, on_host
    return 1, compute.world_size


# --- sharding ------------------------------------------------------------------------------------


def shard(
    model: nn.Module,
    groups: list[nn.Module],
    compute: Compute,
    mode: Sharding = "grad",
    ranks_on_host: int | None = None,
) -> None:
    """Shard a model over the ranks in place; with a single rank, do nothing.

    - "none" keeps everything on every rank.
    - "grad" shards master weights, gradients and optimizer state (ZeRO-2). If sync_gradients() is
      called before each pass, parameters are gathered and gradients are reduced once per step.
    - "full" frees gathered parameters after every use and reduces gradients in every pass (ZeRO-3),
      so that no rank ever holds all parameters or all gradients.

    Each module in `groups`, from model.shard_groups(), is gathered and reduced as a unit. Trained
    shards stay fp32 master weights; they are gathered in the compute dtype, and gradients are
    reduced in fp32 while the backward pass is still running. Frozen parameters, such as those below
    adapters, stay whole on every rank, except for matrices if the mode is "full". On CPUs, a table
    stays whole if a step reads only a few of its rows, and the ranks exchange only those rows; see
    average_rows(). A forecast for other hosts names their `ranks_on_host`; see mesh_shape().
    """
    if compute.world_size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicas, shards = mesh_shape(mode, compute, ranks_on_host)
    log(
        tr(
            "parameters: --shard={mode}, {replicas} replica(s) of {shards} shard(s)",
            mode=mode,
            replicas=replicas,
            shards=shards,
        )
    )
    sizes = (replicas, shards)
    names = ("replicate", "shard")
    if replicas == 1:
        sizes = (shards,)
        names = ("shard",)
    mesh = init_device_mesh(compute.device_type, sizes, mesh_dim_names=names)
    is_mixed = compute.dtype != torch.float32
    # Inputs are not cast: models cast what they use, and the token weights of RL must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute.dtype if is_mixed else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    compute.platform.prepare_sharding()
    unsharded = _unsharded(model, mode, compute)
    modules = [group for group in groups if not unsharded.issuperset(group.parameters())]
    modules.append(model)
    for module in modules:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=mode == "full",
            ignored_params=unsharded,
        )
    setattr(model, _EVERY_PASS, mode == "full")


def _unsharded(model: nn.Module, mode: Sharding, compute: Compute) -> set[nn.Parameter]:
    """Return the parameters that shard() leaves whole on every rank."""
    unsharded = set()
    for parameter in model.parameters():
        # Frozen parameters need no gradients, so only "full" shards them, except vectors: these
        # stay whole, since sharding would cast them, and norms stay fp32 on one device.
        is_small = parameter.dim() == 1
        if not parameter.requires_grad and (mode != "full" or is_small):
            unsharded.add(parameter)
    if not compute.platform.shards_sparse_tables:
        for module in model.modules():
            if getattr(module, "few_rows", False):
                unsharded.update(module.parameters())
    return unsharded


def _is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    return hasattr(module, "set_requires_gradient_sync")


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Make the next pass reduce gradients and free gathered parameters only if `last` is true.

    Call this before each pass of a step. With --shard=full, every pass does both, whatever `last`
    is. For an unsharded model, this does nothing.
    """
    if _is_fsdp(model) and not getattr(model, _EVERY_PASS):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def _reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass has left gathered.

    Gathered parameters are in the compute dtype; the master weights are in the shards.
    """
    for module in model.modules():
        if _is_fsdp(module):
            module.reshard()


# --- gradients of tables -------------------------------------------------------------------------


@torch.no_grad()
def average_rows(model: nn.Module, compute: Compute) -> None:
    """Average the gradients of unsharded tables over the ranks.

    Each rank sends only its nonzero rows, padded to the largest count on any rank. Every rank gets
    the same sparse gradient, so that all copies of a table stay identical.
    """
    if compute.world_size == 1:
        return
    for _, table in trained(model):
        if not is_sharded(table):
            table.grad = _averaged(table, compute.world_size)


def _averaged(table: Tensor, ranks: int) -> Tensor:  # (R, C)
    """Return the mean of a table's gradient over the ranks, as a sparse tensor."""
    if table.grad is None:
        indices, values = torch.empty(0, dtype=torch.int64), table[:0]
    else:
        indices, values = nonzero_rows(table.grad)
    length = torch.tensor([len(indices)])
    lengths = [int(rank_length) for rank_length in gathered(length, ranks)]
    # All ranks must send the same shape, so rows are padded to the largest count.
    padded_indices = torch.zeros(max(lengths), dtype=torch.int64)
    padded_values = table.new_zeros(max(lengths), *table.shape[1:])
    padded_indices[: len(indices)] = indices
    padded_values[: len(indices)] = values
    all_indices = _unpadded(gathered(padded_indices, ranks), lengths)
    all_values = _unpadded(gathered(padded_values, ranks), lengths)
    mean = torch.sparse_coo_tensor(
        all_indices[None], all_values / ranks, table.shape, check_invariants=False
    )
    return mean.coalesce()


def _unpadded(tensors: list[Tensor], lengths: list[int]) -> Tensor:
    """Return `tensors` joined without their padding; tensor i has `lengths[i]` real rows."""
    pieces = []
    for tensor, length in zip(tensors, lengths, strict=True):
        pieces.append(tensor[:length])
    return torch.cat(pieces)


def gathered(tensor: Tensor, ranks: int, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors that the ranks in `group` pass, in the order of the ranks.

    `ranks` is the size of the group, which is all ranks by default. All tensors must have the same
    shape and dtype.
    """
    tensors = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


def nonzero_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:  # (R, C) -> (n,), (n, C)
    """Return the indices and values of a gradient's nonzero rows (its stored rows if sparse)."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values()
    rows = gradient.any(dim=1).nonzero()[:, 0]
    return rows, gradient[rows]


# --- values of all ranks -------------------------------------------------------------------------


def total(values: list[float], compute: Compute) -> list[float]:
    """Return each value's sum over all ranks, on every rank, computed in float64 on the host."""
    if compute.world_size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def least(value: int, compute: Compute) -> int:
    """Return the smallest value that any rank passes, on every rank."""
    if compute.world_size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor.item())


def agree(value: int, compute: Compute) -> int:
    """Return the value that rank 0 passes, on every rank."""
    if compute.world_size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor.item())


@contextlib.contextmanager
def together(name: str, compute: Compute) -> Iterator[None]:
    """Raise UserError on every rank if this block raises it on any rank, and signals.Stopped too.

    Every rank must enter the block, and inside it no rank may wait for another. Ranks on which the
    block succeeded say in their message that `name` is broken.
    """
    failure: UserError | None = None
    try:
        yield
    except UserError as mistake:
        failure = mistake
    except signals.Stopped:  # a signal to this rank, which may stop before the other ranks notice
        signals.check(compute)
        raise
    signals.check(compute)
    succeeded = least(int(failure is None), compute)
    if not succeeded:
        raise failure or UserError(
            tr("{name} is broken on another rank, whose message says why", name=name)
        )


# --- whole parameters ----------------------------------------------------------------------------


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) for parameters that are not frozen; checkpoints keep only these."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathering it if it is sharded; every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole value of every parameter, gathering one at a time.

    Every rank must iterate to the end.
    """
    _reshard(model)
    for name, parameter in model.named_parameters():
        yield name, full_tensor(parameter.detach())


@dataclass(frozen=True)
class ParameterShard:
    """This rank's rows of a parameter, and the ranks that together hold rank 0's copy of it."""

    rows: Tensor  # empty if this rank does not belong to rank 0's copy
    shape: tuple[int, ...]  # the shape of the whole parameter
    owners: tuple[tuple[int, int], ...]  # (rank, number of its rows), in the order of the rows

    @property
    def size(self) -> int:
        """The size of the whole parameter in bytes."""
        return math.prod(self.shape) * self.rows.dtype.itemsize


def parameter_shards(model: nn.Module) -> dict[str, ParameterShard]:
    """Return a dict from each trained parameter's name to this rank's shard, without gathering.

    Together, the shards of all ranks make up one copy of these parameters, that of rank 0. Ranks
    that hold further copies of a parameter get an empty shard of it.
    """
    _reshard(model)
    return {name: _shard_of(parameter) for name, parameter in trained(model)}


def _shard_of(parameter: Tensor) -> ParameterShard:
    rows = local(parameter.detach())
    shape = tuple(parameter.shape)
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        owners = [(0, shape[0])]
    else:
        place = place_of(parameter)
        replicas = mesh.mesh.reshape(-1, place.shards)
        ranks = replicas[0].tolist()
        row_counts = place.row_counts(shape[0])
        owners = list(zip(ranks, row_counts, strict=True))
    if dist.is_initialized() and dist.get_rank() not in dict(owners):
        rows = rows[:0]
    return ParameterShard(rows, shape, tuple(owners))


class Rows(Protocol):
    """A tensor, in memory or in a file, from which a range of rows can be read."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


@torch.no_grad()
def load_whole(model: nn.Module, values: Mapping[str, Rows]) -> None:
    """Copy whole tensors by name into a model's trained parameters, which may be sharded.

    Each rank reads only the rows that it holds. Raises UserError if names or shapes differ.
    """
    _reshard(model)
    check_shapes(model, values)
    for name, parameter in trained(model):
        local_rows = local(parameter)
        first = place_of(parameter).first_row(parameter.shape[0])
        end = first + local_rows.shape[0]
        local_rows.copy_(values[name][first:end])


def check_shapes(model: nn.Module, values: Mapping[str, Rows]) -> None:
    """Raise UserError if `values` and the model's trained parameters differ in names or shapes."""
    model_shapes = {name: tuple(parameter.shape) for name, parameter in trained(model)}
    value_shapes = {name: tuple(value.shape) for name, value in values.items()}
    wrong = []
    for name in sorted({*model_shapes, *value_shapes}):
        if model_shapes.get(name) != value_shapes.get(name):
            value_shape = value_shapes.get(name, "missing")
            model_shape = model_shapes.get(name, "none")
            wrong.append(f"{name}: {value_shape} given, {model_shape} in the model")
    if wrong:
        raise UserError(
            tr(
                "the parameters do not fit the model: {wrong}. They belong to a model of "
                "another shape: load this model's own checkpoint, or build the model from "
                "the meta.json beside the parameters.",
                wrong="; ".join(wrong[:3]),
            )
        )


@torch.no_grad()
def refresh(replica: nn.Module, model: nn.Module) -> None:
    """Copy a model's parameters, which may be sharded, into a whole replica, casting to its dtypes.

    Ranks that do not call this must iterate over whole_parameters(model) instead.
    """
    targets = dict(replica.named_parameters())
    for name, value in whole_parameters(model):
        targets[name].copy_(value)

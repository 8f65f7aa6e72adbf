"""Many ranks: FSDP2 sharding, sums over ranks, whole tensors for checkpoints, unsharded copies to sample from.

FSDP2 and DTensor are imported where they are used: they cost two seconds, which one rank need not pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError
from nanochat.device import Compute, is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard(model: nn.Module, groups: list[nn.Module], compute: Compute) -> None:
    """Spread parameters, gradients and optimizer state over the ranks (ZeRO-2), in place; one rank keeps all.

    `groups` are the modules gathered and reduced together: layers, embeddings, head. Parameters stay fp32 masters;
    they are gathered in the compute dtype, and gradients are reduced in fp32.
    """
    if compute.world_size == 1:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = compute.dtype != torch.float32
    # Inputs are left as they are: the models cast what they use, and RL's token weights must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute.dtype if mixed else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in [*groups, model]:
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)


def _is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    return hasattr(module, "set_requires_gradient_sync")


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Reduce gradients over ranks, and give up gathered parameters, only in the last pass of a step."""
    if _is_fsdp(model):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def _reshard(model: nn.Module) -> None:
    """Give up parameters that a pass without backward left gathered, in the compute dtype: they are not the masters."""
    for module in model.modules():
        if _is_fsdp(module):
            module.reshard()


def total(values: list[float], compute: Compute) -> list[float]:
    """Sums over all ranks, of Python floats, over the host's collectives, in float64."""
    if compute.world_size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def agree(value: int, compute: Compute) -> int:
    """Rank 0's number, on every rank."""
    if compute.world_size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor.item())


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter's name and its whole value, gathered one at a time; every rank must walk through all."""
    _reshard(model)
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, value.full_tensor() if is_sharded(value) else value


@torch.no_grad()
def load_whole(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy whole tensors into a model, sharded or not; names and shapes must agree."""
    _reshard(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    given = {name: tuple(value.shape) for name, value in values.items()}
    wrong = [f"{name}: {given.get(name, 'missing')} given, {shapes.get(name, 'none')} in the model"
             for name in sorted({*shapes, *given}) if shapes.get(name) != given.get(name)]  # fmt: skip
    if wrong:
        raise UserError(f"the parameters do not fit the model: {'; '.join(wrong[:3])}")
    for name, parameter in model.named_parameters():
        value = values[name].to(parameter.device)
        if is_sharded(parameter):
            from torch.distributed.tensor import Shard, distribute_tensor

            value = distribute_tensor(value, parameter.device_mesh, [Shard(0)])
        parameter.copy_(value)


@torch.no_grad()
def refresh(replica: nn.Module, model: nn.Module) -> None:
    """Copy a (sharded) model's parameters into an unsharded one, casting to its formats; every rank takes part."""
    targets = dict(replica.named_parameters())
    for name, value in whole_parameters(model):
        targets[name].copy_(value)

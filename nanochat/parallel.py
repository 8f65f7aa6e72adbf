"""Many ranks: FSDP2 sharding, sums over ranks, whole tensors for checkpoints, unsharded copies to sample from."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nanochat.common import UserError
from nanochat.device import Compute


def shard(model: nn.Module, groups: list[nn.Module], compute: Compute) -> None:
    """Spread parameters, gradients and optimizer state over the ranks (ZeRO-2), in place; one rank keeps all.

    `groups` are the modules gathered and reduced together: layers, embeddings, head. Parameters stay fp32 masters;
    they are gathered in the compute dtype, and gradients are reduced in fp32.
    """
    if compute.world_size == 1:
        return
    mixed = compute.dtype != torch.float32
    # Inputs are left as they are: the models cast what they use, and RL's token weights must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute.dtype if mixed else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in [*groups, model]:
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Reduce gradients over ranks, and give up gathered parameters, only in the last pass of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def _reshard(model: nn.Module) -> None:
    """Give up parameters that a pass without backward left gathered, in the compute dtype: they are not the masters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
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
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


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
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, [Shard(0)])
        parameter.copy_(value)


@torch.no_grad()
def refresh(replica: nn.Module, model: nn.Module) -> None:
    """Copy a (sharded) model's parameters into an unsharded one, casting to its formats; every rank takes part."""
    targets = dict(replica.named_parameters())
    for name, value in whole_parameters(model):
        targets[name].copy_(value)

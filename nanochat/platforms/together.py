"""Several matrices handled together: cast, stepped or multiplied with at once.

Matrices of one shape lie side by side in memory, for devices on which every operator costs a launch. Nothing here
changes a value: tensors that do not lie side by side are copied instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.linear import Linear

Unit = tuple[nn.Parameter, ...]  # parameters used as one matrix, with their rows below one another
Product = Callable[[Tensor], Tensor]  # (..., inputs) -> (..., outputs)
Pack = Callable[
    [Tensor], Product
]  # makes the function that multiplies with a weight (outputs, inputs)


def restore(matrix: nn.Linear) -> None:
    """Give a matrix whose weight is empty a weight of its shape, without numbers yet."""
    if not matrix.weight.numel():
        empty = matrix.weight.new_empty(matrix.out_features, matrix.in_features)
        matrix.weight = nn.Parameter(empty, requires_grad=False)


def joined(matrices: Sequence[Linear], pack: Pack, dtype: torch.dtype) -> Product | None:
    """Return a function that multiplies with all matrices at once, for inference.

    Their own weights are empty from then on. None, and nothing is done, unless all have the number format and no bias,
    and none multiplies another way.
    """
    for matrix in matrices:
        if matrix.multiply is not None or not matrix.weight.numel():
            return None
        if matrix.weight.dtype != dtype or matrix.bias is not None:
            return None
    multiply = pack(torch.cat([matrix.weight.detach() for matrix in matrices]))
    for matrix in matrices:
        matrix.weight = nn.Parameter(matrix.weight.new_empty(0), requires_grad=False)
    return multiply


def as_stack(tensors: Sequence[Tensor]) -> Tensor:  # (K, *shape)
    """The tensors, all of one shape, as one: a view where they lie side by side in memory, else a copy."""
    first, size = tensors[0], tensors[0].numel()
    start, where = first.storage_offset(), first.untyped_storage().data_ptr()
    side_by_side = all(
        t.is_contiguous()
        and t.untyped_storage().data_ptr() == where
        and t.storage_offset() == start + i * size
        for i, t in enumerate(tensors)
    )
    if not side_by_side:
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (size, *first.stride()), start)


def place_together(parameters: Sequence[nn.Parameter]) -> None:
    """Move parameters of one shape to one block of memory, in their order; the Parameter objects stay."""
    for group in _by_shape(parameters).values():
        block = torch.stack([parameter.detach() for parameter in group])
        for parameter, place in zip(group, block, strict=True):
            parameter.data = place


def _by_shape(parameters: Sequence[nn.Parameter]) -> dict[torch.Size, list[nn.Parameter]]:
    groups: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.shape, []).append(parameter)
    return groups


class _Cast(torch.autograd.Function):
    """Casts all parameters, and all their gradients back, with one operator for each shape and direction."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, units: Sequence[int], *parameters: nn.Parameter
    ) -> tuple[Tensor, ...]:
        ctx.units, ctx.groups = units, _by_shape(parameters)
        ctx.parameters = parameters
        cast_to: dict[nn.Parameter, Tensor] = {}
        for group in ctx.groups.values():
            block = as_stack([parameter.detach() for parameter in group]).to(dtype)
            cast_to |= zip(group, block.unbind(), strict=True)
        remaining, results = list(parameters), []
        for count in units:
            parts, remaining = (
                [cast_to[parameter] for parameter in remaining[:count]],
                remaining[count:],
            )
            results.append(_below_one_another(parts))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_of: dict[nn.Parameter, Tensor] = {}
        remaining = list(ctx.parameters)
        for count, grad in zip(ctx.units, grads, strict=True):
            unit, remaining = remaining[:count], remaining[count:]
            grad_of |= zip(unit, grad.split([len(parameter) for parameter in unit]), strict=True)
        cast_grads: dict[nn.Parameter, Tensor] = {}
        for shape, group in ctx.groups.items():
            block = torch.empty(len(group), *shape, dtype=group[0].dtype, device=group[0].device)
            places = list(block.unbind())
            torch._foreach_copy_(places, [grad_of[p] for p in group])  # pyright: ignore[reportPrivateImportUsage]
            cast_grads |= zip(group, places, strict=True)
        return None, None, *(cast_grads[parameter] for parameter in ctx.parameters)


def _below_one_another(parts: Sequence[Tensor]) -> Tensor:
    """Matrices of one width as one matrix."""
    if len(parts) == 1:
        return parts[0]
    if len({tensor.shape for tensor in parts}) == 1:
        return as_stack(parts).flatten(0, 1)
    return torch.cat(list(parts))


def cast_together(layers: Sequence[Sequence[Unit]], dtype: torch.dtype) -> list[list[Tensor]]:
    """Every unit of every layer as one matrix of a format, differentiably; made once a pass instead of at every use."""
    units = [unit for layer in layers for unit in layer]
    cast_tensors = _Cast.apply(
        dtype, [len(unit) for unit in units], *(parameter for unit in units for parameter in unit)
    )
    remaining = iter(cast(tuple[Tensor, ...], cast_tensors))
    return [[next(remaining) for _ in layer] for layer in layers]

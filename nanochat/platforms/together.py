"""Functions that cast, move or multiply by several matrices at once.

Most are for devices on which every operator costs a launch. Casts are fastest if matrices of one
shape are adjacent in memory. Matrices that are not are copied first, with the same results.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol, cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.linear import Linear

Unit = tuple[nn.Parameter, ...]  # parameters used as one matrix, stacked by rows
Layer = Sequence[Unit]
Product = Callable[[Tensor], Tensor]  # (..., inputs) -> (..., outputs)
# Makes the function that multiplies with a weight (outputs, inputs).
Pack = Callable[[Tensor], Product]
# Makes the function that multiplies with several matrices at once, or returns None.
Join = Callable[[Sequence[Linear]], Product | None]


class HasUnits(Protocol):
    """A layer that reports which of its matrices are multiplied as one."""

    def units(self) -> Layer: ...


def empty_weight(matrix: nn.Module) -> None:
    """Replace a matrix's weight with an empty one, because another function now multiplies."""
    nothing = cast(Tensor, matrix.weight).new_empty(0)
    matrix.weight = nn.Parameter(nothing, requires_grad=False)


def restore(matrix: nn.Linear) -> None:
    """If a matrix's weight is empty, replace it with an uninitialized one of the right shape."""
    if matrix.weight.numel():
        return
    shape = (matrix.out_features, matrix.in_features)
    blank = matrix.weight.new_empty(shape)
    matrix.weight = nn.Parameter(blank, requires_grad=False)


def joined(
    matrices: Sequence[Linear],
    pack: Pack,
    dtype: torch.dtype,
) -> Product | None:
    """Return a function that multiplies by all matrices at once, for inference.

    The matrices themselves are left with empty weights. Returns None and changes nothing if any
    matrix has a bias, a dtype other than `dtype`, an empty weight or a `multiply` hook.
    """
    for matrix in matrices:
        if not _can_join(matrix, dtype):
            return None
    weights = [matrix.weight.detach() for matrix in matrices]
    multiply = pack(torch.cat(weights))
    for matrix in matrices:
        empty_weight(matrix)
    return multiply


def _can_join(matrix: Linear, dtype: torch.dtype) -> bool:
    if matrix.multiply is not None or matrix.bias is not None:
        return False
    weight = matrix.weight
    return weight.numel() > 0 and weight.dtype == dtype


# --- tensors of one shape, side by side ----------------------------------------------------------


def as_stack(tensors: Sequence[Tensor]) -> Tensor:  # (K, *shape)
    """Return tensors of one shape stacked, without a copy if they are adjacent in memory."""
    if not _are_side_by_side(tensors):
        return torch.stack(list(tensors))
    first = tensors[0]
    shape = (len(tensors), *first.shape)
    strides = (first.numel(), *first.stride())
    start = first.storage_offset()
    return first.as_strided(shape, strides, start)


def _are_side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are adjacent, in order, in one block of memory."""
    storage = tensors[0].untyped_storage().data_ptr()
    size = tensors[0].numel()
    offset = tensors[0].storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous():
            return False
        if tensor.untyped_storage().data_ptr() != storage:
            return False
        if tensor.storage_offset() != offset:
            return False
        offset += size
    return True


def place_together(parameters: Sequence[nn.Parameter]) -> None:
    """Move the parameters of each shape into one block of memory, in the given order.

    The Parameter objects stay the same.
    """
    for group in _by_shape(parameters):
        tensors = [parameter.detach() for parameter in group]
        places = torch.stack(tensors).unbind()
        for parameter, place in zip(group, places, strict=True):
            parameter.data = place


def _by_shape(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters grouped by shape, in the order in which the shapes first occur."""
    groups = defaultdict(list)
    for parameter in parameters:
        groups[parameter.shape].append(parameter)
    return list(groups.values())


# --- casting -------------------------------------------------------------------------------------


def cast_together(
    layers: Sequence[Layer],
    dtype: torch.dtype,
) -> list[list[Tensor]]:
    """Return a list of lists: for each layer, each unit as a differentiable matrix in `dtype`.

    A forward pass calls this once, instead of casting matrices one by one.
    """
    units = list(chain.from_iterable(layers))
    parameters = chain.from_iterable(units)
    matrices: Any = _Cast.apply(dtype, units, *parameters)
    remaining = iter(matrices)
    return [[next(remaining) for _ in layer] for layer in layers]


class _Cast(torch.autograd.Function):
    """Casts all parameters, and in the backward pass all gradients, with one cast per shape.

    The parameters are passed in addition to the units, because autograd must see them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        units: Sequence[Unit],
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, ...]:
        ctx.units = units
        ctx.groups = _by_shape(parameters)
        ctx.parameters = parameters
        cast_parameters = {}
        for group in ctx.groups:
            masters = [parameter.detach() for parameter in group]
            block = as_stack(masters).to(dtype)
            cast_parameters.update(zip(group, block.unbind(), strict=True))
        matrices = []
        for unit in units:
            rows = [cast_parameters[parameter] for parameter in unit]
            matrices.append(_below_one_another(rows))
        return tuple(matrices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cast_grads = {}
        for unit, grad in zip(ctx.units, grads, strict=True):
            heights = [len(parameter) for parameter in unit]
            rows = grad.split(heights)
            cast_grads.update(zip(unit, rows, strict=True))
        master_grads = {}
        for group in ctx.groups:
            shape = (len(group), *group[0].shape)
            block = group[0].new_empty(shape)
            places = list(block.unbind())
            sources = [cast_grads[parameter] for parameter in group]
            torch._foreach_copy_(places, sources)  # pyright: ignore[reportPrivateImportUsage]
            master_grads.update(zip(group, places, strict=True))
        in_order = [master_grads[parameter] for parameter in ctx.parameters]
        return None, None, *in_order


def _below_one_another(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices of one width as one matrix, stacked by rows."""
    if len(matrices) == 1:
        return matrices[0]
    shapes = {matrix.shape for matrix in matrices}
    if len(shapes) == 1:
        return as_stack(matrices).flatten(0, 1)
    return torch.cat(list(matrices))

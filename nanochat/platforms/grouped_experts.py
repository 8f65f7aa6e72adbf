"""Experts whose tokens are sorted, so that each expert multiplies adjacent rows.

The results are those of models/qwen/experts.py, up to rounding. An expert without tokens costs
nothing, each matrix is read once, and the host waits for the device once in a layer.

Shapes: N tokens, K experts of each token, M = N * K rows, E experts, C channels.
"""

from typing import Any, cast

import torch
from torch import Tensor

from nanochat.models.qwen.experts import Experts
from nanochat.models.qwen.functions import swiglu
from nanochat.platforms.operations import Operations

# --- matrix products ------------------------------------------------------------------------------


@torch.library.custom_op("nanochat::grouped_product", mutates_args=())
def _product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix; opaque, as it depends on the values of ends."""
    y = x.new_empty(x.size(0), weights.size(1))
    start = 0
    for weight, end in zip(weights.unbind(), ends.tolist(), strict=True):
        if end > start:
            torch.mm(x[start:end], weight.mT, out=y[start:end])
        start = end
    return y


@_product.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.size(0), weights.size(1))


@torch.library.custom_op("nanochat::grouped_gradient", mutates_args=())
def _gradient(y_grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the gradients of the experts' matrices; those of experts without rows are zero."""
    gradient = x.new_zeros(ends.size(0), y_grad.size(1), x.size(1))
    start = 0
    for matrix, end in zip(gradient.unbind(), ends.tolist(), strict=True):
        if end > start:
            torch.mm(y_grad[start:end].mT, x[start:end], out=matrix)
        start = end
    return gradient


@_gradient.register_fake
def _(y_grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.size(0), y_grad.size(1), x.size(1))


class _GroupedProduct(torch.autograd.Function):
    """Multiplies the rows of each expert by the expert's matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (M, inputs), sorted by expert
        weights: Tensor,  # (E, outputs, inputs)
        ends: Tensor,  # (E,) on the host: the row after the last one of each expert
    ) -> Tensor:  # (M, outputs)
        needs_weights = ctx.needs_input_grad[0]
        needs_x = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if needs_x else None, weights if needs_weights else None, ends)
        return _product(x, weights, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, ends = ctx.saved_tensors
        y_grad = grads[0].contiguous()
        x_grad = None if weights is None else _product(y_grad, weights.mT, ends)
        weights_grad = None if x is None else _gradient(y_grad, x, ends)
        return x_grad, weights_grad, None


# --- tokens to rows and back ----------------------------------------------------------------------


def _to_rows(x: Tensor, token: Tensor) -> Tensor:  # (N, C), (M,) -> (M, C)
    return x.index_select(0, token)


def _to_tokens(rows: Tensor, place: Tensor, count: int) -> Tensor:  # (M, C), (M,) -> (N, C)
    return rows.index_select(0, place).unflatten(0, (-1, count)).sum(dim=1)


class _ToRows(torch.autograd.Function):
    """Copies each token to its rows; the gradient adds the rows up without atomic operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.count = count
        return _to_rows(x, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _to_tokens(grads[0], place, ctx.count), None, None, None


class _ToTokens(torch.autograd.Function):
    """Adds up the rows of each token; the gradient copies each token to its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(token)
        return _to_tokens(rows, place, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return _to_rows(grads[0], token), None, None, None


# --- the layer ------------------------------------------------------------------------------------


class GroupedExperts(Experts):
    """Experts that multiply their tokens in sorted rows."""

    operations: Operations

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        experts = chosen.flatten()  # (M,) the expert of each row, unsorted
        K = chosen.size(1)
        order = experts.argsort(stable=True)
        place = torch.empty_like(order)  # where the sorted rows have each unsorted row
        place.scatter_(0, order, torch.arange(order.size(0), device=order.device))
        counts = experts.new_zeros(self.down_proj.size(0))
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        ends = counts.cumsum(0).cpu()
        token = order // K

        rows = cast(Tensor, _ToRows.apply(x, token, place, K))
        gate, up = self._grouped("gate_up_proj", rows, ends).chunk(2, dim=-1)
        # The down matrices are linear, so that shares may come before them: fewer channels are
        # multiplied, and the outputs need not be saved for the gradients of the shares.
        inner = swiglu(gate, up) * shares.flatten().index_select(0, order)[:, None]
        outputs = self._grouped("down_proj", inner, ends)
        return cast(Tensor, _ToTokens.apply(outputs, token, place, K))

    def _grouped(self, stack: str, x: Tensor, ends: Tensor) -> Tensor:
        """Return the products of sorted rows with their experts' matrices and adapters."""
        weights = cast(Tensor, getattr(self, stack)).to(x.dtype)
        y = cast(Tensor, _GroupedProduct.apply(x, weights, ends))
        if stack in self.adapters:
            first, second = self.adapters[stack](x.dtype)
            low = cast(Tensor, _GroupedProduct.apply(x, first, ends))
            y = y + cast(Tensor, _GroupedProduct.apply(low, second, ends))
        return y

"""Experts whose tokens are sorted, so that each expert multiplies adjacent rows.

The results are those of models/qwen/experts.py, up to rounding. An expert without tokens costs
nothing, each matrix is read once, and the host waits for the device once in a layer.

Shapes: N tokens, K experts of each token, M = N * K rows, E experts, C channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nanochat.models.qwen.experts import Experts
from nanochat.models.qwen.functions import swiglu
from nanochat.platforms.operations import Operations

# --- matrix products ------------------------------------------------------------------------------

# For every new shape of a product in bf16, oneDNN compiles code for three milliseconds, and keeps it
# in memory between the tensors, so that these find no place there any more. On a CPU, the rows of an
# expert are therefore multiplied in products of few sizes: a multiple of COARSE rows, and the rest
# among as many rows beside them as make a multiple of FINE.
COARSE = 256
FINE = 64

# The two products are operators that are opaque to torch's compiler, because the shapes of their
# parts depend on the values of `counts`.


@torch.library.custom_op("nanochat::grouped_product", mutates_args=())
def _product(
    x: Tensor,  # (M, inputs)
    weights: Tensor,  # (E, outputs, inputs)
    counts: Tensor,  # (E,) on the host
    low: Tensor | None = None,  # (M, rank)
    factors: Tensor | None = None,  # (E, outputs, rank)
) -> Tensor:  # (M, outputs)
    """Multiply the rows of each expert by its matrix, and add the product of `low` and `factors`."""
    y = x.new_empty(x.size(0), weights.size(1))
    for expert, own, rows in _parts(counts, x):
        alone = own == rows
        part = y[rows] if alone else x.new_empty(rows.stop - rows.start, y.size(1))
        if low is None or factors is None:
            torch.mm(x[rows], weights[expert].mT, out=part)
        else:
            # The larger product comes last, so that the sum is rounded once; see plus_product().
            torch.mm(low[rows], factors[expert].mT, out=part)
            part.addmm_(x[rows], weights[expert].mT)
        if not alone:
            y[own] = part[own.start - rows.start : own.stop - rows.start]
    return y


@_product.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    counts: Tensor,
    low: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.size(0), weights.size(1))


@torch.library.custom_op("nanochat::grouped_gradient", mutates_args=())
def _gradient(
    y_grad: Tensor,  # (M, outputs)
    x: Tensor,  # (M, inputs)
    counts: Tensor,  # (E,) on the host
) -> Tensor:  # (E, outputs, inputs)
    """Return the gradients of the experts' matrices; those of experts without rows are zero."""
    gradient = x.new_zeros(counts.size(0), y_grad.size(1), x.size(1))
    for expert, own, rows in _parts(counts, x):
        part = y_grad[rows]
        if own != rows:
            part = torch.zeros_like(part)  # the rows of other experts add nothing
            part[own.start - rows.start : own.stop - rows.start] = y_grad[own]
        gradient[expert].addmm_(part.mT, x[rows])
    return gradient


@_gradient.register_fake
def _(y_grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.size(0), y_grad.size(1), x.size(1))


def _parts(
    counts: Tensor,  # (E,) on the host
    x: Tensor,  # (M, channels)
) -> Iterator[tuple[int, slice, slice]]:
    """Yield experts with some rows of theirs, and the rows that are multiplied for these.

    The latter are the same rows, or more: some of other experts are among them.
    """
    few_sizes = _few_sizes(x)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        end = start + count
        middle = start + count // COARSE * COARSE if few_sizes else end
        if start < middle:
            rows = slice(start, middle)
            yield expert, rows, rows
        if middle < end:
            size = -(-(end - middle) // FINE) * FINE
            first = min(middle, x.size(0) - size)
            yield expert, slice(middle, end), slice(first, first + size)
        start = end


def _few_sizes(x: Tensor) -> bool:
    """Return whether products of few sizes are faster: in bf16 on a CPU, with many rows."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.size(0) >= 4 * COARSE


class _AdaptedProduct(torch.autograd.Function):
    """Multiplies the rows of each expert by the expert's matrix, and adds what its adapter adds.

    The adapter's products are added in place: separate tensors would take a pass over memory each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (M, inputs), sorted by expert
        weights: Tensor,  # (E, outputs, inputs)
        counts: Tensor,  # (E,) on the host: the rows of each expert
        first: Tensor | None,  # (E, rank, inputs)
        second: Tensor | None,  # (E, outputs, rank)
    ) -> Tensor:  # (M, outputs)
        needs_x_grad, needs_weights_grad, *_ = ctx.needs_input_grad
        low = None  # (M, rank)
        if first is not None:
            low = _product(x, first, counts)
        reads_x = needs_weights_grad or first is not None
        ctx.save_for_backward(
            x if reads_x else None,
            weights if needs_x_grad else None,
            counts,
            first,
            second,
            low,
        )
        return _product(x, weights, counts, low, second)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, counts, first, second, low = ctx.saved_tensors
        y_grad = grads[0].contiguous()
        x_grad = None
        weights_grad = None
        low_grad = None
        first_grad = None
        second_grad = None
        if low is not None:
            low_grad = _product(y_grad, second.mT, counts)
            first_grad = _gradient(low_grad, x, counts)
            second_grad = _gradient(y_grad, low, counts)
            first = first.mT
        if weights is not None:
            x_grad = _product(y_grad, weights.mT, counts, low_grad, first)
        if ctx.needs_input_grad[1]:
            weights_grad = _gradient(y_grad, x, counts)
        return x_grad, weights_grad, None, first_grad, second_grad


# --- tokens to rows and back ----------------------------------------------------------------------


@dataclass(frozen=True)
class Sorted:
    """The rows of a layer's experts: each token has K of them, and they are sorted by expert."""

    token: Tensor  # (M,) the token of each row
    place: Tensor  # (M,) the row of each token's first expert, its second one, ..., token by token
    shares: Tensor  # (M, 1) the weight of each row in its token's output
    counts: Tensor  # (E,) on the host: the rows of each expert


def sorted_rows(
    chosen: Tensor,  # (N, K) numbers of the experts
    shares: Tensor,  # (N, K)
    num_experts: int,
) -> Sorted:
    """Sort the pairs of a token and an expert by expert, and then by token."""
    experts = chosen.flatten()  # (M,)
    order = experts.argsort(stable=True)  # (M,) the pair of each row
    rows = torch.arange(order.size(0), device=order.device)
    place = torch.empty_like(order).scatter_(0, order, rows)
    counts = experts.new_zeros(num_experts)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    row_shares = shares.flatten().index_select(0, order)
    return Sorted(
        token=order // chosen.size(1),
        place=place,
        shares=row_shares[:, None],
        counts=counts.cpu(),
    )


def _to_rows(x: Tensor, token: Tensor) -> Tensor:  # (N, C), (M,) -> (M, C)
    return x.index_select(0, token)


def _to_tokens(rows: Tensor, place: Tensor, K: int) -> Tensor:  # (M, C), (M,) -> (N, C)
    by_token = rows.index_select(0, place).unflatten(0, (-1, K))
    return by_token.sum(dim=1)


class _ToRows(torch.autograd.Function):
    """Copies each token to its rows; the gradient adds the rows up without atomic operations."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (N, C)
        token: Tensor,  # (M,)
        place: Tensor,  # (M,)
        K: int,
    ) -> Tensor:  # (M, C)
        ctx.save_for_backward(place)
        ctx.K = K
        return _to_rows(x, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _to_tokens(grads[0], place, ctx.K), None, None, None


class _ToTokens(torch.autograd.Function):
    """Adds up the rows of each token; the gradient copies each token to its rows."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # (M, C)
        token: Tensor,  # (M,)
        place: Tensor,  # (M,)
        K: int,
    ) -> Tensor:  # (N, C)
        ctx.save_for_backward(token)
        return _to_tokens(rows, place, K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return _to_rows(grads[0], token), None, None, None


# --- the layer ------------------------------------------------------------------------------------


class GroupedExperts(Experts):
    """Experts that multiply their tokens in sorted rows."""

    operations: Operations

    def forward(
        self,
        x: Tensor,  # (N, C)
        chosen: Tensor,  # (N, K)
        shares: Tensor,  # (N, K)
    ) -> Tensor:  # (N, C)
        K = chosen.size(1)
        rows = sorted_rows(chosen, shares, self.num_experts)
        inputs = cast(Tensor, _ToRows.apply(x, rows.token, rows.place, K))
        hidden = self._grouped("gate_up_proj", inputs, rows.counts)
        gate, up = hidden.chunk(2, dim=-1)
        # The down matrices are linear, so that shares may come before them: fewer channels are
        # multiplied, and the outputs need not be saved for the gradients of the shares.
        inner = swiglu(gate, up) * rows.shares
        outputs = self._grouped("down_proj", inner, rows.counts)
        return cast(Tensor, _ToTokens.apply(outputs, rows.token, rows.place, K))

    def _grouped(
        self,
        stack: str,
        x: Tensor,  # (M, inputs), sorted by expert
        counts: Tensor,  # (E,)
    ) -> Tensor:  # (M, outputs)
        """Return the products of rows with their experts' matrices and adapters."""
        weights = self.stack(stack).to(x.dtype)
        first = None
        second = None
        if stack in self.adapters:
            first, second = self.adapters[stack](x.dtype)
        return cast(Tensor, _AdaptedProduct.apply(x, weights, counts, first, second))

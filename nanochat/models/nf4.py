"""4-bit weights for the frozen base of an adapter: NF4 with double quantisation (QLoRA).

A block of 64 weights is divided by its largest absolute value, and each quotient becomes the
nearest of 16 levels, which are spaced for normally distributed weights (arXiv 2305.14314). The
largest values are quantised too, in blocks of 256: their mean is subtracted, and each difference
becomes the nearest of 256 levels that are dense around zero (arXiv 2110.02861). A weight takes 4.13
bits. The levels and the rounding are those of bitsandbytes, so that both give the same codes.

Everything is plain torch, which works the same on every device. A product and its backward pass
dequantise some rows of the matrix at a time, so that there is never a dense copy of the matrix.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.linear import Linear, plus_product

BITS = 4
BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a scale of their own
# Weights that are dequantised, or quantised, at a time: 64 MB in fp32.
CHUNK = 1 << 24
# The quantiles of a normal distribution that arXiv 2305.14314 lists in appendix E.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
DECADES = 7  # the levels for scales span seven powers of ten
TINY = 2.0**-126  # the smallest normal fp32 number keeps a block of zeros from dividing by zero


def scale_levels() -> Tensor:  # (256,) fp32, ascending
    """Return the levels of 8-bit scales, relative to the largest of their block.

    Each decade below 1 has twice as many levels as the one below it, at the centres of equal parts.
    Every level occurs with both signs, except for the two that complete a byte: 0 and 1.
    """
    positive = []
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float64)
        centres = (edges[:-1] + edges[1:]) / 2  # (2**decade,)
        power_of_ten = 10.0 ** (decade + 1 - DECADES)
        positive.append(centres * power_of_ten)
    half = torch.cat(positive)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return torch.cat((half, -half, ends)).sort().values.float()


def nearest(x: Tensor, levels: Tensor) -> Tensor:  # (...), (L,) on the host -> (...) uint8
    """Return the index of the level that is nearest to each x; a tie goes to the lower one.

    `levels` are ascending, at most 256.
    """
    midpoints = (levels[1:] + levels[:-1]) / 2
    indices = torch.bucketize(x, midpoints.to(x.device), out_int32=True)
    return indices.to(torch.uint8)


class Tables(nn.Module):
    """The look-up tables that all 4-bit matrices of a model share; they are empty until fill()."""

    pairs: Tensor
    scales: Tensor

    def __init__(self, dtype: torch.dtype):
        """Prepare tables for matrices that are dequantised to `dtype`, of 16 or 32 bits."""
        super().__init__()
        self.dtype = dtype
        # A byte holds two codes. Their two weights are looked up together, as one integer.
        pair_dtype = torch.int32 if dtype.itemsize == 2 else torch.int64
        self.register_buffer("pairs", torch.empty(256, dtype=pair_dtype), persistent=False)
        self.register_buffer("scales", torch.empty(256), persistent=False)

    def fill(self) -> None:
        """Set the values of the tables, on the device that they are on."""
        levels = torch.tensor(LEVELS).to(self.dtype)
        first = levels.repeat_interleave(16)  # the weight in the upper half of each byte
        second = levels.repeat(16)
        weights = torch.stack((first, second), dim=1)  # (256, 2)
        pairs = weights.view(self.pairs.dtype)  # (256, 1): both weights as one integer
        self.pairs.copy_(pairs.flatten())
        self.scales.copy_(scale_levels())


class Nf4(nn.Module):
    """A matrix in 4 bits, which serves as the `multiply` hook of a Linear.

    The number of inputs must be a multiple of 64 (BLOCK). A weight is dequantised in two steps:
        scale = scale level * scale of the scale's block + mean of the scales
        weight = level * scale
    """

    codes: Tensor  # (outputs, inputs / 2) uint8: the codes of two weights, the first above
    scale_codes: Tensor  # (scale blocks, SCALE_BLOCK) uint8
    scale_scales: Tensor  # (scale blocks, 1) fp32
    scale_mean: Tensor  # (1,) fp32

    def __init__(self, outputs: int, inputs: int, tables: Tables):
        """Prepare a matrix on the current default device; fill() sets its values."""
        super().__init__()
        self.shape = (outputs, inputs)
        self.tables = tables
        scale_blocks = -(-outputs * inputs // (BLOCK * SCALE_BLOCK))  # rounded up
        buffers = {
            "codes": torch.empty(outputs, inputs // 2, dtype=torch.uint8),
            "scale_codes": torch.empty(scale_blocks, SCALE_BLOCK, dtype=torch.uint8),
            "scale_scales": torch.empty(scale_blocks, 1),
            "scale_mean": torch.empty(1),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    @property
    def rows_at_a_time(self) -> int:
        """The largest number of rows that are dequantised at the same time."""
        return max(CHUNK // self.shape[1], 1)

    @property
    def is_finite(self) -> bool:
        """Whether all values that fill() quantised were finite."""
        return bool(self.scale_mean.isfinite())

    @torch.no_grad()
    def fill(self, rows: Callable[[int, int], Tensor]) -> None:
        """Quantise a matrix, reading it row by row, so that it is never whole on the device in fp32.

        `rows(first, count)` returns `count` rows of the matrix from row `first` on, in any float
        format.
        """
        self.tables.fill()
        levels = torch.tensor(LEVELS)
        outputs, inputs = self.shape
        scales = torch.zeros(self.scale_codes.numel(), device=self.codes.device)
        blocks_per_row = inputs // BLOCK
        for first in range(0, outputs, self.rows_at_a_time):
            count = min(self.rows_at_a_time, outputs - first)
            dense = rows(first, count).to(self.codes.device).float()
            blocks = dense.view(-1, BLOCK)  # (count * blocks_per_row, BLOCK)
            largest = blocks.abs().amax(dim=1)
            begin = first * blocks_per_row
            scales[begin : begin + len(largest)] = largest
            # A division would round some quotients to other values than those of bitsandbytes,
            # which multiplies by the reciprocal.
            reciprocal = 1 / largest.clamp_min(TINY)
            relative = blocks * reciprocal[:, None]
            codes = nearest(relative, levels).view(count, inputs)
            upper = codes[:, ::2]
            lower = codes[:, 1::2]
            self.codes[first : first + count] = upper * 16 + lower
        self._fill_scales(scales, outputs * blocks_per_row)

    def _fill_scales(self, scales: Tensor, count: int) -> None:
        """Quantise the scales of all blocks; those after the first `count` are padding."""
        self.scale_mean.copy_(scales[:count].mean())
        scales[:count] -= self.scale_mean
        grouped = scales.view(self.scale_codes.shape)
        largest = grouped.abs().amax(dim=1, keepdim=True)
        self.scale_scales.copy_(largest)
        relative = grouped / largest.clamp_min(TINY)
        self.scale_codes.copy_(nearest(relative, scale_levels()))

    def scales(self) -> Tensor:  # (outputs, inputs / 64) in the format of the dense rows
        """Return the scale of each block, dequantised."""
        outputs, inputs = self.shape
        blocks = inputs // BLOCK
        flat_codes = self.scale_codes.flatten().int()
        flat_levels = self.tables.scales.index_select(0, flat_codes)
        relative = flat_levels.view(self.scale_codes.shape)  # (scale blocks, SCALE_BLOCK)
        padded = relative * self.scale_scales + self.scale_mean
        scales = padded.flatten()[: outputs * blocks]
        return scales.view(outputs, blocks).to(self.tables.dtype)

    def dense_rows(self, first: int, scales: Tensor) -> Tensor:  # (rows, inputs)
        """Return the next `rows_at_a_time` rows of the dequantised matrix, from row `first` on."""
        codes = self.codes[first : first + self.rows_at_a_time]
        row_scales = scales[first : first + self.rows_at_a_time]
        pairs = self.tables.pairs.index_select(0, codes.flatten().int())
        levels = pairs.view(self.tables.dtype)  # (rows * inputs,): each integer is two weights
        blocks = levels.view(*row_scales.shape, BLOCK)  # (rows, inputs / 64, 64)
        weights = blocks * row_scales[..., None]
        return weights.view(-1, self.shape[1])

    def dequantised(self) -> Tensor:  # (outputs, inputs)
        """Return the whole matrix, in the format that the tables were prepared for."""
        scales = self.scales()
        starts = range(0, self.shape[0], self.rows_at_a_time)
        return torch.cat([self.dense_rows(first, scales) for first in starts])

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the product of the matrix and x (..., inputs), as (..., outputs).

        The signature is that of Linear.multiply; `weight` is ignored.
        """
        return _Product.apply(x, self, None)  # type: ignore[no-any-return]

    def plus(self, added: Tensor, x: Tensor) -> Tensor:
        """Return `added` (..., outputs) plus the product, rounded only once; see plus_product()."""
        return _Product.apply(x, self, added)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """Computes the product with a frozen matrix, which gets no gradient, and adds to it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., inputs)
        matrix: Nf4,
        added: Tensor | None,  # (..., outputs)
    ) -> Tensor:  # (..., outputs)
        ctx.matrix = matrix
        scales = matrix.scales()
        products = []
        for first in range(0, matrix.shape[0], matrix.rows_at_a_time):
            dense = matrix.dense_rows(first, scales).to(x.dtype)
            if added is None:
                product = F.linear(x, dense)
            else:
                product = plus_product(added[..., first : first + len(dense)], x, dense)
            products.append(product)
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # (..., outputs) -> (..., inputs)
        (grad,) = grads
        matrix = ctx.matrix
        scales = matrix.scales()
        total: Tensor | None = None
        for first in range(0, matrix.shape[0], matrix.rows_at_a_time):
            dense = matrix.dense_rows(first, scales).to(grad.dtype)
            rows_grad = grad[..., first : first + matrix.rows_at_a_time]
            product = rows_grad @ dense
            total = product if total is None else total.add_(product)
        return total, None, grad if ctx.needs_input_grad[2] else None


def hold_in_nf4(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the matrices in a model's layers by empty 4-bit ones, which nf4_matrices() lists.

    Tables stay as they are, and so do matrices whose number of inputs is not a multiple of 64. The
    products are computed in `dtype`. On the meta device, nothing takes memory.
    """
    tables = None
    for module in model.modules():
        if isinstance(module, Linear) and not module.in_features % BLOCK:
            with module.weight.device:
                tables = tables or Tables(dtype)
                module.multiply = Nf4(module.out_features, module.in_features, tables)
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


def nf4_entries(model: nn.Module) -> int:
    """Return the number of weights that a model stores in 4 bits."""
    return sum(math.prod(matrix.shape) for matrix in nf4_matrices(model).values())


def nf4_matrices(model: nn.Module) -> dict[str, Nf4]:
    """Return the 4-bit matrices of a model, by the names of the weights that they replace."""
    matrices = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.multiply, Nf4):
            matrices[f"{name}.weight"] = module.multiply
    return matrices

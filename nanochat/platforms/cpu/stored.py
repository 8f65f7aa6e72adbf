"""Stores the matrices of a model that a CPU serves: in bf16 as oneDNN lays them out, or in panels."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nanochat.gpt import Head
from nanochat.linear import Linear
from nanochat.models.qwen.int8 import Int8
from nanochat.platforms.cpu.kernels import BLOCK, PANEL, Kernels
from nanochat.platforms.together import Product, empty_weight, joined

FEW_ROWS = 32  # the most rows that our own loop multiplies with a matrix faster than oneDNN does


class Packed:
    """Multiplies by a bf16 matrix that is stored in oneDNN's layout.

    `rows` returns rows (..., inputs) of the matrix by their numbers (...), and `address` is that of
    the matrix in blocks. Both are None if the layout is not known.
    """

    dtype = torch.bfloat16
    scales = None

    def __init__(
        self,
        weight: Tensor,  # (outputs, inputs)
        kernels: Kernels | None,
        compared: set[torch.Size] | None = None,  # collects shapes whose layout is as expected
    ):
        weight = weight.detach()
        compared = set() if compared is None else compared
        self.shape = weight.shape
        self._kernels = kernels
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.address: int | None = None
        if kernels is not None:
            compare = weight.shape not in compared
            self.address = kernels.reads(self._laid_out, weight.contiguous(), compare)
        self.rows: Callable[[Tensor], Tensor] | None = None
        if self.address is not None:
            compared.add(weight.shape)
            self._pairs = Kernels.pairs(self.address, weight.shape)
            self.rows = self._rows

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return x (..., inputs) times the transposed matrix.

        This is the `multiply` hook of a Linear; `weight` is ignored.
        """
        outputs, inputs = self.shape
        if self.address is not None and x.numel() <= FEW_ROWS * inputs:
            assert self._kernels is not None
            return self._kernels.multiply_blocks(x, self.address, self.dtype, None, outputs)
        return self._multiply(x, self._laid_out, None, "none", [], "")

    def _rows(self, numbers: Tensor) -> Tensor:  # (...) -> (..., inputs)
        pairs = self._pairs[numbers // BLOCK, :, numbers % BLOCK]
        return pairs.contiguous().view(torch.bfloat16)


class Packed8:
    """Multiplies activations in bf16 by an int8 matrix that is stored in the blocks of products.h.

    Integers are converted to bf16, which holds them exactly, as they are read.
    """

    dtype = torch.int8

    def __init__(
        self,
        integers: Tensor,  # (outputs, inputs)
        scales: Tensor,  # (outputs,) a factor for each output
        kernels: Kernels,
    ):
        self.shape = integers.shape
        self.scales = scales.float()
        self._kernels = kernels
        self._blocks = in_blocks(integers)
        self.address = self._blocks.data_ptr()

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return x (..., inputs) times the transposed matrix.

        This is the `multiply` hook of a Linear; `weight` is ignored.
        """
        return self._kernels.multiply_blocks(
            x, self.address, self.dtype, self.scales, self.shape[0]
        )

    def rows(self, numbers: Tensor) -> Tensor:  # (...) -> (..., inputs) bf16
        """Return rows of the matrix by their numbers, as an embedding table does."""
        part = numbers % BLOCK // PANEL
        integers = self._blocks[numbers // BLOCK, :, part, :, numbers % PANEL].flatten(-2)
        return (integers * self.scales[numbers][..., None]).bfloat16()


def in_blocks(integers: Tensor) -> Tensor:  # (outputs, inputs) -> (blocks, inputs / 2, 4, 2, 16)
    """Return an int8 matrix as multiply_blocks() reads it, with zeros as the last block's rest."""
    outputs, inputs = integers.shape
    blocks = -(-outputs // BLOCK)
    padded = integers.new_zeros(blocks * BLOCK, inputs)
    padded[:outputs] = integers
    parts = padded.view(blocks, BLOCK // PANEL, PANEL, inputs // 2, 2)
    return parts.permute(0, 3, 1, 4, 2).contiguous()


def store(model: nn.Module, pack: Callable[[Tensor], Any], dtype: torch.dtype) -> None:
    """Let `pack` store a model's matrices of one format, joined where layers can join them.

    `pack` returns the function that multiplies with a matrix, whose `rows` looks rows up or is None.
    """
    for module in model.modules():
        join = getattr(module, "join", None)
        if join is not None:
            join(functools.partial(joined, pack=pack, dtype=dtype))
        if _can_be_stored(module, dtype):
            _replace(module, pack(cast(nn.Parameter, module.weight)))


def _can_be_stored(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module has a non-empty weight in `dtype` and an unused `multiply` hook."""
    if not hasattr(module, "multiply") or module.multiply is not None:
        return False
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or not weight.numel():
        return False
    return weight.dtype == dtype


def store_int8(model: nn.Module, pack: Callable[[Tensor, Tensor], Any]) -> None:
    """Let `pack` store a model's 8-bit matrices, joined where layers can join them.

    `pack` is given the integers of a matrix and the scales of its outputs.
    """
    for module in model.modules():
        join = getattr(module, "join", None)
        if join is not None:
            join(functools.partial(_joined_int8, pack=pack))
        multiply = getattr(module, "multiply", None)
        if isinstance(multiply, Int8):
            _replace(module, pack(multiply.integers, multiply.scales))


def _joined_int8(
    matrices: Sequence[Linear],
    pack: Callable[[Tensor, Tensor], Product],
) -> Product | None:
    """Return a function that multiplies by all matrices, or None if any has a bias or no 8 bits."""
    quantized = [matrix.multiply for matrix in matrices if isinstance(matrix.multiply, Int8)]
    if len(quantized) < len(matrices) or any(matrix.has_bias for matrix in matrices):
        return None
    integers = torch.cat([matrix.integers for matrix in quantized])
    scales = torch.cat([matrix.scales for matrix in quantized])
    for matrix in matrices:
        matrix.multiply = None
    return pack(integers, scales)


def _replace(module: nn.Module, stored: Any) -> None:
    """Let a module multiply, and look rows up, by a stored matrix instead of its weight."""
    cast(Any, module).multiply = stored
    if isinstance(module, Linear) and not isinstance(module, Head):
        empty_weight(module)
    elif hasattr(module, "look_up") and stored.rows is not None:
        # a table of published models; our own GPT's head reads its weight in losses too
        cast(Any, module).look_up = stored.rows
        empty_weight(module)

"""Stores the matrices of a model that a CPU serves: in bf16 as oneDNN lays them out, or in panels."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nanochat.gpt import Head
from nanochat.linear import Linear
from nanochat.models.qwen.int8 import Int8
from nanochat.platforms.cpu.kernels import BLOCK, Kernels
from nanochat.platforms.together import Product, empty_weight, joined

# The most rows that our own loop multiplies with a matrix faster than oneDNN does, on one thread.
FEW_ROWS = 32


class Packed:
    """Multiplies by a bf16 matrix that is stored in oneDNN's layout.

    `rows` returns rows (..., inputs) of the matrix by their numbers (...). It is None if the layout
    is not known.
    """

    def __init__(
        self,
        weight: Tensor,  # (outputs, inputs)
        kernels: Kernels | None,
        compared: set[torch.Size] | None = None,  # collects shapes whose layout is as expected
    ):
        weight = weight.detach()
        compared = set() if compared is None else compared
        self._shape = weight.shape
        self._kernels = kernels
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._place: int | None = None
        if kernels is not None:
            compare = weight.shape not in compared
            self._place = kernels.reads(self._laid_out, weight.contiguous(), compare)
        self.rows: Callable[[Tensor], Tensor] | None = None
        if self._place is not None:
            compared.add(weight.shape)
            self._pairs = Kernels.pairs(self._place, weight.shape)
            self.rows = self._rows

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return x (..., inputs) times the transposed matrix.

        This is the `multiply` hook of a Linear; `weight` is ignored.
        """
        outputs, inputs = self._shape
        has_few_rows = x.numel() <= FEW_ROWS * inputs
        if self._place is not None and has_few_rows and torch.get_num_threads() == 1:
            assert self._kernels is not None
            return self._kernels.multiply(x, self._place, outputs)
        return self._multiply(x, self._laid_out, None, "none", [], "")

    def _rows(self, numbers: Tensor) -> Tensor:  # (...) -> (..., inputs)
        pairs = self._pairs[numbers // BLOCK, :, numbers % BLOCK]
        return pairs.contiguous().view(torch.bfloat16)


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

"""Stacks the matrices of experts, which files hold one by one, and takes stacks apart again.

Publishers write ...experts.3.gate_proj.weight, up_proj and down_proj for each expert. Files may also
hold the two stacks of our parameters, as transformers 5 names them; these are read as they are.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanochat.checkpoint_manager.huggingface.quantised import dequantised_rows
from nanochat.models.lora import STACKS

# Of one expert's matrix: the name of the layer's experts, the number, and the matrix.
ONE_MATRIX = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class StackSlice:
    """A stack of matrices in files, with the methods of a slice of a safetensors file."""

    experts: Sequence[Sequence[tuple[Any, Any | None]]]  # (slice, FP8 factors) of each matrix

    def get_shape(self) -> list[int]:
        """Return the shape (E, outputs, inputs) of the whole stack."""
        shapes = [matrix.get_shape() for matrix, _ in self.experts[0]]
        return [len(self.experts), sum(rows for rows, _ in shapes), shapes[0][1]]

    def get_dtype(self) -> str:
        """Return a number format that is not quantised, since reading dequantises the matrices."""
        return "F32"

    def __getitem__(self, experts: slice) -> Tensor:
        """Return the matrices of a range of experts; only these are read."""
        return torch.stack([_read(matrices) for matrices in self.experts[experts]])


def _read(matrices: Sequence[tuple[Any, Any | None]]) -> Tensor:
    """Return the matrices of an expert, one above the other."""
    tensors = []
    for matrix, factors in matrices:
        if factors is None:
            tensors.append(matrix[:])
        else:
            tensors.append(dequantised_rows(matrix, factors, 0, matrix.get_shape()[0]))
    return torch.cat(tensors)


def take_stacks(slices: dict[str, Any], factors: dict[str, Any]) -> dict[str, StackSlice]:
    """Remove the experts' matrices from `slices`, and return the stacks that they make, by name.

    `factors` are those of matrices in FP8, by the matrices' names. Matrices stay in `slices` if
    their shapes differ between experts, or if some expert lacks one of them.
    """
    names: dict[str, dict[int, dict[str, str]]] = {}
    for name in slices:
        parts = ONE_MATRIX.fullmatch(name)
        if parts:
            experts, number, matrix = parts.groups()
            names.setdefault(experts, {}).setdefault(int(number), {})[matrix] = name
    stacks = {}
    for experts, of_expert in names.items():
        for stack, matrices in STACKS.items():
            rows = [
                [of_expert.get(number, {}).get(matrix, "") for matrix in matrices]
                for number in range(len(of_expert))
            ]
            shapes = {
                tuple(tuple(slices[name].get_shape()) if name else () for name in row)
                for row in rows
            }
            if len(shapes) == 1 and all(len(shape) == 2 for shape in next(iter(shapes))):
                pairs = [[(slices.pop(name), factors.get(name)) for name in row] for row in rows]
                stacks[f"{experts}.{stack}"] = StackSlice(pairs)
    return stacks


def one_by_one(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value that publishers' files have for a parameter.

    A stack of experts' matrices yields each matrix, and any other parameter itself.
    """
    experts, _, stack = name.rpartition(".")
    if not experts.endswith(".experts") or stack not in STACKS:
        yield name, parameter
        return
    for number, value in enumerate(parameter.unbind()):
        matrices = STACKS[stack]
        for matrix, part in zip(matrices, value.chunk(len(matrices)), strict=True):
            yield f"{experts}.{number}.{matrix}.weight", part

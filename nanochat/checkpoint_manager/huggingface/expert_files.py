"""Stacks the matrices of experts, which files hold one by one, and takes stacks apart again.

Publishers write ...experts.3.gate_proj.weight, up_proj and down_proj for each expert. Files may also
hold the two stacks of our parameters, as transformers 5 names them; these are read as they are.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanochat.checkpoint_manager.huggingface.quantised import dequantised_rows
from nanochat.models.lora import STACKS

# The name of one expert's matrix: the layer's experts, the expert's number, and the matrix.
ONE_MATRIX = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class StackSlice:
    """A stack of matrices in files, with the methods of a slice of a safetensors file."""

    experts: Sequence[Sequence[tuple[Any, Any | None]]]  # (slice, FP8 factors) of each matrix

    def get_shape(self) -> list[int]:
        """Return the shape (E, outputs, inputs) of the whole stack."""
        shapes = [matrix.get_shape() for matrix, _ in self.experts[0]]
        outputs = sum(rows for rows, _ in shapes)
        inputs = shapes[0][1]
        return [len(self.experts), outputs, inputs]

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
            rows = matrix.get_shape()[0]
            tensors.append(dequantised_rows(matrix, factors, 0, rows))
    return torch.cat(tensors)


def take_stacks(slices: dict[str, Any], factors: dict[str, Any]) -> dict[str, StackSlice]:
    """Remove the experts' matrices from `slices`, and return the stacks that they make, by name.

    `factors` holds the FP8 factors of quantised matrices, by the matrices' names. Matrices stay in
    `slices` if their shapes differ between experts, or if some expert lacks one of them.
    """
    stacks = {}
    for experts, matrices_by_number in _matrix_names(slices).items():
        for stack, matrices in STACKS.items():
            names_by_expert = []
            for number in range(len(matrices_by_number)):
                names = matrices_by_number.get(number, {})
                names_by_expert.append([names[matrix] for matrix in matrices if matrix in names])
            if not _can_stack(names_by_expert, len(matrices), slices):
                continue
            pairs = [
                [(slices.pop(name), factors.get(name)) for name in names]
                for names in names_by_expert
            ]
            stacks[f"{experts}.{stack}"] = StackSlice(pairs)
    return stacks


def _matrix_names(names: Iterable[str]) -> dict[str, dict[int, dict[str, str]]]:
    """Return the names that belong to single experts: layer's experts -> number -> matrix -> name.

    For example {"model.layers.0.mlp.experts": {0: {"up_proj": "model.layers.0...weight"}}}.
    """
    by_experts: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        match = ONE_MATRIX.fullmatch(name)
        if match:
            experts, number, matrix = match.groups()
            matrices_by_number = by_experts.setdefault(experts, {})
            matrices_by_number.setdefault(int(number), {})[matrix] = name
    return by_experts


def _can_stack(
    names_by_expert: Sequence[Sequence[str]],
    count: int,
    slices: Mapping[str, Any],
) -> bool:
    """Return whether every expert has `count` matrices, with the same shapes as the first one's."""
    if any(len(names) != count for names in names_by_expert):
        return False
    shapes = [[slices[name].get_shape() for name in names] for names in names_by_expert]
    are_matrices = all(len(shape) == 2 for shape in shapes[0])
    return are_matrices and all(expert_shapes == shapes[0] for expert_shapes in shapes)


def one_by_one(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value that publishers' files have for a parameter.

    A stack of experts' matrices yields each matrix, and any other parameter itself.
    """
    experts, _, stack = name.rpartition(".")
    if not experts.endswith(".experts") or stack not in STACKS:
        yield name, parameter
        return
    matrices = STACKS[stack]
    for number, joined in enumerate(parameter.unbind()):
        for matrix, value in zip(matrices, joined.chunk(len(matrices)), strict=True):
            yield f"{experts}.{number}.{matrix}.weight", value

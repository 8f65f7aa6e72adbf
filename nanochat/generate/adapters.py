"""Serves several adapters (LoRA) with one model: every row of a pass has one of them, or none.

The model's matrices stay as they are and are read once for all rows, as in Punica (arXiv
2310.18547). What a matrix gets from its adapters is computed in one of three forms, which agree to
rounding: where all rows have one adapter, its two halves are multiplied as in training; a pass of
single tokens multiplies with all adapters at once and masks what belongs to others; and a longer
pass, where that would cost too much, copies the halves of each row's adapter. Shapes: N adapters, R
the largest rank, B rows, T tokens of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError
from nanochat.linear import Linear

if TYPE_CHECKING:
    from nanochat.models.lora import Adapter

NONE = -1  # the number of a row without an adapter
# With more adapters than this for each row, copying those of the rows is cheaper than reading all.
SPREAD = 4


@dataclass(frozen=True)
class _Rows:
    """Which adapter each row of a pass has."""

    shared: int | None  # the adapter of all rows, or NONE; None: the rows differ
    masked: bool  # whether to multiply with all adapters and mask those of other rows
    index: Tensor  # (B,) the numbers, 0 for rows that have none
    has: Tensor  # (B, 1, 1) 1 where a row has an adapter, else 0
    mask: Tensor  # (B, N * R) 1 at the ranks of the row's adapter, else 0


class Adapters:
    """The adapters of a model, by name. Outside of rows() the model computes without any."""

    def __init__(
        self,
        model: nn.Module,
        adapters: Mapping[str, Adapter],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Give every matrix of the model that an adapter changes the halves of all adapters, in
        `dtype`. Ranks may differ; the smaller ones are padded with zeros."""
        self._numbers = {"": NONE} | {name: number for number, name in enumerate(adapters)}
        self._rank = max((adapter.config.rank for adapter in adapters.values()), default=0)
        self._count = len(adapters)
        self._dtype = dtype
        self._device = device
        self._rows: _Rows | None = None
        self._latest: tuple[tuple[int, ...], _Rows] | None = None
        self._fixed: dict[int, _Rows] = {}
        changed: set[str] = set()  # names of the matrices that an adapter changes
        for adapter in adapters.values():
            changed |= {name.rpartition(".lora_")[0] for name in adapter.values}
        for name, matrix in model.named_modules():
            if name in changed and isinstance(matrix, Linear):
                matrix.adapter = self._halves(name, matrix, list(adapters.values())).add

    @property
    def names(self) -> list[str]:
        """The names of the adapters."""
        return [name for name in self._numbers if name]

    def number(self, name: str) -> int:
        """Return the number of an adapter; NONE for "". Raises UserError for an unknown name."""
        if name not in self._numbers:
            offer = f"has {', '.join(map(repr, self.names))}" if self.names else "has none"
            raise UserError(
                f"there is no adapter {name!r}: this model {offer}. Ask for another one, or for "
                "none",
                2,
            )
        return self._numbers[name]

    @contextlib.contextmanager
    def rows(self, numbers: Sequence[int], fixed: bool = False) -> Iterator[None]:
        """Within this, row i of every pass has the adapter of numbers[i]. With `fixed`, for graphs,
        passes of so many single tokens run the same operators on the same memory whatever the
        numbers are."""
        key = tuple(numbers)
        if self._latest is None or self._latest[0] != key:
            self._latest = (key, self._rows_of(key))
        rows = self._latest[1]
        if fixed:
            if len(key) not in self._fixed:
                mask = torch.zeros_like(rows.mask)
                self._fixed[len(key)] = replace(rows, shared=None, masked=True, mask=mask)
            fixed_rows = self._fixed[len(key)]
            fixed_rows.mask.copy_(rows.mask)
            rows = fixed_rows
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    @property
    def current(self) -> _Rows | None:
        """The rows of the pass that runs; None if none has an adapter."""
        if self._rows is None or self._rows.shared == NONE:
            return None
        return self._rows

    def _rows_of(self, numbers: tuple[int, ...]) -> _Rows:
        """Return the rows of a pass with these adapters, their tensors on the device."""
        index = torch.tensor(numbers)
        owners = torch.arange(self._count).repeat_interleave(self._rank)
        mask = (index[:, None] == owners).to(self._dtype)
        has = (index > NONE).to(self._dtype)[:, None, None]
        return _Rows(
            shared=numbers[0] if len(set(numbers)) == 1 else None,
            masked=self._count <= SPREAD * len(numbers),
            index=index.clamp_min(0).to(self._device),
            has=has.to(self._device),
            mask=mask.to(self._device, non_blocking=True),
        )

    def _halves(
        self,
        name: str,
        matrix: Linear,
        adapters: Sequence[Adapter],
    ) -> _Halves:
        """Return what all adapters have for one matrix; zeros where one has nothing."""
        first = torch.zeros(self._count, self._rank, matrix.in_features, dtype=self._dtype)
        second = torch.zeros(self._count, self._rank, matrix.out_features, dtype=self._dtype)
        for number, adapter in enumerate(adapters):
            if f"{name}.lora_A.weight" not in adapter.values:
                continue
            rank = adapter.config.rank
            lora_b = adapter.values[f"{name}.lora_B.weight"].float()
            first[number, :rank] = adapter.values[f"{name}.lora_A.weight"]
            second[number, :rank] = lora_b.mT * adapter.config.scale
        return _Halves(self, first.to(self._device), second.to(self._device))


@dataclass(frozen=True)
class _Halves:
    """The halves of all adapters of one matrix, the second ones already times the adapter's
    scale."""

    adapters: Adapters
    first: Tensor  # (N, R, inputs)
    second: Tensor  # (N, R, outputs)

    def add(
        self,
        x: Tensor,  # (B, T, inputs)
        y: Tensor,  # (B, T, outputs): the product of x and the matrix
    ) -> Tensor:  # (B, T, outputs)
        """Return y with what each row's adapter adds."""
        rows = self.adapters.current
        if rows is None:
            return y
        flat = y.flatten(0, -2)
        if rows.shared is not None:
            low = F.linear(x, self.first[rows.shared]).flatten(0, -2)
            return torch.addmm(flat, low, self.second[rows.shared]).view_as(y)
        if x.size(1) == 1 and rows.masked:
            low = F.linear(x, self.first.flatten(0, 1)).flatten(0, -2) * rows.mask
            return torch.addmm(flat, low, self.second.flatten(0, 1)).view_as(y)
        low = torch.bmm(x, self.first[rows.index].mT) * rows.has
        return torch.baddbmm(y, low, self.second[rows.index])

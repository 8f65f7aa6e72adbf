"""Several adapters (LoRA) on one model: every row of a pass has one of them, or none.

The model's matrices stay as they are and are read once for all rows, as in Punica (arXiv 2310.18547). Of what a matrix
gets from its adapters there are three forms, which agree to rounding: where all rows have one adapter, its two halves
are multiplied as in training; a pass of single tokens multiplies with the adapters of all names at once and masks what
belongs to others; and a longer pass, where that would cost too much, copies the halves of each row's adapter.
Shapes: N adapters, R the largest rank, B rows, T tokens of a row.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError
from nanochat.linear import Linear
from nanochat.models.lora import Adapter

NONE = -1  # the number of a row without an adapter
SPREAD = 4  # with more adapters than this for each row, copying those of the rows is cheaper than reading all


@dataclass(frozen=True)
class _Rows:
    """Which adapter each row of a pass has."""

    only: int | None  # the adapter of all rows, or NONE; None: the rows differ
    masked: bool  # whether to multiply with all adapters and mask those of other rows
    index: Tensor  # (B,) the numbers, 0 for rows that have none
    has: Tensor  # (B, 1, 1) 1 where a row has an adapter, else 0
    mask: Tensor  # (B, N * R) 1 at the ranks of the row's adapter, else 0


class Adapters:
    """The adapters of a model, by name. Outside of rows() the model computes without any."""

    def __init__(
        self,
        model: nn.Module,
        given: Mapping[str, Adapter],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Gives every matrix of the model that an adapter changes the halves of all adapters, in `dtype`. Ranks may
        differ; the smaller ones are padded with zeros."""
        self._numbers = {"": NONE} | {name: number for number, name in enumerate(given)}
        self._rank = max((adapter.config.rank for adapter in given.values()), default=0)
        self._count, self._dtype, self._device = len(given), dtype, device
        self._rows: _Rows | None = None
        self._last: tuple[tuple[int, ...], _Rows] | None = None
        self._fixed: dict[int, _Rows] = {}
        changed = {
            name.rpartition(".lora_")[0] for adapter in given.values() for name in adapter.values
        }
        for name, matrix in model.named_modules():
            if name in changed and isinstance(matrix, Linear):
                matrix.adapter = self._halves(name, matrix, list(given.values())).add

    @property
    def names(self) -> list[str]:
        """The names of the adapters."""
        return [name for name in self._numbers if name]

    def number(self, name: str) -> int:
        """The number of an adapter; NONE for "". UserError for an unknown name."""
        if name not in self._numbers:
            known = f"has {', '.join(map(repr, self.names))}" if self.names else "has none"
            raise UserError(
                f"there is no adapter {name!r}: this model {known}. Ask for another one, or for none",
                2,
            )
        return self._numbers[name]

    @contextlib.contextmanager
    def rows(self, numbers: Sequence[int], fixed: bool = False) -> Iterator[None]:
        """Within this, row i of every pass has the adapter of numbers[i]. With `fixed`, for graphs, passes of so many
        single tokens run the same operators on the same memory whatever the numbers are."""
        wanted = tuple(numbers)
        if self._last is None or self._last[0] != wanted:
            self._last = wanted, self._placed(wanted)
        self._rows = self._last[1]
        if fixed:
            if len(wanted) not in self._fixed:
                own = torch.zeros_like(self._rows.mask)
                self._fixed[len(wanted)] = replace(self._rows, only=None, masked=True, mask=own)
            self._rows = self._fixed[len(wanted)]
            self._rows.mask.copy_(self._last[1].mask)
        try:
            yield
        finally:
            self._rows = None

    @property
    def current(self) -> _Rows | None:
        """The rows of the pass that runs; None if none has an adapter."""
        return self._rows if self._rows is not None and self._rows.only != NONE else None

    def _placed(self, numbers: tuple[int, ...]) -> _Rows:
        index = torch.tensor(numbers)
        mask = (index[:, None] == torch.arange(self._count).repeat_interleave(self._rank)).to(
            self._dtype
        )
        has = (index > NONE).to(self._dtype)[:, None, None]
        only = numbers[0] if len(set(numbers)) == 1 else None
        return _Rows(
            only,
            self._count <= SPREAD * len(numbers),
            index.clamp_min(0).to(self._device),
            has.to(self._device),
            mask.to(self._device, non_blocking=True),
        )

    def _halves(self, name: str, matrix: Linear, given: Sequence[Adapter]) -> "_Halves":
        """What all adapters have for one matrix; zeros where one has nothing."""
        first = torch.zeros(self._count, self._rank, matrix.in_features, dtype=self._dtype)
        second = torch.zeros(self._count, self._rank, matrix.out_features, dtype=self._dtype)
        for number, adapter in enumerate(given):
            rank, scale = adapter.config.rank, adapter.config.scale
            if f"{name}.lora_A.weight" in adapter.values:
                first[number, :rank] = adapter.values[f"{name}.lora_A.weight"]
                second[number, :rank] = adapter.values[f"{name}.lora_B.weight"].float().mT * scale
        return _Halves(self, first.to(self._device), second.to(self._device))


@dataclass(frozen=True)
class _Halves:
    """The halves of all adapters of one matrix, the second ones already times the adapter's scale."""

    adapters: Adapters
    first: Tensor  # (N, R, inputs)
    second: Tensor  # (N, R, outputs)

    def add(
        self, x: Tensor, y: Tensor
    ) -> Tensor:  # (B, T, inputs), (B, T, outputs) -> (B, T, outputs)
        """What the matrix gives for `x`, which is `y`, with what each row's adapter adds."""
        rows = self.adapters.current
        if rows is None:
            return y
        flat = y.flatten(0, -2)
        if rows.only is not None:
            low = F.linear(x, self.first[rows.only]).flatten(0, -2)
            return torch.addmm(flat, low, self.second[rows.only]).view_as(y)
        if x.size(1) == 1 and rows.masked:
            low = F.linear(x, self.first.flatten(0, 1)).flatten(0, -2) * rows.mask
            return torch.addmm(flat, low, self.second.flatten(0, 1)).view_as(y)
        low = torch.bmm(x, self.first[rows.index].mT) * rows.has
        return torch.baddbmm(y, low, self.second[rows.index])

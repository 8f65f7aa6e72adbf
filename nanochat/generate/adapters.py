"""Serves several LoRA adapters with one model: every row of a pass uses one of them, or none.

The model's matrices stay as they are and are read once for all rows, as in Punica (arXiv
2310.18547). What the adapters add to a matrix's output is computed in one of three forms, which
agree up to rounding. If all rows have the same adapter, they are multiplied by its two factors, as
in training. A pass of single tokens multiplies by all adapters at once, and masks out those of
other rows. In other passes, or if that would cost too much, the factors of each row's adapter are
copied. Shapes: N adapters, R the largest rank, B rows, T tokens of a row.
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

from nanochat.common import UserError, tr
from nanochat.linear import Linear

if TYPE_CHECKING:
    from nanochat.models.lora import Adapter

NONE = -1  # the adapter index of a row without an adapter
# If there are more adapters than this per row, copying those of the rows is cheaper than reading
# all adapters.
SPREAD = 4


@dataclass(frozen=True)
class _Rows:
    """The adapter of each row of a pass, in the forms that the computation needs."""

    shared: int | None  # the adapter of all rows, or NONE; None: the rows differ
    uses_mask: bool  # whether to multiply by all adapters and mask out other rows' results
    index: Tensor  # (B,) adapter indices, 0 for rows without an adapter
    has_adapter: Tensor  # (B, 1, 1) 1 if the row has an adapter, else 0
    mask: Tensor  # (B, N * R) 1 at the ranks of the row's adapter, else 0


class Adapters:
    """The adapters of a model, by name; outside rows() the model computes without them."""

    def __init__(
        self,
        model: nn.Module,
        adapters: Mapping[str, Adapter],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """Attach all adapters to the matrices that they change, with their factors in `dtype`.

        The adapters' ranks may differ; smaller ones are padded with zeros.
        """
        self._numbers = {"": NONE} | {name: number for number, name in enumerate(adapters)}
        self._rank = 0
        for adapter in adapters.values():
            configs = adapter.configs.values() or [adapter.config]
            self._rank = max(self._rank, *(config.rank for config in configs))
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
                matrix.adapter = self._factors(name, matrix, list(adapters.values())).contribution

    @property
    def names(self) -> list[str]:
        """The names of the adapters."""
        return [name for name in self._numbers if name]

    def number(self, name: str) -> int:
        """Return the index of the adapter called `name`, or -1 for "" (no adapter).

        Raises UserError (exit code 2) if the name is unknown.
        """
        if name not in self._numbers:
            values = {"name": name, "names": ", ".join(map(repr, self.names))}
            message = tr(
                "there is no adapter {name!r}: this model has {names}. "
                "Ask for another one, or for none",
                **values,
            )
            if not self.names:
                message = tr(
                    "there is no adapter {name!r}: this model has none. "
                    "Ask for another one, or for none",
                    **values,
                )
            raise UserError(message, 2)
        return self._numbers[name]

    @contextlib.contextmanager
    def rows(self, numbers: Sequence[int], fixed: bool = False) -> Iterator[None]:
        """Return a context manager that gives row i of each pass the adapter with index numbers[i].

        With `fixed`, which graphs need, all passes of single tokens with the same number of rows
        run the same operators on the same memory, whichever adapters the rows have.
        """
        key = tuple(numbers)
        if self._latest is None or self._latest[0] != key:
            self._latest = (key, self._rows_of(key))
        rows = self._latest[1]
        if fixed:
            if len(key) not in self._fixed:
                mask = torch.zeros_like(rows.mask)
                self._fixed[len(key)] = replace(rows, shared=None, uses_mask=True, mask=mask)
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
        """The _Rows of the current pass, or None if the pass is to be computed without adapters."""
        if self._rows is None or self._rows.shared == NONE:
            return None
        return self._rows

    def _rows_of(self, numbers: tuple[int, ...]) -> _Rows:
        """Return the _Rows on the device for a pass whose rows use the adapters at these indices."""
        index = torch.tensor(numbers)
        owners = torch.arange(self._count).repeat_interleave(self._rank)
        mask = (index[:, None] == owners).to(self._dtype)
        has_adapter = (index > NONE).to(self._dtype)[:, None, None]
        return _Rows(
            shared=numbers[0] if len(set(numbers)) == 1 else None,
            uses_mask=self._count <= SPREAD * len(numbers),
            index=index.clamp_min(0).to(self._device),
            has_adapter=has_adapter.to(self._device),
            mask=mask.to(self._device, non_blocking=True),
        )

    def _factors(
        self,
        name: str,
        matrix: Linear,
        adapters: Sequence[Adapter],
    ) -> _Factors:
        """Return all adapters' factors for one matrix; those that do not change it have zeros."""
        first = torch.zeros(self._count, self._rank, matrix.in_features, dtype=self._dtype)
        second = torch.zeros(self._count, self._rank, matrix.out_features, dtype=self._dtype)
        for number, adapter in enumerate(adapters):
            if f"{name}.lora_A.weight" not in adapter.values:
                continue
            config = adapter.config_of(name)
            rank = config.rank
            lora_b = adapter.values[f"{name}.lora_B.weight"].float()
            first[number, :rank] = adapter.values[f"{name}.lora_A.weight"]
            second[number, :rank] = lora_b.mT * config.scale
        return _Factors(self, first.to(self._device), second.to(self._device))


@dataclass(frozen=True)
class _Factors:
    """The two factors of every adapter for one matrix, the second one times the adapter's scale."""

    adapters: Adapters
    first: Tensor  # (N, R, inputs)
    second: Tensor  # (N, R, outputs)

    def contribution(
        self,
        x: Tensor,  # (B, T, inputs)
    ) -> Tensor | None:  # (B, T, outputs)
        """Return what each row's adapter adds to the product of the matrix and x."""
        rows = self.adapters.current
        if rows is None:
            return None
        if rows.shared is not None:
            return F.linear(x, self.first[rows.shared]) @ self.second[rows.shared]
        if x.size(1) == 1 and rows.uses_mask:
            low = F.linear(x, self.first.flatten(0, 1)) * rows.mask[:, None]
            return low @ self.second.flatten(0, 1)
        low = torch.bmm(x, self.first[rows.index].mT) * rows.has_adapter
        return torch.bmm(low, self.second[rows.index])

"""Keeps the figures of a run, such as its loss, in a bounded number of rows."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_ROWS = 600  # a curve on a screen cannot show more
MOST_FIGURES = 32  # different names of figures; further names are left out


@dataclass(slots=True)
class Cell:
    """The sum, extremes and count of one figure's values in the lines of a row."""

    total: float
    low: float
    high: float
    count: int = 1

    def join(self, other: "Cell") -> None:
        """Merge the values of another cell into this one."""
        self.total += other.total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        self.count += other.count


@dataclass(slots=True)
class Row:
    """Consecutive lines of a metrics.jsonl, merged: their last step, count and figures."""

    step: int
    lines: int
    cells: dict[str, Cell]

    def join(self, other: "Row") -> None:
        """Merge the lines of a later row into this one."""
        self.step = other.step
        self.lines += other.lines
        for name, cell in other.cells.items():
            if name in self.cells:
                self.cells[name].join(cell)
            else:
                self.cells[name] = cell


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


@dataclass
class Table:
    """A table of a run's figures by step, whose rows merge in pairs when it is full.

    A reader that has the first n rows of an `edition` gets the rows from index n - 1 on, since the
    last row may have grown. When rows merge, a new edition begins, and readers get all rows.
    """

    edition: str = field(default_factory=lambda: secrets.token_hex(6))
    rows: list[Row] = field(default_factory=list)
    width: int = 1  # lines that a full row holds
    # The names of the figures, in the order of their first values.
    names: dict[str, None] = field(default_factory=dict)

    @property
    def cells(self) -> int:
        """The number of cells in all rows, which is a measure of the table's memory."""
        return len(self.rows) * len(self.names)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a line, unless its step is earlier than the last one."""
        if self.rows and step < self.rows[-1].step:
            return
        for name in figures:
            if len(self.names) < MOST_FIGURES:
                self.names.setdefault(name)
        cells = {}
        for name, value in figures.items():
            if name in self.names:
                cells[name] = Cell(value, value, value)
        row = Row(step, 1, cells)
        if self.rows:
            last = self.rows[-1]
            if last.lines < self.width or last.step == step:
                last.join(row)
                return
        if len(self.rows) == MOST_ROWS:
            self._halve()
        self.rows.append(row)

    def _halve(self) -> None:
        """Merge each pair of rows into one, and begin a new edition."""
        for first, second in zip(self.rows[::2], self.rows[1::2], strict=True):
            first.join(second)
        self.rows = self.rows[::2]
        self.width *= 2
        self.edition = secrets.token_hex(6)

    def since(self, edition: str, row_count: int) -> dict[str, Any]:
        """Return a dict with the rows that a reader with `row_count` rows of `edition` needs.

        `from` is the index of the first row returned, `width` the number of lines in a full row,
        and `steps` the list of the rows' steps. `figures` maps each name to a dict of lists, which
        have a value, or None, for each row: `mean`, and if `width` is above 1, the extremes `low`
        and `high`.
        """
        same = edition == self.edition and 0 < row_count <= len(self.rows)
        first = row_count - 1 if same else 0
        rows = self.rows[first:]
        figures: dict[str, dict[str, list[float | None]]] = {}
        for name in self.names:
            cells = [row.cells.get(name) for row in rows]
            figure = {"mean": [cell and _rounded(cell.total / cell.count) for cell in cells]}
            if self.width > 1:
                figure["low"] = [cell and _rounded(cell.low) for cell in cells]
                figure["high"] = [cell and _rounded(cell.high) for cell in cells]
            figures[name] = figure
        steps = [row.step for row in rows]
        return {
            "edition": self.edition,
            "from": first,
            "width": self.width,
            "steps": steps,
            "figures": figures,
        }

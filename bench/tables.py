"""Prints what a benchmark measured: a table for people, and one JSON object as the last line."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 160  # columns: no cell is wrapped, also where the output goes to a file


def show(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table whose first column is a label and whose other columns are figures."""
    label, *figures = titles
    table = Table(label, box=SIMPLE_HEAD)
    for title in figures:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=WIDTH, markup=False, highlight=False).print(table)


def finish(benchmark: str, figures: dict[str, Any]) -> None:
    """Print the figures of a benchmark as one JSON object, with six digits each."""
    print(json.dumps({"benchmark": benchmark, **rounded(figures)}), flush=True)


def rounded(value: Any) -> Any:
    """Return the same figures, also those inside dictionaries and lists, with six digits each."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value

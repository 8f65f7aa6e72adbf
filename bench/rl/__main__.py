"""Measures a step of RL in CPU seconds, as trees and as rows: sampling, training, other parts.

python -m bench.rl --quick           # ends within 50 seconds

How: one thread, the model of the tinyworld preset, untrained, and the sizes of the preset's step:
32 problems with 16 short replies. Trees and rows take turns, so that a busy machine slows them
equally, and the median of each part counts. bench.rl.control asks whether rewards teach.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench import tables
from bench.processes import check_at_least
from bench.rl.side import SUMS, Ours
from nanochat.common import run

COLUMNS = {  # of the table, with the parts of a step; the others are the rest
    "sampling": ("sampling",),
    "training": ("training", "forward", "backward"),
}

Step = Callable[[int], dict[str, float]]  # makes step N; CPU seconds of its parts


@dataclass(frozen=True)
class Config:
    """Print CPU seconds of a step, and one JSON object on the last line."""

    quick: bool = False
    """two steps of each kind, so that it ends within 50 seconds"""
    steps: int = 6
    """measured steps of each kind, after one that warms up"""


def columns_of(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each column of the table from those of the parts of a step."""
    columns = {
        title: sum(parts.get(part, 0.0) for part in column) for title, column in COLUMNS.items()
    }
    rest = sum(parts.values()) - sum(columns.values())
    return {**columns, "rest": rest}


def measure(sides: Mapping[str, Step], steps: int) -> dict[str, dict[str, float]]:
    """Return the median of each side's columns; the sides take turns after a warm-up."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(steps + 1):
        for name, step in sides.items():
            measured[name].append(columns_of(step(number)))
    medians = {}
    for name, (_, *side_steps) in measured.items():
        medians[name] = {
            column: median(step[column] for step in side_steps) for column in side_steps[0]
        }
    return medians


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, steps=cfg.steps)
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    rows = []
    sides = {"trees": Ours(SUMS, True).step, "rows": Ours(SUMS, False).step}
    for name, columns in measure(sides, 2 if cfg.quick else cfg.steps).items():
        total = sum(columns.values())
        cells = [f"{seconds:.3f}" for seconds in (*columns.values(), total)]
        rows.append([name, *cells, f"{SUMS.tokens / total:,.0f}"])
        result[f"sums {name}"] = columns
    titles = ("CPU seconds of a step", *COLUMNS, "rest", "step", "tokens/CPU s")
    tables.show(titles, rows)
    tables.finish("rl", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Measures a step of RL in CPU seconds: sampling, training and the rest, as trees and as rows.

python -m bench.rl --quick           # ends within 50 seconds

How: one thread, the model of the tinyworld preset, untrained. `sums` has the sizes of the preset's step: 32 problems
with 16 short replies. `gsm8k` has long prompts and replies, of which no two are alike. Trees and rows take turns, so
that a busy machine slows them equally, and the median of each part counts. bench.rl.control asks whether rewards teach.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.processes import check_at_least
from bench.rl.side import GSM8K, SUMS, Ours
from nanochat.common import log, run

COLUMNS = ("sampling", "training", "rest")
TRAINING = ("training", "forward", "backward")  # parts of a step; those of no column are the rest

Step = Callable[[int], dict[str, float]]  # makes step N; CPU seconds of its parts


@dataclass(frozen=True)
class Config:
    """Print CPU seconds of a step, and one JSON object on the last line."""

    quick: bool = False
    """one or two steps of each kind, so that it ends within 50 seconds"""
    steps: int = 6
    """measured steps of each kind, after one that warms up"""


def column_of(phase: str) -> str:
    """Return the column of the table that a part of a step belongs to."""
    if phase in TRAINING:
        return "training"
    return phase if phase == "sampling" else "rest"


def measure(sides: dict[str, Step], steps: int) -> dict[str, dict[str, float]]:
    """Return the median CPU seconds of each side's columns; the sides take turns, and warm up first."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(steps + 1):
        for name, step in sides.items():
            row = dict.fromkeys(COLUMNS, 0.0)
            for phase, seconds in step(number).items():
                row[column_of(phase)] += seconds
            rows[name].append(row)
    return {
        name: {column: median(row[column] for row in side_rows[1:]) for column in COLUMNS}
        for name, side_rows in rows.items()
    }


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, steps=cfg.steps)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "rl"}
    titles = "".join(f"{column:>10}" for column in COLUMNS)
    log(f"{'shape':<8}{'side':<8}{titles}{'CPU s a step':>14}{'tokens/CPU s':>14}")
    for shape, quick_steps in ((SUMS, 2), (GSM8K, 1)):
        sides = {"trees": Ours(shape, True).step, "rows": Ours(shape, False).step}
        measured = measure(sides, quick_steps if cfg.quick else cfg.steps)
        for name, seconds in measured.items():
            total = sum(seconds.values())
            speed = shape.tokens / total
            cells = "".join(f"{seconds[column]:>10.3f}" for column in COLUMNS)
            log(f"{shape.name:<8}{name:<8}{cells}{total:>14.3f}{speed:>14,.0f}")
            rounded = {column: round(value, 4) for column, value in seconds.items()}
            result[f"{shape.name} {name}"] = rounded
    print(json.dumps(result))


if __name__ == "__main__":
    run(main, Config, __doc__)

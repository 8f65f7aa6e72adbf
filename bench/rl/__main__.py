"""Measures a step of RL in CPU seconds, as trees and as rows.

python -m bench.rl --quick           # ends within 50 seconds

How: one thread, the model of the tinyworld preset, untrained, and the sizes of the preset's step:
32 problems with 16 short replies. Trees and rows take turns, so that a busy machine slows them
equally, and the median step counts. scripts.chat_rl --profile shows the parts of a step, and
bench.rl.control asks whether rewards teach.
"""

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from bench import child, tables
from bench.rl.side import SUMS, Ours
from nanochat.data.command_line import run


@dataclass(frozen=True)
class Config:
    """Print CPU seconds of a step, and one JSON object on the last line."""

    quick: bool = False
    """two steps of each kind instead of six, so that it ends within 50 seconds"""


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    sides = {"trees": Ours(SUMS, True), "rows": Ours(SUMS, False)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1 + (2 if cfg.quick else 6)):  # the first step warms up
        for name, side in sides.items():
            seconds[name].append(child.seconds_of(partial(side.step, number)))
    result = {name: median(warm) for name, (_, *warm) in seconds.items()}
    rows = []
    for name, step_seconds in result.items():
        rows.append([name, f"{step_seconds:.3f}", f"{SUMS.tokens / step_seconds:,.0f}"])
    tables.show(("", "CPU s/step", "tokens/CPU s"), rows)
    tables.finish("rl", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

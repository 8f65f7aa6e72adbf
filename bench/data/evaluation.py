"""Measures questions with choices, as C-Eval and MMLU ask them, beside lm-evaluation-harness.

python -m bench.data.evaluation --quick                 # ours alone, within 50 seconds
python -m bench.data.evaluation --against lm-eval

How: one model of 36 million parameters with random weights, fabricated questions with the lengths
of published ones, one thread each. The sides take turns, and the median round counts, in CPU
seconds.
"""

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench import tables
from bench.processes import (
    check_at_least,
    check_installed,
    check_peers,
    own_dtype,
    side,
    take_turns,
)
from bench.serve import model
from nanochat.common import log, run

QUICK_PROBLEMS = 6

Answers = Mapping[str, list[dict[str, Any]]]  # of each side, with the seconds of each round


@dataclass(frozen=True)
class Config:
    """Print the speed of an evaluation as a table, and one JSON object on the last line."""

    quick: bool = False
    """few problems, one round and ours alone, so that it ends within 50 seconds"""
    against: tuple[Literal["lm-eval"], ...] = ()
    """what to measure beside ours: lm-eval, the harness's hf backend"""
    problems: int = 32
    """number of questions"""
    rounds: int = 3
    """turns of each side"""


def measure(sides: Sequence[str], task: Mapping[str, Any], rounds: int) -> Answers:
    """Let the sides take turns."""
    with contextlib.ExitStack() as stack:
        processes = {}
        for name in sides:
            process = side(name, "bench.data.evaluation_side", {**task, "side": name})
            processes[name] = stack.enter_context(process)
        for process in processes.values():
            process.answer()  # the model is loaded
        return take_turns(processes, "evaluate", rounds)


def figures(answers: Answers) -> dict[str, Any]:
    """Return the CPU seconds of every side, and how many times as fast ours is."""
    seconds = {
        name: median(answer["seconds"] for answer in side_answers)
        for name, side_answers in answers.items()
    }
    summary: dict[str, Any] = {"cpu_seconds": seconds}
    for peer in seconds:
        if peer != "ours":
            summary["times_as_fast"] = seconds[peer] / seconds["ours"]
    return summary


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, rounds=cfg.rounds)
    check_at_least(2, problems=cfg.problems)
    check_peers(cfg.quick, cfg.against)
    if cfg.against:
        check_installed("lm-eval", "lm_eval", "transformers")
    dtype = own_dtype()
    problems = QUICK_PROBLEMS if cfg.quick else cfg.problems
    rounds = 1 if cfg.quick else cfg.rounds
    sides = ["ours", *cfg.against]
    with tempfile.TemporaryDirectory() as folder:
        files = model.make(Path(folder))
        task = {"model": str(files.folder), "problems": problems, "dtype": dtype}
        answers = measure(sides, task, rounds)
    summary = figures(answers)
    log(f"{files.parameters:,} parameters, {dtype}, {problems} questions, median of {rounds}")
    rows = [(name, f"{seconds:.2f}") for name, seconds in summary["cpu_seconds"].items()]
    tables.show(("", "CPU s"), rows)
    if cfg.against:
        log(f"{summary['times_as_fast']:.2f} times as fast")
    tables.finish("evaluation", {"dtype": dtype, "problems": problems, **summary})


if __name__ == "__main__":
    run(main, Config, __doc__)

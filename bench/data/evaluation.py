"""Measures questions with choices, as C-Eval and MMLU ask them, beside lm-evaluation-harness.

python -m bench.data.evaluation --quick                 # ours alone, within 50 seconds
python -m bench.data.evaluation --against lm-eval

How: one model of 36 million parameters with random weights, fabricated questions with the lengths of published ones, one
thread each. The sides take turns, and the median round counts, in CPU seconds. The scores are compared in fp32.
"""

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.processes import check_at_least, check_installed, check_upstream, side
from bench.serve import model
from nanochat import device
from nanochat.common import log, run

SAME_PROBLEMS = 12  # whose scores are compared in fp32


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


@dataclass
class Measured:
    """What was measured of a side."""

    seconds: list[float] = field(default_factory=list)  # CPU seconds of each round
    scores: dict[str, float] = field(default_factory=dict)


def measure(sides: Sequence[str], task: dict[str, Any], rounds: int) -> dict[str, Measured]:
    """Let the sides take turns."""
    results = {name: Measured() for name in sides}
    with contextlib.ExitStack() as stack:
        processes = {}
        for name in sides:
            own_task = {**task, "side": name}
            process = stack.enter_context(side(name, "bench.data.evaluation_side", own_task))
            process.answer()
            processes[name] = process
        for _ in range(rounds):
            for name, process in processes.items():
                answer = process.ask("evaluate")
                results[name].seconds.append(answer["seconds"])
                results[name].scores = answer["scores"]
    return results


def figures(results: Mapping[str, Measured], in_fp32: Mapping[str, Measured]) -> dict[str, Any]:
    """Return CPU seconds of every side, how many times as fast ours is, and whether the scores are equal."""
    seconds = {name: median(measured.seconds) for name, measured in results.items()}
    summary: dict[str, Any] = {"cpu_seconds": seconds}
    for peer in seconds:
        if peer != "ours":
            summary["times_as_fast"] = round(seconds[peer] / seconds["ours"], 2)
            summary["equal_scores"] = in_fp32["ours"].scores == in_fp32[peer].scores
    return summary


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, rounds=cfg.rounds)
    check_at_least(2, problems=cfg.problems)
    check_upstream(cfg.quick, cfg.against)
    if cfg.against:
        check_installed("lm-eval", "lm_eval", "transformers")
    compute = device.compute_init("cpu")
    dtype = str(compute.platform.best_dtype()[0]).removeprefix("torch.")
    problems, rounds = (6, 1) if cfg.quick else (cfg.problems, cfg.rounds)
    sides = ["ours", *cfg.against]
    in_fp32: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = model.make(Path(folder))
        task = {"model": str(files.folder), "problems": problems, "dtype": dtype}
        results = measure(sides, task, rounds)
        if cfg.against:
            task |= {"dtype": "float32", "problems": SAME_PROBLEMS}
            in_fp32 = measure(sides, task, 1)
    summary = figures(results, in_fp32)
    log(f"{files.parameters:,} parameters, {dtype}, {problems} questions, median of {rounds}")
    for name, seconds in summary["cpu_seconds"].items():
        log(f"{name:<10}{seconds:>10.2f} CPU s")
    if cfg.against:
        same = "equal" if summary["equal_scores"] else "NOT equal"
        log(f"{summary['times_as_fast']} times as fast; scores in fp32 are {same}")
    result = {"benchmark": "evaluation", "dtype": dtype, "problems": problems, **summary}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

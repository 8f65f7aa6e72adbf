"""Measures the evaluation of a base model: CORE beside upstream's code, multiple choice beside lm-evaluation-harness.

python -m bench.eval --quick                                       # ours alone, few problems, within 50 seconds
python -m bench.eval --against lm-eval upstream --upstream DIR     # DIR: a checkout of karpathy/nanochat

One model of 36 million parameters with random weights, fabricated questions with the lengths of published ones, one
thread each. The sides take turns, and the median round counts, in CPU seconds. The scores are compared in fp32. The
last line is JSON.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.serve import model
from bench.serve.sides import ONE_THREAD, ROOT
from bench.upstream import check_checkout
from nanochat import device
from nanochat.common import UserError, log, run

EVALUATIONS = {
    "core": "upstream",
    "choices": "lm-eval",
}  # what is evaluated, and the peer that does it too
SAME_PROBLEMS = 12  # whose scores are compared in fp32
ROUNDING = 1e-6  # of upstream's means, which it computes in fp32; one problem more or less changes a score by 1/12


@dataclass(frozen=True)
class Config:
    """Print the speed of evaluations as a table, and one JSON object on the last line."""

    quick: bool = False
    """few problems, one round and ours alone, so that it ends within 50 seconds"""
    against: tuple[Literal["lm-eval", "upstream"], ...] = ()
    """what to measure beside ours: lm-eval, the harness's hf backend, on multiple choice; upstream's code on CORE,
    which needs --upstream"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat, for --against upstream"""
    problems: int = 32
    """problems of each task"""
    rounds: int = 3
    """turns of each side"""


@dataclass
class Measured:
    """What was measured of a side in one evaluation."""

    seconds: list[float] = field(default_factory=list)  # CPU seconds of each round
    scores: dict[str, float] = field(default_factory=dict)

    def add(self, answer: Mapping[str, Any]) -> None:
        """Take over what the process answered."""
        self.seconds.append(answer["seconds"])
        self.scores = answer["scores"]


class Side:
    """The process of a side."""

    def __init__(self, task: dict[str, Any], errors: Any):
        self.name, self._errors = task["side"], errors
        command = [sys.executable, "-m", "bench.eval.side", json.dumps(task)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self.evaluations: list[str] = self._answer()["evaluations"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        code = self.process.wait()
        self._errors.seek(0)
        words = [words for words in self._errors.read().splitlines() if words.strip()][-5:]
        raise UserError(
            f"{self.name} ended with code {code}; its last lines:\n  " + "\n  ".join(words)
        )

    def evaluate(self, name: str) -> dict[str, Any]:
        """CPU seconds and scores of an evaluation."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why the process has ended
            print(name, file=self.process.stdin, flush=True)
        return self._answer()


@contextlib.contextmanager
def started(sides: Sequence[str], task: dict[str, Any]) -> Iterator[list[Side]]:
    """Start a process for each side; they end with the context."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in sides:
            errors = stack.enter_context(
                tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
            )
            found.append(Side({**task, "side": name}, errors))
            stack.callback(found[-1].process.communicate)
            stack.callback(found[-1].process.kill)
        yield found


def measure(
    sides: Sequence[str], task: dict[str, Any], rounds: int
) -> dict[str, dict[str, Measured]]:
    """Let the sides take turns in each evaluation: evaluation -> side -> what was measured."""
    with started(sides, task) as processes:
        found: dict[str, dict[str, Measured]] = {name: {} for name in EVALUATIONS}
        for _ in range(rounds):
            for name in EVALUATIONS:
                for side in processes:
                    if name in side.evaluations:
                        found[name].setdefault(side.name, Measured()).add(side.evaluate(name))
        return found


def figures(
    found: Mapping[str, Mapping[str, Measured]], same: Mapping[str, Mapping[str, Measured]]
) -> dict[str, Any]:
    """CPU seconds of every side, how many times as fast ours is, and whether the scores in fp32 are equal."""
    result: dict[str, Any] = {}
    for name, peer in EVALUATIONS.items():
        sides = found[name]
        result[name] = {
            "cpu_seconds": {side: round(median(one.seconds), 2) for side, one in sides.items()}
        }
        if peer in sides:
            result[name]["times_as_fast"] = round(
                median(sides[peer].seconds) / median(sides["ours"].seconds), 2
            )
            mine, theirs = same[name]["ours"].scores, same[name][peer].scores
            result[name]["equal_scores"] = mine.keys() == theirs.keys() and all(
                abs(mine[what] - theirs[what]) < ROUNDING for what in mine
            )
    return result


def check(cfg: Config) -> None:
    """UserError (code 2) for flags that cannot be measured."""
    if cfg.rounds < 1:
        raise UserError(f"--rounds must be at least 1, got {cfg.rounds}", exit_code=2)
    if not 2 <= cfg.problems <= 10_000:
        raise UserError(f"--problems must be from 2 to 10,000, got {cfg.problems}", exit_code=2)
    if cfg.quick and cfg.against:
        raise UserError("--quick measures ours alone: leave out --quick or --against", exit_code=2)
    if ("upstream" in cfg.against) != (cfg.upstream is not None):
        raise UserError(
            "--against upstream and --upstream DIR belong together: give both or neither",
            exit_code=2,
        )
    if cfg.upstream is not None:
        check_checkout("--upstream", cfg.upstream)
    for peer, package in (
        ("lm-eval", "lm_eval"),
        ("lm-eval", "transformers"),
        ("upstream", "jinja2"),
    ):
        if peer in cfg.against and importlib.util.find_spec(package) is None:
            raise UserError(
                f"{peer} needs {package}: run `{sys.executable} -m pip install {package}`",
                exit_code=2,
            )


def main(cfg: Config) -> None:
    """Measure and print."""
    check(cfg)
    dtype = str(device.compute_init("cpu").platform.best_dtype()[0]).removeprefix("torch.")
    problems, rounds = (6, 1) if cfg.quick else (cfg.problems, cfg.rounds)
    sides = ["ours", *cfg.against]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = model.make(folder)
        task = {
            "model": str(files.folder),
            "bundle": str(folder),
            "problems": problems,
            "dtype": dtype,
            "upstream": str(cfg.upstream or ""),
        }
        found = measure(sides, task, rounds)
        same = (
            measure(sides, {**task, "dtype": "float32", "problems": SAME_PROBLEMS}, 1)
            if cfg.against
            else {}
        )
    log(
        f"{files.parameters:,} parameters, {dtype}, {problems} problems of each task, one thread, median of {rounds}"
    )
    for name, measured in found.items():
        for side, one in measured.items():
            log(f"{name:<10}{side:<10}{median(one.seconds):>10.2f} CPU s")
    result = figures(found, same)
    for name, about in result.items():
        if "times_as_fast" in about:
            equal = "equal" if about["equal_scores"] else "NOT equal"
            log(
                f"{name}: {about['times_as_fast']} times as fast as {EVALUATIONS[name]}; scores in fp32 are {equal}"
            )
    print(
        json.dumps({"benchmark": "eval", "dtype": dtype, "problems": problems, **result}),
        flush=True,
    )


if __name__ == "__main__":
    run(main, Config, __doc__)

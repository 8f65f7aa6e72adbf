"""Checks that RL teaches, and that the rewards do it: compares runs with shuffled rewards.

python -m bench.rl.control           # three seeds and three controls, from an SFT checkpoint
python -m bench.rl.control --variant="--loss=cispo --updates_per_rollout=4"
python -m bench.rl.control --quick   # one of each for a few steps; shows that it works

How: each run has a base folder of its own, and its gain is its accuracy at the end minus that
before the first step. RL passes if the mean gain is large and certain, and the controls gain
nothing; otherwise the exit code is 1. Typed again after a stop, the command resumes.
"""

import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from bench import tables
from nanochat.checkpoint_manager.locate import find
from nanochat.common import UserError, base_dir, log
from nanochat.data.command_line import run
from nanochat.runtime.tracking import read_metrics

MIN_GAIN = 5.0  # percentage points
MIN_ERRORS = 3.0  # how many standard errors the gain must be above zero
MAX_CONTROL = 2.0  # how many points the mean of the controls may differ from zero
FLAGS = (
    "--examples_per_step=32",
    "--num_samples=16",
    "--max_new_tokens=24",
    "--device_batch_size=128",
    "--init_lr_frac=0.052",
    "--kl=0.5",
    "--embedding_lr=0.03",
    "--scalar_lr=0.05",
)
QUICK = ("--examples_per_step=4", "--num_samples=4", "--max_new_tokens=8")


@dataclass(frozen=True)
class Config:
    """Train RL with real and with shuffled rewards, and print the gains."""

    model_tag: str | None = None
    """tag (folder name) of the SFT checkpoint to start from; default: the newest"""
    seeds: int = 3
    """number of real runs, and of runs with shuffled rewards"""
    num_iterations: int = 300
    """steps per run"""
    eval_examples: int = 1600
    """problems per measurement of accuracy; more problems make the gains less noisy"""
    jobs: int = max((os.cpu_count() or 1) // 2, 1)
    """runs at the same time, with one thread each; use 1 on a single accelerator"""
    variant: str = ""
    """more flags of scripts.chat_rl for every run, such as
    --variant="--loss=cispo --updates_per_rollout=4". Each variant has runs of its own, which
    resume"""
    quick: bool = False
    """one seed and two steps; the exit code is 0 whatever the result"""

    @property
    def folder(self) -> Path:
        """The folder with the base folders of the runs."""
        flags = [flag.strip("-").replace("/", "-") for flag in shlex.split(self.variant)]
        kind = "-".join(["quick" if self.quick else "full", *flags])
        return base_dir() / "rl_control" / kind


@dataclass(frozen=True)
class Verdict:
    """The result, in percentage points of accuracy."""

    gain: float
    error: float | None  # standard error of the mean gain; None for a single run
    control: float  # mean gain with shuffled rewards

    @property
    def passed(self) -> bool:
        """Whether the real runs gain enough while the controls gain nothing."""
        if self.error is None or abs(self.control) > MAX_CONTROL:
            return False
        return self.gain >= max(MIN_GAIN, MIN_ERRORS * self.error)


def judge(gains: Sequence[float], controls: Sequence[float]) -> Verdict:
    """Return the mean gains, and the standard error of the real one."""
    error = None
    if len(gains) > 1:
        error = stdev(gains) / math.sqrt(len(gains))
    return Verdict(fmean(gains), error, fmean(controls))


def gain_of(folder: Path) -> float:
    """Return a run's accuracy at the end minus that before its first step, in percentage points."""
    accuracies = [line["accuracy"] for line in read_metrics(folder) if "accuracy" in line]
    return 100 * (accuracies[-1] - accuracies[0])


def train(source: Path, seed: int, shuffle: bool, cfg: Config) -> float:
    """Train one run and return its gain; the user's report and checkpoints stay unchanged."""
    name = f"{'shuffled' if shuffle else 'seed'}-{seed}"
    base = cfg.folder / name
    base.mkdir(parents=True, exist_ok=True)
    link = base / source.parent.name
    link.unlink(missing_ok=True)
    link.symlink_to(source.parent, target_is_directory=True)
    flags = [
        f"--model_tag={source.name}",
        f"--seed={seed}",
        f"--num_iterations={2 if cfg.quick else cfg.num_iterations}",
        "--eval_every=0",
        f"--eval_examples={cfg.eval_examples}",
        *(QUICK if cfg.quick else FLAGS),
        *shlex.split(cfg.variant),
    ]
    if shuffle:
        flags.append("--shuffle_rewards")
    command = [sys.executable, "-m", "scripts.chat_rl", *flags]
    output_path = base / "log.txt"
    log(f"{name}: {' '.join(command[1:])}; its output goes to {output_path}")
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1"}
    with open(output_path, "a", encoding="utf-8") as output:
        finished = subprocess.run(command, env=environment, stdout=output, stderr=output)
    if finished.returncode:
        raise UserError(
            f"the run {name} ended with code {finished.returncode}; {output_path} says why. "
            "Type the same command to resume",
            finished.returncode,
        )
    gain = gain_of(base / "chatrl_checkpoints" / source.name)
    log(f"{name}: {gain:+.2f} points")
    return gain


def main(cfg: Config) -> None:
    """Train, compare and print. Exits with code 1 if the real runs do not learn, or controls do."""
    _, source = find("sft", cfg.model_tag)
    seeds = range(1, 1 + (1 if cfg.quick else cfg.seeds))
    with ThreadPoolExecutor(cfg.jobs) as pool:
        real = [pool.submit(train, source, seed, False, cfg) for seed in seeds]
        shuffled = [pool.submit(train, source, seed, True, cfg) for seed in seeds]
        gains = [future.result() for future in real]
        controls = [future.result() for future in shuffled]
    verdict = judge(gains, controls)
    titles = ("gain in points", *(f"seed {seed}" for seed in seeds), "mean")
    rows = []
    for title, points in (("rewards", gains), ("shuffled rewards", controls)):
        rows.append([title, *(f"{point:+.2f}" for point in (*points, fmean(points)))])
    tables.show(titles, rows)
    log(
        f"{'passed' if verdict.passed else 'not passed'} (at least {MIN_GAIN:g} points and "
        f"{MIN_ERRORS:g} standard errors, controls within {MAX_CONTROL:g} of zero)"
    )
    result = {
        "variant": cfg.variant,
        **asdict(verdict),
        "passed": verdict.passed,
        "gains": gains,
        "controls": controls,
    }
    tables.finish("rl_control", result)
    if not verdict.passed and not cfg.quick:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main, Config, __doc__)

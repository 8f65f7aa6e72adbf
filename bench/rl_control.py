"""Checks that RL teaches, and that the rewards do it: compares real runs with runs whose rewards are shuffled.

python -m bench.rl_control           # three seeds and three controls, from the newest SFT checkpoint
python -m bench.rl_control --variant="--loss=cispo --updates_per_rollout=4"
python -m bench.rl_control --quick   # one of each for a few steps; shows that it works, not that it learns
"""

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from nanochat.checkpoint_manager.locate import find
from nanochat.common import UserError, base_dir, log, run
from nanochat.runtime.tracking import read_metrics

LEAST_GAIN = 5.0  # percentage points
LEAST_ERRORS = 3.0  # how many standard errors the gain must be above zero
MOST_OF_CONTROLS = 2.0  # how many points the mean of the controls may differ from zero
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
    """Train RL with real and with shuffled rewards, and print the gains; the last line is one JSON object."""

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
    """more flags of scripts.chat_rl for every run, such as --variant="--loss=cispo --updates_per_rollout=4".
    Each variant has runs of its own, which resume"""
    quick: bool = False
    """one seed and two steps; the exit code is 0 whatever the result"""


@dataclass(frozen=True)
class Verdict:
    """The result, in percentage points of accuracy."""

    gain: float
    error: float  # standard error of the mean gain
    control: float  # mean gain with shuffled rewards

    @property
    def passed(self) -> bool:
        """Whether the real runs gain enough while the controls gain nothing."""
        enough = self.gain >= LEAST_GAIN and self.gain >= LEAST_ERRORS * self.error
        return enough and abs(self.control) <= MOST_OF_CONTROLS


def judge(gains: Sequence[float], controls: Sequence[float]) -> Verdict:
    """The mean gains, and the standard error of the real one, which is infinite for a single run."""
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return Verdict(fmean(gains), error, fmean(controls))


def gain(folder: Path) -> float:
    """Accuracy at the end minus accuracy before the first step, in percentage points."""
    measured = [line["accuracy"] for line in read_metrics(folder) if "accuracy" in line]
    return 100 * (measured[-1] - measured[0])


def train(name: str, source: Path, seed: int, shuffle: bool, cfg: Config) -> float:
    """Train one run and return its gain; its own base folder keeps the user's report and checkpoints unchanged."""
    more = shlex.split(cfg.variant)
    kind = "-".join(
        ["quick" if cfg.quick else "full", *(flag.strip("-").replace("/", "-") for flag in more)]
    )
    base = base_dir() / "rl_control" / kind / name
    base.mkdir(parents=True, exist_ok=True)
    link = base / source.parent.name
    link.unlink(missing_ok=True)
    link.symlink_to(source.parent, target_is_directory=True)
    command = [
        sys.executable,
        "-m",
        "scripts.chat_rl",
        f"--model_tag={source.name}",
        f"--seed={seed}",
        f"--num_iterations={2 if cfg.quick else cfg.num_iterations}",
        "--eval_every=0",
        f"--eval_examples={cfg.eval_examples}",
        *(QUICK if cfg.quick else FLAGS),
        *more,
    ]
    if shuffle:
        command.append("--shuffle_rewards")
    log(f"{name}: {' '.join(command[1:])}; its output goes to {base / 'log.txt'}")
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1"}
    with open(base / "log.txt", "a", encoding="utf-8") as output:
        code = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    if code:
        raise UserError(
            f"the run {name} ended with code {code}; {base / 'log.txt'} says why. Type the same command to resume",
            code,
        )
    points = gain(base / "chatrl_checkpoints" / source.name)
    log(f"{name}: {points:+.2f} points")
    return points


def control(cfg: Config) -> None:
    """Train, compare and print. Exits with code 1 if the real runs do not learn, or the controls do."""
    _, source = find("sft", cfg.model_tag)
    seeds = range(1, 1 + (1 if cfg.quick else cfg.seeds))
    runs = [
        (f"{'shuffled' if shuffle else 'seed'}-{seed}", seed, shuffle)
        for shuffle in (False, True)
        for seed in seeds
    ]
    with ThreadPoolExecutor(cfg.jobs) as pool:
        points = list(pool.map(lambda each: train(each[0], source, each[1], each[2], cfg), runs))
    gains, controls = points[: len(seeds)], points[len(seeds) :]
    verdict = judge(gains, controls)
    for title, values in (("gain", gains), ("shuffled rewards", controls)):
        log(f"{title}: {', '.join(f'{value:+.2f}' for value in values)} points")
    log(
        f"mean gain {verdict.gain:+.2f} points, standard error {verdict.error:.2f}; "
        f"mean of the controls {verdict.control:+.2f}: {'passed' if verdict.passed else 'not passed'} (at least "
        f"{LEAST_GAIN:g} points and {LEAST_ERRORS:g} standard errors, controls within {MOST_OF_CONTROLS:g} of zero)"
    )
    error = None if math.isinf(verdict.error) else verdict.error  # JSON has no infinity
    figures = {
        "gain": verdict.gain,
        "error": error,
        "control": verdict.control,
        "passed": verdict.passed,
    }
    print(
        json.dumps(
            {
                "bench": "rl_control",
                "variant": cfg.variant,
                **figures,
                "gains": gains,
                "controls": controls,
            }
        )
    )
    if not verdict.passed and not cfg.quick:
        raise SystemExit(1)


if __name__ == "__main__":
    run(control, Config, __doc__)

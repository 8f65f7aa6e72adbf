"""The runs of bench.multiplier: each trains once, into a file named by its settings."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.processes import ROOT
from bench.text import ABOUT
from bench.train.variants import Plan, Variant, flops_per_token, training
from nanochat.common import log, read_json, write_json
from nanochat.platforms import host

LOOP = "bench/train/side.py"
STEPS = ("bench/batches.py", "bench/child.py", "bench/training.py", "bench/updates.py")
OUR_CODE = ("nanochat", "scripts/base_train.py", LOOP, *STEPS)
UPSTREAM_LOOP = (LOOP, "bench/upstream.py", *STEPS)
SOURCES = {".py", ".cpp", ".h"}
NOT_NUMBERS = {"NANOCHAT_BASE_DIR", "NANOCHAT_LANG"}  # variables that change no result


@dataclass(frozen=True)
class Entry:
    """One thing that is compared: upstream, ours, or ours with a change."""

    name: str
    variant: Variant


@dataclass(frozen=True)
class Run:
    """One training run; `plan` has its length and its seed."""

    text: str
    depth: int
    entry: Entry
    plan: Plan

    @property
    def steps(self) -> int:
        """The length of the run."""
        assert self.plan.horizon is not None
        return self.plan.horizon

    @property
    def flops(self) -> float:
        """The FLOPs of the run, which are the same for both sides."""
        return float(flops_per_token(self.plan.shape) * self.plan.tokens_per_step * self.steps)


@dataclass
class Result:
    """What a run measured, and where it ran."""

    settings: dict[str, Any]
    flops: float
    seconds: float  # CPU seconds of the steps, without compiling and measuring
    bits_per_byte: float  # of the held-out rows, at the end
    losses: list[float]  # of each step, in nats per token
    cpu: str = field(default_factory=host.cpu_model)


def code_hash(folder: Path, sources: Iterable[str]) -> str:
    """Return a hash of source files, and of all sources in folders."""
    digest = hashlib.sha256()
    for source in sources:
        root = folder / source
        for path in [root, *sorted(root.rglob("*"))]:
            if path.suffix in SOURCES and path.exists():  # an older version may lack a file
                digest.update(f"{path.relative_to(folder)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def short_hash(value: Any) -> str:
    """Return a hash of something that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def settings_of(run: Run, upstream: Path | None) -> dict[str, Any]:
    """Return all that decides what a run learns. Two runs with equal settings are the same run.

    Our code is not among the settings of upstream's runs, so that a change of ours leaves these
    runs valid.
    """
    variant = run.entry.variant
    variables = {}
    if variant.side == "upstream":
        assert upstream is not None
        code = [code_hash(upstream, ["nanochat"]), code_hash(ROOT, UPSTREAM_LOOP)]
    else:
        code = [code_hash(variant.checkout or ROOT, OUR_CODE)]
        names = {name for name in os.environ if name.startswith("NANOCHAT_")} - NOT_NUMBERS
        variables = {name: os.environ[name] for name in sorted(names)}
    return {
        **asdict(run.plan),
        **asdict(variant),
        "checkout": None,  # its code counts, not its place
        "text": run.text,
        "rows": read_json(run.plan.rows / ABOUT)["sha256"],
        "torch": torch.__version__,
        "code": code,
        "variables": variables,
    }


class Runs:
    """The finished runs in a folder; a missing run is trained when it is asked for."""

    def __init__(self, folder: Path, upstream: Path | None):
        self.folder = folder
        self.upstream = upstream
        self.trained = 0  # runs that this process trained itself
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, run: Run) -> Path:
        """Return the file of a run, whose name ends with a hash of all of its settings."""
        digest = short_hash(settings_of(run, self.upstream))
        words = [run.text, f"d{run.depth}", str(run.steps), run.entry.name]
        if run.entry.variant.side == "upstream":
            words.append(f"x{run.entry.variant.scale:g}")
        return self.folder / f"{'-'.join(words)}-seed{run.plan.seed}-{digest}.json"

    def __call__(self, run: Run) -> Result:
        """Return the result of a run, from its file or by training."""
        path = self.path(run)
        if path.exists():
            return Result(**read_json(path))
        result = self.train(run)
        write_json(path, asdict(result))
        self.trained += 1
        log(f"{path.name}: {result.bits_per_byte:.4f} bits per byte, {result.seconds:.1f} CPU s")
        return result

    def train(self, run: Run) -> Result:
        """Train a run and measure it on the held-out rows."""
        with training(run.entry.variant, run.plan, self.upstream) as process:
            process.answer()
            steps = process.ask(run.steps)
            bits_per_byte = process.ask("held_out")
        return Result(
            settings=settings_of(run, self.upstream),
            flops=run.flops,
            seconds=sum(steps["seconds"]),
            bits_per_byte=bits_per_byte,
            losses=steps["losses"],
        )

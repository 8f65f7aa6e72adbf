"""The runs of bench.multiplier: each trains once, and its result is saved in a file named by its settings."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.multiplier.curves import Point
from bench.processes import ROOT
from bench.text import ABOUT
from bench.train.variants import Plan, Variant, flops_per_token, training
from nanochat.common import log, read_json, write_json
from nanochat.platforms import host

MEASUREMENTS = 4  # of the held-out rows in a run, the last one at its end
SAVE_EVERY = 100  # steps that a run which is stopped loses at most
LOOP = "bench/train/side.py"
OUR_CODE = ("nanochat", "scripts/base_train.py", LOOP)
UPSTREAM_CODE = ("nanochat",)
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
    def flops_per_step(self) -> float:
        """The FLOPs of one step, which are the same for both sides."""
        return float(flops_per_token(self.plan.shape) * self.plan.tokens_per_step)

    def with_rates(self, scale: float) -> "Run":
        """Return the same run with another factor on upstream's learning rates."""
        variant = replace(self.entry.variant, scale=scale)
        return replace(self, entry=Entry(self.entry.name, variant))


@dataclass
class Result:
    """What a run measured on its way, and where it ran. The same object describes a run that is not at its end."""

    settings: dict[str, Any]
    spent: float = 0.0  # CPU seconds of the steps, without compiling and measuring
    steps: list[int] = field(default_factory=list)  # at which the held-out rows were measured
    flops: list[float] = field(default_factory=list)  # up to each measurement
    seconds: list[float] = field(default_factory=list)  # CPU seconds up to each measurement
    bits_per_byte: list[float] = field(default_factory=list)  # of the held-out rows
    losses: list[float] = field(default_factory=list)  # of each step, in nats per token
    cpu: str = field(default_factory=host.cpu_model)

    @property
    def end(self) -> float:
        """Bits per byte at the end of the run."""
        return self.bits_per_byte[-1]

    def point(self, cost: str) -> Point:
        """Return the end of the run; `cost` is flops or seconds."""
        costs = self.flops if cost == "flops" else self.seconds
        return Point(costs[-1], self.end)


# --- what decides a run ----------------------------------------------------------------------------


def code_hash(folder: Path, sources: Iterable[str]) -> str:
    """Return a hash of source files, and of all sources in folders."""
    digest = hashlib.sha256()
    for source in sources:
        root = folder / source
        for path in [root, *sorted(root.rglob("*"))]:
            if path.suffix in SOURCES:
                digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def settings_of(run: Run, upstream: Path | None) -> dict[str, Any]:
    """Return everything that decides what a run learns. Two runs with equal settings are the same run.

    Our code is not among the settings of upstream's runs, so that a change of ours leaves these runs valid.
    """
    plan, variant = run.plan, run.entry.variant
    shape = asdict(plan.shape)
    if variant.side == "upstream":
        assert upstream is not None
        code = [code_hash(upstream, UPSTREAM_CODE), code_hash(ROOT, [LOOP])]
        variables = {}
    else:
        code = [code_hash(variant.checkout or ROOT, OUR_CODE)]
        names = {name for name in os.environ if name.startswith("NANOCHAT_")} - NOT_NUMBERS
        variables = {name: os.environ[name] for name in sorted(names)}
    return {
        "text": run.text,
        "rows": read_json(plan.rows / ABOUT)["sha256"],
        "shape": shape,
        "rows_per_step": plan.rows_per_step,
        "held_out": plan.held_out,
        "steps": run.steps,
        "seed": plan.seed,
        "side": variant.side,
        "dtype": variant.dtype,
        "compiled": variant.compiled,
        "scale": variant.scale,
        "flags": sorted(variant.flags),
        "torch": torch.__version__,
        "code": code,
        "variables": variables,
    }


# --- training --------------------------------------------------------------------------------------


class Runs:
    """The finished runs in a folder; a run that is not among them is trained when it is asked for."""

    def __init__(self, folder: Path, upstream: Path | None):
        self.folder, self.upstream = folder, upstream
        self.trained = 0  # runs that this process trained itself
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, run: Run) -> Path:
        """Return the file of a run. Its name says what the run is; the hash at its end covers all settings."""
        text = json.dumps(settings_of(run, self.upstream), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        words = [run.text, f"d{run.depth}", str(run.steps), run.entry.name]
        if run.entry.variant.side == "upstream":
            words.append(f"x{run.entry.variant.scale:g}")
        return self.folder / f"{'-'.join(words)}-seed{run.plan.seed}-{digest}.json"

    def __call__(self, run: Run) -> Result:
        """Return the result of a run, from its file or by training."""
        path = self.path(run)
        if path.exists():
            return Result(**read_json(path))
        saved_state = path.with_suffix(".part")
        result = self.train(run, saved_state)
        write_json(path, asdict(result))
        saved_state.unlink(missing_ok=True)
        self.trained += 1
        log(f"{path.name}: {result.end:.4f} bits per byte, {result.spent:.1f} CPU s")
        return result

    def train(self, run: Run, saved_state: Path) -> Result:
        """Train a run from its start, or from where it was saved."""
        ends = {round(run.steps * number / MEASUREMENTS) for number in range(1, MEASUREMENTS + 1)}
        saves = set(range(SAVE_EVERY, run.steps, SAVE_EVERY))
        result = Result(settings_of(run, self.upstream))
        with training(run.entry.variant, run.plan, self.upstream) as process:
            process.answer()
            if saved_state.exists():
                result = Result(**process.ask({"name": "load", "path": str(saved_state)}))
            for stop in sorted((ends | saves) - {0}):
                steps = stop - len(result.losses)
                if steps <= 0:  # made before the run was stopped
                    continue
                answer = process.ask({"name": "steps", "count": steps})
                result.losses += answer["losses"]
                result.spent += sum(answer["seconds"])
                if stop in ends:
                    result.steps.append(stop)
                    result.flops.append(stop * run.flops_per_step)
                    result.seconds.append(result.spent)
                    result.bits_per_byte.append(process.ask({"name": "held_out"}))
                if stop in saves:
                    about = asdict(result)
                    process.ask({"name": "save", "path": str(saved_state), "about": about})
        return result


def best_scale(runs: Runs, run: Run, scales: Sequence[float]) -> float:
    """Return the factor on upstream's learning rates that gives this run the fewest bits per byte.

    Where the best factor is the smallest or the largest one tried, half or twice of it is tried too, until the best
    lies between two others. Only upstream has a factor: for all others it is 1.
    """
    if run.entry.variant.side != "upstream":
        return 1.0
    ends = {scale: runs(run.with_rates(scale)).end for scale in scales}
    while True:
        best = min(ends, key=lambda scale: ends[scale])
        if best == min(ends):
            next_scale = best / 2
        elif best == max(ends):
            next_scale = best * 2
        else:
            return best
        ends[next_scale] = runs(run.with_rates(next_scale)).end

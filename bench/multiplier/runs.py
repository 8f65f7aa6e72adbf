"""The runs of bench.multiplier: each trains once, and its curve is kept in a file that is named by its settings."""

import ast
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.multiplier.curves import Point
from bench.train.rows import ABOUT
from bench.train.worker import ROOT, Plan, Variant, flops_per_token, workers
from bench.upstream import shape_for
from nanochat.common import read_json, write_json
from nanochat.platforms import host
from nanochat.platforms.base import kernels_asked
from nanochat.platforms.cpu.platform import Cpu
from nanochat.runtime.progress import Progress

MEASURED = 4  # times that a run measures the held-out rows, the last time at its end
TURN = 20  # steps between two reports of progress
KEEP = (
    100  # steps after which a run is saved, so that one which was stopped loses no more than these
)
GIGA = 1e9
# The files and folders that decide what a run computes. The loop itself is bench/train/side.py, on both sides.
OURS = (
    "nanochat/gpt.py",
    "nanochat/nn",
    "nanochat/train",
    "nanochat/platforms/cpu",
    "nanochat/platforms/host.py",
    "scripts/base_train.py",
)
APART = "nanochat/rl"  # no run of this benchmark samples replies
UPSTREAM = ("nanochat",)
LOOP = "bench/train/side.py"
SOURCES = (".py", ".cpp", ".h")


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
        assert self.plan.horizon is not None
        return self.plan.horizon

    @property
    def flops(self) -> float:
        """FLOPs of the whole run."""
        return float(
            flops_per_token(self.plan.shape)
            * self.plan.rows_per_step
            * self.plan.shape.sequence_len
        ) * (self.steps)

    def scaled(self, scale: float) -> "Run":
        """The same run with another factor on upstream's learning rates."""
        return replace(
            self, entry=replace(self.entry, variant=replace(self.entry.variant, scale=scale))
        )


@dataclass(frozen=True)
class Result:
    """What is kept of a run: its held-out loss along the way, its cost, and where it ran."""

    settings: dict[str, Any]
    parameters: int
    flops: list[float]  # up to each measurement
    seconds: list[
        float
    ]  # CPU seconds of the steps up to each measurement, without compiling and measuring
    bits_per_byte: list[float]  # of the held-out rows
    losses: list[float]  # of each step, in nats per token
    torch: str
    cpu: str

    @property
    def end(self) -> float:
        """Bits per byte at the end of the run."""
        return self.bits_per_byte[-1]

    def point(self, cost: str) -> Point:
        """The end of the run; `cost` is flops or seconds."""
        return Point((self.flops if cost == "flops" else self.seconds)[-1], self.end)


@dataclass
class Course:
    """How far a run has come, and what was measured on the way."""

    spent: float = 0.0  # CPU seconds of the steps
    seconds: list[float] = field(default_factory=list)
    bits_per_byte: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        """The steps taken."""
        return len(self.losses)


class Plain(ast.NodeTransformer):
    """Takes the docstrings out of a syntax tree."""

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
        return node


@functools.cache
def plain(source: str, python: bool) -> str:
    """What a source in Python or C++ computes, without comments, docstrings and layout."""
    if python:
        return ast.dump(Plain().visit(ast.parse(source)))
    return " ".join(re.sub(r"//[^\n]*", "", source).split())


def code_of(folder: Path, parts: Iterable[str]) -> str:
    """A hash of source files, and of all sources in folders, that ignores comments, docstrings and layout."""
    digest = hashlib.sha256()
    for path in (
        path for part in parts for path in [folder / part, *sorted((folder / part).rglob("*"))]
    ):
        if path.suffix in SOURCES and folder / APART not in path.parents:
            source = plain(path.read_text(encoding="utf-8"), path.suffix == ".py")
            digest.update(f"{path.relative_to(folder)}\n{source}\n".encode())
    return digest.hexdigest()[:16]


def number_format(dtype: str) -> dict[str, Any]:
    """What decides, besides the code, how our side computes on this machine: NANOCHAT_KERNELS, and whether products are
    rounded more coarsely than to `dtype`, which NANOCHAT_INT8 or the processor decides."""
    kernels = kernels_asked("auto")
    return {
        "kernels": kernels,
        "coarser": bool(Cpu().operations(kernels).coarser(getattr(torch, dtype))),
    }


def settings(run: Run, peer: Path | None) -> dict[str, Any]:
    """Everything that decides what a run learns. Two runs with equal settings are the same run.

    Our code is not among the settings of upstream's runs, so that a change of ours leaves these runs valid.
    """
    plan, variant = run.plan, run.entry.variant
    if variant.side == "upstream":
        assert peer is not None
        computed = {"code": code_of(peer, UPSTREAM) + code_of(ROOT, (LOOP,))}
    else:
        home = variant.checkout or ROOT
        computed = {
            "code": code_of(home, OURS) + code_of(home, (LOOP,)),
            **number_format(variant.dtype),
        }
    return {
        "text": run.text,
        "rows": read_json(plan.rows / ABOUT)["sha256"],
        "shape": shape_for(variant.side, plan.shape),
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
        **computed,
    }


class Runs:
    """The finished runs in a folder; asks for a run train it if it is not among them."""

    def __init__(self, folder: Path, peer: Path | None, progress: Progress):
        self.folder, self.peer, self.progress = folder, peer, progress
        self.trained = 0  # runs that this process trained itself
        self._seen: set[Path] = set()

    def path(self, run: Run) -> Path:
        """The file of a run. Its name says what the run is; the hash at its end covers all settings."""
        text = json.dumps(settings(run, self.peer), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        side = "upstream" if run.entry.variant.side == "upstream" else run.entry.name
        scale = f"-x{run.entry.variant.scale:g}" if side == "upstream" else ""
        return (
            self.folder
            / f"{run.text}-d{run.depth}-{run.steps}-{side}{scale}-seed{run.plan.seed}-{digest}.json"
        )

    def __call__(self, run: Run) -> Result:
        """The result of a run, from its file or by training."""
        path = self.path(run)
        if path.exists():
            result = Result(**read_json(path))
            self.progress.advance(0 if path in self._seen else run.flops / GIGA, skipped=True)
        else:
            kept = path.with_suffix(".part")
            result = self._train(run, kept)
            write_json(path, asdict(result))
            kept.unlink(missing_ok=True)
            self.trained += 1
            self.progress.say(
                f"{path.name}: {result.end:.4f} bits per byte, {result.seconds[-1]:.1f} CPU s"
            )
        self._seen.add(path)
        return result

    def _train(self, run: Run, kept: Path) -> Result:
        """Train a run from its start, or from where `kept` saved it."""
        share = run.flops / run.steps
        stops = sorted(
            {round(run.steps * part / MEASURED) for part in range(1, MEASURED + 1)} - {0}
        )
        course = Course()
        with workers([run.entry.variant], run.plan, self.peer) as (worker,):
            ready = worker.answer()
            if kept.exists():
                course = Course(**worker.resume(kept))
                self.progress.advance(course.done * share / GIGA, skipped=True)
            while course.done < run.steps:
                steps = min(next(stop for stop in stops if stop > course.done) - course.done, TURN)
                answer = worker.ask(steps)
                course.losses += answer["losses"]
                course.spent += sum(answer["seconds"])
                self.progress.advance(steps * share / GIGA)
                if course.done in stops:
                    course.seconds.append(course.spent)
                    course.bits_per_byte.append(worker.bits_per_byte())
                if course.done // KEEP > (course.done - steps) // KEEP and course.done < run.steps:
                    worker.keep(kept, asdict(course))
        return Result(
            settings(run, self.peer),
            ready["parameters"],
            [share * stop for stop in stops],
            course.seconds,
            course.bits_per_byte,
            course.losses,
            torch.__version__,
            host.cpu_model(),
        )


def tuned(runs: Runs, run: Run, scales: Sequence[float]) -> float:
    """The factor on upstream's learning rates that gives this run the fewest bits per byte.

    Where the best factor is the smallest or the largest one tried, half or twice of it is tried too, until the best
    lies between two others. Only upstream has a factor: for all others it is 1.
    """
    if run.entry.variant.side != "upstream":
        return 1.0
    tried = {scale: runs(run.scaled(scale)).end for scale in scales}
    while True:
        best = min(tried, key=lambda scale: tried[scale])
        if best == min(tried):
            further = best / 2
        elif best == max(tried):
            further = best * 2
        else:
            return best
        tried[further] = runs(run.scaled(further)).end

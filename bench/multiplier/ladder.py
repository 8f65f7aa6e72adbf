"""The ladder: models of growing size beside upstream's, over paired seeds, a few runs at a time.

python -m bench.multiplier --ladder                                 # the table of the finished runs
python -m bench.multiplier --ladder --upstream DIR --hours 2        # trains missing runs first

Finished runs are lines of ladder.json beside this file, which is committed. So the ladder is
climbed in parts, on several hosts. FLOPs are the same on every host, and their multipliers take
seeds from all of them; CPU seconds are compared only between runs on one kind of CPU.
"""

import datetime
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench import tables
from bench.multiplier.curves import Interval, multiplier_of
from bench.multiplier.runs import Entry, Result, Run, code_hash, short_hash
from bench.text import ABOUT
from bench.train.variants import Variant
from nanochat import schedule
from nanochat.common import log, read_json, write_atomic
from nanochat.report import golden

FILE = Path(__file__).parent / "ladder.json"
DECIMALS = 2  # of the golden losses by which two versions of our code learn the same


@dataclass(frozen=True)
class Rung:
    """One size of the ladder on one text."""

    text: str  # code or documents
    depth: int
    steps: int
    seeds: tuple[int, ...]
    stretch: tuple[float, ...]  # lengths of upstream's runs, as multiples of `steps`

    @property
    def lengths(self) -> list[int]:
        """The lengths of upstream's runs, in steps."""
        return [round(self.steps * factor) for factor in self.stretch]


RUNGS = (
    Rung("code", 3, 800, (1, 2, 3, 4, 5), (1.0, 2.0)),
    Rung("code", 4, 800, (1, 2, 3, 4, 5), (1.0, 2.0)),
    Rung("code", 6, 800, (1, 2, 3), (1.0, 1.6)),
    Rung("documents", 3, 800, (1, 2, 3), (1.0, 2.0, 4.0)),
    Rung("documents", 4, 800, (1, 2, 3), (1.0, 2.0, 3.5)),
)


def lengths_on(text: str) -> tuple[int, ...]:
    """Return the lengths of the baseline's runs on a text, in steps."""
    return tuple(length for rung in RUNGS if rung.text == text for length in rung.lengths)


@dataclass(frozen=True)
class Experiment:
    """What is trained; two runs with equal experiments repeat each other, on whatever host."""

    text: str
    rows: str  # hash of the rows
    depth: int
    steps: int
    name: str  # ours or upstream
    seed: int
    recipe: str  # hash of what decides how this side learns


@dataclass(frozen=True)
class Record(Experiment):
    """A finished run, and where it was trained."""

    bits_per_byte: float
    flops: float
    seconds: float  # CPU seconds of the steps
    cpu: str
    dtype: str
    torch: str
    date: str

    @property
    def experiment(self) -> Experiment:
        """What was trained."""
        return Experiment(*(getattr(self, field.name) for field in fields(Experiment)))

    @property
    def kind(self) -> tuple[str, str]:
        """The kind of CPU and the torch that the CPU seconds depend on."""
        return self.cpu, self.torch


@dataclass(frozen=True)
class RungFigures:
    """The multipliers of one rung on one text."""

    text: str
    depth: int
    steps: int
    seeds: int
    bits_per_byte: float
    upstream: float  # bits per byte after as many steps
    flops: Interval | None
    seconds: Interval | None  # of the seeds on `cpu`
    cpu: str
    seeds_on_cpu: int


def runs_of(rung: Rung, ours: Entry, upstream: Entry) -> Iterator[tuple[Entry, dict[str, int]]]:
    """Yield what trains, with its steps (the `horizon` of a plan) and its seed, seed by seed."""
    for seed in rung.seeds:
        yield ours, {"horizon": rung.steps, "seed": seed}
        for length in rung.lengths:
            yield upstream, {"horizon": length, "seed": seed}


def our_recipe() -> str:
    """Return a hash of what our code learns, which stays the same if code is only rewritten.

    It covers the settings of the golden runs d3 and d4, the losses that they must have, and the
    schedules of a run's later steps.
    """
    runs = [golden.load().runs[name] for name in ("d3", "d4")]
    losses = [[round(loss, DECIMALS) for loss in run.losses] for run in runs]
    schedules = [_schedules(run.settings) for run in runs]
    return short_hash([[run.settings for run in runs], losses, schedules])


def _schedules(settings: Mapping[str, Any]) -> list[list[float]]:
    """Return the factors of rate, momentum and weight decay at each step of a run."""
    steps, warmdown = settings["num_iterations"], settings["warmdown_ratio"]
    warmup = schedule.warmup_steps(settings["warmup_steps"], steps)
    return [
        [
            schedule.trapezoid(step, steps, warmup, warmdown, settings["final_lr_frac"]),
            schedule.momentum(step, steps, warmdown),
            schedule.decay_factor(step, steps),
        ]
        for step in range(steps)
    ]


def upstream_recipe(checkout: Path, variant: Variant) -> str:
    """Return a hash of what upstream's code learns with its rates scaled as in a variant."""
    return short_hash([code_hash(checkout, ["nanochat"]), variant.scale])


def experiment_of(run: Run, recipe: str) -> Experiment:
    """Return what a planned run trains."""
    assert run.plan.seed is not None
    rows = read_json(run.plan.rows / ABOUT)["sha256"][:12]
    return Experiment(run.text, rows, run.depth, run.steps, run.entry.name, run.plan.seed, recipe)


def record_of(run: Run, experiment: Experiment, result: Result) -> Record:
    """Return the record of a run that has just ended on this host."""
    return Record(
        **asdict(experiment),
        bits_per_byte=round(result.bits_per_byte, 6),
        flops=result.flops,
        seconds=round(result.seconds, 1),
        cpu=result.cpu,
        dtype=run.entry.variant.dtype,
        torch=torch.__version__,
        date=datetime.date.today().isoformat(),
    )


def read_records(file: Path = FILE) -> list[Record]:
    """Return the runs in a file; none if it does not exist."""
    return [Record(**record) for record in read_json(file)] if file.exists() else []


def write_records(records: Iterable[Record], file: Path = FILE) -> None:
    """Write runs to a file, one line for each, in the order of their experiments."""
    ordered = sorted(records, key=lambda record: astuple(record.experiment))
    lines = ",\n".join(json.dumps(asdict(record)) for record in ordered)
    write_atomic(file, f"[\n{lines}\n]\n".encode())


def climb(
    runs: Iterable[Run],
    recipes: Mapping[str, str],
    train: Callable[[Run], Result],
    hours: float,
    file: Path = FILE,
) -> int:
    """Train the runs that the file lacks, in order, and add each to it; returns how many.

    `recipes` has the recipe of each side by its name. No run begins after `hours`, but the one that
    has begun is finished.
    """
    until = time.monotonic() + 3600 * hours
    known = {record.experiment for record in read_records(file)}
    trained = 0
    for run in runs:
        experiment = experiment_of(run, recipes[run.entry.name])
        if experiment in known:
            continue
        if time.monotonic() >= until:
            log("the hours are over; type the command again to train the other runs")
            break
        record = record_of(run, experiment, train(run))
        write_records([*read_records(file), record], file)  # which another process may have changed
        trained += 1
    return trained


def current(records: Sequence[Record]) -> list[Record]:
    """Return the records of today's recipe of ours, and of the baseline's newest recipe."""
    recipes = {"ours": our_recipe()}
    for record in sorted(records, key=lambda record: record.date):
        if record.name != "ours":
            recipes[record.name] = record.recipe
    return [record for record in records if record.recipe == recipes[record.name]]


def whole_seeds(rung: Rung, records: Sequence[Record]) -> list[list[Record]]:
    """Return our run and upstream's runs of every length, for each seed that has them all.

    `records` are those that current() returns. Only runs on equal rows and in one number format are
    compared. Where the records have several of these, those with the most whole seeds count.
    """
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if (record.text, record.depth) == (rung.text, rung.depth):
            alike.setdefault((record.rows, record.dtype), []).append(record)
    return max((_whole_seeds(rung, group) for group in alike.values()), key=len, default=[])


def _whole_seeds(rung: Rung, records: Sequence[Record]) -> list[list[Record]]:
    wanted = [("ours", rung.steps), *(("upstream", length) for length in rung.lengths)]
    runs = {(record.name, record.steps, record.seed): record for record in records}
    of_seeds = [[runs.get((*run, seed)) for run in wanted] for seed in rung.seeds]
    return [[run for run in seed if run] for seed in of_seeds if all(seed)]


def figures(records: Sequence[Record]) -> list[RungFigures]:
    """Return the multipliers of each rung that has at least one whole seed."""
    result = []
    counted = current(records)
    for rung in RUNGS:
        seeds = whole_seeds(rung, counted)
        if seeds:
            result.append(figures_of(rung, seeds))
    return result


def figures_of(rung: Rung, seeds: Sequence[Sequence[Record]]) -> RungFigures:
    """Return the multipliers of a rung from its whole seeds."""
    kinds = Counter(kinds.pop() for seed in seeds if len(kinds := {run.kind for run in seed}) == 1)
    kind = kinds.most_common(1)[0][0] if kinds else ("", "")
    on_cpu = [seed for seed in seeds if {run.kind for run in seed} == {kind}]
    return RungFigures(
        text=rung.text,
        depth=rung.depth,
        steps=rung.steps,
        seeds=len(seeds),
        bits_per_byte=fmean(seed[0].bits_per_byte for seed in seeds),
        upstream=fmean(seed[1].bits_per_byte for seed in seeds),
        flops=multiplier_of("flops", seeds),
        seconds=multiplier_of("seconds", on_cpu) if on_cpu else None,
        cpu=kind[0],
        seeds_on_cpu=len(on_cpu),
    )


def show(results: Sequence[RungFigures]) -> None:
    """Print one line for each rung, with intervals of 95 %."""
    titles = ("text, depth, steps", "seeds", "bits/byte", "upstream", "multiplier, FLOPs")
    rows = [
        [
            f"{result.text}, d{result.depth}, {result.steps}",
            f"{result.seeds}",
            f"{result.bits_per_byte:.4f}",
            f"{result.upstream:.4f}",
            in_words(result.flops),
            in_words(result.seconds) if result.seeds_on_cpu else "",
            f"{result.seeds_on_cpu} on {result.cpu}" if result.seeds_on_cpu else "",
        ]
        for result in results
    ]
    tables.show((*titles, "CPU seconds", "seeds of CPU seconds"), rows)


def in_words(interval: Interval | None) -> str:
    """Return a multiplier with its interval; a question mark follows what was extrapolated."""
    if interval is None:
        return "no slope"
    words = f"{interval.mean:.2f}" + "?" * interval.extrapolated
    if interval.low is None:
        return words
    return f"{words} [{interval.low:.2f}, {interval.high:.2f}]"

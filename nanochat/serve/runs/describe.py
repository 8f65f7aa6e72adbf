"""The runs under a base folder: which there are, whether they run, and how far they are."""

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.files import latest_step, read_meta
from nanochat.checkpoint_manager.locate import STAGES
from nanochat.common import UserError, check_regular, parse_json, visible
from nanochat.runtime.trackers.jsonl import being_written
from nanochat.serve.runs.follow import MOST_STEPS, figures_of, open_regular

MOST_RUNS = 200  # in the list; the oldest are left out
TAIL_BYTES = 1 << 17  # of a file, read for the list
RECENT_STEPS = 20  # whose pace tells the time left, as in the training's own log
# Without a new line for so long, a run without a lock that this host can see counts as stopped.
SILENT_SECONDS = 120
SILENT_STEPS = 20
MOST_RUN_BYTES = 1 << 20  # of a run.json
LONGEST_FACT = 200  # letters
FACTS = ("device", "ranks", "dtype", "parameters")  # of run.json, for the page


@dataclass(frozen=True)
class Run:
    """A folder with a metrics.jsonl. `key` names it in addresses; the name of the folder is no part
    of that."""

    stage: str
    folder: Path

    @property
    def key(self) -> str:
        return hashlib.sha256(os.fsencode(f"{self.stage}/{self.folder.name}")).hexdigest()[:16]

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"


@dataclass(frozen=True)
class Tail:
    """The end of a metrics.jsonl: the last step, the last value of every figure, and the seconds of
    a recent step."""

    step: int
    figures: dict[str, float]
    pace: float | None


def find_runs(base: Path) -> tuple[list[Run], int]:
    """Return the runs whose files changed last, the newest first, and how many older ones are left
    out."""
    aged: list[tuple[int, Run]] = []
    for stage, place in STAGES.items():
        for path in (base / f"{place}_checkpoints").glob("*/metrics.jsonl"):
            try:
                aged.append((path.stat().st_mtime_ns, Run(stage, path.parent)))
            except OSError:  # it has just gone
                continue
    aged.sort(key=lambda pair: (-pair[0], pair[1].folder))
    runs = [run for _, run in aged]
    return runs[:MOST_RUNS], max(0, len(runs) - MOST_RUNS)


def tail(path: Path) -> Tail:
    """Return what the last lines of a metrics.jsonl say. Raises OSError if it cannot be read."""
    file = open_regular(path)
    try:
        size = os.fstat(file).st_size
        data = os.pread(file, TAIL_BYTES, max(0, size - TAIL_BYTES))
    finally:
        os.close(file)
    lines = data.split(b"\n")[:-1]  # the last one has no end yet
    if size > TAIL_BYTES:
        del lines[:1]  # its beginning was not read
    step = 0
    latest: dict[str, float] = {}
    seconds: list[float] = []
    for line in lines:
        entry = figures_of(line)
        if entry is None:
            continue
        step, figures = entry
        latest |= figures
        if figures.get("seconds", 0) > 0:
            seconds.append(figures["seconds"])
    recent = seconds[-RECENT_STEPS:]
    pace = sum(recent) / len(recent) if recent else None
    return Tail(step, latest, pace)


@dataclass(frozen=True)
class RunFiles:
    """The end of a run's metrics.jsonl, the content of its run.json, and the steps of the whole
    run."""

    tail: Tail
    facts: dict[str, Any]
    steps: int | None


class Describer:
    """Describes runs, and remembers what it read of files that have not changed since."""

    def __init__(self) -> None:
        self._cache: dict[str, tuple[object, RunFiles]] = {}  # by run: the files' state, and them

    def describe(self, run: Run, now: float) -> dict[str, Any] | None:
        """Return a run as JSON, `now` being the time in seconds since 1970; None if its file is
        gone or no regular file."""
        try:
            about = run.metrics.stat()
            locked = being_written(run.metrics)
            files = self._files(run, about)
        except OSError:
            return None
        end = files.tail
        steps = files.steps
        pace = end.pace or 0
        silent_seconds = now - about.st_mtime
        young = silent_seconds < max(SILENT_SECONDS, SILENT_STEPS * pace)
        # A lock on another host cannot be seen.
        elsewhere = locked is None or files.facts.get("host") != socket.gethostname()
        finished = steps is not None and end.step >= steps
        running = locked or (young and elsewhere and not finished)
        seconds_left = None
        if running and steps and pace and not finished:
            seconds_left = (steps - end.step) * pace
        state = "finished" if finished else "stopped"
        folder = os.fsencode(run.folder.name)
        description = {
            "id": run.key,
            "stage": run.stage,
            "tag": visible(folder.decode(errors="replace")),
            "state": "running" if running else state,
            "step": end.step,
            "steps": steps,
            "seconds_left": _plain(seconds_left),
            "changed": about.st_mtime,
            "figures": end.figures,
            "samples": _version(run.folder / "samples.jsonl"),
        }
        for name in FACTS:
            value = _plain(files.facts.get(name))
            if value is not None:
                description[name] = value
        return description

    def forget(self, runs: list[Run]) -> None:
        """Drop what is remembered of all other runs."""
        keys = {run.key for run in runs}
        self._cache = {key: entry for key, entry in self._cache.items() if key in keys}

    def _files(self, run: Run, about: os.stat_result) -> RunFiles:
        """Return what the files of a run say; read them only if they have changed."""
        version = _version(run.folder / "run.json")
        state = (about.st_ino, about.st_size, about.st_mtime_ns, version)
        cached = self._cache.get(run.key)
        if cached is not None and cached[0] == state:
            return cached[1]
        facts = _facts(run.folder / "run.json")
        files = RunFiles(tail(run.metrics), facts, _steps(run.folder, facts))
        self._cache[run.key] = (state, files)
        return files


def _plain(value: Any) -> str | float | None:
    """Return a short text or a number that a browser can count; None for anything else."""
    if isinstance(value, str):
        return value[:LONGEST_FACT]
    if isinstance(value, int | float) and 0 <= value < MOST_STEPS:
        return value
    return None


def _version(path: Path) -> str | None:
    """Return something that changes when a file does; None if there is none."""
    try:
        about = path.stat()
    except OSError:
        return None
    return f"{about.st_mtime_ns}-{about.st_size}"


def _facts(path: Path) -> dict[str, Any]:
    """Return the content of a run.json, which older runs do not have; nothing if it is damaged."""
    try:
        check_regular(path, MOST_RUN_BYTES)
        facts = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _steps(folder: Path, facts: dict[str, Any]) -> int | None:
    """Return the steps of the whole run, as run.json or the newest checkpoint says."""
    steps = facts.get("steps")
    if not isinstance(steps, int):
        newest = latest_step(folder)
        try:
            steps = read_meta(folder, newest)["steps"] if newest is not None else None
        except (OSError, UserError):  # loading the checkpoint will say what is wrong
            steps = None
    if isinstance(steps, int) and 0 < steps < MOST_STEPS:
        return steps
    return None

"""Describes the runs under a base folder: their names, states and progress."""

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.files import latest_step, read_meta
from nanochat.checkpoint_manager.locate import STAGES
from nanochat.common import UserError, check_regular, parse_json, visible
from nanochat.runtime.samples import open_to_read
from nanochat.runtime.trackers.jsonl import being_written
from nanochat.serve.runs.follow import MOST_STEPS, figures_of

MOST_RUNS = 200  # in the list; the oldest are left out
TAIL_BYTES = 1 << 17  # how much of the end of a file is read for the list
RECENT_STEPS = 20  # their mean duration gives the time left, as in the training log
# A run without a lock that this host can see counts as stopped if it has not written a line for so
# long.
SILENT_SECONDS = 120
SILENT_STEPS = 20
MOST_RUN_BYTES = 1 << 20  # size limit of a run.json
LONGEST_FACT = 200  # characters
FACTS = ("device", "ranks", "dtype", "parameters")  # keys of run.json that the page shows


@dataclass(frozen=True)
class Run:
    """A training run, whose folder has a metrics.jsonl.

    `key`, a hash of the stage and the folder's name, identifies the run in URLs.
    """

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
    """The end of a metrics.jsonl: its last step, and the last value of every figure in it.

    `step` is 0 if the end has no valid line. `pace` is the mean duration of recent steps in
    seconds, or None if unknown.
    """

    step: int
    figures: dict[str, float]
    pace: float | None


def find_runs(base: Path) -> tuple[list[Run], int]:
    """Return the runs whose metrics.jsonl changed last, newest first, and how many are left out.

    At most MOST_RUNS runs are returned.
    """
    aged: list[tuple[int, Run]] = []
    for stage, prefix in STAGES.items():
        for path in (base / f"{prefix}_checkpoints").glob("*/metrics.jsonl"):
            try:
                aged.append((path.stat().st_mtime_ns, Run(stage, path.parent)))
            except OSError:  # it has just been deleted
                continue
    aged.sort(key=lambda pair: (-pair[0], pair[1].folder))
    runs = [run for _, run in aged]
    return runs[:MOST_RUNS], max(0, len(runs) - MOST_RUNS)


def tail(path: Path) -> Tail:
    """Read the end of a metrics.jsonl, and return it as a Tail.

    Raises OSError if the file cannot be read or is not a regular file.
    """
    file = open_to_read(path)
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
        parsed = figures_of(line)
        if parsed is None:
            continue
        step, figures = parsed
        latest |= figures
        if figures.get("seconds", 0) > 0:
            seconds.append(figures["seconds"])
    recent = seconds[-RECENT_STEPS:]
    pace = sum(recent) / len(recent) if recent else None
    return Tail(step, latest, pace)


@dataclass(frozen=True)
class RunFiles:
    """What a run's files say: the end of metrics.jsonl, the content of run.json, the step count."""

    tail: Tail
    facts: dict[str, Any]
    steps: int | None


class Describer:
    """Describes runs, without reading unchanged files again."""

    def __init__(self) -> None:
        self._cache: dict[str, tuple[object, RunFiles]] = {}  # key of a run -> state, content

    def describe(self, run: Run, now: float) -> dict[str, Any] | None:
        """Return a dict that describes a run, or None if its metrics.jsonl cannot be read.

        `now` is the time in seconds since 1970.
        """
        try:
            file_stat = run.metrics.stat()
            locked = being_written(run.metrics)
            files = self._files(run, file_stat)
        except OSError:
            return None
        end = files.tail
        steps = files.steps
        pace = end.pace or 0
        silent_seconds = now - file_stat.st_mtime
        young = silent_seconds < max(SILENT_SECONDS, SILENT_STEPS * pace)
        # A lock that a process on another host holds cannot be seen.
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
            "changed": file_stat.st_mtime,
            "figures": end.figures,
            "samples": _version(run.folder / "samples.jsonl"),
        }
        for name in FACTS:
            value = _plain(files.facts.get(name))
            if value is not None:
                description[name] = value
        return description

    def forget(self, runs: list[Run]) -> None:
        """Drop the cached files of all runs but those in `runs`."""
        keys = {run.key for run in runs}
        self._cache = {key: entry for key, entry in self._cache.items() if key in keys}

    def _files(self, run: Run, file_stat: os.stat_result) -> RunFiles:
        """Return a run's RunFiles, reading files only if metrics.jsonl or run.json has changed."""
        version = _version(run.folder / "run.json")
        state = (file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, version)
        cached = self._cache.get(run.key)
        if cached is not None and cached[0] == state:
            return cached[1]
        facts = facts_of(run.folder / "run.json")
        files = RunFiles(tail(run.metrics), facts, _steps(run.folder, facts))
        self._cache[run.key] = (state, files)
        return files


def _plain(value: Any) -> str | float | None:
    """Return `value` if it is a number from 0 to below 2**53, or a text, cut off if it is long.

    Returns None for any other value.
    """
    if isinstance(value, str):
        return value[:LONGEST_FACT]
    if isinstance(value, int | float) and 0 <= value < MOST_STEPS:
        return value
    return None


def _version(path: Path) -> str | None:
    """Return a file's modification time and size as text, or None if it cannot be found."""
    try:
        file_stat = path.stat()
    except OSError:
        return None
    return f"{file_stat.st_mtime_ns}-{file_stat.st_size}"


def facts_of(path: Path) -> dict[str, Any]:
    """Return the content of a run.json, or {} if it is too large, damaged or missing."""
    try:
        check_regular(path, MOST_RUN_BYTES)
        facts = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _steps(folder: Path, facts: dict[str, Any]) -> int | None:
    """Return the number of steps of the whole run, or None if it is unknown or out of range.

    It is read from the newest checkpoint if run.json does not hold it.
    """
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

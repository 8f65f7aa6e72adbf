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
SILENT_SECONDS, SILENT_STEPS = (
    120,
    20,
)  # without a new line, a run that no lock tells of counts as stopped
MOST_ABOUT = 1 << 20  # bytes of a run.json
LONGEST_FACT = 200  # letters
FACTS = ("device", "ranks", "dtype", "parameters")  # of run.json, for the page


@dataclass(frozen=True)
class Run:
    """A folder with a metrics.jsonl. `key` names it in addresses; the name of the folder is no part of that."""

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
    """The end of a metrics.jsonl: the last step, the last value of every figure, and the seconds of a recent step."""

    step: int
    figures: dict[str, float]
    pace: float | None


def find_runs(base: Path) -> tuple[list[Run], int]:
    """The runs whose files changed last, the newest first, and how many older ones are left out."""
    aged: list[tuple[int, Run]] = []
    for stage, place in STAGES.items():
        for path in (base / f"{place}_checkpoints").glob("*/metrics.jsonl"):
            try:
                aged.append((path.stat().st_mtime_ns, Run(stage, path.parent)))
            except OSError:  # it has just gone
                continue
    aged.sort(key=lambda one: (-one[0], one[1].folder))
    return [run for _, run in aged[:MOST_RUNS]], max(0, len(aged) - MOST_RUNS)


def tail(path: Path) -> Tail:
    """What the last lines of a metrics.jsonl say. OSError if it cannot be read."""
    file = open_regular(path)
    try:
        size = os.fstat(file).st_size
        data = os.pread(file, TAIL_BYTES, max(0, size - TAIL_BYTES))
    finally:
        os.close(file)
    lines = data.split(b"\n")[:-1]  # the last one has no end yet
    found = [
        one for one in map(figures_of, lines[1:] if size > TAIL_BYTES else lines) if one is not None
    ]
    last: dict[str, float] = {}
    for _, figures in found:
        last |= figures
    seconds = [figures["seconds"] for _, figures in found if figures.get("seconds", 0) > 0][
        -RECENT_STEPS:
    ]
    return Tail(
        found[-1][0] if found else 0, last, sum(seconds) / len(seconds) if seconds else None
    )


class Looker:
    """Describes runs, and remembers what it read of files that have not changed since."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[object, Tail, dict[str, Any], int | None]] = {}

    def describe(self, run: Run, now: float) -> dict[str, Any] | None:
        """A run as JSON, `now` being the time in seconds since 1970; None if its file is gone or no regular file."""
        try:
            about, held = run.metrics.stat(), being_written(run.metrics)
            end, told, steps = self._read(run, about)
        except OSError:
            return None
        young = now - about.st_mtime < max(SILENT_SECONDS, SILENT_STEPS * (end.pace or 0))
        elsewhere = (
            held is None or told.get("host") != socket.gethostname()
        )  # where no lock can be seen
        done = steps is not None and end.step >= steps
        running = held or (young and elsewhere and not done)
        left = (
            (steps - end.step) * end.pace if running and steps and end.pace and not done else None
        )
        return {
            "id": run.key,
            "stage": run.stage,
            "tag": visible(os.fsencode(run.folder.name).decode(errors="replace")),
            "state": "running" if running else "finished" if done else "stopped",
            "step": end.step,
            "steps": steps,
            "seconds_left": _plain(left),
            "changed": about.st_mtime,
            "figures": end.figures,
            "samples": _version(run.folder / "samples.jsonl"),
            **{name: value for name in FACTS if (value := _plain(told.get(name))) is not None},
        }

    def forget(self, runs: list[Run]) -> None:
        """Drop what is remembered of all other runs."""
        kept = {run.key for run in runs}
        self._kept = {key: value for key, value in self._kept.items() if key in kept}

    def _read(self, run: Run, about: os.stat_result) -> tuple[Tail, dict[str, Any], int | None]:
        state = (about.st_ino, about.st_size, about.st_mtime_ns, _version(run.folder / "run.json"))
        before = self._kept.get(run.key)
        if before is None or before[0] != state:
            told = _told(run.folder / "run.json")
            before = (state, tail(run.metrics), told, _steps(run.folder, told))
            self._kept[run.key] = before
        return before[1:]


def _plain(value: Any) -> str | float | None:
    """A short text or a number that a browser can count; None for anything else."""
    if isinstance(value, str):
        return value[:LONGEST_FACT]
    return value if isinstance(value, int | float) and 0 <= value < MOST_STEPS else None


def _version(path: Path) -> str | None:
    """Something that changes when a file does; None if there is none."""
    try:
        about = path.stat()
    except OSError:
        return None
    return f"{about.st_mtime_ns}-{about.st_size}"


def _told(path: Path) -> dict[str, Any]:
    """The content of a run.json, which older runs do not have; nothing if it is damaged."""
    try:
        check_regular(path, MOST_ABOUT)
        told = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _steps(folder: Path, told: dict[str, Any]) -> int | None:
    """The steps of the whole run, as run.json or the newest checkpoint says."""
    steps = told.get("steps")
    if not isinstance(steps, int):
        newest = latest_step(folder)
        try:
            steps = read_meta(folder, newest)["steps"] if newest is not None else None
        except (OSError, UserError):  # loading the checkpoint will say what is wrong
            steps = None
    return steps if isinstance(steps, int) and 0 < steps < MOST_STEPS else None

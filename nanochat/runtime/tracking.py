"""Where figures go while a stage trains: metrics.jsonl always, wandb when a run is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from nanochat.common import UserError, to_json, warn, write_atomic


class Tracker:
    """metrics.jsonl of a stage, one JSON object a line, and optionally a wandb run; on rank 0 only."""

    def __init__(self, folder: Path, run: str, settings: dict[str, Any], step: int, main: bool):
        """After `step` updates: later lines of an interrupted run are dropped. `run` "dummy" means no wandb.

        `last` is the step of the last line that is kept, -1 without one.
        """
        self.last = -1
        self.file: TextIO | None = None
        self.run: Any = None
        if not main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [line for line in _lines(path) if line.get("step", 0) <= step] if step else []
        self.last = kept[-1].get("step", 0) if kept else -1
        write_atomic(path, "".join(to_json(line) + "\n" for line in kept))  # a kill here must not lose them
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - held for the life of the stage
        if run != "dummy":
            self.run = _wandb(run, settings)

    def log(self, **figures: Any) -> None:
        """Write one line; floats as given, so that what is read back is what was measured, or None if not finite."""
        if self.file is not None:
            self.file.write(to_json(figures) + "\n")
            self.file.flush()
        self._tell(lambda run: run.log(figures, step=figures.get("step")))

    def close(self) -> None:
        """Finish the files and the run."""
        if self.file is not None:
            self.file.close()
        self._tell(lambda run: run.finish())

    def _tell(self, what: Callable[[Any], Any]) -> None:
        if self.run is not None:
            try:
                what(self.run)
            except Exception as failure:  # the edge to a foreign service: it must never stop training
                warn(f"wandb failed and is off for the rest of this run: {failure}")
                self.run = None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a stage's metrics.jsonl; what was not finite is None, and a last line cut by a kill left out."""
    return _lines(folder / "metrics.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    if path.exists():
        for text in path.read_bytes().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:  # not JSON, or a character cut in two
                break
    return lines


def _wandb(run: str, settings: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as missing:
        raise UserError(f"--run {run} needs wandb, which cannot be imported ({missing}); leave --run out") from missing
    try:
        return wandb.init(project="nanochat", name=run, config=settings)
    except Exception as failure:  # no key, no network: said before the run starts, not after it
        raise UserError(f"wandb could not start run {run!r}: {failure}. Log in with `wandb login`, set "
                        "WANDB_MODE=offline, or leave --run out") from failure  # fmt: skip

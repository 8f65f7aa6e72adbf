"""Where figures go while a stage trains: metrics.jsonl always, wandb when a run is named."""

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from nanochat.common import UserError, warn


class Tracker:
    """metrics.jsonl of a stage, one JSON object a line, and optionally a wandb run; on rank 0 only."""

    def __init__(self, folder: Path, run: str, settings: dict[str, Any], step: int, main: bool):
        """After `step` updates: later lines of an interrupted run are dropped. `run` "dummy" means no wandb."""
        self.file: TextIO | None = None
        self.run: Any = None
        if not main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [line for line in _lines(path) if line.get("step", 0) <= step]
        self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - held for the life of the stage
        for line in kept:
            self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if run != "dummy":
            self.run = _wandb(run, settings)

    def log(self, **figures: Any) -> None:
        """Write one line; floats as given, so that what is read back is what was measured."""
        if self.file is not None:
            self.file.write(json.dumps(figures) + "\n")
            self.file.flush()
        if self.run is not None:
            try:
                self.run.log(figures, step=figures.get("step"))
            except Exception as failure:  # the edge to a foreign service: it must never stop training
                warn(f"wandb failed and is off for the rest of this run: {failure}")
                self.run = None

    def close(self) -> None:
        """Finish the files and the run."""
        if self.file is not None:
            self.file.close()
        if self.run is not None:
            self.run.finish()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a stage's metrics.jsonl; a last line cut by a kill is left out."""
    return _lines(folder / "metrics.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
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


def progress_on_terminal() -> bool:
    """Whether a moving bar can be shown."""
    return sys.stderr.isatty()

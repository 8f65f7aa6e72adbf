"""Records figures while a stage trains: always in metrics.jsonl, and in wandb when a run is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from nanochat.common import UserError, parse_json, to_json, warn, write_atomic


class Tracker:
    """Writes metrics.jsonl of a stage, one JSON object per line, and optionally a wandb run; only rank 0 writes."""

    def __init__(self, folder: Path, run: str, settings: dict[str, Any], step: int, main: bool):
        """Open the files after `step` updates; lines of later steps, which an interrupted run left, are dropped.

        `run` "dummy" means no wandb. The attribute `last` is the step of the last kept line, or -1.
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
        write_atomic(path, "".join(to_json(line) + "\n" for line in kept))  # atomic, so that a kill loses no line
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole stage
        if run != "dummy":
            self.run = _wandb(run, settings)

    def log(self, **figures: Any) -> None:
        """Write one line. Floats are written without rounding; a value that is not finite is read back as None."""
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
            except Exception as failure:  # an external service must never stop training
                warn(f"wandb failed and is off for the rest of this run: {failure}")
                self.run = None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in a folder. Values that were not finite are None; a line cut by a kill is skipped."""
    return _lines(folder / "metrics.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    if path.exists():
        for text in path.read_bytes().splitlines():
            try:
                lines.append(parse_json(text))
            except ValueError:  # not JSON, or a character cut in two
                break
    return lines


def _wandb(run: str, settings: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as missing:
        raise UserError(
            f"--run {run} needs wandb, which cannot be imported ({missing}). Install wandb, or leave --run out"
        ) from missing
    try:
        return wandb.init(project="nanochat", name=run, config=settings)
    except Exception as failure:  # no key or no network: stop before the run starts, not after hours
        raise UserError(f"wandb could not start run {run!r}: {failure}. Log in with `wandb login`, set "
                        "WANDB_MODE=offline, or leave --run out") from failure  # fmt: skip

"""metrics.jsonl: the source of truth about a run, one JSON object per line."""

from pathlib import Path
from typing import Any

from nanochat.common import parse_json, to_json, write_atomic


class Jsonl:
    """metrics.jsonl in the folder of a stage. The attribute `last` is the step of the last kept line, or -1."""

    def __init__(self, folder: Path, step: int):
        """Open the file after `step` updates; lines of later steps, which an interrupted run left, are dropped."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(folder) if line.get("step", 0) <= step] if step else []
        self.last: int = kept[-1].get("step", 0) if kept else -1
        write_atomic(path, "".join(to_json(line) + "\n" for line in kept))  # atomic, so that a kill loses no line
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole stage

    def log(self, figures: dict[str, Any]) -> None:
        """Write one line. Floats are written without rounding; a value that is not finite becomes null."""
        self._file.write(to_json(figures) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in a folder. Values that were not finite are None; a line cut by a kill is skipped."""
    path = folder / "metrics.jsonl"
    lines = []
    if path.exists():
        for text in path.read_bytes().splitlines():
            try:
                lines.append(parse_json(text))
            except ValueError:  # not JSON, or a character cut in two
                break
    return lines

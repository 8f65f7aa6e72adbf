"""What a model answered to every question: one JSON line each, kept beside the score of the finished task."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat import device
from nanochat.common import base_dir, log, parse_json, to_json, write_atomic
from nanochat.device import Compute


def records_dir(stage: str, tag: str, step: int) -> Path:
    """The folder of the records of a model."""
    return base_dir() / "records" / f"{stage}-{tag}-{step:06d}"


def fingerprint(task: Any, limit: int | None = None) -> str:
    """A hash of the first `limit` questions and their answers, and of how a text poses them where the task does."""
    digest = hashlib.sha256()
    for i in range(len(task) if limit is None else min(limit, len(task))):
        asked = task.cloze(i) if hasattr(task, "cloze") else task[i]
        digest.update(repr(asked).encode())
    return digest.hexdigest()[:16]


class Records:
    """The answers to one task. The first line of the file says which model and settings they are of, and the score.

    The file appears when the task is finished, so a task that has a file need not be evaluated again. Every rank adds
    its own answers; the ranks share the folder, as they share the base folder.
    """

    def __init__(self, folder: Path, task: str, about: Mapping[str, Any], compute: Compute):
        """`about` says what the answers depend on: model, settings and data."""
        name = re.sub(r"[^\w.-]+", "_", task)
        self.path = folder / f"{name}.jsonl"
        self._part = folder / f".{name}.rank-{compute.rank}"
        self._about, self._compute = {"task": task, **about}, compute
        self._lines: list[tuple[int, dict[str, Any]]] = []

    def finished(self) -> dict[str, Any] | None:
        """The score of an earlier evaluation of the same, or None."""
        try:
            with open(self.path, "rb") as f:
                head = parse_json(f.readline())
        except (OSError, ValueError):
            return None
        same = isinstance(head, dict) and head.get("about") == parse_json(to_json(self._about))
        return head.get("score") if same else None

    def add(self, number: int, record: Mapping[str, Any]) -> None:
        """Keep the answer to question `number`; the file has the answers in the order of these numbers."""
        self._lines.append((number, dict(record)))

    def finish(self, score: Mapping[str, Any]) -> None:
        """Write the answers of all ranks with their score. Every rank must call this."""
        if self._compute.world_size > 1:
            write_atomic(
                self._part, "".join(to_json([number, line]) + "\n" for number, line in self._lines)
            )
            device.barrier(self._compute)
        if self._compute.main:
            for rank in range(1, self._compute.world_size):
                part = self._part.with_name(self._part.name.removesuffix("0") + str(rank))
                self._lines += [
                    (number, line)
                    for number, line in map(parse_json, part.read_bytes().splitlines())
                ]
            self._lines.sort(key=lambda line: line[0])
            lines = [
                {"about": self._about, "score": dict(score)},
                *(line for _, line in self._lines),
            ]
            write_atomic(self.path, "".join(to_json(line) + "\n" for line in lines))
            log(f"answers: {self.path}")
        device.barrier(self._compute)
        self._part.unlink(missing_ok=True)


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line of a file of records, with `about` and `score`, and its answers."""
    head, *lines = (parse_json(line) for line in path.read_bytes().splitlines())
    return head, lines

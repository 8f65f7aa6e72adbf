"""Saves and reads a model's answers to all questions of a task, together with the score."""

import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat import device
from nanochat.common import (
    UserError,
    base_dir,
    parse_json,
    sha256_of,
    to_json,
    tr,
    write_atomic,
)
from nanochat.device import Compute
from nanochat.prepare.conversations import RENDERING

Fields = Mapping[str, Any]  # a JSON object

PACKAGE = Path(__file__).parent.parent
# The code that asks and grades, beside the modules of tasks. When a file changes, answers that were
# saved before are not used.
GRADERS = ("evals/*.py", "generate/reply.py", "data/calculator.py", "data/tinyworld/**/*.py")


def records_dir(stage: str, tag: str, step: int) -> Path:
    """Return the folder for the records of a model, given its stage, tag and step.

    The tag of a published model with an adapter has several words, which _ joins.
    """
    name = re.sub(r"[\s+]+", "_", tag)
    return base_dir() / "records" / f"{stage}-{name}-{step:06d}"


def fingerprint(task: Any, limit: int | None = None) -> str:
    """Return a hash of the first `limit` questions of a task, their answers, and the task's code.

    If the task has a method `cloze`, the values that it returns are hashed instead of the task's
    items. The code is that of all modules in the folder of the task's module, since tasks share
    functions.
    """
    modules = Path(inspect.getfile(type(task))).parent.glob("*.py")
    digest = hashlib.sha256(_code_hash(modules).encode())
    count = len(task)
    if limit is not None:
        count = min(limit, count)
    for i in range(count):
        question = task.cloze(i) if hasattr(task, "cloze") else task[i]
        digest.update(repr(question).encode())
    return digest.hexdigest()[:16]


def _code_hash(files: Iterable[Path]) -> str:
    """Return a hash of the names and the contents of source files."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name} {sha256_of(path)}".encode())
    return digest.hexdigest()[:16]


class Records:
    """Collects a model's answers to one task, and writes them to a JSON lines file with the score.

    The first line of the file holds the model, the settings and the score, and each further line
    one answer. The file appears only when the task is finished, so that a saved score is always
    final. Every rank adds its own answers. The ranks must share the folder, just as they share the
    base folder.

    The name of the file ends with a hash of all that the answers depend on, the code of the graders,
    the device and the kernels included, so an evaluation with another model or other settings
    writes another file.
    """

    def __init__(
        self,
        folder: Path,
        task: str,
        about: Fields,
        compute: Compute,
    ):
        """Prepare to write the file of a task to `folder`.

        `about` describes everything that the answers depend on: the model, settings and data. Only
        rank 0 must know all of it.
        """
        name = re.sub(r"[^\w.-]+", "_", task)
        graders = _code_hash(path for pattern in GRADERS for path in PACKAGE.glob(pattern))
        code = {"rendering": RENDERING, "graders": graders}
        kernels = "fused" if compute.operations.fuses_layers else "plain"
        computed = {"device": compute.device_type, "kernels": kernels}
        self._about = {"task": task, **about, "code": code, "computed": computed}
        digest = hashlib.sha256(to_json(self._about).encode()).hexdigest()[:8]
        self.path = folder / f"{name}-{digest}.jsonl"
        self._folder = folder
        self._name = name
        self._compute = compute
        self._records: list[tuple[int, Fields]] = []

    def saved_score(self) -> dict[str, Any] | None:
        """Return the score of an earlier evaluation with the same model, settings and data.

        Returns None if the file does not exist or has no such score.
        """
        try:
            with open(self.path, "rb") as file:
                head = parse_json(file.readline())
        except (OSError, ValueError):
            return None
        if not isinstance(head, dict):
            return None
        about = parse_json(to_json(self._about))
        return head.get("score") if head.get("about") == about else None

    def add(self, number: int, record: Fields) -> None:
        """Add the record of question `number`, an index by which the file orders records."""
        self._records.append((number, dict(record)))

    def finish(self, score: Fields) -> None:
        """Write the answers of all ranks, and the score, to the file; every rank must call this."""
        rank_path = self._rank_path(self._compute.rank)
        if self._compute.world_size > 1:
            _write_lines(rank_path, self._records)
            device.barrier(self._compute)
        if self._compute.main:
            records = sorted(self._of_all_ranks(), key=lambda numbered: numbered[0])
            head = {"about": self._about, "score": dict(score)}
            _write_lines(self.path, [head, *(record for _, record in records)])
        device.barrier(self._compute)
        rank_path.unlink(missing_ok=True)

    def _of_all_ranks(self) -> list[tuple[int, Fields]]:
        records = list(self._records)
        for rank in range(1, self._compute.world_size):
            for line in self._rank_path(rank).read_bytes().splitlines():
                number, record = parse_json(line)
                records.append((number, record))
        return records

    def _rank_path(self, rank: int) -> Path:
        """Return the path of the temporary file in which a rank passes its answers to rank 0."""
        return self._folder / f".{self._name}.rank-{rank}"


def _write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write a file with each value as a line of JSON."""
    lines = [to_json(value) + "\n" for value in values]
    write_atomic(path, "".join(lines))


def unfinished(broken: Sequence[str]) -> UserError:
    """Return the error for the end of an evaluation in which the tasks in `broken` failed."""
    return UserError(
        tr(
            "{broken_count} of the tasks could not be evaluated: {broken}. The warnings "
            "above say why; the other tasks are done, and the same command skips them",
            broken_count=len(broken),
            broken=", ".join(broken),
        )
    )


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a records file; return its header (with `about` and `score`) and its list of answers."""
    lines = path.read_bytes().splitlines()
    head, *records = map(parse_json, lines)
    return head, records

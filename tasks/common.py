"""Shared by the tasks: loading rows, reading numbers, and slices and mixtures."""

import csv
import errno
import os
import re
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq

from nanochat.common import UserError, base_dir, check_regular, log, rank, tr
from nanochat.data.conversation import Conversation, Message, Part, Task
from nanochat.data.shards import check_packing
from nanochat.data.sources.hub import endpoint, is_hub
from tasks.record_keys import check_message, is_trained

# File ending -> builder of `datasets`, best first; csv and tsv are read here, where every cell stays the text it is.
_TYPES = {"parquet": "parquet", "jsonl": "json", "json": "json", "csv": "", "tsv": ""}

# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A split of a data set on the Hugging Face hub.

    A copy of the hub's repository has its files (`<split>*.parquet` or `<split>*.jsonl`) in the folders `inside`, which
    are searched in this order, or in files that one of the patterns `others` names.
    """

    repo: str
    subset: str | None
    split: str
    inside: tuple[str, ...]
    others: tuple[str, ...] = ()
    header: tuple[str, ...] = ()  # the columns of a tsv file, which has no line with their names
    parquet_branch: bool = (
        False  # the hub's main branch is a program; another has what it makes, a folder per subset
    )

    @property
    def name(self) -> str:
        """The last part of the name on the hub: the name of its folder in NANOCHAT_TASK_DIR."""
        return self.repo.rpartition("/")[2]

    def local_folder(self) -> Path | None:
        """The folder with a copy in NANOCHAT_TASK_DIR, or None."""
        task_dir = os.environ.get("NANOCHAT_TASK_DIR")
        folder = Path(task_dir, self.name).expanduser() if task_dir else None
        return folder if folder is not None and folder.is_dir() else None

    def files(self, folder: Path) -> list[Path]:
        """The files of the split below a folder, all of the best type that exists; [] if there are none."""
        for name in self.inside:
            for ending in (ending for ending, builder in _TYPES.items() if builder):
                wanted = re.compile(rf"{re.escape(self.split)}([-_.].*)?\.{ending}")
                files = sorted(
                    path
                    for path in (folder / name).glob(f"*.{ending}")
                    if wanted.fullmatch(path.name)
                )
                if files:
                    return files
        return next(
            (files for pattern in self.others if (files := sorted(folder.glob(pattern)))), []
        )

    def __str__(self) -> str:
        return f"{self.repo} ({', '.join(filter(None, (self.subset, self.split)))})"


def carry_in(repos: Sequence[str]) -> str:
    """How to get data sets of the hub onto this machine, in two sentences."""
    commands = [
        f"`hf download {repo} --repo-type dataset --local-dir {repo.rpartition('/')[2]}`"
        for repo in repos
    ]
    return tr(
        "Set HF_ENDPOINT to a mirror that this machine can reach. Or, on a machine with a network, run "
        "{commands}, copy what they fetch into a folder of this machine, and set NANOCHAT_TASK_DIR to that "
        "folder",
        commands=", ".join(commands),
    )


class Table:
    """The rows of a data set in a seeded order, so that the first n rows are a random sample."""

    def __init__(self, rows: Any, source: str, seed: int = 42):
        self.source = source
        self._rows = rows
        self._order = np.random.default_rng(seed).permutation(len(rows))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._rows[self.number(i)]

    def number(self, i: int) -> int:
        """The place of row i in the published files, counted from 0."""
        return int(self._order[i])


def _read(where: str, *arguments: Any, advice: str, **options: Any) -> Any:
    """Call `datasets.load_dataset`, and turn its many kinds of failure into one message."""
    # imported here, since the import takes a second or two and only tasks with rows need it
    import datasets
    import datasets.exceptions

    if rank() > 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(*arguments, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as failure:
        cause = failure.__cause__ or failure
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise cause from None
        text = tr(
            "{where} cannot be read: {cause}. {advice}", where=where, cause=cause, advice=advice
        )
        raise UserError(text, exit_code=2) from failure


def _check_files(files: Sequence[Path]) -> None:
    """UserError for a file that would fill the memory when it is read."""
    for path in files:
        try:
            check_regular(path, max_bytes=path.stat().st_size)
            if path.suffix == ".parquet":
                check_packing(path)
        except (OSError, ValueError) as failure:
            raise UserError(
                f"{path} cannot be read: {failure}. Copy the file again from its source", 2
            ) from failure


class _Joined:
    """The rows of several subjects one after another, each with its subject in the column `subject`, and with its place
    among the rows of the subject in the column `id` if there is none."""

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = [(subject, rows) for subject, rows in parts.items() if len(rows)]
        self._starts = np.cumsum([0] + [len(rows) for _, rows in self._parts]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        part = bisect_right(self._starts, i) - 1
        subject, rows = self._parts[part]
        place = i - self._starts[part]
        return {"id": place, **rows[place], "subject": subject}


class _Cells(list[dict[str, Any]]):
    """The rows of csv or tsv files. Every cell is the text that stands there: 1.50, 01 and None stay what they are."""

    def __init__(self, files: Sequence[Path], header: Sequence[str]):
        super().__init__()
        self.column_names = list(header)
        for path in files:
            tsv = path.suffix == ".tsv"
            names, quoting = (
                (header or None) if tsv else None,
                csv.QUOTE_NONE if tsv else csv.QUOTE_MINIMAL,
            )
            try:
                with open(path, encoding="utf-8-sig", newline="") as f:
                    reader = csv.DictReader(
                        f, names, delimiter="\t" if tsv else ",", quoting=quoting, strict=True
                    )
                    for row in reader:
                        if None in row or None in row.values():
                            raise ValueError(
                                f"line {reader.line_num} has not as many cells as there are columns"
                            )
                        self.append(row)
                    self.column_names = list(reader.fieldnames or ())
            except (csv.Error, ValueError) as broken:
                text = f"{path} cannot be read: {broken}. Copy the file again from its source"
                raise UserError(text, exit_code=2) from broken


def _open(
    sources: Mapping[str, Published], columns: Sequence[str], folder: Path | None
) -> tuple[dict[str, Any], str]:
    """The rows of several splits, which have the columns, and where they are from; see load_table."""
    found, where = _find(sources, columns, folder)
    for key, source in sources.items():
        _check_columns(
            found[key].column_names,
            columns,
            where if len(sources) == 1 else f"{where} ({key})",
            source,
        )
    return found, where


def _find(
    sources: Mapping[str, Published], columns: Sequence[str], folder: Path | None
) -> tuple[dict[str, Any], str]:
    first = next(iter(sources.values()))
    folder = folder or first.local_folder()
    if folder is None:
        token = None if is_hub(endpoint()) else False  # None is HF_TOKEN or the stored one
        rows = {}
        for key, source in sources.items():
            names = (source.repo,) if source.parquet_branch else (source.repo, source.subset)
            place = (
                {"data_dir": source.subset, "revision": "refs/convert/parquet"}
                if source.parquet_branch
                else {}
            )
            advice = carry_in([source.repo])
            rows[key] = _read(
                str(source), *names, split=source.split, token=token, advice=advice, **place
            )
        return rows, str(first) if len(sources) == 1 else first.repo
    files = {key: source.files(folder) for key, source in sources.items()}
    for key, source in sources.items():
        if not files[key]:
            tried = [f"{one}/{source.split}*.parquet|jsonl" for one in source.inside] + list(
                source.others
            )
            wanted = " or ".join(str(folder / one) for one in tried)
            raise UserError(
                f"there are no rows of {source.name} ({source.split}) in {folder}: looked for {wanted}. Copy one of "
                "these files there, or name another folder",
                exit_code=2,
            )
    every = [path for some in files.values() for path in some]
    where, builder = (
        str(every[0].parent if len(sources) == 1 else folder),
        _TYPES[every[0].suffix[1:]],
    )
    _check_files(every)
    if not builder:
        return {key: _Cells(some, sources[key].header) for key, some in files.items()}, where
    if (
        builder == "parquet" and len(sources) > 1
    ):  # read together, a file that lacks a column would get empty cells
        for key, some in files.items():
            for path in some:
                _check_columns(pq.read_schema(path).names, columns, str(path), sources[key])
    elif len(sources) > 1:
        alone = {
            key: _find({key: source}, columns, folder)[0][key] for key, source in sources.items()
        }
        return alone, where
    cache, named = (
        str(base_dir() / "task_cache"),
        {key: [str(path) for path in some] for key, some in files.items()},
    )
    return _read(
        where,
        builder,
        data_files=named,
        cache_dir=cache,
        advice="Copy the files again from their source",
    ), where


def _check_columns(
    names: Sequence[str], columns: Sequence[str], where: str, source: Published
) -> None:
    missing = [column for column in columns if column not in names]
    if missing:
        raise UserError(
            f"{where} lacks the columns {missing}; it has {list(names)}. Use the published files of {source.repo}",
            exit_code=2,
        )


def load_table(
    source: Published, columns: Sequence[str], folder: str | Path | None = None
) -> Table:
    """Load the rows of a published data set from `folder`, from NANOCHAT_TASK_DIR, or from the Hugging Face hub.

    columns: the columns that every row must have. UserError (exit 2) if the rows cannot be read or lack a column.
    """
    found, where = _open(
        {source.split: source}, columns, Path(folder).expanduser() if folder is not None else None
    )
    rows = found[source.split]
    log(f"{source.name} {source.split}: {len(rows):,} rows from {where}")
    return Table(rows, where)


def load_subjects(
    sources: Mapping[str, Published], columns: Sequence[str], folder: str | Path | None = None
) -> Table:
    """Load the rows of all subjects of a data set, like load_table; each row names its subject in `subject`."""
    found, where = _open(
        sources, columns, Path(folder).expanduser() if folder is not None else None
    )
    joined, first = (
        _Joined({subject: found[subject] for subject in sources}),
        next(iter(sources.values())),
    )
    log(f"{first.name} {first.split}: {len(joined):,} rows in {len(sources)} subjects from {where}")
    return Table(joined, where)


def one_of(what: str, given: str, allowed: Sequence[str]) -> str:
    """Return `given` if it is allowed; otherwise raise a UserError that lists the allowed values."""
    if given not in allowed:
        raise UserError(f"{what} must be one of {', '.join(allowed)}, got {given!r}")
    return given


# --- numbers and conversations -------------------------------------------------------------------

_NUMBER = re.compile(r"(?:(?<![\d.])-)?(?:\d[\d,]*)?(?:\d|\.\d+)")


def final_number(text: str) -> Fraction | None:
    """The number that a text ends with: the first number after the last `####`, or without `####` the last number.
    None if there is no number."""
    text = unicodedata.normalize("NFKC", text)
    _, marker, after = text.rpartition("####")
    found = _NUMBER.findall(after)
    number = (found[0] if marker else found[-1]) if found else ""
    return Fraction(number.replace(",", "")) if 0 < len(number) <= 64 else None


def read_messages(messages: Any) -> Conversation:
    """A conversation from a list of {"role", "content"}. ValueError names the rule that the list breaks.

    The rules: after an optional system message, user and assistant take turns, and the assistant speaks last. Every
    content is a text that is not empty. An assistant message with "weight": 0 or "loss": false is not trained, and
    at least one assistant message is.
    """
    if not isinstance(messages, list):
        raise ValueError(f"a conversation is a list of messages, got {type(messages).__name__}")
    turns: list[Message] = []
    for n, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f'message {n} must be an object with "role" and "content"')
        check_message(message, n)
        role, content = message["role"], message["content"]
        spoken = len([turn for turn in turns if turn.role != "system"])
        expected = "assistant" if spoken % 2 else "user"
        if role != expected and not (role == "system" and n == 1):
            raise ValueError(
                f"message {n} must have role {expected!r} (user and assistant take turns), got {role!r}"
            )
        if not isinstance(content, str):
            raise ValueError(
                f"the content of message {n} must be a text, got {type(content).__name__}"
            )
        if not content.strip():
            raise ValueError(f"the content of message {n} must be a text that is not empty")
        turns.append(Message(role, (Part("text", content),), is_trained(message, n)))
    if not turns or turns[-1].role != "assistant":
        raise ValueError("a conversation must end with a message of role 'assistant'")
    if not any(turn.trained for turn in turns if turn.role == "assistant"):
        raise ValueError(
            "every assistant message has weight 0 or loss false, so nothing is trained; remove the record"
        )
    return Conversation(tuple(turns))


class Ungraded:
    """Base of tasks that are only for training: they have no letters and cannot be graded."""

    kind: Literal["choice", "generative"] = "generative"
    name: str

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        raise UserError(
            f"{self.name} has no right answers, so it can only train a model; choose another task"
        )


# --- slices and mixtures -------------------------------------------------------------------------


class Subset:
    """Every `step`-th problem of a task from `start` to `stop`, or those that `numbers` lists."""

    def __init__(
        self,
        task: Task,
        start: int = 0,
        stop: int | None = None,
        step: int = 1,
        numbers: Sequence[int] | None = None,
    ):
        self.task = task
        self.name = task.name
        self.kind: Literal["choice", "generative"] = task.kind
        self._numbers = range(len(task))[start:stop:step] if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Conversation:
        return self.task[self._numbers[i]]

    def letters(self, i: int) -> tuple[str, ...]:
        return self.task.letters(self._numbers[i])

    def grade(self, i: int, reply: str) -> float:
        return self.task.grade(self._numbers[i], reply)


def first_places(numbers: np.ndarray) -> np.ndarray:  # (N,) int64, both
    """For each place of a list of numbers, the first place that has the same number."""
    _, first, which = np.unique(numbers, return_index=True, return_inverse=True)
    return first[which]


class TaskMixture:
    """Several tasks shuffled into one. A task that is given twice counts twice. The order depends only on the seed."""

    kind: Literal["choice", "generative"] = "generative"

    def __init__(self, tasks: Sequence[Task], seed: int = 42):
        self.tasks = list(tasks)
        self.name = "+".join(task.name for task in self.tasks)
        self._starts = np.cumsum([0] + [len(task) for task in self.tasks])
        self._order = np.random.default_rng(seed).permutation(int(self._starts[-1]))

    def __len__(self) -> int:
        return len(self._order)

    def locate(self, i: int) -> tuple[Task, int]:
        """The task that problem i comes from, and its number there."""
        number = self._order[i]
        which = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.tasks[which], int(number - self._starts[which])

    def originals(self) -> np.ndarray:  # (problems,) int64
        """For each problem, the place of its first copy: its own place, unless its task was given twice."""
        same = [
            next(k for k, other in enumerate(self.tasks) if other is task) for task in self.tasks
        ]
        which = np.searchsorted(self._starts, self._order, side="right") - 1
        return first_places(self._order - self._starts[which] + self._starts[np.array(same)[which]])

    def __getitem__(self, i: int) -> Conversation:
        task, number = self.locate(i)
        return task[number]

    def letters(self, i: int) -> tuple[str, ...]:
        task, number = self.locate(i)
        return task.letters(number)

    def grade(self, i: int, reply: str) -> float:
        task, number = self.locate(i)
        return task.grade(number, reply)

"""Shared by the tasks: loading rows, wording questions with choices, reading numbers, and slices and mixtures."""

import errno
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nanochat.common import UserError, base_dir, check_regular, log, rank, tr
from nanochat.data.conversation import Conversation, Message, Part, Task, chat
from nanochat.data.hub import endpoint, is_hub
from nanochat.data.shards import check_packing

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TYPES = {"parquet": "parquet", "jsonl": "json", "json": "json"}  # file ending -> builder of `datasets`, best first

# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A split of a data set on the Hugging Face hub.

    A copy of the hub's repository has its files (`<split>*.parquet` or `<split>*.jsonl`) in the folders `inside`, which
    are searched in this order.
    """

    repo: str
    subset: str | None
    split: str
    inside: tuple[str, ...]

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
            for ending in _TYPES:
                wanted = re.compile(rf"{re.escape(self.split)}([-_.].*)?\.{ending}")
                files = sorted(path for path in (folder / name).glob(f"*.{ending}") if wanted.fullmatch(path.name))
                if files:
                    return files
        return []

    def __str__(self) -> str:
        return f"{self.repo} ({', '.join(filter(None, (self.subset, self.split)))})"


def carry_in(repos: Sequence[str]) -> str:
    """How to get data sets of the hub onto this machine, in two sentences."""
    commands = [f"`hf download {repo} --repo-type dataset --local-dir {repo.rpartition('/')[2]}`" for repo in repos]
    return tr("Set HF_ENDPOINT to a mirror that this machine can reach. Or, on a machine with a network, run "
              "{commands}, copy what they fetch into a folder of this machine, and set NANOCHAT_TASK_DIR to that "
              "folder", commands=", ".join(commands))  # fmt: skip


class Table:
    """The rows of a data set in a seeded order, so that the first n rows are a random sample."""

    def __init__(self, rows: Any, source: str, seed: int = 42):
        self.source = source
        self._rows = rows
        self._order = np.random.default_rng(seed).permutation(len(rows))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._rows[int(self._order[i])]


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
        text = tr("{where} cannot be read: {cause}. {advice}", where=where, cause=cause, advice=advice)
        raise UserError(text, exit_code=2) from failure


def _check_files(files: Sequence[Path]) -> None:
    """UserError for a file that would fill the memory when it is read."""
    for path in files:
        try:
            check_regular(path, most=path.stat().st_size)
            if path.suffix == ".parquet":
                check_packing(path)
        except (OSError, ValueError) as failure:
            raise UserError(f"{path} cannot be read: {failure}. Copy the file again from its source", 2) from failure


def load_table(source: Published, columns: Sequence[str], folder: str | Path | None = None) -> Table:
    """Load the rows of a published data set from `folder`, from NANOCHAT_TASK_DIR, or from the Hugging Face hub.

    columns: the columns that every row must have. UserError (exit 2) if the rows cannot be read or lack a column.
    """
    name, split = source.name, source.split
    folder = Path(folder).expanduser() if folder is not None else source.local_folder()
    if folder is not None:
        files = source.files(folder)
        if not files:
            wanted = " or ".join(str(folder / one / f"{split}*.parquet|jsonl") for one in source.inside)
            raise UserError(
                f"there are no rows of {name} ({split}) in {folder}: looked for {wanted}. Copy one of these files "
                "there, or name another folder",
                exit_code=2,
            )
        where, advice = str(files[0].parent), "Copy the files again from their source"
        kind, cache = _TYPES[files[0].suffix[1:]], str(base_dir() / "task_cache")
        _check_files(files)
        named = {split: [str(path) for path in files]}
        rows = _read(where, kind, data_files=named, split=split, cache_dir=cache, advice=advice)
    else:
        where = str(source)
        token = None if is_hub(endpoint()) else False  # None is HF_TOKEN or the stored one
        rows = _read(where, source.repo, source.subset, split=split, token=token, advice=carry_in([source.repo]))
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise UserError(
            f"{where} lacks the columns {missing}; it has {rows.column_names}. Use the published files of "
            f"{source.repo}",
            exit_code=2,
        )
    log(f"{name} {split}: {len(rows):,} rows from {where}")
    return Table(rows, where)


def one_of(what: str, given: str, allowed: Sequence[str]) -> str:
    """Return `given` if it is allowed; otherwise raise a UserError that lists the allowed values."""
    if given not in allowed:
        raise UserError(f"{what} must be one of {', '.join(allowed)}, got {given!r}")
    return given


# --- questions with choices ----------------------------------------------------------------------


@dataclass(frozen=True)
class ChoiceProblem:
    """A question, its choices, and the position of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int


def render_choices(question: str, choices: Sequence[str]) -> str:
    """The text of a question with choices, as the user asks it.

    Each letter comes after its choice. Attention only looks back, so at that position a model has already seen what
    the letter stands for, which small models need. The letter is alone on its line, so that it is the same token as in
    the answer.
    """
    listed = "".join(f"{choice}\n{letter}\n" for choice, letter in zip(choices, LETTERS, strict=False))
    return f"{question}\n\nThe choices, each with its letter below it:\n{listed}\nAnswer with the letter."


class ChoiceTask:
    """A task of questions with choices, made from a table and a function `read` that reads one row."""

    kind: Literal["choice", "generative"] = "choice"

    def __init__(self, name: str, table: Table, read: Callable[[Mapping[str, Any]], ChoiceProblem]):
        self.name = name
        self._table = table
        self._read = read

    def __len__(self) -> int:
        return len(self._table)

    def problem(self, i: int) -> ChoiceProblem:
        """Problem i, checked: at least two choices, and the answer among them."""
        problem = self._read(self._table[i])
        if not (2 <= len(problem.choices) <= len(LETTERS) and 0 <= problem.answer < len(problem.choices)):
            raise UserError(
                f"{self._table.source}: the answer of a row must be one of its choices, got {problem}. Fix or remove "
                "the row."
            )
        return problem

    def __getitem__(self, i: int) -> Conversation:
        problem = self.problem(i)
        return chat(render_choices(problem.question, problem.choices), LETTERS[problem.answer])

    def letters(self, i: int) -> tuple[str, ...]:
        return tuple(LETTERS[: len(self.problem(i).choices)])

    def grade(self, i: int, reply: str) -> float:
        return float(reply.strip() == LETTERS[self.problem(i).answer])


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
    content is a text that is not empty.
    """
    if not isinstance(messages, list):
        raise ValueError(f"a conversation is a list of messages, got {type(messages).__name__}")
    turns: list[Message] = []
    for n, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f'message {n} must be an object with "role" and "content"')
        role, content = message["role"], message["content"]
        spoken = len([turn for turn in turns if turn.role != "system"])
        expected = "assistant" if spoken % 2 else "user"
        if role != expected and not (role == "system" and n == 1):
            raise ValueError(f"message {n} must have role {expected!r} (user and assistant take turns), got {role!r}")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"the content of message {n} must be a text that is not empty")
        turns.append(Message(role, (Part("text", content),)))
    if not turns or turns[-1].role != "assistant":
        raise ValueError("a conversation must end with a message of role 'assistant'")
    return Conversation(tuple(turns))


class Ungraded:
    """Base of tasks that are only for training: they have no letters and cannot be graded."""

    kind: Literal["choice", "generative"] = "generative"
    name: str

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        raise UserError(f"{self.name} has no right answers, so it can only train a model; choose another task")


# --- slices and mixtures -------------------------------------------------------------------------


class Subset:
    """Every `step`-th problem of a task from `start` to `stop`."""

    def __init__(self, task: Task, start: int = 0, stop: int | None = None, step: int = 1):
        self.task = task
        self.name = task.name
        self.kind: Literal["choice", "generative"] = task.kind
        self._numbers = range(len(task))[start:stop:step]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Conversation:
        return self.task[self._numbers[i]]

    def letters(self, i: int) -> tuple[str, ...]:
        return self.task.letters(self._numbers[i])

    def grade(self, i: int, reply: str) -> float:
        return self.task.grade(self._numbers[i], reply)


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

    def __getitem__(self, i: int) -> Conversation:
        task, number = self.locate(i)
        return task[number]

    def letters(self, i: int) -> tuple[str, ...]:
        task, number = self.locate(i)
        return task.letters(number)

    def grade(self, i: int, reply: str) -> float:
        task, number = self.locate(i)
        return task.grade(number, reply)

"""Functions and classes that the tasks share.

They check arguments, read numbers from texts, and build subsets and mixtures of tasks.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from nanochat.common import UserError, tr
from nanochat.data.conversation import Conversation, Task


def one_of(
    label: str,
    value: str,
    allowed: Sequence[str],
) -> str:
    """Return `value`, or raise UserError with the allowed values if it is not one of them."""
    if value not in allowed:
        raise UserError(
            tr(
                "{label} must be one of {allowed}, got {value!r}",
                label=label,
                allowed=", ".join(allowed),
                value=value,
            )
        )
    return value


# --- numbers -------------------------------------------------------------------------------------

# A sign may stand before the currency, as in -$5.
_NUMBER = re.compile(r"(?:(?<![\d.])-(?:\\?[$¥€£]\s*)?)?(?:\d[\d,]*)?(?:\d|\.\d+)")
_UNREAD = re.compile(r"[^\d.-]")  # in a number: its currency and what separates thousands
_EXPONENT = re.compile(r"[⁰¹²³⁴-⁹⁺⁻]+|\^\s*(?:\{[^{}]*\}|[-+]?\d+)")
# What is before, after or in a number that is no number of its own, as in 1/3, \frac{1}{3}, √3,
# x_1, 2:3, 1e5, 2 + 3, 2^5, 2π and 1,2. The second sign of each pair is the slash of ⅓ in NFKC.
_OPERATOR = r"(?:\d\s*[-*x]|[\d)}]\s*(?:[+×÷·]|\\(?:times|cdot|div)))\s*"
_BEFORE = re.compile(rf"(?:(?:[/⁄{{√]|\\sqrt)\s*|[^\W_]_|\d:|\d(?:e\+?)?|{_OPERATOR})$", re.I)
_AFTER = re.compile(r"\s*(?:\^|[/⁄]\s*\d|π|\\pi)")
_IN_LIST = re.compile(r",(?!\d{2,3}(?!\d))")


def in_one_form(text: str) -> str:
    """Return a text with characters of one width (NFKC), and with "-" for every minus sign."""
    return unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-")


def final_number(text: str, alone: bool = False) -> Fraction | None:
    """Return the final number in a text, or None if there is none.

    That is the first number after the last `####`, or the last number in a text without `####`;
    exponents, as in 12 cm², do not count. The result is also None if that number is longer than 64
    characters or, with `alone`, if it is part of a fraction, a power, a list or another formula.
    """
    _, marker, after = in_one_form(_EXPONENT.sub("^", text)).rpartition("####")
    numbers = list(_NUMBER.finditer(after))
    if not numbers:
        return None
    number = numbers[0 if marker else -1]
    in_formula = _BEFORE.search(after[: number.start()]) or _AFTER.match(after, number.end())
    if alone and (in_formula or _IN_LIST.search(number[0])):
        return None
    return Fraction(_UNREAD.sub("", number[0])) if len(number[0]) <= 64 else None


class Ungraded:
    """Base class of tasks that can only train a model: they have no letters and no grades."""

    kind: Literal["choice", "generative"] = "generative"
    name: str

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        raise UserError(
            tr(
                "{name} has no right answers, so it can only train a model; choose another task",
                name=self.name,
            )
        )


# --- slices and mixtures -------------------------------------------------------------------------


class Subset:
    """A subset of a task's problems.

    It has every `step`-th problem from `start` up to `stop`, or the problems whose indices are in
    `numbers`.
    """

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

    def record(self, i: int) -> Mapping[str, Any]:
        """Return the record of a problem as its file has it, or {} if the task has no records."""
        if not hasattr(self.task, "record"):
            return {}
        return self.task.record(self._numbers[i])  # pyright: ignore[reportAttributeAccessIssue]


def first_places(numbers: np.ndarray) -> np.ndarray:  # (N,) int64, both
    """Return, for each position in an array, the first position that holds the same value."""
    _, first_positions, number_index = np.unique(numbers, return_index=True, return_inverse=True)
    return first_positions[number_index]


class TaskMixture:
    """Several tasks shuffled into one, in an order that depends only on the seed.

    If a task is listed twice, its problems occur twice.
    """

    kind: Literal["choice", "generative"] = "generative"

    def __init__(self, tasks: Sequence[Task], seed: int = 42):
        self.tasks = list(tasks)
        self.name = "+".join(task.name for task in self.tasks)
        self._starts = np.cumsum([0] + [len(task) for task in self.tasks])
        self._order = np.random.default_rng(seed).permutation(int(self._starts[-1]))

    def __len__(self) -> int:
        return len(self._order)

    def locate(self, i: int) -> tuple[Task, int]:
        """Return the task that problem i comes from, and the index of the problem in that task."""
        position = self._order[i]
        task_number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self.tasks[task_number], int(position - self._starts[task_number])

    def originals(self) -> np.ndarray:  # (problems,) int64
        """Return, for each position, the position of the first copy of its problem.

        Only problems of a task that is listed twice have copies.
        """
        task_numbers = np.searchsorted(self._starts, self._order, side="right") - 1
        numbers_in_task = self._order - self._starts[task_numbers]
        first_listed = np.array([self._first_listed(task) for task in self.tasks])
        return first_places(numbers_in_task + self._starts[first_listed[task_numbers]])

    def _first_listed(self, task: Task) -> int:
        return next(k for k, listed in enumerate(self.tasks) if listed is task)

    def __getitem__(self, i: int) -> Conversation:
        task, number = self.locate(i)
        return task[number]

    def letters(self, i: int) -> tuple[str, ...]:
        task, number = self.locate(i)
        return task.letters(number)

    def grade(self, i: int, reply: str) -> float:
        task, number = self.locate(i)
        return task.grade(number, reply)

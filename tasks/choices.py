"""Questions with choices: how a chat asks them, and how a text poses them to a model that continues it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nanochat.common import UserError
from nanochat.data.conversation import Cloze, Conversation, assistant, chat, user
from tasks.common import Table

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class ChoiceProblem:
    """A question, its choices, and the position of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int
    subject: str = ""
    id: str = ""  # as the data set numbers its questions; empty if it does not


def render_choices(question: str, choices: Sequence[str]) -> str:
    """The text of a question with choices, as the user asks it.

    Each letter comes after its choice. Attention only looks back, so at that position a model has already seen what
    the letter stands for, which small models need. The letter is alone on its line, so that it is the same token as in
    the answer.
    """
    listed = "".join(
        f"{choice}\n{letter}\n" for choice, letter in zip(choices, LETTERS, strict=False)
    )
    return f"{question}\n\nThe choices, each with its letter below it:\n{listed}\nAnswer with the letter."


@dataclass(frozen=True)
class Plain:
    """How a text poses the questions of a task; the wordings are those of lm-evaluation-harness.

    With `lettered`, the choices are listed and the model continues with a letter; else it continues with a choice.
    """

    intro: Callable[[str], str] = lambda subject: ""  # before the first example, of the subject
    opening: str = ""
    cue: str = "\nAnswer:"
    lettered: bool = True

    def pose(self, problem: ChoiceProblem) -> str:
        """The question up to where the answer follows."""
        if not self.lettered:
            return f"{self.opening}{problem.question}{self.cue}"
        listed = "".join(
            f"\n{letter}. {one}" for letter, one in zip(LETTERS, problem.choices, strict=False)
        )
        return f"{self.opening}{problem.question.strip()}{listed}{self.cue}"

    def answers(self, problem: ChoiceProblem) -> tuple[str, ...]:
        """What the model may continue with, one for each choice."""
        return tuple(LETTERS[: len(problem.choices)]) if self.lettered else problem.choices


class ChoiceTask:
    """A task of questions with choices, made from a table and a function `read` that reads one row.

    `examples` has questions with answers to show before each question, of the same subject: a function of the subject
    and their number. `shots` is how many are shown.
    """

    kind: Literal["choice", "generative"] = "choice"

    def __init__(
        self,
        name: str,
        table: Table,
        read: Callable[[Mapping[str, Any]], ChoiceProblem],
        plain: Plain | None = None,
        examples: Table | None = None,
        shots: int = 0,
    ):
        self.name, self.shots = name, shots
        self._table, self._read = table, read
        self._plain = plain or Plain()
        self._examples = _by_subject(examples, read) if examples is not None and shots else {}

    def __len__(self) -> int:
        return len(self._table)

    def problem(self, i: int) -> ChoiceProblem:
        """Problem i, checked: at least two choices, and the answer among them."""
        return _checked(self._read(self._table[i]), self._table.source)

    def identify(self, i: int) -> str:
        """The name of problem i in records: its subject and number, as published."""
        problem = self.problem(i)
        return "/".join(filter(None, (problem.subject, problem.id or str(self._table.number(i)))))

    def group(self, i: int) -> str:
        """The subject of problem i; reports give figures per subject."""
        return self.problem(i).subject or self.name

    def _shown(self, problem: ChoiceProblem) -> list[ChoiceProblem]:
        return self._examples.get(problem.subject, [])[: self.shots]

    def __getitem__(self, i: int) -> Conversation:
        problem = self.problem(i)
        asked = chat(render_choices(problem.question, problem.choices), LETTERS[problem.answer])
        shown = [
            message
            for one in self._shown(problem)
            for message in (
                user(render_choices(one.question, one.choices)),
                assistant(LETTERS[one.answer]),
            )
        ]
        return Conversation((*shown, *asked.messages))

    def cloze(self, i: int) -> Cloze:
        """Problem i as a text to continue, with examples before it."""
        problem, plain = self.problem(i), self._plain
        shown = [
            f"{plain.pose(one)} {plain.answers(one)[one.answer]}\n\n"
            for one in self._shown(problem)
        ]
        return Cloze(
            plain.intro(problem.subject),
            tuple(shown),
            plain.pose(problem),
            plain.answers(problem),
            problem.answer,
        )

    def letters(self, i: int) -> tuple[str, ...]:
        return tuple(LETTERS[: len(self.problem(i).choices)])

    def grade(self, i: int, reply: str) -> float:
        return float(reply.strip() == LETTERS[self.problem(i).answer])


def _checked(problem: ChoiceProblem, where: str) -> ChoiceProblem:
    if not (
        2 <= len(problem.choices) <= len(LETTERS) and 0 <= problem.answer < len(problem.choices)
    ):
        raise UserError(
            f"{where}: the answer of a row must be one of its choices, got {problem}. Fix or remove the row."
        )
    return problem


def _by_subject(
    table: Table, read: Callable[[Mapping[str, Any]], ChoiceProblem]
) -> dict[str, list[ChoiceProblem]]:
    """The examples of each subject in the order in which they were published."""
    found: dict[str, list[ChoiceProblem]] = {}
    for i in sorted(range(len(table)), key=table.number):
        problem = _checked(read(table[i]), table.source)
        found.setdefault(problem.subject, []).append(problem)
    return found


def letter_columns(
    row: Mapping[str, Any], question: str, answer: str, letters: str = "ABCD"
) -> ChoiceProblem:
    """A row that has a column for the question, one for each choice, and one for the letter of the answer."""
    right = str(row[answer]).strip()
    place = letters.find(right) if len(right) == 1 else -1
    identity = "" if row.get("id") is None else str(row["id"])
    return ChoiceProblem(
        row[question], tuple(str(row[one]) for one in letters), place, row["subject"], identity
    )

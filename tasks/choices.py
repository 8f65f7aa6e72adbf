"""Multiple-choice questions, for chat models and for base models, which only continue a text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nanochat.common import UserError, tr
from nanochat.data.conversation import Cloze, Conversation, Message, assistant, user
from tasks.published import Table

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class ChoiceProblem:
    """A question, its choices, and the index of the right choice."""

    question: str
    choices: tuple[str, ...]
    answer: int
    subject: str = ""
    id: str = ""  # as the data set numbers its questions; empty if it does not


def render_choices(question: str, choices: Sequence[str]) -> str:
    """Return a question and its choices as a user message.

    Each letter comes after its choice. Attention only looks back, so when a model reads a letter,
    it has already seen what the letter stands for, which small models need. Each letter is alone on
    its line, so that it is the same token as in the answer.
    """
    lines = [question, "", "The choices, each with its letter below it:"]
    for choice, letter in zip(choices, LETTERS, strict=False):
        lines += [choice, letter]
    lines += ["", "Answer with the letter."]
    return "\n".join(lines)


@dataclass(frozen=True)
class Plain:
    """Phrases the questions of a task as text for a base model to continue.

    The wordings are those of lm-evaluation-harness. If `lettered` is set, the choices are listed
    and the model continues with a letter. Otherwise it continues with the text of a choice.
    """

    intro: Callable[[str], str] = lambda subject: ""  # the text before the first example
    opening: str = ""
    cue: str = "\nAnswer:"
    lettered: bool = True

    def pose(self, problem: ChoiceProblem) -> str:
        """Return the text of a question, up to the point where the answer follows."""
        if not self.lettered:
            return f"{self.opening}{problem.question}{self.cue}"
        lines = [problem.question.strip()]
        for letter, choice in zip(LETTERS, problem.choices, strict=False):
            lines.append(f"{letter}. {choice}")
        question = "\n".join(lines)
        return f"{self.opening}{question}{self.cue}"

    def answers(self, problem: ChoiceProblem) -> tuple[str, ...]:
        """Return the possible continuations, one for each choice."""
        return _letters(problem) if self.lettered else problem.choices


class ChoiceTask:
    """A task of multiple-choice questions that are read from a table.

    `to_problem` converts a row of a table to a problem. `examples` is a table of questions with
    answers, and the first `shots` of them with the same subject precede each question.
    """

    kind: Literal["choice", "generative"] = "choice"

    def __init__(
        self,
        name: str,
        table: Table,
        to_problem: Callable[[Mapping[str, Any]], ChoiceProblem],
        plain: Plain | None = None,
        examples: Table | None = None,
        shots: int = 0,
    ):
        self.name = name
        self.shots = shots
        self._table = table
        self._to_problem = to_problem
        self._plain = plain or Plain()
        self._examples: dict[str, list[ChoiceProblem]] = {}
        if examples is not None and shots:
            self._examples = _by_subject(examples, to_problem)

    def __len__(self) -> int:
        return len(self._table)

    def problem(self, i: int) -> ChoiceProblem:
        """Return problem i.

        Raises UserError if it does not have 2 to 26 choices, or if its answer is not one of them.
        """
        return _checked(self._to_problem(self._table[i]), self._table.source)

    def identify(self, i: int) -> str:
        """Return the name by which records identify problem i, such as anatomy/17.

        It consists of the subject, if there is one, and the id of the problem. A data set without
        ids gives the position of the row in the published files.
        """
        problem = self.problem(i)
        number = problem.id or str(self._table.number(i))
        return f"{problem.subject}/{number}" if problem.subject else number

    def group(self, i: int) -> str:
        """Return the group of problem i in reports: its subject, or else the task's name."""
        return self.problem(i).subject or self.name

    def _examples_for(self, problem: ChoiceProblem) -> list[ChoiceProblem]:
        return self._examples.get(problem.subject, [])[: self.shots]

    def __getitem__(self, i: int) -> Conversation:
        problem = self.problem(i)
        messages: list[Message] = []
        for item in (*self._examples_for(problem), problem):
            messages.append(user(render_choices(item.question, item.choices)))
            messages.append(assistant(LETTERS[item.answer]))
        return Conversation(tuple(messages))

    def cloze(self, i: int) -> Cloze:
        """Return problem i as a text to continue, preceded by its examples."""
        problem = self.problem(i)
        plain = self._plain
        examples = []
        for example in self._examples_for(problem):
            answer = plain.answers(example)[example.answer]
            examples.append(f"{plain.pose(example)} {answer}\n\n")
        return Cloze(
            intro=plain.intro(problem.subject),
            examples=tuple(examples),
            question=plain.pose(problem),
            choices=plain.answers(problem),
            answer=problem.answer,
        )

    def letters(self, i: int) -> tuple[str, ...]:
        return _letters(self.problem(i))

    def grade(self, i: int, reply: str) -> float:
        return float(reply.strip() == LETTERS[self.problem(i).answer])


def _letters(problem: ChoiceProblem) -> tuple[str, ...]:
    return tuple(LETTERS[: len(problem.choices)])


def _checked(problem: ChoiceProblem, where: str) -> ChoiceProblem:
    count = len(problem.choices)
    if not 2 <= count <= len(LETTERS) or not 0 <= problem.answer < count:
        raise UserError(
            tr(
                "{where}: the answer of a row must be one of its choices, got {problem}. "
                "Fix or remove the row.",
                where=where,
                problem=problem,
            )
        )
    return problem


def _by_subject(
    table: Table, to_problem: Callable[[Mapping[str, Any]], ChoiceProblem]
) -> dict[str, list[ChoiceProblem]]:
    """Return the examples of each subject, in the order in which they were published."""
    examples: dict[str, list[ChoiceProblem]] = {}
    for i in table.in_published_order():
        problem = _checked(to_problem(table[i]), table.source)
        examples.setdefault(problem.subject, []).append(problem)
    return examples


def letter_columns(
    row: Mapping[str, Any],
    question: str,
    answer: str,
    letters: str = "ABCD",
) -> ChoiceProblem:
    """Return the problem in a row that has a column for each choice.

    `question` and `answer` name the columns with the question and with the letter of the answer. An
    unknown letter gives the answer -1.
    """
    answer_letter = str(row[answer]).strip()
    return ChoiceProblem(
        question=row[question],
        choices=tuple(str(row[letter]) for letter in letters),
        answer=letters.find(answer_letter) if len(answer_letter) == 1 else -1,
        subject=row["subject"],
        id="" if row.get("id") is None else str(row["id"]),
    )

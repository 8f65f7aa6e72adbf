"""Conversations, and the protocol of a task that asks questions and grades replies."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]
Kind = Literal["text", "python", "python_output"]


@dataclass(frozen=True)
class Part:
    """A piece of an assistant message: words, a call of the calculator, or the calculator's output."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Message:
    """One turn. User and system turns hold one text part; assistant turns may hold tool calls and outputs."""

    role: Role
    parts: tuple[Part, ...]
    # Whether the assistant is trained to write this turn; no part of the text, as `given` of a conversation.
    trained: bool = field(default=True, repr=False)

    @property
    def text(self) -> str:
        """The words of the turn, without tool calls and their outputs."""
        return "".join(part.text for part in self.parts if part.kind == "text")


@dataclass(frozen=True)
class Conversation:
    """Turns in order: an optional system turn, then user and assistant turns that alternate."""

    messages: tuple[Message, ...]
    # How many turns at the beginning the assistant is not trained to write; no part of the text, so that names of tasks
    # that are made from it stay as they are.
    given: int = field(default=0, repr=False)

    @property
    def prompt(self) -> "Conversation":
        """What a model is asked: the conversation without its last turn, if the assistant speaks last."""
        last = self.messages[-1]
        return Conversation(self.messages[:-1]) if last.role == "assistant" else self


def user(text: str) -> Message:
    """A user turn."""
    return Message("user", (Part("text", text),))


def system(text: str) -> Message:
    """A system turn: an instruction for the whole conversation."""
    return Message("system", (Part("text", text),))


def assistant(*parts: str | Part) -> Message:
    """An assistant turn from texts and parts, in order."""
    return Message(
        "assistant", tuple(Part("text", part) if isinstance(part, str) else part for part in parts)
    )


def chat(question: str, *answer: str | Part) -> Conversation:
    """A conversation of one question and its answer."""
    return Conversation((user(question), assistant(*answer)))


@dataclass(frozen=True)
class Cloze:
    """A question for a model that continues a text: the likeliest of `choices`, after a space, is its answer.

    The text is `intro`, then `examples`, which may be left out from the first on, then `question`.
    """

    intro: str
    examples: tuple[str, ...]
    question: str
    choices: tuple[str, ...]
    answer: int  # the place of the right choice


class Task(Protocol):
    """A set of conversations. The last turn of each conversation is the reference answer.

    A problem of a `choice` task has one right letter, and the model answers with the likeliest of `letters(i)`. A
    problem of a `generative` task is answered in words, which `grade` grades.
    """

    @property
    def name(self) -> str:
        """The name of the task in reports and on command lines."""
        ...

    @property
    def kind(self) -> Literal["choice", "generative"]:
        """How a model answers the problems: with a letter, or in words."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Conversation: ...

    def letters(self, i: int) -> tuple[str, ...]:
        """The letters to choose from in problem i; empty for generative tasks."""
        ...

    def grade(self, i: int, reply: str) -> float:
        """The score of a reply to problem i, in [0, 1]; 1 is right. In choice tasks the reply is a letter."""
        ...

"""What a chat is, and what a task that asks and grades one looks like."""

from dataclasses import dataclass
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]
Kind = Literal["text", "python", "python_output"]


@dataclass(frozen=True)
class Part:
    """A piece of an assistant message: words, a call of the calculator, or what the calculator answered."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Message:
    """One turn. User and system turns hold one text part; assistant turns may hold tool calls and outputs."""

    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The words of the turn, without tool calls and their outputs."""
        return "".join(part.text for part in self.parts if part.kind == "text")


@dataclass(frozen=True)
class Conversation:
    """Turns in order: an optional system turn, then user and assistant in alternation."""

    messages: tuple[Message, ...]

    @property
    def prompt(self) -> "Conversation":
        """The conversation without its last turn, if that is the assistant's: what a model is asked."""
        last = self.messages[-1]
        return Conversation(self.messages[:-1]) if last.role == "assistant" else self


def user(text: str) -> Message:
    """A user turn."""
    return Message("user", (Part("text", text),))


def system(text: str) -> Message:
    """A system turn: what holds for the whole conversation."""
    return Message("system", (Part("text", text),))


def assistant(*parts: str | Part) -> Message:
    """An assistant turn from texts and parts, in order."""
    return Message("assistant", tuple(Part("text", part) if isinstance(part, str) else part for part in parts))


def chat(question: str, *answer: str | Part) -> Conversation:
    """A conversation of one question and its answer."""
    return Conversation((user(question), assistant(*answer)))


class Task(Protocol):
    """A set of conversations; the last turn of each is the reference answer.

    `choice` tasks have one right letter among `letters(i)`, and are answered by the likeliest of them;
    `generative` tasks are answered in words and graded by `grade`.
    """

    @property
    def name(self) -> str:
        """How reports call it."""
        ...

    @property
    def kind(self) -> Literal["choice", "generative"]:
        """How it is answered."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Conversation: ...

    def letters(self, i: int) -> tuple[str, ...]:
        """The letters to choose from in problem i; empty for generative tasks."""
        ...

    def grade(self, i: int, reply: str) -> float:
        """The score of a reply to problem i, in [0, 1]; 1 is right. For choice tasks the reply is a letter."""
        ...

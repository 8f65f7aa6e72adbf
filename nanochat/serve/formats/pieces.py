"""The internal form of a reply, from which every route writes: a sequence of pieces.

A parser turns the text of a reply into pieces as the text arrives. However the text is cut, the
pieces of one kind that follow each other add up to the same texts.
"""

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nanochat.data.conversation import Part


@dataclass(frozen=True)
class Thought:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Words:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """The beginning of a call of one of the client's functions."""

    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


@dataclass(frozen=True)
class Arguments:
    """The next characters of the arguments of the latest call, which are JSON together.

    If the model broke the call off, or wrote something other than JSON, they are not valid JSON.
    """

    text: str


@dataclass(frozen=True)
class Calculation:
    """A call of our own calculator; `result` is None if no result followed."""

    expression: str
    result: str | None


Piece = Thought | Words | Call | Arguments | Calculation


class Parser(Protocol):
    """Turns the text of a reply into pieces."""

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """Add text, and return the pieces that it completes; `last` ends the reply."""
        ...


def add_piece(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or extend the last one if both are texts of one kind; skip empty texts."""
    if isinstance(piece, Thought | Words | Arguments):
        if not piece.text:
            return
        last = pieces[-1] if pieces else None
        if isinstance(last, Thought | Words | Arguments) and type(last) is type(piece):
            pieces[-1] = replace(last, text=last.text + piece.text)
            return
    pieces.append(piece)


def first_mark(text: str, marks: Collection[str]) -> tuple[int, str] | None:
    """Return the index of the first of the marks in a text, and the mark, or None."""
    places = [(text.find(mark), mark) for mark in marks]
    return min((place for place in places if place[0] >= 0), default=None)


def open_beginning(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of one of the marks."""
    longest = min(max(map(len, marks)) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def parts_as_request(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return the parts of a reply as the dicts in which a client of ours sends them back.

    The part before a result must be its call.
    """
    sent: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "text":
            sent.append({"type": "text", "text": part.text})
        elif part.kind == "python":
            sent.append({"type": "tool", "expression": part.text, "result": None})
        else:
            sent[-1]["result"] = part.text
    return sent

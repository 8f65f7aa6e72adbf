"""Collects the pieces of a growing reply: thoughts, words, calculations and calls of functions.

The tokens spell Parts. A client gets Pieces, and may send back what Reply.parts holds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanochat.data.conversation import Part
from nanochat.serve.formats.bare_calls import BareCalls
from nanochat.serve.formats.json_calls import JsonCalls
from nanochat.serve.formats.listed_calls import ListedCalls
from nanochat.serve.formats.marked_calls import MarkedCalls
from nanochat.serve.formats.pieces import (
    Arguments,
    Calculation,
    Call,
    Piece,
    Thought,
    Words,
    add_piece,
)
from nanochat.serve.formats.thoughts import Marks, Thoughts, thought_state
from nanochat.serve.formats.xml_calls import XmlCalls
from nanochat.serve.routes.tools import NONE, Tools
from nanochat.tokenizer import Tokenizer

# By the form of calls. A model whose template has none is told to write calls as "json".
PARSERS: Mapping[str | None, Callable[[Mapping[str, Any]], MarkedCalls]] = {
    None: JsonCalls,
    "json": JsonCalls,
    "xml": XmlCalls,
    "list": ListedCalls,
    "args": ListedCalls,
    "bare": BareCalls,
}


@dataclass(frozen=True)
class Form:
    """How the model writes a reply."""

    tools: Tools = NONE
    calls: str | None = None  # the form of calls, a key of PARSERS; None if the template has none
    marks: Marks | None = None  # around thoughts; None for a model that does not think
    opened: bool = False  # whether the prompt has opened the thought
    closed: bool = False  # whether the prompt has closed it, so that the reply has none
    strips_space: bool = False  # whether a space at the beginning of the reply is left out
    specials: Mapping[str, int] = field(default_factory=dict)  # special tokens, by their spelling


def form_of(
    prompt: list[int],
    tools: Tools,
    tokenizer: Tokenizer,
) -> Form:
    """Return the form of a reply to a prompt, by what the model's template writes."""
    thoughts = thought_state(prompt, tokenizer)
    return Form(tools, tokenizer.call_format, *thoughts, tokenizer.strips_space, tokenizer.specials)


class Reply:
    """Turns the parts of a growing reply into pieces, and collects them.

    White space is left out around calls, and after a thought that ends the reply.
    """

    def __init__(self, form: Form = Form()) -> None:
        self.thought = ""
        self.calls: list[dict[str, Any]] = []  # in OpenAI's format
        self.parts: list[dict[str, Any]] = []  # texts and calculations
        self.thought_tokens = 0
        self._thoughts = Thoughts(form.marks, form.opened) if form.marks else None
        self._calls: MarkedCalls | None = None
        if form.tools.parameters:
            self._calls = PARSERS[form.calls](form.tools.parameters)
        self._has_one_call = form.tools.parallel is False
        self._strips_space = form.strips_space
        self._is_over = False  # whether nothing more is passed on, after the only call
        self._expression: str | None = None  # the calculator call that still waits for its result
        self._blank = ""  # white space, which is passed on only if words follow
        self._holds_blank = self._calls is not None

    @property
    def text(self) -> str:
        """The text of the answer so far, without calls."""
        return "".join(part["text"] for part in self.parts if part["type"] == "text")

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message in OpenAI's format, with `parts` if it has calculations."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            message |= {"reasoning_content": self.thought, "reasoning": self.thought}
        if any(part["type"] == "tool" for part in self.parts):
            message["parts"] = self.parts
        if self.calls:
            message |= {"tool_calls": self.calls, "content": self.text or None}
        return message

    def add(self, parts: Iterable[Part], last: bool = False) -> list[Piece]:
        """Add the parts that one token completes, and return the pieces that can be passed on.

        With `last`, the reply ends, and nothing is held back any more. Until then, a calculator
        call waits for its result, and text that may belong to a mark or a call for more text.
        """
        was_thinking = self._thinking
        pieces: list[Piece] = []
        for part in parts:
            if part.kind == "python_output":
                self._end_calculation(part.text, pieces)
                continue
            self._end_calculation(None, pieces)
            if part.kind == "python":
                self._add_held_words(pieces)
                self._expression = part.text
            else:
                self._add_text(part.text, pieces)
        if last:
            self._end_calculation(None, pieces)
            self._add_text("", pieces, last=True)
        if was_thinking or self._thinking:
            self.thought_tokens += 1
        return pieces

    @property
    def _thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.thinking

    def _add_text(self, text: str, pieces: list[Piece], last: bool = False) -> None:
        """Add what a text completes to `pieces`."""
        if self._strips_space and text:
            text = text.removeprefix(" ")
            self._strips_space = False
        parsed: list[Piece] = [Words(text)]
        if self._thoughts:
            parsed = self._thoughts.push(text, last)
        words = ""
        for piece in parsed:
            if isinstance(piece, Words):
                words += piece.text
            else:
                self._add_piece(piece, pieces)
        answer = self._calls.push(words, last) if self._calls else [Words(words)]
        for piece in answer:
            self._add_piece(piece, pieces)
        if last and self._blank and not self.calls and not self.thought:
            self._holds_blank = False
            self._add_piece(Words(""), pieces)

    def _add_held_words(self, pieces: list[Piece]) -> None:
        """Add to `pieces` the words that were held back because they may begin the mark of a call."""
        if self._calls:
            for piece in self._calls.held_words():
                self._add_piece(piece, pieces)

    def _add_piece(self, piece: Piece, pieces: list[Piece]) -> None:
        """Collect a piece, and add it to `pieces`."""
        if isinstance(piece, Words):
            text = self._blank + piece.text
            if self._holds_blank and not text.strip():
                self._blank = text
                return
            self._blank = ""
            piece = Words(text)
        if isinstance(piece, Call) and self.calls and self._has_one_call:
            self._is_over = True
        if self._is_over:
            return
        if isinstance(piece, Thought):
            self.thought += piece.text
        elif isinstance(piece, Words):
            add_text(self.parts, piece.text)
        elif isinstance(piece, Call):
            function = {"name": piece.name, "arguments": ""}
            self.calls.append({"id": piece.id, "type": "function", "function": function})
            self._blank = ""
        elif isinstance(piece, Arguments):
            self.calls[-1]["function"]["arguments"] += piece.text
        if not isinstance(piece, Calculation):
            self._holds_blank = isinstance(piece, Call | Arguments)
        add_piece(pieces, piece)

    def _end_calculation(self, result: str | None, pieces: list[Piece]) -> None:
        """End the calculator call that waits for its result, if any."""
        if self._expression is None:
            return
        calculation = Calculation(self._expression, result)
        self._expression = None
        self.parts.append({"type": "tool", "expression": calculation.expression, "result": result})
        self._add_piece(calculation, pieces)


def add_text(parts: list[dict[str, Any]], text: str) -> None:
    """Append text to the parts of a reply, extending the last part if that is text."""
    if not text:
        return
    if parts and parts[-1]["type"] == "text":
        parts[-1]["text"] += text
    else:
        parts.append({"type": "text", "text": text})

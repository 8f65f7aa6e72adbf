"""The reply to a request: the events that report its tokens, and the meaning of those tokens.

An Event reports one token, and a Completion collects a whole reply. TextStream turns tokens into
text and calculator calls, StoppedReply also looks for stop strings, and Calls follows the
calculator calls that the engine answers.
"""

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nanochat.common import tr
from nanochat.data.calculator import calculate
from nanochat.data.conversation import Kind, Part
from nanochat.tokenizer import Tokenizer

Finish = Literal["stop", "length", "error"]
# The most likely tokens, each with its log-probability, most likely first.
Alternatives = tuple[tuple[int, float], ...]
FAILED = "error"  # the answer to a calculator call that is not a valid calculation
# Roles of the tokens that open a calculator call or its answer, and of those that return to text.
OPENING_ROLES: dict[str, Kind] = {"python_start": "python", "output_start": "python_output"}
CLOSING_ROLES = (
    "bos",
    "user_start",
    "user_end",
    "assistant_start",
    "assistant_end",
    "python_end",
    "output_end",
)


def broken_model() -> str:
    """Return the message to users for when Event.broken ends a reply."""
    return tr(
        "the model gives NaN instead of probabilities: its weights are damaged, or its numbers "
        "are too large for this format. Try --dtype float32, or name another step or model"
    )


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """A prompt token, with its natural-log probability given the tokens before it."""

    token: int
    logprob: float
    alternatives: Alternatives = ()


@dataclass(frozen=True)
class Event:
    """One token of a reply, as the engine reports it.

    A `forced` token was not sampled: the engine wrote it as part of a calculator answer.
    """

    request: int
    token: int
    # Natural log of the token's probability over all tokens at temperature 1; 0 if forced.
    logprob: float
    forced: bool
    # Set on the last token only: "stop" at an end mark or a stop string or token, "length" when no
    # room is left, "error" when the schema takes too much work or the model is `broken`, so that
    # the reply is incomplete.
    finish: Finish | None
    alternatives: Alternatives = ()  # as many as Sampling.logprobs asks for
    # On the first token: how many prompt tokens did not have to be read again.
    reused: int = 0
    # On the first token, if requested: the scores of all prompt tokens but the first.
    prompt_scores: Sequence[Scored] = ()
    # What to show if the request has stop strings, without text that may begin a stop string.
    # None: decode the token.
    parts: tuple[Part, ...] | None = None
    # The request's stop string or stop token that ended the reply.
    matched: str | int | None = None

    @property
    def broken(self) -> bool:
        """True if the model gave NaN instead of probabilities, so that the token means nothing."""
        return math.isnan(self.logprob)


@dataclass
class Completion:
    """A whole reply: every token, including an end mark, with its log-probability.

    `forced` says which tokens were not sampled. The other fields are as in Event.
    """

    tokens: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    alternatives: list[Alternatives] = field(default_factory=list)
    reused: int = 0
    prompt_scores: Sequence[Scored] = ()
    parts: list[Part] | None = None
    matched: str | int | None = None

    def add(self, event: Event) -> None:
        """Append the token of an event, and update the other fields."""
        self.tokens.append(event.token)
        self.forced.append(event.forced)
        self.logprobs.append(event.logprob)
        self.finish = event.finish
        self.reused += event.reused
        self.prompt_scores = event.prompt_scores or self.prompt_scores
        self.matched = event.matched
        if event.alternatives or self.alternatives:
            self.alternatives.append(event.alternatives)
        if event.parts is not None:
            self.parts = [*(self.parts or []), *event.parts]


# --- text ----------------------------------------------------------------------------------------


class TextStream:
    """Turns the tokens of a reply into parts, token by token.

    Text is returned as soon as its characters are complete; a calculator call or answer is returned
    as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, strips_space: bool = False):
        """Begin a reply; with `strips_space`, a space at the beginning of its text is left out."""
        self._tokenizer = tokenizer
        self._strips_space = strips_space
        # mark -> the kind of part that follows it
        self._marks: dict[int, Kind] = {}
        for role, kind in OPENING_ROLES.items():
            self._marks[tokenizer.special(role)] = kind
        for role in CLOSING_ROLES:
            self._marks[tokenizer.special(role)] = "text"
        for token in tokenizer.stops:
            self._marks[token] = "text"
        self._kind: Kind = "text"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._call = ""

    @property
    def kind(self) -> Kind:
        """The kind of part that the next token belongs to, unless that token is a mark."""
        return self._kind

    def is_mark(self, token: int) -> bool:
        """Return whether a token is a mark, which stands for no text."""
        return token in self._marks

    def push(self, token: int) -> list[Part]:
        """Add a token, and return the parts that it completes, often none."""
        if token in self._marks:
            parts = self.flush()
            self._kind = self._marks[token]
            return parts
        text = self._decoder.decode(self._tokenizer.decode_bytes([token]))
        if self._kind == "text":
            if self._strips_space and text:
                text = text.removeprefix(" ")
                self._strips_space = False
            return text_parts(text)
        self._call += text
        return []

    def flush(self) -> list[Part]:
        """Return what is left as a list of at most one part; a partial character becomes U+FFFD."""
        text = self._call + self._decoder.decode(b"", final=True)
        self._call = ""
        return [Part(self._kind, text)] if text else []


def text_parts(text: str) -> list[Part]:
    """Return a text as a list of one part, or an empty list for an empty text."""
    return [Part("text", text)] if text else []


def reply_parts(tokens: Iterable[int], tokenizer: Tokenizer, continues: bool = False) -> list[Part]:
    """Return the parts of a whole reply, in order: text, calculator calls and their answers.

    If the tokenizer strips the space at the beginning of a text, so does this, unless the reply
    `continues` the text of its prompt.
    """
    stream = TextStream(tokenizer, tokenizer.strips_space and not continues)
    streamed = [piece for token in tokens for piece in stream.push(token)]
    parts: list[Part] = []
    for piece in streamed + stream.flush():
        if parts and piece.kind == "text" == parts[-1].kind:
            parts[-1] = Part("text", parts[-1].text + piece.text)
        else:
            parts.append(piece)
    return parts


# --- stop strings --------------------------------------------------------------------------------


class StopText:
    """Passes text on, but holds back its end if a stop string may begin there."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, stops), default=1) - 1
        self._withheld = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that can be shown, and the first complete stop string or None.

        If two stop strings begin at the same character, the longer one counts.
        """
        text = self._withheld + text
        match = self._first_match(text)
        if match is not None:
            start, stop = match
            self._withheld = ""
            return text[:start], stop
        shown_length = len(text) - self._open_beginning(text)
        self._withheld = text[shown_length:]
        return text[:shown_length], None

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return the index at which the first stop string begins and that string, or None."""
        starts = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start, -len(stop), stop) for start, stop in starts if start >= 0]
        if not matches:
            return None
        start, _, stop = min(matches)
        return start, stop

    def _open_beginning(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0

    def flush(self) -> str:
        """Return the text that is still held back, once nothing more can follow it."""
        text = self._withheld
        self._withheld = ""
        return text


class StoppedReply:
    """Turns the tokens of a reply into parts as TextStream does, up to the first stop string.

    Only text is searched for stop strings. A calculator call ends the text before it, so no stop
    string spans a call.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._stream = TextStream(tokenizer)
        self._text = StopText(stops)

    def push(
        self,
        token: int,
        last: bool,
        armed: bool = True,
    ) -> tuple[tuple[Part, ...], str | None]:
        """Add a token; return the parts that can be shown, and the stop string reached or None.

        With `last`, the reply ends here, and nothing is held back. Unless `armed`, stop strings are
        passed on as text.
        """
        parts = self._stream.push(token)
        if last:
            parts += self._stream.flush()
        visible_parts: list[Part] = []
        for piece in parts:
            if piece.kind != "text":
                visible_parts += [*text_parts(self._text.flush()), piece]
                continue
            if not armed:
                visible_parts.append(piece)
                continue
            text, stop = self._text.push(piece.text)
            visible_parts += text_parts(text)
            if stop is not None:
                return tuple(visible_parts), stop
        if last:
            visible_parts += text_parts(self._text.flush())
        return tuple(visible_parts), None


# --- calculator calls ----------------------------------------------------------------------------


def answer_marks(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that mark a calculator answer, without any that the tokenizer lacks.

    A model may not sample these marks, so whatever is shown as the calculator's answer really is
    one.
    """
    marks = (tokenizer.special("output_start"), tokenizer.special("output_end"))
    return [mark for mark in marks if mark >= 0]


class Calls:
    """Follows the calculator call that is open in one reply, if any."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._expression: list[int] | None = None  # tokens of the open call
        self._opening = tokenizer.special("python_start")
        self._closing = tokenizer.special("python_end")

    def copy(self) -> "Calls":
        """Return a copy with the same open call, for a second reply that begins like this one."""
        copied = Calls(self._tokenizer)
        if self._expression is not None:
            copied._expression = list(self._expression)
        return copied

    def follow(self, token: int) -> list[int]:
        """Follow a sampled token, and return the answer's tokens if it closes a call, else [].

        The marks around the answer are included. The answer to an invalid expression is "error",
        because without an answer the model would make one up.
        """
        if token == self._opening:
            self._expression = []
            return []
        if self._expression is None:
            return []
        if token != self._closing:
            self._expression.append(token)
            return []
        answer = calculate(self._tokenizer.decode(self._expression))
        self._expression = None
        start = self._tokenizer.special("output_start")
        end = self._tokenizer.special("output_end")
        text = self._tokenizer.encode(FAILED if answer is None else answer)
        return [start, *text, end]

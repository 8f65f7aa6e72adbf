"""One reply while it grows: its text and calls, the log-probabilities of its tokens, and how it ended."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from nanochat.data.conversation import Part
from nanochat.engine import Event
from nanochat.generate.reply import Alternatives, Scored, TextStream
from nanochat.serve.routes.tools import NONE, CallText, Tools
from nanochat.tokenizer import Tokenizer

Scores = Literal["text", "all"]
LEAST = -9999.0  # what OpenAI sends for a token that cannot come; JSON has no minus infinity


@dataclass(frozen=True)
class Said:
    """A token of a reply's text, with the natural log of its probability and the likeliest tokens at its place."""

    token: int
    logprob: float
    alternatives: Alternatives


class Choice:
    """Follows the events of one request to the engine."""

    def __init__(self, tokenizer: Tokenizer, scored: Scores | None):
        """`scored` says which tokens scores() gives: those of the text, or all, marks and calculator calls too."""
        self._stream = TextStream(tokenizer)
        self._tokenizer = tokenizer
        self._scored = scored
        self._pending: list[
            tuple[int, Said]
        ] = []  # tokens with the place of each in the text, in bytes
        self._written = self._shown = 0  # bytes that the model wrote, and that the client may see
        self.tokens = 0
        self.reused = 0  # tokens of the prompt that were not read again
        self.prompt: tuple[Scored, ...] = ()
        self.finish: str | None = None
        self._cut = False

    def add(self, event: Event) -> list[Part]:
        """Follow an event; return what can be shown now."""
        mark = self._stream.is_mark(event.token)
        within = self._scored == "all" or (
            not mark and not event.forced and self._stream.kind == "text"
        )
        parts = self._stream.push(event.token)
        if event.finish is not None:
            parts += self._stream.flush()
        if (
            event.parts is not None
        ):  # the engine looked for stop strings, and holds back what may begin one
            parts = [*event.parts]
        if within and self._scored:
            self._pending.append(
                (self._written, Said(event.token, event.logprob, event.alternatives))
            )
            self._written += 0 if mark else len(self._tokenizer.decode_bytes([event.token]))
        counted = (part for part in parts if self._scored == "all" or part.kind == "text")
        self._shown += sum(len(part.text.encode()) for part in counted)
        self.tokens += 1
        self.reused += event.reused
        self.prompt = tuple(event.prompt_scores) or self.prompt
        self.finish = event.finish
        self._cut = isinstance(event.matched, str)
        return parts

    def scores(self) -> list[Said]:
        """The tokens of the text that was shown since the last call; none of what a stop string cut off."""
        ended = self.finish is not None and not self._cut
        ready = (
            len(self._pending) if ended else sum(place < self._shown for place, _ in self._pending)
        )
        taken, self._pending = self._pending[:ready], self._pending[ready:]
        return [said for _, said in taken]


class Reply:
    """Collects a reply while it grows: takes parts from the engine and returns deltas to send.

    Text goes into `content`. A calculator call becomes one `tool` delta, {expression, result}, which extends OpenAI's
    format and which other clients ignore; `result` is null if the reply ended before the answer. A call of one of the
    client's tools goes into `tool_calls`.
    """

    def __init__(self, tools: Tools = NONE) -> None:
        self.tool_calls: list[dict[str, Any]] = []
        self._calls = CallText(tools) if tools.parameters else None
        self.parts: list[dict[str, Any]] = []
        self._expression: str | None = None  # the calculator call that still waits for its result

    @property
    def text(self) -> str:
        """The text so far, without calculator calls."""
        return "".join(part["text"] for part in self.parts if part["type"] == "text")

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message that the client may send back later, with `parts` if it has calculator calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if any(part["type"] == "tool" for part in self.parts):
            message["parts"] = self.parts
        if self.tool_calls:
            message |= {"tool_calls": self.tool_calls, "content": self.text or None}
        return message

    def add(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Add what the model said; return the deltas to send."""
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if part.kind == "python_output":
                deltas += self._called(part.text)
                continue
            deltas += self._called(None)
            if part.kind == "python":
                self._expression = part.text
            else:
                self._words(self._calls.push(part.text) if self._calls else [part.text], deltas)
        return deltas

    def end(self) -> list[dict[str, Any]]:
        """The deltas of what is held back: a calculator call that has no result, and what might have become a call."""
        deltas = self._called(None)
        if self._calls:
            self._words(self._calls.push("", last=True), deltas)
        return deltas

    def _words(self, items: list[str | dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
        """Add texts and calls to the deltas."""
        for item in items:
            if isinstance(item, dict):
                deltas.append({"tool_calls": [{"index": len(self.tool_calls), **item}]})
                self.tool_calls.append(item)
            elif deltas and "content" in deltas[-1]:
                deltas[-1]["content"] += self._said(item)
            else:
                deltas.append({"content": self._said(item)})

    def _called(self, result: str | None) -> list[dict[str, Any]]:
        if self._expression is None:
            return []
        call, self._expression = {"expression": self._expression, "result": result}, None
        self.parts.append({"type": "tool", **call})
        return [{"tool": call}]

    def _said(self, text: str) -> str:
        add_text(self.parts, text)
        return text


def add_text(parts: list[dict[str, Any]], text: str) -> None:
    """Add text behind the parts of a reply."""
    if parts and parts[-1]["type"] == "text":
        parts[-1]["text"] += text
    else:
        parts.append({"type": "text", "text": text})


def count_usage(prompt: int, reply: int, cached: int) -> dict[str, Any]:
    """Token counts under OpenAI's names; `cached` is how many tokens of prompts were not read again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(logprob, LEAST)


def spelling(token: int, tokenizer: Tokenizer) -> str:
    """The text of a token; bytes:\\xe4\\xbd where it is no whole text, so that no two tokens look the same."""
    raw = tokenizer.decode_bytes([token])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

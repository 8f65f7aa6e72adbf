"""POST /v1/chat/completions: reads chats in OpenAI's format, and writes replies as its clients expect them."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.data.conversation import Conversation, Message, Part
from nanochat.engine import Event
from nanochat.serve.routes.answers import DONE, event
from nanochat.serve.routes.choices import Choice, Said, count_usage, finite, spelling
from nanochat.serve.routes.fields import ApiError, Limits, flag, integer, invalid, read_fields
from nanochat.serve.routes.intake import Work, make_prompt
from nanochat.serve.routes.messages import read_conversation
from nanochat.serve.routes.sampling import READ, Defaults, Wanted, alternatives, read_wanted
from nanochat.serve.routes.tools import NONE, CallText, Tools, read_tools
from nanochat.tokenizer import Tokenizer

KNOWN = READ | {
    "messages", "max_tokens", "max_completion_tokens", "truncation", "logprobs", "top_logprobs", "tools",
    "tool_choice", "parallel_tool_calls", "continue_final_message",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "service_tier": ("auto", "default")}


@dataclass(frozen=True)
class ChatRequest:
    """A checked request."""

    conversation: Conversation
    wanted: Wanted
    truncate: bool  # drop the oldest exchanges when the whole chat does not fit
    logprobs: bool
    tools: Tools
    continued: bool = False  # the last message is the beginning of the reply

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """The prompt as requests to the engine, and the writer of the replies. ApiError 400 if it does not fit."""
        wanted = self.wanted
        begun = reply_tokens(self.conversation.messages[-1], tokenizer) if self.continued else []
        room = limits.context - len(begun)
        prompt, dropped = make_prompt(self.conversation.prompt, wanted.max_tokens, self.truncate, tokenizer, room)
        prompt = [*prompt, *begun]
        requests = wanted.requests(prompt, limits.context)

        def writer(number: str) -> ChatWriter:
            envelope = Envelope(f"chatcmpl-{number}", int(time.time()), limits.model, dropped)
            return ChatWriter(envelope, self, len(prompt), tokenizer)

        return Work(requests, writer)


def read_chat(value: Any, limits: Limits, defaults: Defaults) -> ChatRequest:
    """Check a decoded body. ApiError (400, or 404 for an unknown model) that names the field."""
    fields = read_fields(value, limits, KNOWN, NEUTRAL)
    truncation = fields.get("truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise invalid('truncation must be "auto" or "disabled"', "truncation")
    longest = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    logprobs, top = flag(fields, "logprobs"), alternatives(fields, "top_logprobs")
    if top and not logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    flag(fields, "parallel_tool_calls")
    tools = read_tools(fields)
    more: dict[str, Any] = {"logprobs": top or 0}
    if tools.schema:
        if fields.get("response_format", {}) != {"type": "text"} and "response_format" in fields:
            raise invalid("a reply that must be a call has no response_format: leave one of them out", "tool_choice")
        more["schema"] = tools.schema
    wanted = read_wanted(fields, limits, defaults, integer(fields, longest, 1, limits.context), **more)
    continued = flag(fields, "continue_final_message")
    conversation = read_conversation(fields.get("messages"), tools.instructions, continued)
    return ChatRequest(conversation, wanted, truncation == "auto", logprobs, tools, continued)


def reply_tokens(message: Message, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a reply without the mark that ends it, so that the model continues it."""
    found: list[int] = []
    for part in message.parts:
        kind = {"python": "python", "python_output": "output"}.get(part.kind)
        marks = [[tokenizer.special(f"{kind}_{side}")] if kind else [] for side in ("start", "end")]
        found += [*marks[0], *tokenizer.encode(part.text), *marks[1]]
    return found


# --- replies -------------------------------------------------------------------------------------


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
        if self.parts and self.parts[-1]["type"] == "text":
            self.parts[-1]["text"] += text
        else:
            self.parts.append({"type": "text", "text": text})
        return text


@dataclass(frozen=True)
class Envelope:
    """The fields that every piece of one answer repeats; `created` is in seconds since 1970.

    `truncated` is how many of the oldest messages the model did not see, which the client allowed (truncation: auto).
    """

    id: str
    created: int
    model: str
    truncated: int = 0

    def body(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        """An object of the API with some choices."""
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if self.truncated:
            body["truncated_messages"] = self.truncated
        if usage is not None:
            body["usage"] = usage
        return body


class ChatWriter:
    """Writes the replies to one chat."""

    def __init__(self, envelope: Envelope, asked: ChatRequest, prompt: int, tokenizer: Tokenizer):
        """`prompt` is the length of the prompt in tokens."""
        self._envelope, self._asked, self._prompt, self._tokenizer = envelope, asked, prompt, tokenizer
        count = asked.wanted.n
        self._choices = [Choice(tokenizer, "text" if asked.logprobs else None) for _ in range(count)]
        self._replies = [Reply(asked.tools) for _ in range(count)]
        self._scores: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.stream = asked.wanted.stream

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far. The prompt counts once, however many replies there are."""
        tokens = sum(choice.tokens for choice in self._choices)
        return count_usage(self._prompt, tokens, self._choices[0].reused)

    def opening(self) -> bytes:
        """The role of each reply."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(place, role) for place in range(len(self._choices)))

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Follow events; return the chunks of what they add."""
        gathered: dict[int, list[Part]] = {}
        for place, item in news:
            gathered.setdefault(place, []).extend(self._choices[place].add(item))
        sent = b""
        for place, parts in gathered.items():
            choice, reply = self._choices[place], self._replies[place]
            deltas = reply.add(parts) + (reply.end() if choice.finish else [])
            scores = [self._score(said) for said in choice.scores()]
            self._scores[place] += scores
            if self.stream:
                sent += self._chunks(place, deltas, scores)
        return sent

    def closing(self) -> bytes:
        """The usage, if the client wants it alone, and the end of the stream."""
        alone = self._asked.wanted.include_usage
        usage = event(self._envelope.body("chat.completion.chunk", [], self.usage)) if alone else b""
        return usage + DONE

    def failure(self, refusal: ApiError) -> bytes:
        """The error, and the end of the stream."""
        return event(refusal.body) + DONE

    def body(self) -> dict[str, Any]:
        """The whole answer. A reply with calculator calls has `parts`, which the client may send back later."""
        choices = []
        for place, reply in enumerate(self._replies):
            message: dict[str, Any] = {"role": "assistant", "content": reply.text}
            if any(part["type"] == "tool" for part in reply.parts):
                message["parts"] = reply.parts
            if reply.tool_calls:
                message["tool_calls"] = reply.tool_calls
                message["content"] = reply.text or None
            logprobs = {"content": self._scores[place], "refusal": None} if self._asked.logprobs else None
            choices.append(
                {"index": place, "message": message, "logprobs": logprobs, "finish_reason": self._end(place)}
            )
        return self._envelope.body("chat.completion", choices, self.usage)

    def _end(self, place: int) -> str | None:
        """Why a reply ended, in OpenAI's words."""
        finish = self._choices[place].finish
        return "tool_calls" if finish == "stop" and self._replies[place].tool_calls else finish

    def _chunks(self, place: int, deltas: list[dict[str, Any]], scores: list[dict[str, Any]]) -> bytes:
        """The chunks of one reply. Scores go with the first; the last says why the reply ended."""
        sent = b""
        for delta in deltas or [{"content": ""}] * bool(scores):
            sent += self._chunk(place, delta, scores=scores)
            scores = []
        if self._choices[place].finish:
            last = all(choice.finish for choice in self._choices) and not self._asked.wanted.include_usage
            sent += self._chunk(place, {}, self._end(place), usage=self.usage if last else None)
        return sent

    def _chunk(
        self, place: int, delta: dict[str, Any], finish: str | None = None, scores: Iterable[dict[str, Any]] = (),
        usage: dict[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        scores = [*scores]
        logprobs = {"content": scores, "refusal": None} if scores else None
        if self._asked.wanted.continuous_usage and finish is None and any(c.tokens for c in self._choices):
            usage = self.usage
        choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(self._envelope.body("chat.completion.chunk", [choice], usage))

    def _score(self, said: Said) -> dict[str, Any]:
        """A token as OpenAI describes it, with the likeliest tokens at its place."""
        top = [self._named(token, logprob) for token, logprob in said.alternatives]
        return {**self._named(said.token, said.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = [*self._tokenizer.decode_bytes([token])]
        return {"token": spelling(token, self._tokenizer), "logprob": finite(logprob), "bytes": raw}

"""POST /v1/chat/completions: reads chats in OpenAI's format, and writes replies as its clients expect them."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.data.conversation import Conversation, Message, Part
from nanochat.engine import Event
from nanochat.serve.routes.answers import DONE, event
from nanochat.serve.routes.choices import Choice, Reply, Said, count_usage, finite, spelling
from nanochat.serve.routes.fields import (
    ApiError,
    Limits,
    flag,
    integer,
    invalid,
    read_fields,
    truncates,
)
from nanochat.serve.routes.intake import Work, make_prompt
from nanochat.serve.routes.messages import alternating, read_conversation
from nanochat.serve.routes.sampling import (
    READ,
    Defaults,
    Wanted,
    alternatives,
    check_scores,
    read_format,
    read_wanted,
)
from nanochat.serve.routes.tools import Tools, only_schema, read_tools
from nanochat.tokenizer import Tokenizer

KNOWN = READ | {
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "truncation",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "continue_final_message",
    "add_generation_prompt",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}


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
        chat, begun = self.conversation, []
        if self.continued:
            plain = alternating(chat)
            chat, begun = plain.prompt, reply_tokens(plain.messages[-1], tokenizer)
        room = limits.context - len(begun)
        prompt, dropped = make_prompt(chat, wanted.max_tokens, self.truncate, tokenizer, room)
        prompt = [*prompt, *begun]
        requests = wanted.requests(prompt, limits.context)
        if self.logprobs:
            longest = sum(sampling.max_tokens for _, sampling in requests)
            check_scores(longest * (1 + wanted.sampling.logprobs), "n, max_tokens or top_logprobs")

        def writer(number: str) -> ChatWriter:
            envelope = Envelope(f"chatcmpl-{number}", int(time.time()), limits.model, dropped)
            return ChatWriter(envelope, self, len(prompt), tokenizer)

        return Work(requests, writer)


def read_chat(value: Any, limits: Limits, defaults: Defaults) -> ChatRequest:
    """Check a decoded body. ApiError (400, or 404 for an unknown model) that names the field."""
    fields = read_fields(value, limits, KNOWN, NEUTRAL)
    longest = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    logprobs, top = flag(fields, "logprobs"), alternatives(fields, "top_logprobs")
    if top and not logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    flag(fields, "parallel_tool_calls")
    tools = read_tools(fields)
    schema = only_schema(tools, read_format(fields.get("response_format"), "response_format"))
    wanted = read_wanted(
        fields,
        limits,
        defaults,
        integer(fields, longest, 1, limits.context),
        schema=schema,
        logprobs=top or 0,
    )
    continued = flag(fields, "continue_final_message")
    if flag(fields, "add_generation_prompt", not continued) == continued:
        text = "add_generation_prompt must be the opposite of continue_final_message, or left out"
        raise invalid(text, "add_generation_prompt")
    conversation = read_conversation(fields.get("messages"), tools.instructions, continued)
    return ChatRequest(conversation, wanted, truncates(fields), logprobs, tools, continued)


def reply_tokens(message: Message, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a reply without the mark that ends it, so that the model continues it."""
    found: list[int] = []
    for part in message.parts:
        kind = {"python": "python", "python_output": "output"}.get(part.kind)
        marks = [[tokenizer.special(f"{kind}_{side}")] if kind else [] for side in ("start", "end")]
        found += [*marks[0], *tokenizer.encode(part.text), *marks[1]]
    return found


# --- replies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Envelope:
    """The fields that every piece of one answer repeats; `created` is in seconds since 1970.

    `truncated` is how many of the oldest messages the model did not see, which the client allowed (truncation: auto).
    """

    id: str
    created: int
    model: str
    truncated: int = 0

    def body(
        self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        """An object of the API with some choices."""
        body = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.truncated:
            body["truncated_messages"] = self.truncated
        if usage is not None:
            body["usage"] = usage
        return body


class ChatWriter:
    """Writes the replies to one chat."""

    def __init__(self, envelope: Envelope, asked: ChatRequest, prompt: int, tokenizer: Tokenizer):
        """`prompt` is the length of the prompt in tokens."""
        self._envelope, self._asked, self._prompt, self._tokenizer = (
            envelope,
            asked,
            prompt,
            tokenizer,
        )
        count = asked.wanted.n
        self._choices = [
            Choice(tokenizer, "text" if asked.logprobs else None) for _ in range(count)
        ]
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
        usage = (
            event(self._envelope.body("chat.completion.chunk", [], self.usage)) if alone else b""
        )
        return usage + DONE

    def failure(self, refusal: ApiError) -> bytes:
        """The error, and the end of the stream."""
        return event(refusal.body) + DONE

    def body(self) -> dict[str, Any]:
        """The whole answer. A reply with calculator calls has `parts`, which the client may send back later."""
        choices = []
        for place, reply in enumerate(self._replies):
            logprobs = (
                {"content": self._scores[place], "refusal": None} if self._asked.logprobs else None
            )
            choices.append(
                {
                    "index": place,
                    "message": reply.message,
                    "logprobs": logprobs,
                    "finish_reason": self._end(place),
                }
            )
        return self._envelope.body("chat.completion", choices, self.usage)

    def _end(self, place: int) -> str | None:
        """Why a reply ended, in OpenAI's words."""
        finish = self._choices[place].finish
        return "tool_calls" if finish == "stop" and self._replies[place].tool_calls else finish

    def _chunks(
        self, place: int, deltas: list[dict[str, Any]], scores: list[dict[str, Any]]
    ) -> bytes:
        """The chunks of one reply. Scores go with the first; the last says why the reply ended."""
        sent = b""
        for delta in deltas or [{"content": ""}] * bool(scores):
            sent += self._chunk(place, delta, scores=scores)
            scores = []
        if self._choices[place].finish:
            last = (
                all(choice.finish for choice in self._choices)
                and not self._asked.wanted.include_usage
            )
            sent += self._chunk(place, {}, self._end(place), usage=self.usage if last else None)
        return sent

    def _chunk(
        self,
        place: int,
        delta: dict[str, Any],
        finish: str | None = None,
        scores: Iterable[dict[str, Any]] = (),
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        scores = [*scores]
        logprobs = {"content": scores, "refusal": None} if scores else None
        if (
            self._asked.wanted.continuous_usage
            and finish is None
            and any(c.tokens for c in self._choices)
        ):
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

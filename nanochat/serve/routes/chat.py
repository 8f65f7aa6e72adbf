"""Answers POST /v1/chat/completions: reads chats and writes replies in OpenAI's format."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanochat.data.conversation import Conversation
from nanochat.generate.reply import Event
from nanochat.serve.formats.pieces import (
    Arguments,
    Calculation,
    Call,
    Piece,
    Thought,
    add_piece,
)
from nanochat.serve.formats.thoughts import closing
from nanochat.serve.routes.answers import (
    DONE,
    Choice,
    TokenScore,
    Work,
    count_usage,
    event,
    finite,
    spelling,
)
from nanochat.serve.routes.constraints import constrained
from nanochat.serve.routes.fields import (
    READ,
    VLLM_NEUTRAL,
    ApiError,
    Defaults,
    Limits,
    ReplySettings,
    alternatives,
    check_scores,
    flag,
    invalid,
    read_fields,
    read_settings,
    truncates,
    upper_bound,
)
from nanochat.serve.routes.fitted import OPTIONS, fitted, read_max_thought, read_options
from nanochat.serve.routes.messages import read_conversation
from nanochat.serve.routes.prompts import continues, make_prompt, without_beginning
from nanochat.serve.routes.reply import Form, Reply, form_of
from nanochat.serve.routes.tools import Tools, read_tools
from nanochat.tokenizer import Tokenizer

FIELDS = READ | {
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
    *OPTIONS,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    **VLLM_NEUTRAL,
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked request to /v1/chat/completions."""

    conversation: Conversation
    settings: ReplySettings
    truncate: bool  # drop the oldest exchanges if the whole chat does not fit
    logprobs: bool
    tools: Tools
    options: Mapping[str, Any]  # variables of the chat template
    max_thought: int | None  # tokens
    continued: bool = False  # whether the last message is the beginning of the reply

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """Return the engine requests for the replies, and a function that makes the writer.

        Raises ApiError (400) if the prompt cannot be rendered or does not fit into the context, or
        if the answer would list too many log-probabilities.
        """
        settings = self.settings
        chat = fitted(self.conversation, self.tools, self.options, tokenizer)
        reply_start: list[int] = []
        thought = ""
        if self.continued:
            chat, reply_start, thought = without_beginning(chat, tokenizer)
        room = settings.reply_room(limits.context)

        def fitting() -> tuple[list[int], int]:
            arguments = (room, self.truncate, tokenizer, limits.context)
            return make_prompt(chat, *arguments, begun=len(reply_start))

        prompt, dropped = fitting()
        form = form_of(prompt, self.tools, tokenizer)
        if reply_start:
            after_thought = [*closing(prompt, tokenizer, thought), *reply_start]
            if form.opened:  # the answer is continued, not the thought
                reply_start = [*closing(prompt, tokenizer), *reply_start]
                prompt, dropped = fitting()
            # The model reads again what it thought before its answer, if that leaves enough room.
            if len(prompt) + len(after_thought) + room <= limits.context:
                reply_start = after_thought
            form = replace(form, opened=False, closed=True, strips_space=False)
        prompt = [*prompt, *reply_start]
        requests = settings.requests(prompt, limits.context)
        requests = constrained(requests, form, self.max_thought)
        scores = 0
        if self.logprobs:
            tokens = sum(sampling.max_tokens for _, sampling in requests)
            scores = tokens * (1 + settings.sampling.logprobs)
            check_scores(scores, "n, max_tokens or top_logprobs")

        def writer(number: str) -> ChatWriter:
            created = int(time.time())
            envelope = Envelope(f"chatcmpl-{number}", created, limits.model, dropped)
            return ChatWriter(envelope, self, len(prompt), tokenizer, form)

        return Work(requests, writer, scores, self.tools.headers, form)


def read_chat(
    value: Any,
    limits: Limits,
    defaults: Defaults,
) -> ChatRequest:
    """Check a decoded body, and return it as a ChatRequest.

    Raises ApiError (400) for an invalid body.
    """
    fields = read_fields(value, FIELDS, NEUTRAL)
    logprobs = flag(fields, "logprobs")
    top_logprobs = alternatives(fields, "top_logprobs")
    if top_logprobs and not logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    tools = read_tools(fields)
    length_field = "max_tokens"
    if "max_completion_tokens" in fields:
        length_field = "max_completion_tokens"
    max_tokens = upper_bound(fields, length_field, limits.context)
    settings = read_settings(
        fields,
        limits,
        defaults,
        max_tokens,
        logprobs=top_logprobs or 0,
    )
    continued = continues(fields)
    conversation = read_conversation(fields.get("messages"), continued)
    return ChatRequest(
        conversation,
        settings,
        truncates(fields),
        logprobs,
        tools,
        read_options(fields),
        read_max_thought(fields, limits),
        continued,
    )


# --- replies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Envelope:
    """The fields that every chunk of one answer repeats; `created` is in seconds since 1970.

    `truncated` is how many of the oldest turns were dropped because the chat was too long.
    """

    id: str
    created: int
    model: str
    truncated: int = 0

    def body(
        self,
        kind: str,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Return an API object of the type `kind` as a dict, with `usage` unless that is None."""
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

    def __init__(
        self,
        envelope: Envelope,
        request: ChatRequest,
        prompt_length: int,
        tokenizer: Tokenizer,
        form: Form,
    ):
        self._envelope = envelope
        self._request = request
        self._prompt_length = prompt_length
        self._tokenizer = tokenizer
        count = request.settings.n
        self._choices = [
            Choice(tokenizer, "text" if request.logprobs else None) for _ in range(count)
        ]
        self._replies = [Reply(form) for _ in range(count)]
        self._sent_calls = [0] * count
        self._open = count  # replies whose end has not been streamed
        self._scores: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.stream = request.settings.stream

    @property
    def usage(self) -> dict[str, Any]:
        """The token counts so far; the prompt counts once, however many replies there are."""
        tokens = sum(choice.tokens for choice in self._choices)
        thoughts = sum(reply.thought_tokens for reply in self._replies)
        return count_usage(self._prompt_length, tokens, self._choices[0].reused, thoughts)

    def opening(self) -> bytes:
        """Return the first chunk of each reply, which holds its role."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, role) for index in range(len(self._choices)))

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Process events, each with its reply's index, and return the chunks to stream."""
        pieces_by_reply: dict[int, list[Piece]] = {}
        for index, token_event in news:
            parts = self._choices[index].add(token_event)
            pieces = pieces_by_reply.setdefault(index, [])
            for piece in self._replies[index].add(parts, last=token_event.finish is not None):
                add_piece(pieces, piece)
        sent = b""
        for index, pieces in pieces_by_reply.items():
            deltas = self._deltas(index, pieces)
            scores = [self._score(score) for score in self._choices[index].scores()]
            self._scores[index] += scores
            if self.stream:
                sent += self._chunks(index, deltas, scores)
        return sent

    def _deltas(self, index: int, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return pieces of a reply as deltas.

        Beside OpenAI's, there are `reasoning_content` and `reasoning`, the two names that clients
        read thoughts under, and `tool`, a calculation. A call is one delta with the arguments that
        come with its beginning.
        """
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Thought):
                deltas.append({"reasoning_content": piece.text, "reasoning": piece.text})
            elif isinstance(piece, Calculation):
                calculation = {"expression": piece.expression, "result": piece.result}
                deltas.append({"tool": calculation})
            elif isinstance(piece, Call):
                self._sent_calls[index] += 1
                function = {"name": piece.name, "arguments": ""}
                call = {"id": piece.id, "type": "function", "function": function}
                deltas.append({"tool_calls": [{"index": self._sent_calls[index] - 1, **call}]})
            elif isinstance(piece, Arguments):
                last = deltas[-1] if deltas else {}
                if "tool_calls" in last:
                    last["tool_calls"][0]["function"]["arguments"] += piece.text
                else:
                    call = {"index": self._sent_calls[index] - 1}
                    function = {"arguments": piece.text}
                    deltas.append({"tool_calls": [{**call, "function": function}]})
            else:
                deltas.append({"content": piece.text})
        return deltas

    def closing(self) -> bytes:
        """Return the end of the stream: a chunk with the usage, if wanted, and [DONE]."""
        if not self._request.settings.include_usage:
            return DONE
        usage = self._envelope.body("chat.completion.chunk", [], self.usage)
        return event(usage) + DONE

    def failure(self, refusal: ApiError) -> bytes:
        """Return the end of a failed stream: an event with the error, and [DONE]."""
        return event(refusal.body) + DONE

    def body(self) -> dict[str, Any]:
        """Return the whole answer as a dict."""
        choices = []
        for index, reply in enumerate(self._replies):
            logprobs = None
            if self._request.logprobs:
                logprobs = {"content": self._scores[index], "refusal": None}
            choice = {
                "index": index,
                "message": reply.message,
                "logprobs": logprobs,
                "finish_reason": self._finish_reason(index),
            }
            choices.append(choice)
        return self._envelope.body("chat.completion", choices, self.usage)

    def _finish_reason(self, index: int) -> str | None:
        """Return OpenAI's word for why a reply ended, or None if it has not ended."""
        finish = self._choices[index].finish
        if finish == "stop" and self._replies[index].calls:
            return "tool_calls"
        return finish

    def _chunks(
        self,
        index: int,
        deltas: list[dict[str, Any]],
        scores: list[dict[str, Any]],
    ) -> bytes:
        """Return the chunks to stream for some deltas of a reply.

        The first chunk carries `scores`. If the reply has ended, one more chunk says why, and the
        last of these chunks carries the usage unless a chunk after it does.
        """
        if scores and not deltas:
            deltas = [{"content": ""}]
        sent = b""
        for delta in deltas:
            sent += self._chunk(index, delta, scores=scores)
            scores = []
        if self._choices[index].finish:
            self._open -= 1
            usage = None
            if self._open == 0 and not self._request.settings.include_usage:
                usage = self.usage
            sent += self._chunk(index, {}, self._finish_reason(index), usage=usage)
        return sent

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        scores: Sequence[dict[str, Any]] = (),
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """Return one chunk of a reply."""
        begun = any(choice.tokens for choice in self._choices)
        if self._request.settings.continuous_usage and finish is None and begun:
            usage = self.usage
        logprobs = {"content": list(scores), "refusal": None} if scores else None
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        return event(self._envelope.body("chat.completion.chunk", [choice], usage))

    def _score(self, score: TokenScore) -> dict[str, Any]:
        """Return OpenAI's description of a token and of the most likely tokens at its position."""
        alternatives = [self._token(token, logprob) for token, logprob in score.alternatives]
        return {**self._token(score.token, score.logprob), "top_logprobs": alternatives}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        """Return a token as a dict of its text, log-probability and bytes."""
        return {
            "token": spelling(token, self._tokenizer),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.decode_bytes([token])),
        }

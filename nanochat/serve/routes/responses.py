"""POST /v1/responses in its plain form: a text or messages in, text out, whole or as events. Nothing is stored."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.data.conversation import Conversation
from nanochat.engine import Event
from nanochat.serve.routes.answers import event
from nanochat.serve.routes.choices import Choice
from nanochat.serve.routes.fields import (
    ApiError,
    Limits,
    flag,
    integer,
    invalid,
    kind,
    mapping,
    missing,
    number,
    read_fields,
)
from nanochat.serve.routes.intake import Work, make_prompt
from nanochat.serve.routes.messages import read_conversation
from nanochat.serve.routes.sampling import Defaults, Wanted, read_format, read_wanted
from nanochat.tokenizer import Tokenizer

KNOWN = {
    "input", "instructions", "max_output_tokens", "temperature", "top_p", "top_k", "seed", "text", "stream",
    "truncation",
}  # fmt: skip
# A response cannot go on from an earlier one, because nothing is stored: the client sends the whole chat.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("auto", "none"), "background": (False,), "include": ([],),
    "service_tier": ("auto",), "parallel_tool_calls": (True, False), "top_logprobs": (0,),
}  # fmt: skip


@dataclass(frozen=True)
class ResponseRequest:
    """A checked request."""

    conversation: Conversation
    instructions: str | None
    wanted: Wanted
    truncate: bool

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """The prompt as a request to the engine, and the writer of the reply. ApiError 400 if it does not fit."""
        wanted = self.wanted
        prompt, _ = make_prompt(self.conversation, wanted.max_tokens, self.truncate, tokenizer, limits.context)

        def writer(number: str) -> ResponseWriter:
            return ResponseWriter(number, limits.model, self, len(prompt), tokenizer)

        return Work(wanted.requests(prompt, limits.context), writer)


def read_response(value: Any, limits: Limits, defaults: Defaults) -> ResponseRequest:
    """Check a decoded body. ApiError (400, or 404 for an unknown model) that names the field."""
    fields = read_fields(value, limits, KNOWN, NEUTRAL)
    instructions, given = fields.get("instructions"), fields.get("input")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid(f"instructions must be a text, got {kind(instructions)}", "instructions")
    if given is None:
        raise missing("input", "a text or a list of messages")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid(f"input must be a text or a list of messages, got {kind(given)}", "input")
    for i, item in enumerate(given):
        if isinstance(item, dict) and item.get("type", "message") != "message":
            raise invalid(f"input[{i}].type must be message", f"input[{i}].type")
    truncation = fields.get("truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise invalid('truncation must be "auto" or "disabled"', "truncation")
    longest = integer(fields, "max_output_tokens", 1, limits.context)
    schema = read_format(mapping(fields, "text").get("format"), "text.format")
    number(fields, "temperature", 0, 2)
    flag(fields, "stream")
    common = {name: fields[name] for name in ("temperature", "top_p", "top_k", "seed", "stream") if name in fields}
    wanted = read_wanted(common, limits, defaults, longest, schema=schema)
    try:
        conversation = read_conversation(given, instructions or "")
    except ApiError as refusal:  # the field has another name on this route
        text = str(refusal).replace("messages", "input")
        param = refusal.param and refusal.param.replace("messages", "input")
        raise ApiError(refusal.status, refusal.code, text, param) from None
    return ResponseRequest(conversation, instructions, wanted, truncation == "auto")


class ResponseWriter:
    """Writes one reply as a response or as the events of its stream."""

    def __init__(self, number: str, model: str, asked: ResponseRequest, prompt: int, tokenizer: Tokenizer):
        """`prompt` is the length of the prompt in tokens."""
        self._number, self._model, self._asked, self._prompt = number, model, asked, prompt
        self._created = int(time.time())
        self._choice = Choice(tokenizer, None)
        self._text = ""
        self._sent = 0  # events of the stream so far
        self.stream = asked.wanted.stream

    def opening(self) -> bytes:
        """The response, its one message and the message's one part, all empty."""
        item = self._item("in_progress")
        return (
            self._event("response.created", response=self._response("in_progress"))
            + self._event("response.in_progress", response=self._response("in_progress"))
            + self._event("response.output_item.added", output_index=0, item={**item, "content": []})
            + self._event("response.content_part.added", **self._place, part=self._part)
        )

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Follow events; return the event of the text that they add."""
        parts = [part for _, item in news for part in self._choice.add(item)]
        text = "".join(part.text for part in parts if part.kind == "text")
        self._text += text
        if not (text and self.stream):
            return b""
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def closing(self) -> bytes:
        """The whole part, message and response."""
        body = self.body()
        kind = "response.completed" if body["status"] == "completed" else "response.incomplete"
        return (
            self._event("response.output_text.done", **self._place, text=self._text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=self._part)
            + self._event("response.output_item.done", output_index=0, item=body["output"][0])
            + self._event(kind, response=body)
        )

    def failure(self, refusal: ApiError) -> bytes:
        """The response with its error."""
        error = {"code": refusal.code, "message": str(refusal)}
        return self._event("response.failed", response={**self._response("failed"), "error": error})

    def body(self) -> dict[str, Any]:
        """The whole response."""
        status = "completed" if self._choice.finish == "stop" else "incomplete"
        response = self._response(status)
        if status == "incomplete":
            reasons = {"length": "max_output_tokens"}
            response["incomplete_details"] = {"reason": reasons.get(self._choice.finish or "", "content_filter")}
        return {**response, "output": [self._item(status)], "usage": self._usage}

    @property
    def _usage(self) -> dict[str, Any]:
        tokens, cached = self._choice.tokens, self._choice.reused
        return {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt + tokens,
        }

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._number}", "output_index": 0, "content_index": 0}

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _item(self, status: str) -> dict[str, Any]:
        item_id = f"msg_{self._number}"
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [self._part]}

    def _response(self, status: str) -> dict[str, Any]:
        sampling = self._asked.wanted.sampling
        return {
            "id": f"resp_{self._number}", "object": "response", "created_at": self._created, "status": status,
            "model": self._model, "output": [], "error": None, "incomplete_details": None,
            "instructions": self._asked.instructions, "max_output_tokens": self._asked.wanted.max_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "tools": [], "tool_choice": "none",
            "parallel_tool_calls": False, "metadata": {}, "previous_response_id": None, "store": False,
            "truncation": "auto" if self._asked.truncate else "disabled", "usage": None,
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

"""The OpenAI chat format: checks requests, and writes answers and errors as clients expect them."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanochat.data.conversation import Conversation, Message, Part

# Fields for features that this server lacks. A request may send them only with the value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "stop": ([],),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
# Fields that clients send for their own records; they change no answer.
IGNORED = frozenset({"user", "metadata", "store"})
SAMPLING = frozenset({"temperature", "top_k", "max_tokens", "max_completion_tokens", "seed"})
READ = SAMPLING | {"messages", "model", "stream", "stream_options", "truncation"}
MOST_MESSAGES = 1000  # a chat of 500 questions; checking more would keep other clients waiting
MOST_PARTS = 4000  # of all messages together
ERROR_TYPES = {404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refused request: the HTTP status, and the reason as OpenAI's error JSON."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None, retry_after: int | None = None):
        """`retry_after` is in seconds."""
        super().__init__(_whole(message))
        self.status = status
        self.code = code
        self.param = param and _whole(param)
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """The error JSON."""
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _whole(text: str) -> str:
    """A text that may repeat a name from a request; half of a surrogate pair, which JSON may hold, becomes "?"."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True)
class Limits:
    """What a request may ask for: the name of the model, its context and its vocabulary, both in tokens."""

    model: str
    context: int
    vocabulary: int


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. None means that the client left the choice to the server."""

    conversation: Conversation
    temperature: float | None
    top_k: int | None  # 0 samples from the whole vocabulary
    max_tokens: int | None
    seed: int | None
    truncate: bool  # drop the oldest exchanges when the whole chat does not fit
    stream: bool
    include_usage: bool  # send a last chunk that holds only the usage
    continuous_usage: bool  # send the usage so far in every chunk


def read_request(value: Any, limits: Limits) -> ChatRequest:
    """Check a decoded request body. Raises ApiError (400, or 404 for an unknown model) that names the field."""
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object with a list of messages, got " + _kind(value))
    fields = {name: given for name, given in value.items() if given is not None and name not in IGNORED}
    for name, given in fields.items():
        if name in NEUTRAL:
            if given not in NEUTRAL[name]:
                neutral = json.dumps(NEUTRAL[name][0])
                text = f"this server supports {name} only with the value {neutral}: send that, or leave {name} out"
                raise ApiError(400, "unsupported_parameter", text, name)
        elif name not in READ:
            text = f"there is no parameter {name[:80]!r}: check the spelling, or leave it out"
            raise ApiError(400, "unknown_parameter", text, name[:80])
    model = fields.get("model", limits.model)
    if model != limits.model:
        text = f"this server has only the model {limits.model!r}: ask for that, or leave model out"
        raise ApiError(404, "model_not_found", text, "model")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise _invalid("stream_options must be an object, got " + _kind(options), "stream_options")
    truncation = fields.get("truncation", "disabled")
    if truncation not in ("auto", "disabled"):
        raise _invalid('truncation must be "auto" or "disabled"', "truncation")
    longest = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    return ChatRequest(
        conversation=_conversation(fields),
        temperature=_number(fields, "temperature", 0, 2),
        top_k=_integer(fields, "top_k", 0, limits.vocabulary),
        max_tokens=_integer(fields, longest, 1, limits.context),
        seed=_integer(fields, "seed", 0, 2**63 - 1),
        truncate=truncation == "auto",
        stream=_flag(fields, "stream"),
        include_usage=_flag(options, "include_usage"),
        continuous_usage=_flag(options, "continuous_usage_stats"),
    )


def _invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid_value", message, param)


def _kind(value: Any) -> str:
    """The type of a JSON value in words. The value itself may be private and is not repeated."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _number(fields: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(f"{name} must be a number from {low} to {high}, got {_kind(value)}", name)
    if not low <= value <= high:  # also false for NaN
        got = f"{value:g}" if isinstance(value, float) and math.isfinite(value) else "a number out of range"
        raise _invalid(f"{name} must be from {low} to {high}, got {got}", name)
    return float(value)


def _integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(f"{name} must be a whole number from {low} to {high}, got {_kind(value)}", name)
    if not low <= value <= high:
        raise _invalid(
            f"{name} must be from {low} to {high}, got {value if abs(value) < 1e18 else 'a number out of range'}", name
        )
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _invalid(f"{name} must be true or false, got {_kind(value)}", name)
    return bool(value)


# --- conversations -------------------------------------------------------------------------------


def _conversation(fields: Mapping[str, Any]) -> Conversation:
    """The messages of a request: an optional system message, then user and assistant in turn, ending with the user."""
    given = fields.get("messages")
    if given is None:
        raise ApiError(
            400, "missing_required_parameter", "messages is required: send a list of {role, content}", "messages"
        )
    if not isinstance(given, list):
        raise _invalid("messages must be a list of {role, content}, got " + _kind(given), "messages")
    if not given:
        raise ApiError(400, "empty_prompt", "messages must hold at least one user message, got none", "messages")
    if len(given) > MOST_MESSAGES:
        text = f"there may be at most {MOST_MESSAGES:,} messages, got {len(given):,}: leave out the oldest"
        raise ApiError(400, "too_many_messages", text, "messages")
    if (parts := sum(map(_count, given))) > MOST_PARTS:
        text = (
            f"all messages together may have at most {MOST_PARTS:,} parts, got {parts:,}: leave out the oldest messages"
        )
        raise ApiError(400, "too_many_messages", text, "messages")
    messages = tuple(_message(item, f"messages[{i}]") for i, item in enumerate(given))
    first = 1 if messages[0].role == "system" else 0
    for i, message in enumerate(messages[first:], start=first):
        expected = ("user", "assistant")[(i - first) % 2]
        if message.role != expected:
            raise _invalid(
                "messages must be an optional system message, then user and assistant in turn: "
                f"messages[{i}].role must be {expected}, got {message.role}",
                f"messages[{i}].role",
            )
    if messages[-1].role != "user":
        raise _invalid("the last message must have the role user", f"messages[{len(messages) - 1}].role")
    return Conversation(messages)


def _count(item: Any) -> int:
    """How many parts a message has, before it is checked."""
    lists = [item.get(name) for name in ("content", "parts")] if isinstance(item, dict) else []
    return sum(len(some) for some in lists if isinstance(some, list))


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, dict):
        raise _invalid(f"{name} must be an object {{role, content}}, got {_kind(item)}", name)
    role = item.get("role")
    if role not in ("system", "user", "assistant"):
        got = repr(role[:80]) if isinstance(role, str) else _kind(role)
        raise _invalid(f"{name}.role must be system, user or assistant, got {got}", f"{name}.role")
    if role == "assistant" and item.get("parts") is not None:
        parts = _parts(item["parts"], f"{name}.parts")
    else:
        parts = (Part("text", _text(item.get("content"), f"{name}.content")),)
    if not any(part.text.strip() for part in parts):
        raise ApiError(400, "empty_prompt", f"{name} is empty: every message must hold some text", f"{name}.content")
    return Message(role, parts)


def _text(content: Any, name: str) -> str:
    """The text of a message: a string, or a list of text parts, which some clients send."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise _invalid(f"{name} may hold only text parts, {{type: text, text}}", name)
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _invalid(f"{name} must be a string or a list of text parts, got {_kind(content)}", name)
    return content


def _parts(value: Any, name: str) -> tuple[Part, ...]:
    """The parts of an assistant message with calculator calls, in the form in which `Reply.parts` sent them."""
    parts: list[Part] = []
    for item in value if isinstance(value, list) else [value]:
        tool = item.get("expression") if isinstance(item, dict) else None
        text = item.get("text") if isinstance(item, dict) else None
        if isinstance(tool, str) and item.get("type") == "tool":
            parts.append(Part("python", tool))
            if isinstance(item.get("result"), str):
                parts.append(Part("python_output", item["result"]))
        elif isinstance(text, str) and item.get("type") == "text":
            parts.append(Part("text", text))
        else:
            raise _invalid(f"{name} may hold only {{type: text, text}} and {{type: tool, expression, result}}", name)
    return tuple(parts)


# --- answers -------------------------------------------------------------------------------------


class Reply:
    """Collects a reply while it grows: takes parts from the engine and returns deltas to send.

    Text goes into `content`. A calculator call becomes one `tool` delta, {expression, result}, which extends OpenAI's
    format and which other clients ignore; `result` is null if the reply ended before the answer.
    """

    def __init__(self) -> None:
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
            deltas += self.end()
            if part.kind == "python":
                self._expression = part.text
            elif deltas and "content" in deltas[-1]:
                deltas[-1]["content"] += self._said(part.text)
            else:
                deltas.append({"content": self._said(part.text)})
        return deltas

    def end(self) -> list[dict[str, Any]]:
        """The delta of a call that has no result, if there is such a call."""
        return self._called(None)

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

    def _object(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if self.truncated:
            body["truncated_messages"] = self.truncated
        if usage is not None:
            body["usage"] = usage
        return body

    def completion(self, reply: Reply, finish: str, usage: dict[str, int]) -> dict[str, Any]:
        """A whole answer. With calculator calls it has `parts`, which the client may send back in its next request."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if any(part["type"] == "tool" for part in reply.parts):
            message["parts"] = reply.parts
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._object("chat.completion", [choice], usage)

    def chunk(self, delta: dict[str, Any], finish: str | None = None, usage: dict[str, int] | None = None) -> bytes:
        """One event of a streamed answer."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(self._object("chat.completion.chunk", [choice], usage))

    def usage_chunk(self, usage: dict[str, int]) -> bytes:
        """The final event with only the usage, for clients that asked for it (include_usage)."""
        return event(self._object("chat.completion.chunk", [], usage))


def event(value: Any) -> bytes:
    """A server-sent event that carries a JSON value."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts under OpenAI's names."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

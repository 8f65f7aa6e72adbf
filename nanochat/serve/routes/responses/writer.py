"""Writes a reply for /v1/responses, either whole or as a stream of events in OpenAI's order."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.data.conversation import Part
from nanochat.generate.reply import Event
from nanochat.serve.routes.answers import Choice, Reply, add_text, event
from nanochat.serve.routes.fields import ApiError, ReplySettings
from nanochat.serve.routes.tools import Tools
from nanochat.tokenizer import Tokenizer

# Stores a reply: its message, and its response.
Store = Callable[[dict[str, Any], dict[str, Any]], None]


@dataclass(frozen=True)
class Repeated:
    """The fields of a request that its response repeats, and the tools that the model may call."""

    tools: Tools
    settings: ReplySettings
    instructions: str | None
    truncate: bool
    previous: str | None  # the ID of the response that this one continues
    store: bool
    echoed: Mapping[str, Any]  # fields of the request, unchanged


class ResponseWriter:
    """Writes one reply as a response object, and passes it to `store`.

    The output holds a message for each run of text, and an item for each function call. A
    calculator call belongs to the message around it: {expression, result} in `parts` and, in a
    stream, in the `tool` of a text event. Both fields extend OpenAI's format.
    """

    def __init__(
        self,
        number: str,
        model: str,
        repeated: Repeated,
        prompt_length: int,
        tokenizer: Tokenizer,
        store: Store,
    ):
        """Make the writer of one reply; `prompt_length` is in tokens."""
        self._number = number
        self._model = model
        self._repeated = repeated
        self._prompt_length = prompt_length
        self._store = store
        self._created = int(time.time())
        self._choice = Choice(tokenizer, None)
        self._reply = Reply(repeated.tools)
        self._items: list[dict[str, Any]] = []
        # Texts and calculator calls of the message that is growing.
        self._open: list[dict[str, Any]] | None = None
        self._blank = ""  # white space, which becomes a message only if more text follows
        self._sent = 0  # events of the stream so far
        self.stream = repeated.settings.stream

    def opening(self) -> bytes:
        """Return the events that announce a response, which has no output yet."""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Process the engine's events, and return the events to stream for them."""
        parts: list[Part] = []
        for _, token_event in news:
            parts += self._choice.add(token_event)
        deltas = self._reply.add(parts)
        if self._choice.finish:
            deltas += self._reply.end()
        return b"".join(map(self._follow, deltas))

    def closing(self) -> bytes:
        """Return the last events of the stream, after passing the response to `store`."""
        sent = self._end()
        body = self.body()
        kind = "response.completed" if body["status"] == "completed" else "response.incomplete"
        return sent + self._event(kind, response=body)

    def failure(self, refusal: ApiError) -> bytes:
        """Return the last event of a stream that fails, with `refusal` as its error."""
        error = {"code": refusal.code, "message": str(refusal)}
        response = {**self._response("failed"), "error": error}
        return self._event("response.failed", response=response)

    def body(self) -> dict[str, Any]:
        """Return the whole response as a dict, after passing it to `store`."""
        self._end()
        response = self._response(self._status)
        if self._status == "incomplete":
            reason = "content_filter"
            if self._choice.finish == "length":
                reason = "max_output_tokens"
            response["incomplete_details"] = {"reason": reason}
        body = {**response, "output": self._items, "usage": self._usage}
        self._store(self._reply.message, body)
        return body

    # --- items -----------------------------------------------------------------------------------

    def _follow(self, delta: dict[str, Any]) -> bytes:
        """Add a delta of the reply to the output, and return the events to stream."""
        if "tool_calls" in delta:
            return self._close("completed") + self._call(delta["tool_calls"][0])
        text = self._blank + delta.get("content", "")
        tool = delta.get("tool")
        if self._open is None and tool is None and not text.strip():
            self._blank = text
            return b""
        self._blank = ""
        return self._begin() + self._grow(text, tool)

    def _begin(self) -> bytes:
        """Begin a message unless one is open, and return the events to stream."""
        if self._open is not None:
            return b""
        self._open = []
        item = {
            "id": self._id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        self._items.append(item)
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        sent = self._event("response.output_item.added", item=item)
        sent += self._event("response.content_part.added", **self._position, part=content)
        item["content"] = [content]
        return sent

    def _grow(self, text: str, tool: dict[str, Any] | None) -> bytes:
        """Add text and a calculator call, if any, to the open message, and return the event."""
        assert self._open is not None
        if text:
            add_text(self._open, text)
            self._items[-1]["content"][0]["text"] += text
        fields = {**self._position, "delta": text, "logprobs": []}
        if tool is not None:
            self._open.append({"type": "tool", **tool})
            fields["tool"] = tool
        return self._event("response.output_text.delta", **fields)

    def _close(self, status: str) -> bytes:
        """End the open message, if there is one, and return the events to stream."""
        if self._open is None:
            return b""
        item = self._items[-1]
        parts = self._open
        self._open = None
        item["status"] = status
        if any(part["type"] == "tool" for part in parts):
            item["parts"] = parts
        (content,) = item["content"]
        fields = {**self._position, "text": content["text"], "logprobs": []}
        sent = self._event("response.output_text.done", **fields)
        sent += self._event("response.content_part.done", **self._position, part=content)
        return sent + self._event("response.output_item.done", item=item)

    def _call(self, call: dict[str, Any]) -> bytes:
        """Add a function call, which arrives whole, and return the events to stream."""
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        item = {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": name,
            "arguments": "",
        }
        self._items.append(item)
        sent = self._event("response.output_item.added", item=item)
        item |= {"status": "completed", "arguments": arguments}
        self._blank = ""
        kind = "response.function_call_arguments"
        item_id = item["id"]
        sent += self._event(f"{kind}.delta", item_id=item_id, delta=arguments)
        sent += self._event(f"{kind}.done", item_id=item_id, name=name, arguments=arguments)
        return sent + self._event("response.output_item.done", item=item)

    def _end(self) -> bytes:
        """End the open message, or write one if there is no output, and return the events."""
        sent = b""
        if not self._items:
            text = self._blank
            self._blank = ""
            sent = self._begin()
            if text:
                sent += self._grow(text, None)
        return sent + self._close(self._status)

    # --- objects ---------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "completed" if self._choice.finish == "stop" else "incomplete"

    @property
    def _position(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "content_index": 0}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._number}_{len(self._items)}"

    @property
    def _usage(self) -> dict[str, Any]:
        tokens = self._choice.tokens
        cached = self._choice.reused
        return {
            "input_tokens": self._prompt_length,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt_length + tokens,
        }

    def _response(self, status: str) -> dict[str, Any]:
        repeated = self._repeated
        sampling = repeated.settings.sampling
        return {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": repeated.instructions,
            "max_output_tokens": repeated.settings.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "metadata": {},
            "previous_response_id": repeated.previous,
            "store": repeated.store,
            "truncation": "auto" if repeated.truncate else "disabled",
            "usage": None,
            **repeated.echoed,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the stream, or b"" if the reply is not streamed.

        Events about items carry the index of the last item in the output.
        """
        if not self.stream:
            return b""
        if "response" not in fields:
            fields["output_index"] = len(self._items) - 1
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

"""Writes a reply for /v1/responses, either whole or as a stream of events in OpenAI's order."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.generate.reply import Event
from nanochat.serve.formats.pieces import (
    Arguments,
    Calculation,
    Call,
    Piece,
    Thought,
    Words,
    add_piece,
)
from nanochat.serve.routes.answers import Choice, event
from nanochat.serve.routes.fields import ApiError, ReplySettings
from nanochat.serve.routes.reply import Form, Reply, add_text
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

    The output holds an item for each run of text, each thought and each function call. A calculator
    call belongs to the message around it: {expression, result} in `parts` and, in a
    stream, in the `tool` of a text event. Both fields extend OpenAI's format.
    """

    def __init__(
        self,
        number: str,
        model: str,
        repeated: Repeated,
        prompt_length: int,
        tokenizer: Tokenizer,
        form: Form,
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
        self._reply = Reply(form)
        self._items: list[dict[str, Any]] = []
        self._kind: str | None = None  # the type of the last item, while it grows
        self._open: list[dict[str, Any]] = []  # texts and calculator calls of the open message
        self._sent = 0  # events of the stream so far
        self.stream = repeated.settings.stream

    def opening(self) -> bytes:
        """Return the events that announce a response, which has no output yet."""
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Process the engine's events, and return the events to stream for them."""
        pieces: list[Piece] = []
        for _, token_event in news:
            parts = self._choice.add(token_event)
            for piece in self._reply.add(parts, last=token_event.finish is not None):
                add_piece(pieces, piece)
        return b"".join(map(self._follow, pieces))

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

    def _follow(self, piece: Piece) -> bytes:
        """Add a piece of the reply to the output, and return the events to stream."""
        if isinstance(piece, Call):
            return self._close("completed") + self._begin_call(piece)
        if isinstance(piece, Arguments):
            item = self._items[-1]
            item["arguments"] += piece.text
            kind = "response.function_call_arguments.delta"
            return self._event(kind, item_id=item["id"], delta=piece.text)
        if isinstance(piece, Thought):
            return self._begin_thought() + self._think(piece.text)
        return self._begin() + self._grow(piece)

    def _begin(self) -> bytes:
        """Begin a message unless one is open, and return the events to stream."""
        if self._kind == "message":
            return b""
        sent = self._close("completed")
        self._open = []
        item = {
            "id": self._id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        self._add_item(item)
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        sent += self._event("response.output_item.added", item=item)
        sent += self._event("response.content_part.added", **self._position, part=content)
        item["content"] = [content]
        return sent

    def _grow(self, piece: Words | Calculation) -> bytes:
        """Add a text or a calculator call to the open message, and return the event."""
        fields: dict[str, Any] = {**self._position, "delta": "", "logprobs": []}
        if isinstance(piece, Words):
            add_text(self._open, piece.text)
            self._items[-1]["content"][0]["text"] += piece.text
            fields["delta"] = piece.text
        else:
            calculation = {"expression": piece.expression, "result": piece.result}
            self._open.append({"type": "tool", **calculation})
            fields["tool"] = calculation
        return self._event("response.output_text.delta", **fields)

    def _begin_thought(self) -> bytes:
        """Begin a reasoning item unless one is open, and return the events to stream."""
        if self._kind == "reasoning":
            return b""
        sent = self._close("completed")
        item = {
            "id": self._id("rs"),
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
        }
        self._add_item(item)
        content = {"type": "reasoning_text", "text": ""}
        sent += self._event("response.output_item.added", item=item)
        sent += self._event("response.content_part.added", **self._position, part=content)
        item["content"] = [content]
        return sent

    def _think(self, text: str) -> bytes:
        """Add text to the open reasoning item, and return the event."""
        self._items[-1]["content"][0]["text"] += text
        return self._event("response.reasoning_text.delta", **self._position, delta=text)

    def _begin_call(self, call: Call) -> bytes:
        """Begin a function call, and return the event to stream."""
        item = {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        self._add_item(item)
        return self._event("response.output_item.added", item=item)

    def _add_item(self, item: dict[str, Any]) -> None:
        """Add an item to the output, which grows until _close()."""
        self._items.append(item)
        self._kind = item["type"]

    def _close(self, status: str) -> bytes:
        """End the item that grows, if there is one, and return the events to stream."""
        kind = self._kind
        if kind is None:
            return b""
        self._kind = None
        item = self._items[-1]
        item["status"] = status
        if kind == "function_call":
            fields = {key: item[key] for key in ("name", "arguments")}
            event_name = "response.function_call_arguments.done"
            sent = self._event(event_name, item_id=item["id"], **fields)
            return sent + self._event("response.output_item.done", item=item)
        (content,) = item["content"]
        fields = {**self._position, "text": content["text"]}
        if kind == "message":
            fields["logprobs"] = []
            if any(part["type"] == "tool" for part in self._open):
                item["parts"] = self._open
        text_kind = "reasoning_text" if kind == "reasoning" else "output_text"
        sent = self._event(f"response.{text_kind}.done", **fields)
        sent += self._event("response.content_part.done", **self._position, part=content)
        return sent + self._event("response.output_item.done", item=item)

    def _end(self) -> bytes:
        """End the item that grows, or write a message if there is no output; return the events."""
        sent = b"" if self._items else self._begin()
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
            "output_tokens_details": {"reasoning_tokens": self._reply.thought_tokens},
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

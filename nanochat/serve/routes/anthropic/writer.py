"""Writes a reply in the format of Anthropic's Messages API, whole or as events."""

from collections.abc import Sequence
from typing import Any

from nanochat.generate.reply import Event
from nanochat.serve.formats.pieces import Arguments, Call, Piece, Thought, Words
from nanochat.serve.formats.values import NO_JSON, decoded
from nanochat.serve.routes.answers import Choice, event
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.reply import Form, Reply
from nanochat.tokenizer import Tokenizer

# The types of the deltas that extend a block, and the fields that these hold, by the block's type.
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
# Some clients leave a thought without a signature out of what they send back. None is checked here.
SIGNATURE = "unsigned"


class MessageWriter:
    """Writes the reply to one request, without calculations, for which the format has no place."""

    def __init__(
        self,
        number: str,
        model: str,
        prompt_length: int,
        tokenizer: Tokenizer,
        form: Form,
        stream: bool,
        shows_thoughts: bool,
    ):
        """Begin a reply; `shows_thoughts` is false if thinking blocks are to be empty."""
        self.stream = stream
        self._head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": model}
        self._prompt_length = prompt_length
        self._choice = Choice(tokenizer, None)
        self._reply = Reply(form)
        self._shows_thoughts = shows_thoughts
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []  # each with its texts
        self._is_open = False  # whether the last of the blocks may still grow

    # --- a stream --------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """Return the beginning of the stream: the message without content, and a ping."""
        empty = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **empty, "usage": self._usage}
        return _event("message_start", message=message) + _event("ping")

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Process events of the reply, and return the bytes to stream."""
        sent = b""
        for _, token_event in news:
            parts = self._choice.add(token_event)
            for piece in self._reply.add(parts, last=token_event.finish is not None):
                sent += self._piece(piece)
        return sent

    def closing(self) -> bytes:
        """Return the end of the stream, which says why the reply ended, and its token counts."""
        end = _event("message_delta", delta=self._ending, usage=self._usage)
        return self._end_block() + end + _event("message_stop")

    def failure(self, refusal: ApiError) -> bytes:
        """Return the end of a failed stream: an event with the error."""
        return event(refusal.anthropic_body, "error")

    def _piece(self, piece: Piece) -> bytes:
        """Add a piece to the blocks, and return its events."""
        if isinstance(piece, Thought):
            text = piece.text if self._shows_thoughts else ""
            return self._extend({"type": "thinking", "thinking": "", "signature": ""}, text)
        if isinstance(piece, Words):
            return self._extend({"type": "text", "text": ""}, piece.text)
        if isinstance(piece, Call):
            call = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            return self._end_block() + self._begin_block(call)
        return self._delta(piece.text) if isinstance(piece, Arguments) else b""

    def _extend(self, empty_block: dict[str, Any], text: str) -> bytes:
        """Add text to the last block if it has the type of `empty_block`, else to that block."""
        sent = b""
        if not self._is_open or self._blocks[-1][0]["type"] != empty_block["type"]:
            sent = self._end_block() + self._begin_block(empty_block)
        return sent + self._delta(text)

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        self._blocks.append((block, []))
        self._is_open = True
        return self._block_event("content_block_start", content_block=block)

    def _delta(self, text: str) -> bytes:
        """Add text to the last block, and return its event."""
        if not text:
            return b""
        block, texts = self._blocks[-1]
        texts.append(text)
        delta_type, key = DELTAS[block["type"]]
        return self._block_event("content_block_delta", delta={"type": delta_type, key: text})

    def _end_block(self) -> bytes:
        """End the last block, if it is open, and return its last events."""
        if not self._is_open:
            return b""
        self._is_open = False
        sent = b""
        if self._blocks[-1][0]["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            sent = self._block_event("content_block_delta", delta=delta)
        return sent + self._block_event("content_block_stop")

    def _block_event(self, name: str, **fields: Any) -> bytes:
        """Return an event about the last block, or b"" if the answer is not streamed."""
        return _event(name, index=len(self._blocks) - 1, **fields) if self.stream else b""

    # --- a whole answer --------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        """Return the whole answer as a dict."""
        content = [_whole(block, "".join(texts)) for block, texts in self._blocks]
        return {**self._head, "content": content, **self._ending, "usage": self._usage}

    @property
    def _ending(self) -> dict[str, Any]:
        """Why the reply ended, in Anthropic's words."""
        stop = self._choice.stop_string
        reason = "max_tokens" if self._choice.finish == "length" else "end_turn"
        if reason == "end_turn" and self._reply.calls:
            reason = "tool_use"
        elif stop is not None:
            reason = "stop_sequence"
        sequence = stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence}

    @property
    def _usage(self) -> dict[str, Any]:
        """The token counts so far. Anthropic counts a prompt without its cached tokens."""
        return {
            "input_tokens": self._prompt_length - self._choice.reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._choice.reused,
            "output_tokens": self._choice.tokens,
            "output_tokens_details": {"thinking_tokens": self._reply.thought_tokens},
        }


def _event(name: str, **fields: Any) -> bytes:
    """Return an event, whose data repeats its name, as all of Anthropic's do."""
    return event({"type": name, **fields}, name)


def _whole(block: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a block with its text."""
    if block["type"] == "text":
        return {**block, "text": text}
    if block["type"] == "thinking":
        return {**block, "thinking": text, "signature": SIGNATURE}
    arguments = decoded(text or "{}")
    return {**block, "input": {NO_JSON: text} if arguments is None else arguments}

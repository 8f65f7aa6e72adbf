"""Answers requests that generate text: follows growing replies, and sends the answer's bytes.

Choice follows the engine's events of one reply. Reply (in reply.py) turns the events into pieces of
text and calls, a Writer puts the pieces into the format of its route, and Answer sends them,
streamed or whole. If a client disconnects, its answer ends.
"""

import asyncio
import codecs
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from nanochat.common import UserError
from nanochat.data.conversation import Part
from nanochat.generate.reply import Alternatives, Event, Scored, TextStream, broken_model
from nanochat.generate.sampling import Sampling
from nanochat.generate.schema.grammar import too_complex
from nanochat.serve.engine_thread import Displaced, EngineThread, Ticket
from nanochat.serve.models import Metrics, Watch
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.reply import Form
from nanochat.tokenizer import Tokenizer

T = TypeVar("T")
ScoredTokens = Literal["text", "all"]
LEAST = -9999.0  # what OpenAI sends for an impossible token, since JSON has no minus infinity
DONE = b"data: [DONE]\n\n"
QUEUE_FULL = "as many requests are waiting as may wait: try again in 2 seconds"


# --- one reply while it grows --------------------------------------------------------------------


@dataclass(frozen=True)
class TokenScore:
    """A token of a reply, its natural-log probability, and the likeliest tokens at its position."""

    token: int
    logprob: float
    alternatives: Alternatives


class Choice:
    """Follows one reply: its parts, token counts and scores."""

    def __init__(self, tokenizer: Tokenizer, scored: ScoredTokens | None):
        """Begin to follow a reply.

        `scored` says which tokens scores() covers: "text" means those of the text, "all" also
        special tokens and calculator calls, and None no tokens.
        """
        self._stream = TextStream(tokenizer)
        self._tokenizer = tokenizer
        self._scored = scored
        # Tokens that scores() has not returned yet, each with its position in the text, in bytes.
        self._pending: list[tuple[int, TokenScore]] = []
        # Lengths in bytes of UTF-8, in which invalid bytes are U+FFFD.
        self._written = 0  # what the model wrote
        self._shown = 0  # what the client may see
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tokens = 0
        self.reused = 0  # tokens of the prompt that were not read again
        self.prompt_scores: tuple[Scored, ...] = ()
        self.finish: str | None = None
        self.stop_string: str | None = None  # the one that ended the reply

    def add(self, event: Event) -> list[Part]:
        """Process the reply's next event, and return the parts that can be shown now."""
        if self._scored:
            self._score(event)
        parts = self._stream.push(event.token)
        if event.finish is not None:
            parts += self._stream.flush()
        if event.parts is not None:
            # The engine looks for stop strings, and holds back text that may begin one.
            parts = list(event.parts)
        for piece in parts:
            if self._scored == "all" or piece.kind == "text":
                self._shown += len(piece.text.encode())
        self.tokens += 1
        self.reused += event.reused
        self.prompt_scores = tuple(event.prompt_scores) or self.prompt_scores
        self.finish = event.finish
        self.stop_string = event.matched if isinstance(event.matched, str) else None
        return parts

    def _score(self, event: Event) -> None:
        """Keep the log-probability of a token, if scores() must return it."""
        mark = self._stream.is_mark(event.token)
        if mark:
            self._written += len(self._decoder.decode(b"", final=True).encode())
        in_text = not mark and not event.forced and self._stream.kind == "text"
        if not in_text and self._scored != "all":
            return
        score = TokenScore(event.token, event.logprob, event.alternatives)
        self._pending.append((self._written, score))
        if not mark:
            raw = self._tokenizer.decode_bytes([event.token])
            self._written += len(self._decoder.decode(raw).encode())

    def scores(self) -> list[TokenScore]:
        """Return the scores of the tokens whose text has been shown since the last call.

        Tokens that a stop string cut off are left out.
        """
        ready = sum(position < self._shown for position, _ in self._pending)
        if self.finish is not None and self.stop_string is None:
            ready = len(self._pending)
        scores = [score for _, score in self._pending[:ready]]
        self._pending = self._pending[ready:]
        return scores


def count_usage(
    prompt: int,
    reply: int,
    cached: int,
    thoughts: int = 0,
) -> dict[str, Any]:
    """Return a dict of token counts under OpenAI's names.

    `cached` counts reused tokens of the prompt, and `thoughts` those of the reply's thoughts.
    """
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thoughts},
    }


def finite(logprob: float) -> float:
    """Return `logprob`, but at least -9999, since JSON has no minus infinity."""
    return max(logprob, LEAST)


def spelling(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token, or its bytes as in bytes:\\xe4\\xbd if they are not UTF-8."""
    raw = tokenizer.decode_bytes([token])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


# --- writers -------------------------------------------------------------------------------------


class Writer(Protocol):
    """Writes the replies of one request in the format of its route."""

    stream: bool

    def opening(self) -> bytes:
        """Return the first bytes of a stream."""
        ...

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Process events, each with its reply's index, and return the bytes to stream."""
        ...

    def closing(self) -> bytes:
        """Return the last bytes of a stream, after all replies have ended."""
        ...

    def failure(self, refusal: ApiError) -> bytes:
        """Return the last bytes of a stream that fails with `refusal`."""
        ...

    def body(self) -> dict[str, Any]:
        """Return the whole answer as a dict, for a request that does not stream."""
        ...


class Work(NamedTuple):
    """The engine requests of one HTTP request, and how to answer it.

    `writer` returns the writer of an answer from the answer's ID. `scores` is the most
    log-probabilities that the answer may list, `headers` are those of the response, and `form` says
    how the model writes the reply to a chat.
    """

    requests: list[tuple[list[int], Sampling]]
    writer: Callable[[str], Writer]
    scores: int = 0
    headers: Mapping[str, str] = {}
    form: Form = Form()


def error(refusal: ApiError, path: str) -> JSONResponse:
    """Return a refusal of a request to `path` as an HTTP response, in the format of that path."""
    return JSONResponse(refusal.body_for(path), refusal.status_for(path), refusal.headers)


def event(value: Any, name: str | None = None) -> bytes:
    """Return a server-sent event called `name`, if given, that carries `value` as JSON."""
    head = "" if name is None else f"event: {name}\n"
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"{head}data: {text}\n\n".encode()


# --- sending -------------------------------------------------------------------------------------


async def _left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` and return its result, or cancel it and return None if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Answer(Response):
    """The answer to one request, streamed or whole; it always releases the request's ticket."""

    def __init__(
        self,
        thread: EngineThread[Event],
        ticket: Ticket[Event],
        writer: Writer,
        metrics: Metrics,
        start: float,
        headers: Mapping[str, str],
    ):
        """Prepare the answer; `start` is when the request arrived, by the monotonic clock."""
        super().__init__()
        self.extra_headers = dict(headers)
        self.thread = thread
        self.ticket = ticket
        self.writer = writer
        prompt_lengths = [len(prompt) for prompt, _ in ticket.requests]
        self.watch = Watch(metrics, prompt_lengths, start)

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            if self.writer.stream:
                await while_connected(receive, self._stream(send))
            else:
                await while_connected(receive, self._send_at_once(scope, receive, send))
        finally:
            self.thread.release(self.ticket)
            self.watch.end()

    async def _news(self) -> list[tuple[int, Event]]:
        """Wait for events of the replies, and return them, each with its reply's index.

        Raises ApiError if the replies cannot continue, for example because the engine failed.
        """
        try:
            news = await self.ticket.events()
        except ApiError:
            raise
        except Displaced:
            raise ApiError(429, "queue_full", QUEUE_FULL, retry_after=2) from None
        except UserError as refusal:
            raise ApiError(400, "invalid_request", str(refusal)) from refusal
        except Exception as failure:  # an edge of the process: the engine's thread logs tracebacks
            text = f"the engine failed with {type(failure).__name__}: the server's log says why"
            raise ApiError(500, "engine_failed", text) from failure
        if any(event.broken for _, event in news):
            raise ApiError(500, "model_broken", broken_model())
        self.watch.add(news)
        if any(event.finish == "error" for _, event in news):
            raise ApiError(400, "schema_too_complex", too_complex())
        return news

    async def _send_at_once(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send the whole answer once all replies have ended, or an error as soon as one occurs."""
        try:
            while not self.watch.done:
                news = await self._news()
                self.writer.add(news)
            response = JSONResponse(self.writer.body(), headers=self.extra_headers)
        except ApiError as failure:
            response = error(failure, scope["path"])
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send the answer as server-sent events while the replies grow."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"x-accel-buffering", b"no"),
        ]
        for name, value in self.extra_headers.items():
            headers.append((name.lower().encode(), value.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, self.writer.opening())
        try:
            while not self.watch.done:
                news = await self._news()
                await _send(send, self.writer.add(news))
            await _send(send, self.writer.closing())
        except ApiError as failure:
            await _send(send, self.writer.failure(failure))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})

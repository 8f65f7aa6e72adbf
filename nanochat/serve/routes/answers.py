"""Answers to requests: replies that stream or come whole, and errors. A client that leaves ends its answer."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from nanochat.common import UserError
from nanochat.engine import Event
from nanochat.generate.reply import BROKEN
from nanochat.generate.schema.grammar import TOO_COMPLEX
from nanochat.serve.engine_thread import Displaced, EngineThread, Ticket
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.metrics import Metrics, Watch

T = TypeVar("T")
QUEUE_FULL = "as many requests are waiting as may wait: try again in 2 seconds"


class Writer(Protocol):
    """Writes the replies of one request in the format of its route."""

    stream: bool

    def opening(self) -> bytes:
        """The first events of a stream."""
        ...

    def add(self, news: Sequence[tuple[int, Event]]) -> bytes:
        """Follow events, each with the place of its reply; return what a stream sends of them."""
        ...

    def closing(self) -> bytes:
        """The last events of a stream, after all replies have ended."""
        ...

    def failure(self, refusal: ApiError) -> bytes:
        """The last events of a stream that fails."""
        ...

    def body(self) -> dict[str, Any]:
        """The whole answer, for a request that does not stream."""
        ...


def error(refusal: ApiError) -> JSONResponse:
    """A refusal as OpenAI's error JSON."""
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


def event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event that carries a JSON value."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return (
        head
        + b"data: "
        + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` and return its result; cancel it and return None as soon as the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Answer(Response):
    """The answer to one request, streamed or whole. The ticket is released whatever happens."""

    def __init__(
        self,
        thread: EngineThread[Event],
        ticket: Ticket[Event],
        writer: Writer,
        metrics: Metrics,
        start: float,
    ):
        """`start` is when the request came, by the monotonic clock."""
        super().__init__()
        self.thread, self.ticket, self.writer = thread, ticket, writer
        self.watch = Watch(metrics, [len(prompt) for prompt, _ in ticket.requests], start)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            work = self._stream(send) if self.writer.stream else self._whole(scope, receive, send)
            await while_connected(receive, work)
        finally:
            self.thread.release(self.ticket)
            self.watch.end()

    async def _news(self) -> list[tuple[int, Event]]:
        """The events of the next delivery. Raises ApiError if the engine fails or the model is broken."""
        try:
            news = await self.ticket.events()
        except ApiError:
            raise
        except Displaced:
            raise ApiError(429, "queue_full", QUEUE_FULL, retry_after=2) from None
        except UserError as refusal:
            raise ApiError(400, "invalid_request", str(refusal)) from refusal
        except (
            Exception
        ) as failure:  # an edge of the process: the engine thread has logged the traceback
            text = f"the engine failed with {type(failure).__name__}: the server's log says why"
            raise ApiError(500, "engine_failed", text) from failure
        if any(event.broken for _, event in news):
            raise ApiError(500, "model_broken", BROKEN)
        self.watch.add(news)
        if any(event.finish == "error" for _, event in news):
            raise ApiError(400, "schema_too_complex", TOO_COMPLEX)
        return news

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while not self.watch.done:
                self.writer.add(await self._news())
            response = JSONResponse(self.writer.body())
        except ApiError as failure:
            response = error(failure)
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, self.writer.opening())
        try:
            while not self.watch.done:
                await _send(send, self.writer.add(await self._news()))
            await _send(send, self.writer.closing())
        except ApiError as failure:
            await _send(send, self.writer.failure(failure))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})

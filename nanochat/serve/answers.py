"""Answers to requests: a reply that streams or comes whole, and an error. A client that leaves ends its answer."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from nanochat.common import UserError
from nanochat.engine import Event
from nanochat.generate.reply import TextStream
from nanochat.serve import chat_api
from nanochat.serve.chat_api import ApiError, ChatRequest, Envelope, Reply
from nanochat.serve.engine_thread import EngineThread, Ticket

T = TypeVar("T")


def error(refusal: ApiError) -> JSONResponse:
    """A refusal as OpenAI's error JSON."""
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


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
        self, thread: EngineThread[Event], ticket: Ticket[Event], asked: ChatRequest, frame: Envelope, text: TextStream
    ):
        super().__init__()
        self.thread, self.ticket, self.asked, self.envelope, self.decoder = thread, ticket, asked, frame, text
        self.reply = Reply()
        self.tokens = 0
        self.finish: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            work = self._stream(send) if self.asked.stream else self._whole(scope, receive, send)
            await while_connected(receive, work)
        finally:
            self.thread.release(self.ticket)

    @property
    def usage(self) -> dict[str, int]:
        return chat_api.usage(len(self.ticket.prompt), self.tokens)

    async def _deltas(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The new deltas of each delivery, until the reply ends. Raises ApiError if the engine fails."""
        while self.finish is None:
            try:
                events = await self.ticket.events()
            except ApiError:
                raise
            except UserError as refusal:
                raise ApiError(400, "invalid_request", str(refusal)) from refusal
            except Exception as failure:  # an edge of the process: the engine thread has logged the traceback
                text = f"the engine failed with {type(failure).__name__}: the server's log says why"
                raise ApiError(500, "engine_failed", text) from failure
            parts = [part for event in events for part in self.decoder.push(event.token)]
            self.tokens += len(events)
            self.finish = events[-1].finish
            if self.finish:
                parts += self.decoder.flush()
            yield self.reply.add(parts) + (self.reply.end() if self.finish else [])

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for _ in self._deltas():
                pass
            response = JSONResponse(self.envelope.completion(self.reply, self.finish or "stop", self.usage))
        except ApiError as failure:
            response = error(failure)
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, self.envelope.chunk({"role": "assistant", "content": ""}))
        try:
            async for deltas in self._deltas():
                usage = self.usage if self.asked.continuous_usage else None
                await _send(send, b"".join(self.envelope.chunk(delta, None, usage) for delta in deltas))
            alone = self.asked.include_usage
            await _send(send, self.envelope.chunk({}, self.finish, None if alone else self.usage))
            if alone:
                await _send(send, self.envelope.usage_chunk(self.usage))
        except ApiError as failure:
            await _send(send, chat_api.event(failure.body))
        await _send(send, chat_api.DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})

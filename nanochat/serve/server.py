"""Answers the routes: checks bodies one at a time, and hands them to the thread that owns their
engine."""

import asyncio
import functools
import json
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from nanochat.common import UserError
from nanochat.generate.reply import Event
from nanochat.serve.connections import Caps, neighbour
from nanochat.serve.engine_thread import Ticket
from nanochat.serve.models import Hosted, Loadable, Models
from nanochat.serve.routes import tokens
from nanochat.serve.routes.answers import QUEUE_FULL, Answer, Work, Writer, while_connected
from nanochat.serve.routes.fields import ApiError, Defaults, Limits
from nanochat.serve.routes.responses.request import read_response
from nanochat.serve.routes.responses.store import ResponseStore, Shelf
from nanochat.serve.waiting import ByAddress, SmallestFirst, Turns
from nanochat.tokenizer import Tokenizer

T = TypeVar("T")
Route = Callable[[Request], Awaitable[Response]]
BODY_BYTES = 256 * 1024  # largest body of a request
# An escape in JSON text: a surrogate pair, half of one, or any other.
ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Settings:
    """The server's limits, and what it serves besides the API."""

    waiting: int = 64  # chats that may wait for a slot of a model; the server refuses more
    # Requests that may wait for their check; the server refuses more, the largest first.
    preparing: int = 64
    # Requests that one address may have at the same time; 0 leaves that to the line.
    per_address: int = 0
    api_key: str = ""  # what clients must send; empty: nothing
    page: bool = True  # serve the web page
    hosts: tuple[str, ...] = ()  # names that it answers to, besides IP addresses and localhost
    caps: Caps = field(default_factory=Caps)
    # The base folder whose runs the page /runs shows; None: there is no such page.
    runs: Path | None = None


class CheckedRequest(Protocol):
    """A checked request to a route that generates."""

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """Return its requests to the engine, and the writer of its answer."""
        ...


ReadBody = Callable[[Any, Limits, Defaults], CheckedRequest]  # how a route checks a decoded body


@dataclass(frozen=True)
class Prepared:
    """A request that waits for the engine: its model, its ticket, and the writer of its answer."""

    model: Hosted
    ticket: Ticket[Event]
    writer: Callable[[str], Writer]


class ChatServer:
    """Answers the routes with the engines behind them."""

    def __init__(self, models: Sequence[Loadable], settings: Settings):
        """The first of `models` answers the requests that name none."""
        self.models = Models(models, settings.waiting)
        self.settings = settings
        self.responses = ResponseStore()
        self.turns = Turns(SmallestFirst(settings.preparing))
        # The turns need no more than one thread, and each thread keeps memory.
        self.preparing = ThreadPoolExecutor(1, "prepare")
        self.schema_turns = Turns(ByAddress(settings.preparing))
        self.schemas = ThreadPoolExecutor(1, "schemas")  # a new schema may take seconds

    # --- what the server tells -------------------------------------------------------------------

    async def health(self) -> JSONResponse:
        """GET /health: whether the engines' threads run, and how busy they are together."""
        threads = self.models.threads
        alive = all(thread.alive for thread in threads)
        state = {
            "status": "ok" if alive else "stopped",
            "slots": sum(thread.slots for thread in threads),
            "free_slots": sum(thread.free_slots for thread in threads),
            "chats": sum(len(thread.tickets) for thread in threads),
        }
        return JSONResponse(state, 200 if alive else 503)

    async def list_models(self) -> JSONResponse:
        """GET /v1/models: the models, the default one first, and the defaults of a request."""
        models = [self._described(model) for model in self.models.all]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, name: str) -> JSONResponse:
        """GET /v1/models/NAME: the model of this name."""
        return JSONResponse(self._described(self.models.named(name)))

    def _described(self, model: Hosted) -> dict[str, Any]:
        """Return what the server says of a model."""
        description = model.described()
        if self.settings.runs is not None:
            description["runs"] = True
        return description

    async def metrics_text(self) -> Response:
        """GET /metrics."""
        return self.models.families.response()

    async def tokenizer_info(self, model: str | None = None) -> JSONResponse:
        """GET /tokenizer_info?model=NAME."""
        hosted = self.models.named(model)
        return JSONResponse(tokens.tokenizer_info(hosted.tokenizer, hosted.limits))

    # --- routes that read a body -----------------------------------------------------------------

    def encoding(self, work: Callable[[Any, Tokenizer, Limits], dict[str, Any]]) -> Route:
        """Return a route that only the tokenizer answers."""

        async def answer(request: Request) -> Response:
            body = await read_body(request)

            def answer_body() -> dict[str, Any]:
                value = decode_json(body)
                model = self.models.of_body(value)
                return work(value, model.tokenizer, model.limits)

            content = await while_connected(request.receive, self._in_turn(body, answer_body))
            if content is None:
                return Response()  # the client has left
            return JSONResponse(content)

        return answer

    def generating(self, reader: ReadBody) -> Route:
        """Return a route that the engine answers."""

        async def answer(request: Request) -> Response:
            start = time.monotonic()
            owner = neighbour(request.client.host if request.client else "")
            body = await read_body(request)
            preparation = self._prepare(body, reader, owner)
            prepared = await while_connected(request.receive, preparation)
            if prepared is None:
                return Response()  # the client has left
            model = prepared.model
            writer = prepared.writer(secrets.token_hex(12))
            return Answer(model.thread, prepared.ticket, writer, model.metrics, start)

        return answer

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses."""
        reader = functools.partial(read_response, shelf=self._shelf(request))
        return await self.generating(reader)(request)

    async def response(self, number: str, request: Request) -> JSONResponse:
        """GET /v1/responses/NUMBER: a response that is stored."""
        for name in request.query_params:
            text = f"this route does not support {name[:80]}: leave it out"
            raise ApiError(400, "unsupported_parameter", text, name[:80])
        return JSONResponse(self._shelf(request).response(number))

    async def remove_response(self, number: str, request: Request) -> JSONResponse:
        """DELETE /v1/responses/NUMBER: forget a response."""
        self._shelf(request).response(number, again=False)
        return JSONResponse({"id": number, "object": "response", "deleted": True})

    def _shelf(self, request: Request) -> Shelf:
        """Return the stored responses of a client."""
        return self.responses.of(request.headers.get("authorization", ""))

    # --- preparation -----------------------------------------------------------------------------

    async def _in_turn(self, body: bytes, work: Callable[[], T]) -> T:
        """Run work on a body off the event loop. One body at a time, the smallest first."""
        try:
            async with self.turns.turn(size=len(body)):
                return await asyncio.get_running_loop().run_in_executor(self.preparing, work)
        except asyncio.QueueFull:
            raise _queue_full() from None

    async def _prepare(
        self,
        body: bytes,
        reader: ReadBody,
        owner: str,
    ) -> Prepared:
        """Check a body and submit its ticket. One body at a time: its place is certain before its
        text is encoded.

        Only a schema that the model does not know yet waits for its automaton outside of that
        order: addresses take turns there.
        """
        loop = asyncio.get_running_loop()

        def check() -> tuple[Hosted, CheckedRequest]:
            value = decode_json(body)
            model = self.models.of_body(value)
            return model, reader(value, model.limits, model.defaults)

        try:
            async with self.turns.turn(size=len(body)):
                model, request = await loop.run_in_executor(self.preparing, check)
                self._check_place(model, owner)
                work = await loop.run_in_executor(self.preparing, _work, request, model)
                schema = work.requests[0][1].schema
                if schema is None:
                    return self._submitted(model, work, owner, None)
                if model.schemas.is_ready(schema):
                    return self._submitted(model, work, owner, _automaton(schema, model))
            async with self.schema_turns.turn(owner):
                automaton = await loop.run_in_executor(self.schemas, _automaton, schema, model)
            self._check_place(model, owner)
            return self._submitted(model, work, owner, automaton)
        except asyncio.QueueFull:
            raise _queue_full() from None

    def _check_place(self, model: Hosted, owner: str) -> None:
        """Raise asyncio.QueueFull if too many wait for the model, or if the address has all the
        requests that it may have, over all models."""
        requests = 0
        for thread in self.models.threads:
            requests += sum(ticket.owner == owner for ticket in thread.tickets)
        if 0 < self.settings.per_address <= requests or model.thread.full(owner):
            raise asyncio.QueueFull

    def _submitted(
        self,
        model: Hosted,
        work: Work,
        owner: str,
        automaton: object,
    ) -> Prepared:
        """Queue the requests of a body; the ticket keeps the automaton of their schema alive."""
        ticket: Ticket[Event] = Ticket(work.requests, owner, automaton)
        model.thread.submit(ticket)
        return Prepared(model, ticket, work.writer)

    def close(self) -> None:
        """Take no more bodies."""
        for executor in (self.preparing, self.schemas):
            executor.shutdown(wait=False, cancel_futures=True)


def _queue_full() -> ApiError:
    return ApiError(429, "queue_full", QUEUE_FULL, retry_after=2)


def _work(request: CheckedRequest, model: Hosted) -> Work:
    """Return what a request asks of the engine. ApiError 400 for what the engine would refuse."""
    work = request.work(model.tokenizer, model.limits)
    if model.adapter:
        requests = []
        for prompt, sampling in work.requests:
            requests.append((prompt, replace(sampling, adapter=model.adapter)))
        work = work._replace(requests=requests)
    try:
        for prompt, sampling in work.requests:
            model.check(prompt, sampling)
    except UserError as refusal:
        raise ApiError(400, "invalid_request", str(refusal)) from None
    return work


def _automaton(schema: str, model: Hosted) -> object:
    """Make the automaton of a schema, so that the engine need not wait for it as long as the result
    is held. ApiError 400 if that cannot be done."""
    try:
        return model.schemas.prepare(schema)
    except UserError as refusal:
        raise ApiError(400, "invalid_request", str(refusal)) from None


# --- bodies --------------------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """Return the body of a request. ApiError 415 if it is not JSON, 413 beyond BODY_BYTES.

    The type matters: a browser lets any web site post plain text to this server, but not JSON.
    """
    content_type, _, _ = request.headers.get("content-type", "").partition(";")
    if content_type.strip().lower() != "application/json":
        raise ApiError(415, "unsupported_media_type", "Content-Type must be application/json")
    body = bytearray()
    announced = int(request.headers.get("content-length", 0))
    if announced <= BODY_BYTES:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                break
    if max(announced, len(body)) > BODY_BYTES:
        text = f"the body must not be larger than {BODY_BYTES:,} bytes: send a shorter chat"
        raise ApiError(413, "body_too_large", text)
    return bytes(body)


def decode_json(body: bytes) -> Any:
    """Return the value of a body, which can be written as JSON in UTF-8 again: half of a surrogate
    pair becomes U+FFFD.

    ApiError 400 if the body is not JSON, or if a number in it is NaN or infinite.
    """
    try:
        # Replaced here, once: some routes send texts of the request back, and such a half would
        # make that fail.
        text = ESCAPE.sub(_without_half, body.decode("utf-8-sig"))
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not valid JSON in UTF-8") from None


def _without_half(escape: re.Match[str]) -> str:
    """Return an escape, or U+FFFD for half of a surrogate pair."""
    return r"\ufffd" if escape["half"] else escape[0]


def _finite(number: str) -> float:
    """Return a number of a body. ApiError 400 for NaN, Infinity and 1e999, which JSON cannot
    hold."""
    value = float(number)
    if not math.isfinite(value):
        text = (
            f"the body must be JSON, whose numbers are finite, got {number[:80]}: send a number "
            "below 1.8e308, or null"
        )
        raise ApiError(400, "invalid_json", text)
    return value

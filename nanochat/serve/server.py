"""Answers the routes: checks request bodies one at a time, and submits requests to the engines."""

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

import nanochat
from nanochat.common import UserError, own_language
from nanochat.generate.reply import Event
from nanochat.serve.connections import Caps, comes_from_here, owner_of
from nanochat.serve.engine_thread import HasSize, Ticket
from nanochat.serve.formats.values import MOST_DEPTH, NotFinite, TooDeep, parsed
from nanochat.serve.models import Hosted, Loadable, Models
from nanochat.serve.routes import tokens
from nanochat.serve.routes.answers import QUEUE_FULL, Answer, Work, Writer, while_connected
from nanochat.serve.routes.fields import ApiError, Defaults, Limits
from nanochat.serve.routes.responses.request import read_response
from nanochat.serve.routes.responses.store import ResponseStore, Shelf
from nanochat.serve.waiting import Turns
from nanochat.tokenizer import Tokenizer

T = TypeVar("T")
Route = Callable[[Request], Awaitable[Response]]
BODY_BYTES = 256 * 1024  # largest body of a request
LARGE_BYTES = 8 << 20  # largest body of a chat from this machine, or with the key
# Larger bodies than BODY_BYTES that may wait to be checked. Each may take 8 MB.
LARGE_WAITING = 2
# Values and keys of one body together. An object with one value takes up to 240 bytes.
MOST_VALUES = 1 << 18


@dataclass(frozen=True)
class Settings:
    """The server's limits and key, and what it serves in addition to the API."""

    waiting: int = 64  # requests that may wait for a slot of a model; the server refuses more
    # Requests that may wait to be checked; the server refuses more, large ones first.
    preparing: int = 64
    # Requests that one address may have at the same time; 0: no such limit.
    per_address: int = 0
    api_key: str = ""  # the key that clients must send; empty: none
    page: bool = True  # serve the web page
    # Host names that the server answers to, besides IP addresses and localhost.
    hosts: tuple[str, ...] = ()
    # Sites whose pages may call the API, as https://chat.example.org; "*": all.
    origins: tuple[str, ...] = ()
    caps: Caps = field(default_factory=Caps)
    # The base folder whose runs the page /runs shows; None: there is no such page.
    runs: Path | None = None
    starts: bool = False  # whether that page may start, resume and stop runs


class CheckedRequest(Protocol):
    """A checked request to a route that generates text."""

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """Return the engine requests, and a function that makes the writer of the answer."""
        ...


ReadBody = Callable[[Any, Limits, Defaults], CheckedRequest]  # checks the decoded body of a route


@dataclass(frozen=True)
class Prepared:
    """A submitted request: its model, its ticket, and how to answer it."""

    model: Hosted
    ticket: Ticket[Event]
    writer: Callable[[str], Writer]  # from the ID of the answer
    headers: Mapping[str, str]  # headers of the response


class ChatServer:
    """Answers the routes of the API with the models that it serves."""

    def __init__(self, models: Sequence[Loadable], settings: Settings):
        """Serve `models`; the first one answers requests that name no model."""
        self.models = Models(models, settings.waiting)
        self.settings = settings
        self.responses = ResponseStore()
        self.turns = Turns(settings.preparing)
        # The turns need no more than one thread, and each thread takes memory.
        self.preparing = ThreadPoolExecutor(1, "prepare", own_language.set, ("en",))
        # Large bodies have a queue and a thread of their own, so that no other body waits for one.
        self.large_turns = Turns(LARGE_WAITING)
        self.preparing_large = ThreadPoolExecutor(1, "prepare-large", own_language.set, ("en",))
        self.schema_turns = Turns(settings.preparing)
        # A new schema may take seconds.
        self.schemas = ThreadPoolExecutor(1, "schemas", own_language.set, ("en",))

    # --- facts about the server ------------------------------------------------------------------

    async def health(self) -> JSONResponse:
        """Answer GET /health: how busy the engines are, with status 503 if one has stopped."""
        threads = self.models.threads
        alive = all(thread.alive for thread in threads)
        state = {
            "status": "ok" if alive else "stopped",
            "version": nanochat.__version__,
            "slots": sum(thread.slots for thread in threads),
            "free_slots": sum(thread.free_slots for thread in threads),
            "chats": sum(len(thread.tickets) for thread in threads),
        }
        return JSONResponse(state, 200 if alive else 503)

    async def list_models(self) -> JSONResponse:
        """Answer GET /v1/models: all models with their defaults, the default model first."""
        models = [self._described(model) for model in self.models.all]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, name: str) -> JSONResponse:
        """Answer GET /v1/models/NAME with the entry of that model."""
        return JSONResponse(self._described(self.models.named(name)))

    def _described(self, model: Hosted) -> dict[str, Any]:
        """Return a model's entry in /v1/models, with `runs` if the server shows training runs."""
        description = model.described()
        if self.settings.runs is not None:
            description["runs"] = True
        return description

    async def metrics_text(self) -> Response:
        """Answer GET /metrics with Prometheus text."""
        return self.models.families.response()

    async def tokenizer_info(self, model: str | None = None) -> JSONResponse:
        """Answer GET /tokenizer_info?model=NAME with facts about that model's tokenizer."""
        hosted = self.models.named(model)
        return JSONResponse(tokens.tokenizer_info(hosted.tokenizer, hosted.limits))

    # --- routes that read a body -----------------------------------------------------------------

    def encoding(
        self,
        work: Callable[[Any, Tokenizer, Limits], dict[str, Any]],
        large: bool = False,
    ) -> Route:
        """Return a route that answers with the dict that `work` makes of a decoded body.

        With `large`, trusted clients may send bodies of up to LARGE_BYTES.
        """

        async def answer(request: Request) -> Response:
            body = await read_body(request, self._most_bytes(request, large))

            def answer_body() -> dict[str, Any]:
                value = decode_json(body)
                model = self.models.of_body(value)
                return work(value, model.tokenizer, model.limits)

            answering = self._in_turn(owner_of(request), body, answer_body)
            content = await while_connected(request.receive, answering)
            if content is None:
                return Response()  # the client has left
            return JSONResponse(content)

        return answer

    def generating(self, reader: ReadBody, large: bool = False) -> Route:
        """Return a route that checks a body with `reader` and answers it with the engine.

        With `large`, trusted clients may send bodies of up to LARGE_BYTES.
        """

        async def answer(request: Request) -> Response:
            start = time.monotonic()
            owner = owner_of(request)
            body = await read_body(request, self._most_bytes(request, large))
            preparation = self._prepare(body, reader, owner)
            prepared = await while_connected(request.receive, preparation)
            if prepared is None:
                return Response()  # the client has left
            model = prepared.model
            writer = prepared.writer(secrets.token_hex(12))
            ticket = prepared.ticket
            return Answer(model.thread, ticket, writer, model.metrics, start, prepared.headers)

        return answer

    async def respond(self, request: Request) -> Response:
        """Answer POST /v1/responses with the engine; a request may continue a stored response."""
        reader = functools.partial(read_response, shelf=self._shelf(request))
        return await self.generating(reader)(request)

    async def response(self, number: str, request: Request) -> JSONResponse:
        """Answer GET /v1/responses/ID with that stored response; query parameters are refused."""
        for name in request.query_params:
            text = f"this route does not support {name[:80]}: leave it out"
            raise ApiError(400, "unsupported_parameter", text, name[:80])
        return JSONResponse(self._shelf(request).response(number))

    async def remove_response(self, number: str, request: Request) -> JSONResponse:
        """Answer DELETE /v1/responses/ID by deleting that stored response."""
        self._shelf(request).response(number, again=False)
        return JSONResponse({"id": number, "object": "response", "deleted": True})

    def _shelf(self, request: Request) -> Shelf:
        """Return the Shelf that holds the stored responses of a request's key."""
        return self.responses.of(request.headers.get("authorization", ""), owner_of(request))

    # --- preparation -----------------------------------------------------------------------------

    def _most_bytes(self, request: Request, large: bool) -> int:
        """Return the largest body that a request may have.

        With a key, no request gets here without it.
        """
        is_trusted = bool(self.settings.api_key) or comes_from_here(request)
        return LARGE_BYTES if large and is_trusted else BODY_BYTES

    def _queue_for(self, body: bytes) -> tuple[Turns, ThreadPoolExecutor]:
        """Return the queue in which a body waits for its turn, and the thread that checks it."""
        if len(body) > BODY_BYTES:
            return self.large_turns, self.preparing_large
        return self.turns, self.preparing

    async def _in_turn(self, owner: str, body: bytes, work: Callable[[], T]) -> T:
        """Run `work`, which handles a `body` from the address `owner`, in a thread.

        Returns the result. Raises ApiError (429) if the queue has no room for this body.
        """
        turns, thread = self._queue_for(body)
        try:
            async with turns.turn(owner, len(body)):
                return await asyncio.get_running_loop().run_in_executor(thread, work)
        except asyncio.QueueFull:
            raise _queue_full() from None

    async def _prepare(
        self,
        body: bytes,
        reader: ReadBody,
        owner: str,
    ) -> Prepared:
        """Check a body, submit its requests to the engine's thread, and return a Prepared.

        Bodies are checked one at a time, and their prompts encoded only if there is room for the
        request. A new JSON schema is compiled after that, with addresses taking turns. Raises
        ApiError if the request is refused.
        """
        loop = asyncio.get_running_loop()

        def check() -> tuple[Hosted, CheckedRequest]:
            value = decode_json(body)
            model = self.models.of_body(value)
            return model, reader(value, model.limits, model.defaults)

        turns, thread = self._queue_for(body)
        try:
            async with turns.turn(owner, len(body)):
                model, request = await loop.run_in_executor(thread, check)
                self._check_place(model, owner)
                work = await loop.run_in_executor(thread, _work, request, model)
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
        """Raise asyncio.QueueFull if there is no room for a request of the address `owner`.

        Either too many requests wait for the model, or the address already has as many as it may
        have, for all models together.
        """
        request_count = 0
        for thread in self.models.threads:
            request_count += sum(ticket.owner == owner for ticket in thread.tickets)
        if 0 < self.settings.per_address <= request_count or model.thread.full(owner):
            raise asyncio.QueueFull

    def _submitted(
        self,
        model: Hosted,
        work: Work,
        owner: str,
        automaton: HasSize | None,
    ) -> Prepared:
        """Submit the requests of a body to the engine's thread, and return a Prepared.

        The ticket keeps the compiled schema (`automaton`) alive. Raises asyncio.QueueFull if there
        is no room.
        """
        ticket: Ticket[Event] = Ticket(work.requests, owner, automaton, work.scores)
        model.thread.submit(ticket)
        return Prepared(model, ticket, work.writer, work.headers)

    def close(self) -> None:
        """Stop preparing bodies."""
        for executor in (self.preparing, self.preparing_large, self.schemas):
            executor.shutdown(wait=False, cancel_futures=True)


def _queue_full() -> ApiError:
    return ApiError(429, "queue_full", QUEUE_FULL, retry_after=2)


def _work(request: CheckedRequest, model: Hosted) -> Work:
    """Return a checked request's Work, whose engine requests name the model's adapter, if any.

    Raises ApiError (400) if the request's work() does, or if the engine would refuse a prompt.
    """
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


def _automaton(schema: str, model: Hosted) -> HasSize | None:
    """Return the automaton that constrains replies to a JSON schema, compiling it if needed.

    While the automaton is held, the engine need not compile the schema. Raises ApiError (400) if
    the schema cannot be compiled.
    """
    try:
        return model.schemas.prepare(schema)
    except UserError as refusal:
        raise ApiError(400, "invalid_request", str(refusal)) from None


# --- bodies --------------------------------------------------------------------------------------


async def read_body(request: Request, most_bytes: int = BODY_BYTES) -> bytes:
    """Return the body of a request.

    Raises ApiError: 413 if it is larger than `most_bytes`, and 415 if its Content-Type is
    not JSON. The type matters because a browser lets any website post plain text to this server,
    but not JSON.
    """
    content_type, _, _ = request.headers.get("content-type", "").partition(";")
    if content_type.strip().lower() != "application/json":
        raise ApiError(415, "unsupported_media_type", "Content-Type must be application/json")
    body = bytearray()
    announced = int(request.headers.get("content-length", 0))
    if announced <= most_bytes:
        async for piece in request.stream():
            body += piece
            if len(body) > most_bytes:
                break
    if max(announced, len(body)) > most_bytes:
        text = f"the body must not be larger than {most_bytes:,} bytes: send a shorter chat"
        raise ApiError(413, "body_too_large", text)
    return bytes(body)


def decode_json(body: bytes) -> Any:
    """Return the JSON value of a body, with U+FFFD in place of each unpaired surrogate.

    UTF-8, in which answers are sent, cannot encode such a surrogate. Raises ApiError (400) if the
    body is not valid JSON in UTF-8, if it contains NaN, Infinity or a float such as 1e999, if it has
    too many values, or if they are nested too deep.
    """
    if len(body) > BODY_BYTES:
        _check_values(body)
    try:
        return parsed(body.decode("utf-8-sig"))
    except NotFinite as number:
        text = (
            f"the body must be JSON, whose numbers are finite, got {str(number)[:80]}: send a "
            "number below 1.8e308, or null"
        )
        raise ApiError(400, "invalid_json", text) from None
    except TooDeep:
        text = (
            f"objects and lists may be nested {MOST_DEPTH} deep at most: send what lies deeper as "
            "a text"
        )
        raise ApiError(400, "invalid_json", text) from None
    except ValueError:
        raise ApiError(400, "invalid_json", "the body is not valid JSON in UTF-8") from None


def _check_values(body: bytes) -> None:
    """Raise ApiError (400) if a large body has more than MOST_VALUES values and keys.

    They are counted before the body is decoded, because in Python a value of two bytes takes up to
    a hundred times as much.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    values = plain.count(b'"') // 2
    if values <= MOST_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        values = sum(map(outside.count, (b",", b":", b"[", b"{")))
    if values > MOST_VALUES:
        text = f"a body may have at most {MOST_VALUES:,} values: send fewer, or longer texts"
        raise ApiError(400, "too_many_values", text)

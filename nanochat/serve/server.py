"""The chat server: its routes, answered with what the engine's own thread generates."""

import asyncio
import contextlib
import functools
import importlib.resources
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nanochat.common import UserError
from nanochat.engine import Event
from nanochat.serve.connections import Caps, neighbour
from nanochat.serve.engine_thread import Ticket
from nanochat.serve.guard import Guard
from nanochat.serve.hosted import Hosted, Loadable, Models
from nanochat.serve.listening import App
from nanochat.serve.routes import intake, tokens
from nanochat.serve.routes.answers import QUEUE_FULL, Answer, Writer, error, while_connected
from nanochat.serve.routes.chat import read_chat
from nanochat.serve.routes.completions import read_completion
from nanochat.serve.routes.fields import ApiError, Limits
from nanochat.serve.routes.intake import Work
from nanochat.serve.routes.responses.kept import Kept, Shelf
from nanochat.serve.routes.responses.request import read_response
from nanochat.serve.routes.sampling import Defaults
from nanochat.serve.runs.routes import Runs
from nanochat.tokenizer import Tokenizer

T = TypeVar("T")
Route = Callable[[Request], Awaitable[Response]]
SCRIPTS = (
    "about.js",
    "app.js",
    "client.js",
    "sse.js",
    "chats/check.js",
    "chats/conversation.js",
    "chats/exchange.js",
    "chats/files.js",
    "chats/kept.js",
    "chats/pair.js",
    "chats/panel.js",
    "chats/store.js",
    "chats/tree.js",
    "language/i18n.js",
    "language/names.js",
    "language/phrases.js",
    "language/words.js",
    "reply/dom.js",
    "reply/draw.js",
    "reply/inline.js",
    "reply/markdown.js",
    "reply/saw.js",
    "reply/tokens.js",
    "reply/turn.js",
    "runs/chart.js",
    "runs/feed.js",
    "runs/figures.js",
    "runs/list.js",
    "runs/runs.js",
    "runs/samples.js",
    "runs/words.js",
    "settings/drawer.js",
    "settings/values.js",
)
STYLES = (
    "style.css",
    "chats/panel.css",
    "reply/markdown.css",
    "reply/pair.css",
    "reply/reply.css",
    "runs/runs.css",
    "settings/settings.css",
)
PAGES = ("index.html", "runs/index.html")
ASSETS = {
    **dict.fromkeys(SCRIPTS, "text/javascript"),
    **dict.fromkeys(STYLES, "text/css"),
    "favicon.svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Settings:
    """The server's limits, and what it serves besides the API."""

    waiting: int = 64  # chats that may wait for a slot of a model; the server refuses more
    preparing: int = (
        64  # requests that may wait for their check; the server refuses more, the largest first
    )
    per_address: int = (
        0  # requests that one address may have at the same time; 0 leaves that to the line
    )
    api_key: str = ""  # what clients must send; empty: nothing
    page: bool = True  # serve the web page
    hosts: tuple[
        str, ...
    ] = ()  # names that this server answers to, besides IP addresses and localhost
    caps: Caps = field(default_factory=Caps)
    runs: Path | None = (
        None  # the base folder whose runs the page /runs shows; None: there is no such page
    )


class Asked(Protocol):
    """A checked request to a route that generates."""

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """What it asks of the engine."""
        ...


Read = Callable[[Any, Limits, Defaults], Asked]  # how a route checks a decoded body


class ChatServer:
    """Answers the routes with the engines behind them."""

    def __init__(self, models: Sequence[Loadable], settings: Settings):
        """The first of `models` answers the requests that name none."""
        self.models = Models(models, settings.waiting)
        self.settings = settings
        self.kept = Kept()
        self.turns = intake.Turns(settings.preparing)
        self.preparing = ThreadPoolExecutor(
            1, "prepare"
        )  # the turns need no more, and each thread keeps memory
        self.schema_turns = intake.AddressTurns(settings.preparing)
        self.schemas = ThreadPoolExecutor(1, "schemas")  # a new schema may take seconds

    async def health(self) -> JSONResponse:
        """GET /health: whether the engines' threads run, and how busy they are together."""
        threads = self.models.threads
        alive = all(thread.alive for thread in threads)
        state = {
            "slots": sum(thread.slots for thread in threads),
            "free_slots": sum(thread.free_slots for thread in threads),
            "chats": sum(len(thread.tickets) for thread in threads),
        }
        return JSONResponse(
            {"status": "ok" if alive else "stopped", **state}, 200 if alive else 503
        )

    async def list_models(self) -> JSONResponse:
        """GET /v1/models: the models, the default one first, and the defaults of a request."""
        return JSONResponse(
            {"object": "list", "data": [self._described(each) for each in self.models.all]}
        )

    async def model(self, name: str) -> JSONResponse:
        """GET /v1/models/NAME: the model of this name."""
        return JSONResponse(self._described(self.models.named(name)))

    def _described(self, model: Hosted) -> dict[str, Any]:
        return model.described() | ({} if self.settings.runs is None else {"runs": True})

    async def metrics_text(self) -> Response:
        """GET /metrics."""
        return self.models.families.response()

    async def tokenizer_info(self, model: str | None = None) -> JSONResponse:
        """GET /tokenizer_info?model=NAME."""
        asked = self.models.named(model)
        return JSONResponse(tokens.tokenizer_info(asked.tokenizer, asked.limits))

    def encoding(self, work: Callable[[Any, Tokenizer, Limits], dict[str, Any]]) -> Route:
        """A route that only the tokenizer answers."""

        async def answer(request: Request) -> Response:
            body = await intake.read_body(request)

            def found_in_body() -> dict[str, Any]:
                value = intake.decode_json(body)
                asked = self.models.asked(value)
                return work(value, asked.tokenizer, asked.limits)

            found = await while_connected(request.receive, self._in_turn(body, found_in_body))
            return Response() if found is None else JSONResponse(found)  # the client may have left

        return answer

    def generating(self, read: Read) -> Route:
        """A route that the engine answers."""

        async def answer(request: Request) -> Response:
            start = time.monotonic()
            owner = neighbour(request.client.host if request.client else "")
            body = await intake.read_body(request)
            prepared = await while_connected(request.receive, self._prepared(body, read, owner))
            if prepared is None:
                return Response()  # the client has left
            model, ticket, writer = prepared
            return Answer(model.thread, ticket, writer(secrets.token_hex(12)), model.metrics, start)

        return answer

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses."""
        return await self.generating(functools.partial(read_response, shelf=self._shelf(request)))(
            request
        )

    async def response(self, number: str, request: Request) -> JSONResponse:
        """GET /v1/responses/NUMBER: a response that is kept."""
        if asked := next(iter(request.query_params), None):
            text = f"this route does not support {asked[:80]}: leave it out"
            raise ApiError(400, "unsupported_parameter", text, asked[:80])
        return JSONResponse(self._shelf(request).response(number))

    async def remove_response(self, number: str, request: Request) -> JSONResponse:
        """DELETE /v1/responses/NUMBER: forget a response."""
        self._shelf(request).response(number, again=False)
        return JSONResponse({"id": number, "object": "response", "deleted": True})

    def _shelf(self, request: Request) -> Shelf:
        """The responses that are kept for a client."""
        return self.kept.of(request.headers.get("authorization", ""))

    async def _in_turn(self, body: bytes, work: Callable[[], T]) -> T:
        """Run work on a body off the event loop. One body at a time, the smallest first."""
        try:
            async with self.turns.turn(len(body)):
                return await asyncio.get_running_loop().run_in_executor(self.preparing, work)
        except asyncio.QueueFull:
            raise ApiError(429, "queue_full", QUEUE_FULL, retry_after=2) from None

    async def _prepared(
        self, body: bytes, read: Read, owner: str
    ) -> tuple[Hosted, Ticket[Event], Callable[[str], Writer]]:
        """Check a body and submit its ticket. One body at a time: its place is certain before its text is encoded.

        Only a schema that the model does not know yet waits for its automaton outside of that order: addresses take
        turns there.
        """
        loop = asyncio.get_running_loop()

        def checked() -> tuple[Hosted, Asked]:
            value = intake.decode_json(body)
            model = self.models.asked(value)
            return model, read(value, model.limits, model.defaults)

        try:
            async with self.turns.turn(len(body)):
                model, asked = await loop.run_in_executor(self.preparing, checked)
                self._check_place(model, owner)
                work = await loop.run_in_executor(self.preparing, _work, asked, model)
                schema = work.requests[0][1].schema
                if schema is None or model.schemas.is_ready(schema):
                    automaton = None if schema is None else _automaton(schema, model)
                    return self._submitted(model, work, owner, automaton)
            async with self.schema_turns.turn(owner):
                automaton = await loop.run_in_executor(self.schemas, _automaton, schema, model)
            self._check_place(model, owner)
            return self._submitted(model, work, owner, automaton)
        except asyncio.QueueFull:
            raise ApiError(429, "queue_full", QUEUE_FULL, retry_after=2) from None

    def _check_place(self, model: Hosted, owner: str) -> None:
        """Raise asyncio.QueueFull if too many wait for the model, or if the address has all the requests that it may
        have, over all models."""
        own = sum(
            ticket.owner == owner for thread in self.models.threads for ticket in thread.tickets
        )
        if 0 < self.settings.per_address <= own or model.thread.full(owner):
            raise asyncio.QueueFull

    def _submitted(
        self, model: Hosted, work: Work, owner: str, automaton: object
    ) -> tuple[Hosted, Ticket[Event], Callable[[str], Writer]]:
        """Queue the requests of a body; the ticket holds the automaton of their schema."""
        ticket: Ticket[Event] = Ticket(work.requests, owner, automaton)
        model.thread.submit(ticket)
        return model, ticket, work.writer

    def close(self) -> None:
        """Take no more bodies."""
        for executor in (self.preparing, self.schemas):
            executor.shutdown(wait=False, cancel_futures=True)


def _work(asked: Asked, model: Hosted) -> Work:
    """What a request asks of the engine. ApiError 400 for what the engine would refuse."""
    work = asked.work(model.tokenizer, model.limits)
    if model.adapter:
        own = [
            (prompt, replace(sampling, adapter=model.adapter)) for prompt, sampling in work.requests
        ]
        work = work._replace(requests=own)
    try:
        for prompt, sampling in work.requests:
            model.check(prompt, sampling)
    except UserError as refusal:
        raise ApiError(400, "invalid_request", str(refusal)) from None
    return work


def _automaton(schema: str, model: Hosted) -> object:
    """Make the automaton of a schema, so that the engine need not wait for it as long as the result is held. ApiError
    400 if that cannot be done."""
    try:
        return model.schemas.prepare(schema)
    except UserError as refusal:
        raise ApiError(400, "invalid_request", str(refusal)) from None


# --- the application -----------------------------------------------------------------------------


def assets() -> Mapping[str, bytes]:
    """The files of the web pages, by name."""
    folder = importlib.resources.files("nanochat.serve") / "web"
    return {name: (folder / name).read_bytes() for name in (*PAGES, *ASSETS)}


def create_app(models: Sequence[Loadable], settings: Settings) -> App:
    """Build the web application. The engines' threads start and end with it."""
    server, files = ChatServer(models, settings), assets()
    runs = None if settings.runs is None else Runs(settings.runs, chat=settings.page)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for thread in server.models.threads:
            thread.start()
        yield
        server.close()
        if runs is not None:
            runs.close()
        await asyncio.gather(*(thread.stop() for thread in server.models.threads))

    app = _application(lifespan)
    if settings.page:
        _add_pages(app, {"/": files["index.html"]}, files)
    if runs is not None:
        _add_pages(app, {"/runs": files["runs/index.html"]}, files)
        runs.add_to(app)
    gets = {
        "/health": server.health,
        "/metrics": server.metrics_text,
        "/tokenizer_info": server.tokenizer_info,
    }
    gets |= {"/v1/models": server.list_models, "/v1/models/{name}": server.model}
    posts = {
        "/v1/chat/completions": server.generating(read_chat),
        "/v1/completions": server.generating(read_completion),
        "/v1/responses": server.respond,
        "/tokenize": server.encoding(tokens.tokenize),
        "/detokenize": server.encoding(tokens.detokenize),
    }
    for path, route in gets.items():
        app.add_api_route(path, route)
    for path, route in posts.items():
        app.add_api_route(path, route, methods=["POST"])
    app.add_api_route("/v1/responses/{number}", server.response)
    app.add_api_route("/v1/responses/{number}", server.remove_response, methods=["DELETE"])
    return App(Guard(app, settings.hosts, settings.api_key), server.models.threads, settings.caps)


def create_runs_app(base: Path, hosts: tuple[str, ...], api_key: str) -> App:
    """Build an application without a model, whose only page shows the runs under a base folder."""
    runs, files = Runs(base, chat=False), assets()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        runs.close()

    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    app = _application(lifespan)
    _add_pages(app, dict.fromkeys(("/", "/runs"), files["runs/index.html"]), files)
    runs.add_to(app)
    app.add_api_route("/health", health)
    return App(Guard(app, hosts, api_key), [], Caps())


def _application(
    lifespan: Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]],
) -> FastAPI:
    """An application without routes, which answers errors with OpenAI's error JSON."""

    async def refused(_: Request, failure: Exception) -> Response:
        if isinstance(failure, ApiError):
            failure.__traceback__ = (
                None  # it refers to the request, and to itself: only a garbage collection frees it
            )
        return error(_refusal(failure))

    async def left(_: Request, failure: Exception) -> Response:
        return Response()  # which nobody reads

    # FastAPI's own documentation pages load scripts from the internet, which fails on a machine without a network.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(ClientDisconnect, left)
    return app


def _add_pages(app: FastAPI, pages: Mapping[str, bytes], files: Mapping[str, bytes]) -> None:
    """Add routes to pages, by path, and to the files that they load."""

    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise ApiError(404, "not_found", "there is no such file: the page is at /")
        return Response(files[name], media_type=ASSETS[name])

    def page(content: bytes) -> Callable[[], Awaitable[Response]]:
        async def answer() -> Response:
            return Response(content, media_type="text/html")

        return answer

    for path, content in pages.items():
        app.add_api_route(path, page(content))
    app.add_api_route("/assets/{name:path}", asset)


def _refusal(failure: Exception) -> ApiError:
    """What a client hears about a failed request. The details of a fault in this server stay in its log."""
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, HTTPException):
        return ApiError(
            failure.status_code, "not_found", f"{failure.detail}: docs/chat.md lists the routes"
        )
    return ApiError(500, "server_failed", "the server failed: its log says why")

"""The chat server: its routes, answered with what the engine's own thread generates."""

import asyncio
import contextlib
import importlib.resources
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nanochat.common import UserError
from nanochat.engine import Engine, Event
from nanochat.serve.connections import Caps, neighbour
from nanochat.serve.engine_thread import EngineThread, Ticket
from nanochat.serve.guard import Guard
from nanochat.serve.listening import App
from nanochat.serve.routes import intake, tokens
from nanochat.serve.routes.answers import QUEUE_FULL, Answer, Writer, error, while_connected
from nanochat.serve.routes.chat import read_chat
from nanochat.serve.routes.completions import read_completion
from nanochat.serve.routes.fields import ApiError, Limits
from nanochat.serve.routes.intake import Work
from nanochat.serve.routes.metrics import Metrics
from nanochat.serve.routes.responses import read_response
from nanochat.serve.routes.sampling import Defaults
from nanochat.tokenizer import Tokenizer

T = TypeVar("T")
Route = Callable[[Request], Awaitable[Response]]
SCRIPTS = (
    "about.js", "app.js", "client.js", "sse.js", "words.js",
    "chats/check.js", "chats/conversation.js", "chats/files.js", "chats/kept.js", "chats/panel.js", "chats/store.js",
    "chats/tree.js",
    "language/i18n.js", "language/phrases.js",
    "reply/dom.js", "reply/draw.js", "reply/inline.js", "reply/markdown.js", "reply/tokens.js", "reply/turn.js",
    "settings/drawer.js", "settings/values.js",
)  # fmt: skip
STYLES = ("style.css", "chats/panel.css", "reply/markdown.css", "reply/reply.css", "settings/settings.css")
ASSETS = {
    **dict.fromkeys(SCRIPTS, "text/javascript"),
    **dict.fromkeys(STYLES, "text/css"),
    "favicon.svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Settings:
    """The model that the server announces, the defaults of a request, and the server's limits."""

    model: str  # the name in the API, such as nanochat-sft-d4
    stage: str
    tag: str
    step: int
    temperature: float = 0.6
    top_k: int = 50  # 0 samples from the whole vocabulary
    max_tokens: int = 512
    waiting: int = 64  # chats that may wait for a slot; the server refuses more
    preparing: int = 64  # requests that may wait for their check; the server refuses more, the largest first
    per_address: int = 0  # requests that one address may have at the same time; 0 leaves that to the line
    api_key: str = ""  # what clients must send; empty: nothing
    page: bool = True  # serve the web page
    hosts: tuple[str, ...] = ()  # names that this server answers to, besides IP addresses and localhost
    caps: Caps = field(default_factory=Caps)
    about: Mapping[str, Any] = field(default_factory=dict)  # what else /v1/models says of the model, for the page


class Asked(Protocol):
    """A checked request to a route that generates."""

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """What it asks of the engine."""
        ...


Read = Callable[[Any, Limits, Defaults], Asked]  # how a route checks a decoded body


class ChatServer:
    """Answers the routes with the engine behind them."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: Settings):
        self.thread: EngineThread[Event] = EngineThread(engine, settings.waiting, settings.per_address)
        self.check = engine.check
        self.tokenizer = tokenizer
        self.settings = settings
        self.limits = Limits(settings.model, engine.length, tokenizer.vocab_size)
        self.defaults = Defaults(settings.temperature, settings.top_k, settings.max_tokens)
        self.turns = intake.Turns(settings.preparing)
        self.preparing = ThreadPoolExecutor(1, "prepare")  # the turns need no more, and each thread keeps memory
        self.metrics = Metrics(settings.model, self.thread)
        self.started = int(time.time())

    async def health(self) -> JSONResponse:
        """GET /health: whether the engine's thread runs, and how busy it is."""
        thread = self.thread
        state = {"slots": thread.slots, "free_slots": thread.free_slots, "chats": len(thread.tickets)}
        return JSONResponse({"status": "ok" if thread.alive else "stopped", **state}, 200 if thread.alive else 503)

    async def models(self) -> JSONResponse:
        """GET /v1/models: the one model, and the defaults of a request."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> JSONResponse:
        """GET /v1/models/NAME: the model, if it has this name."""
        if name != self.settings.model:
            text = f"this server has only the model {self.settings.model!r}: ask for that"
            raise ApiError(404, "model_not_found", text, "model")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        settings, context = self.settings, self.limits.context
        defaults = {name: getattr(settings, name) for name in ("temperature", "top_k", "max_tokens")}
        model = {"id": settings.model, "object": "model", "created": self.started, "owned_by": "nanochat"}
        place = {"stage": settings.stage, "tag": settings.tag, "step": settings.step}
        return {**model, **settings.about, **place, "context_length": context, "max_model_len": context,
                "defaults": defaults}  # fmt: skip

    async def metrics_text(self) -> Response:
        """GET /metrics."""
        return self.metrics.response()

    async def tokenizer_info(self) -> JSONResponse:
        """GET /tokenizer_info."""
        return JSONResponse(tokens.tokenizer_info(self.tokenizer, self.limits))

    def encoding(self, work: Callable[[Any, Tokenizer, Limits], dict[str, Any]]) -> Route:
        """A route that only the tokenizer answers."""

        async def answer(request: Request) -> Response:
            body = await intake.read_body(request)
            found = await while_connected(
                request.receive,
                self._in_turn(body, lambda: work(intake.decode_json(body), self.tokenizer, self.limits)),
            )
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
            ticket, writer = prepared
            return Answer(self.thread, ticket, writer(secrets.token_hex(12)), self.metrics, start)

        return answer

    async def _in_turn(self, body: bytes, work: Callable[[], T]) -> T:
        """Run work on a body off the event loop. One body at a time, the smallest first."""
        try:
            async with self.turns.turn(len(body)):
                return await asyncio.get_running_loop().run_in_executor(self.preparing, work)
        except asyncio.QueueFull:
            raise ApiError(429, "queue_full", QUEUE_FULL, retry_after=2) from None

    async def _prepared(self, body: bytes, read: Read, owner: str) -> tuple[Ticket[Event], Callable[[str], Writer]]:
        """Check a body and submit its ticket. One body at a time: its place is certain before its text is encoded."""
        loop = asyncio.get_running_loop()
        try:
            async with self.turns.turn(len(body)):
                asked = await loop.run_in_executor(
                    self.preparing, lambda: read(intake.decode_json(body), self.limits, self.defaults)
                )
                if self.thread.full(owner):
                    raise asyncio.QueueFull
                work = await loop.run_in_executor(self.preparing, self._work, asked)
                ticket: Ticket[Event] = Ticket(work.requests, owner)
                self.thread.submit(ticket)
                return ticket, work.writer
        except asyncio.QueueFull:
            raise ApiError(429, "queue_full", QUEUE_FULL, retry_after=2) from None

    def _work(self, asked: Asked) -> Work:
        """What a request asks of the engine. ApiError 400 for what the engine would refuse."""
        work = asked.work(self.tokenizer, self.limits)
        try:
            for prompt, sampling in work.requests:
                self.check(prompt, sampling)
        except UserError as refusal:
            raise ApiError(400, "invalid_request", str(refusal)) from None
        return work


# --- the application -----------------------------------------------------------------------------


def assets() -> Mapping[str, bytes]:
    """The files of the web page, by name."""
    folder = importlib.resources.files("nanochat.serve") / "web"
    return {name: (folder / name).read_bytes() for name in ("index.html", *ASSETS)}


def create_app(engine: Engine, tokenizer: Tokenizer, settings: Settings) -> App:
    """Build the web application. The engine's thread starts and ends with it."""
    server, files = ChatServer(engine, tokenizer, settings), assets()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.thread.start()
        yield
        server.preparing.shutdown(wait=False)
        await server.thread.stop()

    async def page() -> Response:
        return Response(files["index.html"], media_type="text/html")

    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise ApiError(404, "not_found", "there is no such file: the page is at /")
        return Response(files[name], media_type=ASSETS[name])

    async def refused(_: Request, failure: Exception) -> Response:
        if isinstance(failure, ApiError):
            failure.__traceback__ = None  # it refers to the request, and to itself: only a garbage collection frees it
        return error(_refusal(failure))

    async def left(_: Request, failure: Exception) -> Response:
        return Response()  # which nobody reads

    # FastAPI's own documentation pages load scripts from the internet, which fails on a machine without a network.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(ClientDisconnect, left)
    if settings.page:
        app.add_api_route("/", page)
        app.add_api_route("/assets/{name:path}", asset)
    gets = {"/health": server.health, "/metrics": server.metrics_text, "/tokenizer_info": server.tokenizer_info}
    gets |= {"/v1/models": server.models, "/v1/models/{name}": server.model}
    posts = {
        "/v1/chat/completions": server.generating(read_chat),
        "/v1/completions": server.generating(read_completion),
        "/v1/responses": server.generating(read_response),
        "/tokenize": server.encoding(tokens.tokenize),
        "/detokenize": server.encoding(tokens.detokenize),
    }
    for path, route in gets.items():
        app.add_api_route(path, route)
    for path, route in posts.items():
        app.add_api_route(path, route, methods=["POST"])
    return App(Guard(app, settings.hosts, settings.api_key), server.thread, settings.caps)


def _refusal(failure: Exception) -> ApiError:
    """What a client hears about a failed request. The details of a fault in this server stay in its log."""
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, HTTPException):
        return ApiError(failure.status_code, "not_found", f"{failure.detail}: docs/chat.md lists the routes")
    return ApiError(500, "server_failed", "the server failed: its log says why")

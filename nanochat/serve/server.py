"""The chat server: its routes, answered with what the engine's own thread generates."""

import asyncio
import contextlib
import importlib.resources
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nanochat.engine import Engine, Event
from nanochat.generate.reply import TextStream
from nanochat.generate.sampling import Sampling
from nanochat.serve import chat_api, intake
from nanochat.serve.answers import Answer, error, while_connected
from nanochat.serve.chat_api import ApiError, ChatRequest, Envelope, Limits
from nanochat.serve.connections import Caps
from nanochat.serve.engine_thread import EngineThread, Ticket
from nanochat.serve.guard import Guard
from nanochat.serve.listening import App
from nanochat.tokenizer import Tokenizer

SCRIPTS = ("app.js", "client.js", "i18n.js", "kept.js", "phrases.js", "sse.js", "view.js", "words.js")
ASSETS = {**dict.fromkeys(SCRIPTS, "text/javascript"), "style.css": "text/css", "favicon.svg": "image/svg+xml"}


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
    hosts: tuple[str, ...] = ()  # names that this server answers to, besides IP addresses and localhost
    caps: Caps = field(default_factory=Caps)
    about: Mapping[str, Any] = field(default_factory=dict)  # what else /v1/models says of the model, for the page


class Prepared(NamedTuple):
    """A checked request, its ticket at the engine, and how many of its oldest messages were dropped."""

    asked: ChatRequest
    ticket: Ticket[Event]
    truncated: int


class ChatServer:
    """Answers the routes with the engine behind them."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: Settings):
        self.thread: EngineThread[Event] = EngineThread(engine, settings.waiting)
        self.tokenizer = tokenizer
        self.settings = settings
        self.limits = Limits(settings.model, engine.length, tokenizer.vocab_size)
        self.turns = intake.Turns(settings.preparing)
        self.preparing = ThreadPoolExecutor(1, "prepare")  # the turns need no more, and each thread keeps memory
        self.started = int(time.time())

    async def health(self) -> JSONResponse:
        """GET /health: whether the engine's thread runs, and how busy it is."""
        thread = self.thread
        state = {"slots": thread.slots, "free_slots": thread.free_slots, "chats": len(thread.tickets)}
        return JSONResponse({"status": "ok" if thread.alive else "stopped", **state}, 200 if thread.alive else 503)

    async def models(self) -> JSONResponse:
        """GET /v1/models: the one model, and the defaults of a request."""
        settings = self.settings
        defaults = {name: getattr(settings, name) for name in ("temperature", "top_k", "max_tokens")}
        model = {"id": settings.model, "object": "model", "created": self.started, "owned_by": "nanochat"}
        place = {"stage": settings.stage, "tag": settings.tag, "step": settings.step}
        model |= {**settings.about, **place, "context_length": self.limits.context, "defaults": defaults}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await intake.read_body(request)
        prepared = await while_connected(request.receive, self._prepared(body))
        if prepared is None:
            return Response()  # the client has left
        asked, ticket, truncated = prepared
        envelope = Envelope(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), self.settings.model, truncated)
        return Answer(self.thread, ticket, asked, envelope, TextStream(self.tokenizer))

    async def _prepared(self, body: bytes) -> Prepared:
        """Check a body and submit its ticket. One body at a time: its place is certain before its text is encoded."""
        loop, context = asyncio.get_running_loop(), self.limits.context
        try:
            async with self.turns.turn(len(body)):
                asked = await loop.run_in_executor(
                    self.preparing, lambda: chat_api.read_request(intake.decode_json(body), self.limits)
                )
                if self.thread.full:
                    raise asyncio.QueueFull
                prompt, truncated = await loop.run_in_executor(
                    self.preparing, intake.make_prompt, asked, self.tokenizer, context
                )
                ticket: Ticket[Event] = Ticket(prompt, self._sampling(asked, context - len(prompt)))
                self.thread.submit(ticket)
                return Prepared(asked, ticket, truncated)
        except asyncio.QueueFull:
            text = "as many chats are waiting as may wait: try again in 2 seconds"
            raise ApiError(429, "queue_full", text, retry_after=2) from None

    def _sampling(self, asked: ChatRequest, room: int) -> Sampling:
        """How to sample the answer: as the request asks, else by the server's defaults, in at most `room` tokens."""
        settings = self.settings
        top_k = settings.top_k if asked.top_k is None else asked.top_k
        return Sampling(
            temperature=settings.temperature if asked.temperature is None else asked.temperature,
            top_k=top_k or None,
            max_tokens=min(asked.max_tokens or settings.max_tokens, room),
            seed=secrets.randbits(31) if asked.seed is None else asked.seed,
        )


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
    app.add_api_route("/", page)
    app.add_api_route("/assets/{name}", asset)
    app.add_api_route("/health", server.health)
    app.add_api_route("/v1/models", server.models)
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"])
    return App(Guard(app, settings.hosts), server.thread, settings.caps)


def _refusal(failure: Exception) -> ApiError:
    """What a client hears about a failed request. The details of a fault in this server stay in its log."""
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, HTTPException):
        return ApiError(
            failure.status_code, "not_found", f"{failure.detail}: the routes are /v1/models and /v1/chat/completions"
        )
    return ApiError(500, "server_failed", "the server failed: its log says why")

"""The chat server: the HTTP loop answers requests with what the engine's own thread generates."""

import asyncio
import bisect
import contextlib
import importlib.resources
import ipaddress
import json
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanochat.data.conversation import Conversation
from nanochat.engine import Engine, Event
from nanochat.generate.reply import TextStream
from nanochat.generate.sampling import Sampling
from nanochat.serve import chat_api
from nanochat.serve.chat_api import ApiError, ChatRequest, Envelope, Limits, Reply
from nanochat.serve.engine_thread import EngineThread, Ticket
from nanochat.tokenizer import Tokenizer

BODY_BYTES = 256 * 1024  # largest body of a request
DRAIN_SECONDS = 3  # time that answers under way get to end when the server stops
ASSETS = {
    "app.js": "text/javascript",
    "client.js": "text/javascript",
    "i18n.js": "text/javascript",
    "sse.js": "text/javascript",
    "view.js": "text/javascript",
    "style.css": "text/css",
    "favicon.svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
T = TypeVar("T")


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
    hosts: tuple[str, ...] = ()  # names that this server answers to, besides IP addresses and localhost


# --- answers -------------------------------------------------------------------------------------


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
            response = _error(failure)
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


def _error(refusal: ApiError) -> JSONResponse:
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


# --- requests ------------------------------------------------------------------------------------


async def read_json(request: Request) -> Any:
    """The decoded body of a request. ApiError 415 for another type, 413 beyond BODY_BYTES, 400 for invalid JSON.

    The type matters: a browser lets any web site post plain text to this server, but not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "unsupported_media_type", "Content-Type must be application/json")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES:
            raise ApiError(
                413, "body_too_large", f"the body must not be larger than {BODY_BYTES:,} bytes: send a shorter chat"
            )
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not valid JSON in UTF-8") from None


class ChatServer:
    """Answers the routes with the engine behind them."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: Settings):
        self.thread: EngineThread[Event] = EngineThread(engine, settings.waiting)
        self.tokenizer = tokenizer
        self.settings = settings
        self.limits = Limits(settings.model, engine.length, tokenizer.vocab_size)
        self.started = int(time.time())

    def health(self) -> JSONResponse:
        """GET /health: whether the engine's thread runs, and how busy it is."""
        thread = self.thread
        state = {"slots": thread.slots, "free_slots": thread.free_slots, "chats": len(thread.tickets)}
        return JSONResponse({"status": "ok" if thread.alive else "stopped", **state}, 200 if thread.alive else 503)

    def models(self) -> JSONResponse:
        """GET /v1/models: the one model, and the defaults of a request."""
        settings = self.settings
        defaults = {name: getattr(settings, name) for name in ("temperature", "top_k", "max_tokens")}
        model = {"id": settings.model, "object": "model", "created": self.started, "owned_by": "nanochat"}
        place = {"stage": settings.stage, "tag": settings.tag, "step": settings.step}
        model |= {**place, "context_length": self.limits.context, "defaults": defaults}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = chat_api.read_request(await read_json(request), self.limits)
        prompt, truncated = await asyncio.to_thread(self._prompt, asked)
        ticket: Ticket[Event] = Ticket(prompt, self._sampling(asked, self.limits.context - len(prompt)))
        try:
            self.thread.submit(ticket)
        except asyncio.QueueFull:
            text = f"{self.settings.waiting} chats are waiting already: try again in 2 seconds"
            raise ApiError(429, "queue_full", text, retry_after=2) from None
        envelope = Envelope(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), self.settings.model, truncated)
        return Answer(self.thread, ticket, asked, envelope, TextStream(self.tokenizer))

    def _prompt(self, asked: ChatRequest) -> tuple[list[int], int]:
        """The tokens of the prompt, and how many of the oldest messages were dropped to make it fit.

        ApiError 400 if the prompt, together with the length of the answer that was asked for, exceeds the context.
        """
        messages, context, answer = asked.conversation.messages, self.limits.context, asked.max_tokens or 1
        system = messages[: messages[0].role == "system"]
        turns = messages[len(system) :]

        def rendered(dropped: int) -> list[int]:
            return self.tokenizer.render_prompt(Conversation((*system, *turns[2 * dropped :])))

        def fits(dropped: int) -> bool:
            return len(rendered(dropped)) + answer <= context

        droppable = range(1, len(turns) // 2 + 1) if asked.truncate else range(0)
        prompt = rendered(0)
        if len(prompt) + answer <= context:
            return prompt, 0
        fewest = bisect.bisect_left(droppable, True, key=fits)
        if fewest < len(droppable):
            return rendered(droppable[fewest]), 2 * droppable[fewest]
        if droppable:
            prompt = rendered(droppable[-1])
        rest = f"and max_tokens asks for {answer} more" if asked.max_tokens else "which leaves no room for an answer"
        text = f"the model's context holds {context} tokens; the messages have {len(prompt)}, {rest}: shorten the chat"
        raise ApiError(400, "context_length_exceeded", text, "messages")

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


def host_allowed(host: str, names: tuple[str, ...]) -> bool:
    """Whether a Host header names this server: an IP address, localhost, or one of `names`.

    If another site points its own name at this address (DNS rebinding), the header holds that site's name.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name in {"localhost", *(own.lower() for own in names)}


class Guard:
    """Checks the Host header of every request, and adds the safety headers to every response."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]):
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own, (b"cache-control", b"no-store")]}
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if host_allowed(host, self.hosts):
            await self.app(scope, receive, guarded)
        else:
            text = (
                "this server does not answer to this Host name: to allow it, start the server with --allowed_hosts NAME"
            )
            await _error(ApiError(403, "host_not_allowed", text))(scope, receive, guarded)


def assets() -> Mapping[str, bytes]:
    """The files of the web page, by name."""
    folder = importlib.resources.files("nanochat.serve") / "web"
    return {name: (folder / name).read_bytes() for name in ("index.html", *ASSETS)}


@dataclass(frozen=True)
class App:
    """The web application, and the engine thread that works for it."""

    asgi: ASGIApp
    thread: EngineThread[Event]


def create_app(engine: Engine, tokenizer: Tokenizer, settings: Settings) -> App:
    """Build the web application. The engine's thread starts and ends with it."""
    server, files = ChatServer(engine, tokenizer, settings), assets()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.thread.start()
        yield
        await server.thread.stop()

    async def page() -> Response:
        return Response(files["index.html"], media_type="text/html")

    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise ApiError(404, "not_found", "there is no such file: the page is at /")
        return Response(files[name], media_type=ASSETS[name])

    async def refused(_: Request, failure: Exception) -> Response:
        return _error(_refusal(failure))

    # FastAPI's own documentation pages load scripts from the internet, which fails on a machine without a network.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    app.add_api_route("/", page)
    app.add_api_route("/assets/{name}", asset)
    app.add_api_route("/health", server.health)
    app.add_api_route("/v1/models", server.models)
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"])
    return App(Guard(app, settings.hosts), server.thread)


def _refusal(failure: Exception) -> ApiError:
    """What a client hears about a failed request. The details of a fault in this server stay in its log."""
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, HTTPException):
        return ApiError(
            failure.status_code, "not_found", f"{failure.detail}: the routes are /v1/models and /v1/chat/completions"
        )
    return ApiError(500, "server_failed", "the server failed: its log says why")


class Server(uvicorn.Server):
    """uvicorn without access log, server header or websockets; it ends the answers under way before it shuts down."""

    def __init__(self, app: App):
        config = uvicorn.Config(
            app.asgi,
            http="h11",
            loop="asyncio",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2 * DRAIN_SECONDS,  # some clients never read the end of their answer
        )
        super().__init__(config)
        self.thread = app.thread

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting requests. Answers under way have DRAIN_SECONDS to end; then the server ends them."""
        stopping = ApiError(503, "server_stopping", "the server was stopped before the answer was complete")
        ending = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self.thread.dismiss, stopping)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def serve(app: App, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again at its end; ignored, that end is normal
        signal.signal(number, lambda *_: None)
    Server(app).run(sockets=[listener])

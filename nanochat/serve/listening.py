"""Accepts connections, checks each request's host name and key, and shuts the server down."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanochat.common import own_language, tr, warn
from nanochat.data.library_words import os_problem
from nanochat.generate.reply import Event
from nanochat.serve.connections import (
    SOCKET_BYTES,
    Caps,
    Connection,
    Connections,
    host_name,
)
from nanochat.serve.engine_thread import EngineThread
from nanochat.serve.routes.answers import error
from nanochat.serve.routes.fields import ApiError

DRAIN_SECONDS = 3  # how long answers under way may take to end when the server stops
STOP_SECONDS = 30.0  # how long the server may take to stop; then its process ends in any case
BACKLOG = 2048  # connections that the kernel completes before the server accepts them
ACCEPTED_AT_ONCE = 16  # then other tasks get a turn; until that turn, these are not counted
OWN_FILES = 128  # open files for everything but connections: the model, the log, the device
FULL_SECONDS = 0.1  # pause between attempts when the process may open no more files
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src "
        "'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

# --- who may ask ---------------------------------------------------------------------------------


def host_allowed(host: str, names: tuple[str, ...]) -> bool:
    """Return whether a Host header names this server: an IP address, localhost, or one of `names`.

    If another site makes its own name point to this machine (DNS rebinding), the header holds that
    name.
    """
    name = host_name(host)
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name == "localhost" or name in map(str.lower, names)


def needs_key(path: str) -> bool:
    """Return whether a path needs the key; only /health, the pages and their assets do not."""
    return path not in ("/", "/runs", "/health") and not path.startswith("/assets/")


def digest(text: bytes) -> bytes:
    """Return the SHA-256 of a key; comparing hashes takes equally long for keys of any length."""
    return hashlib.sha256(text).digest()


def _header(scope: Scope, name: bytes) -> bytes:
    """Return the value of the first header called `name`, or b"" if there is none."""
    for header, value in scope["headers"]:
        if header == name:
            return value
    return b""


class Guard:
    """Checks the Host header and key of HTTP requests, and adds security headers to responses."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: tuple[str, ...],
        api_key: str = "",
    ):
        """Guard `app`, allowing the host names `hosts`; if `api_key` is empty, no key is needed."""
        self.app = app
        self.hosts = hosts
        self._key = digest(api_key.encode()) if api_key else None
        self._safety_headers = [
            (name.lower().encode(), value.encode()) for name, value in HEADERS.items()
        ]

    def _authorized(self, scope: Scope) -> bool:
        """Return whether a request has the right key, or needs none."""
        if self._key is None or not needs_key(scope["path"]):
            return True
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        has_token = hmac.compare_digest(digest(key.strip()), self._key)
        has_key = hmac.compare_digest(digest(_header(scope, b"x-api-key")), self._key)
        return has_key or (has_token and scheme.lower() == b"bearer")

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], *self._safety_headers]
                message = {**message, "headers": headers}
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = _header(scope, b"host").decode("latin-1")
        if not host_allowed(host, self.hosts):
            text = (
                "this server does not answer to this Host name: to allow it, start the server with "
                "--allowed_hosts NAME"
            )
            refusal = ApiError(403, "host_not_allowed", text)
            await error(refusal, scope["path"])(scope, receive, guarded)
        elif not self._authorized(scope):
            text = (
                "this server needs its key: send the header Authorization: Bearer KEY or x-api-key: "
                "KEY, with the key of --api_key"
            )
            response = error(ApiError(401, "invalid_api_key", text), scope["path"])
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, guarded)
        else:
            own_language.set("en")  # programs read what the API answers
            await self.app(scope, receive, guarded)


# --- connections ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class App:
    """The web application, its engine threads, and the bounds on its connections."""

    asgi: ASGIApp
    threads: Sequence[EngineThread[Event]]
    caps: Caps


def raise_open_files() -> None:
    """Raise this process's limit on open files to the hard limit, except on Windows."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def affordable(caps: Caps) -> Caps:
    """Return `caps`, with fewer connections if the process may not open enough files for them."""
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return replace(caps, connections=max(1, min(caps.connections, soft - OWN_FILES)))
    return caps


class Server(uvicorn.Server):
    """A uvicorn server without an access log, a Server header or WebSockets.

    It accepts connections itself, because if the process may open no more files, asyncio's own loop
    keeps trying, about a thousand times a second, and logs a traceback each time.
    """

    def __init__(self, app: App):
        config = uvicorn.Config(
            app.asgi,
            http="h11",
            loop="asyncio",
            ws="none",
            log_level="error",  # at "warning", every malformed request is a line in the log
            access_log=False,
            server_header=False,
            proxy_headers=False,  # else any local client names its own address, in X-Forwarded-For
            # A bound is needed because some clients never read the end of their answer.
            timeout_graceful_shutdown=2 * DRAIN_SECONDS,
        )
        super().__init__(config)
        self.threads = app.threads
        self.connections = Connections(affordable(app.caps))
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and begin to accept connections."""
        await super().startup(sockets=[])
        self._accepting = [
            asyncio.create_task(self._accept(listener)) for listener in sockets or []
        ]

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket until this task is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        opening: set[asyncio.Task[object]] = set()  # asyncio itself does not keep a task alive
        while True:
            try:
                for _ in range(ACCEPTED_AT_ONCE):
                    accepted, _ = await loop.sock_accept(listener)
                    _set_options(accepted)
                    task = loop.create_task(self._open(accepted))
                    opening.add(task)
                    task.add_done_callback(opening.discard)
                await asyncio.sleep(0)
            except ConnectionError:
                continue  # the client has left already
            except OSError as failure:  # this process or the system may open no more files
                self.connections.seldom.warn(
                    tr(
                        "a connection was not accepted ({strerror}): trying again",
                        strerror=os_problem(failure),
                    )
                )
                self.connections.make_room()
                await asyncio.sleep(FULL_SECONDS)

    async def _open(self, accepted: socket.socket) -> None:
        """Attach an accepted socket to a new Connection."""
        loop = asyncio.get_running_loop()
        state = self.lifespan.state

        def connection() -> Connection:
            return Connection(self.config, self.server_state, state, self.connections)

        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(connection, accepted)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop because of a signal, and end the process if stopping takes too long."""
        super().handle_exit(sig, frame)
        # Python waits for every thread that is at work, and no thread can be ended from outside.
        timer = threading.Timer(STOP_SECONDS, _end)
        timer.daemon = True
        timer.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and give the answers under way DRAIN_SECONDS to end.

        Answers that take longer end with an error. Those whose clients do not read them are
        cancelled later by uvicorn, which logs their number in one line.
        """
        logging.getLogger("uvicorn.error").addFilter(_not_cancelled)
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        stopping = ApiError(
            503, "server_stopping", "the server was stopped before the answer was complete"
        )
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(DRAIN_SECONDS, thread.dismiss, stopping) for thread in self.threads
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()


def _set_options(accepted: socket.socket) -> None:
    """Limit the kernel's buffers for a connection, and let it send without delay."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        accepted.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
    # Without this, a reused connection waits 40 ms between the head and the body of every answer.
    # asyncio sets it only on sockets that name their protocol, which accepted ones do not.
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Return False for the traceback of a cancelled answer, True for any other log record."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _end() -> None:
    """Warn, and end the process at once, whatever is still running."""
    warn(
        tr(
            "the server did not stop within {stop_seconds:g} seconds: its process ends now",
            stop_seconds=STOP_SECONDS,
        )
    )
    os._exit(1)


def serve(app: App, listener: socket.socket) -> None:
    """Serve `app` on the socket `listener` until Ctrl-C or SIGTERM."""
    raise_open_files()
    # uvicorn raises these signals again at its end; ignored, they let it end normally.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: None)
    Server(app).run(sockets=[listener])

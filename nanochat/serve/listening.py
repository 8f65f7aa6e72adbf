"""Runs the chat server on a listening socket: accepts connections, and stops in order."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from nanochat.common import warn
from nanochat.engine import Event
from nanochat.serve.connections import SOCKET_BYTES, Caps, Connection, Connections
from nanochat.serve.engine_thread import EngineThread
from nanochat.serve.routes.fields import ApiError

DRAIN_SECONDS = 3  # time that answers under way get to end when the server stops
STOP_SECONDS = 30.0  # time that the server has to stop; then its process ends, whatever still runs
BACKLOG = 2048  # connections that the kernel completes before the server accepts them
ACCEPTED_AT_ONCE = 16  # then others get a turn; until that turn, these are not counted
OWN_FILES = 128  # open files for everything but connections: the model, the log, the device
FULL_SECONDS = 0.1  # pause of accepting when the process may open no more files


@dataclass(frozen=True)
class App:
    """The web application, the engine threads that work for it, and the bounds on its connections."""

    asgi: ASGIApp
    threads: Sequence[EngineThread[Event]]
    caps: Caps


def raise_open_files() -> None:
    """Let this process open as many files as the system allows it to."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def affordable(caps: Caps) -> Caps:
    """The bounds, with no more connections than this process may open files."""
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return replace(caps, connections=max(1, min(caps.connections, soft - OWN_FILES)))
    return caps


class Server(uvicorn.Server):
    """uvicorn without access log, server header or websockets; it ends the answers under way before it shuts down.

    The server accepts connections itself: asyncio's own loop, when the process may open no more files, goes on trying
    and logs a traceback for each of some thousand attempts in a second.
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
            timeout_graceful_shutdown=2
            * DRAIN_SECONDS,  # some clients never read the end of their answer
        )
        super().__init__(config)
        self.threads = app.threads
        self.connections = Connections(affordable(app.caps))
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections."""
        await super().startup(sockets=[])
        self._accepting = [
            asyncio.create_task(self._accept(listener)) for listener in sockets or []
        ]

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        opening: set[asyncio.Task[object]] = set()  # asyncio itself keeps no task alive
        while True:
            try:
                for _ in range(ACCEPTED_AT_ONCE):
                    accepted, _ = await loop.sock_accept(listener)
                    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                        accepted.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
                    # Without this, a kept connection waits 40 ms between the head and the body of every answer. asyncio
                    # sets it only on sockets that name their protocol, which accepted ones do not.
                    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    task = loop.create_task(self._open(accepted))
                    opening.add(task)
                    task.add_done_callback(opening.discard)
                await asyncio.sleep(0)
            except ConnectionError:
                continue  # the client has gone already
            except OSError as failure:  # this process or the system may open no more files
                self.connections.seldom.warn(
                    f"a connection was not accepted ({failure.strerror}): trying again"
                )
                self.connections.make_room()
                await asyncio.sleep(FULL_SECONDS)

    async def _open(self, accepted: socket.socket) -> None:
        loop, state = asyncio.get_running_loop(), self.lifespan.state
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                lambda: Connection(self.config, self.server_state, state, self.connections),
                accepted,
            )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, on a signal."""
        super().handle_exit(sig, frame)
        # Python waits for every thread that works, and no thread can be ended from outside.
        last = threading.Timer(STOP_SECONDS, _end)
        last.daemon = True
        last.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting requests. Answers under way have DRAIN_SECONDS to end; then the server ends them.

        One line tells how many answers uvicorn cancelled because their clients do not read them.
        """
        logging.getLogger("uvicorn.error").addFilter(_not_cancelled)
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        stopping = ApiError(
            503, "server_stopping", "the server was stopped before the answer was complete"
        )
        loop = asyncio.get_running_loop()
        ending = [
            loop.call_later(DRAIN_SECONDS, thread.dismiss, stopping) for thread in self.threads
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for each in ending:
                each.cancel()


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Return whether a log record is something else than the traceback of a cancelled answer."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _end() -> None:
    warn(f"the server did not stop within {STOP_SECONDS:g} seconds: its process ends now")
    os._exit(1)


def serve(app: App, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    raise_open_files()
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # uvicorn raises them again at its end; ignored, that end is normal
        signal.signal(number, lambda *_: None)
    Server(app).run(sockets=[listener])

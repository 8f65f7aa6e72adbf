"""Connections of the chat server: bounds their number, their memory, and how long each may keep the
server waiting.

A connection is in one of two states. Either the client waits for the server: this has no deadline
here, because the queue of chats bounds it. Or the server waits for the client: to ask, to finish
its headers or body, or to read what was sent. Every such wait has a deadline. When the server runs
out of room, it closes the connection that has kept it waiting longest, so that a new client always
finds a place.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from nanochat.common import warn
from nanochat.serve.routes.fields import ApiError

HEADER_BYTES = 16 * 1024  # a browser with many cookies sends a few kilobytes
BODY_PIECES = 1024  # chunks or packets of one body: 256 kB in packets of 1,460 bytes are 180
# What a client may still send of a body that was refused, so that it reads the answer.
SWALLOWED_BYTES = 1 << 20
# Each way, in the kernel; its default grows to some megabytes for a client that does not read.
SOCKET_BYTES = 64 * 1024
WARNING_SECONDS = 60  # least time between two lines in the log about the same thing

# What the server waits for: a request, the rest of its headers, the rest of its body, that the
# client reads what was sent, or that the client hears of a refusal before the connection closes.
Wait = Literal["idle", "headers", "body", "read", "leave"]


@dataclass(frozen=True)
class Caps:
    """Bounds on connections. The seconds are how long a client may keep the server waiting, by what
    it waits for."""

    idle: float = 30  # longer than clients keep unused connections, so that they close first
    headers: float = 10  # headers fit into a few packets
    body: float = 30  # 256 kB at 70 kbit/s
    read: float = 30  # a phone between two cells is back by then
    leave: float = 2
    connections: int = 1024
    per_address: int = 512  # a proxy in front of this server is one address
    # Of all requests that are not complete: 64 of the largest bodies.
    unfinished_bytes: int = 16 << 20
    # Answers that wait for their client to read; each may be as long as the context.
    unread: int = 64


class Seldom:
    """Warns about each thing at most every WARNING_SECONDS: the log must not grow as fast as
    someone can attack."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def warn(self, message: str) -> None:
        """Log the message, unless it was logged a moment ago."""
        now = time.monotonic()
        if now - self._last.get(message, -WARNING_SECONDS) >= WARNING_SECONDS:
            self._last[message] = now
            warn(message)


def neighbour(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the /64 network that one IPv6 customer
    has."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, ipaddress.IPv6Address):
        return host
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class Connections:
    """All open connections: which of them keep the server waiting, and what their unfinished
    requests hold."""

    def __init__(self, caps: Caps):
        self.caps = caps
        self.seldom = Seldom()
        self.waiting: dict[Connection, None] = {}  # the longest wait first
        self.per_address: Counter[str] = Counter()
        self.unfinished = 0  # bytes of requests that are not complete

    def admit(self, new: "Connection") -> bool:
        """Count a new connection, and close older ones if there are too many. False if nothing
        could be closed."""
        self.per_address[new.address] += 1
        if self.per_address[new.address] > self.caps.per_address:
            self.seldom.warn(
                f"an address has {self.caps.per_address} connections, the most it may: older ones "
                "close"
            )
            if not self.make_room(new.address):
                return False
        if self.per_address.total() > self.caps.connections:
            self.seldom.warn(
                f"{self.caps.connections} connections are open, the most allowed: older ones close"
            )
            return self.make_room()
        return True

    def make_room(self, address: str | None = None) -> bool:
        """Close the connection that keeps the server waiting longest. False if none does."""
        for connection in self.waiting:
            if address in (None, connection.address):
                connection.drop()
                return True
        return False

    def wait(self, connection: "Connection", wait: Wait) -> None:
        """Note that a connection begins to keep the server waiting; drop the oldest if too many do
        not read."""
        self.waiting[connection] = None
        if wait != "read":
            return
        unread = [other for other in self.waiting if other.wait == "read"]
        if len(unread) > self.caps.unread:
            self.seldom.warn(
                f"{self.caps.unread} clients do not read their answers, the most that may: older "
                "ones close"
            )
            unread[0].drop()

    def hold(self, connection: "Connection", count: int) -> None:
        """Note how many bytes the unfinished request of a connection holds; refuse the oldest if
        all hold too many."""
        self.unfinished += count - connection.unfinished
        connection.unfinished = count
        while self.unfinished > self.caps.unfinished_bytes:
            oldest = next((other for other in self.waiting if other.unfinished), connection)
            self.seldom.warn("unfinished requests hold too much memory: the oldest are refused")
            text = (
                "the server receives too many requests: try again in 2 seconds, and send the body "
                "without a pause"
            )
            oldest.refuse(ApiError(429, "too_many_bodies", text, retry_after=2))

    def forget(self, connection: "Connection") -> None:
        """Give back what a connection held."""
        self.waiting.pop(connection, None)
        self.unfinished -= connection.unfinished
        connection.unfinished = 0
        self.per_address[connection.address] -= 1
        if not self.per_address[connection.address]:
            del self.per_address[connection.address]


class Requests(h11.Connection):
    """Reads requests, and refuses two things that h11 accepts.

    A request with both Content-Length and Transfer-Encoding means different things to different
    programs on its way. A body of single bytes costs a thousand times the work of a body in one
    piece.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEADER_BYTES)
        self._pieces = 0

    def next_event(self) -> Any:
        """Return the next event, or raise h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = 0
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError(
                    "send either Content-Length or Transfer-Encoding, not both"
                )
        elif isinstance(event, h11.Data):
            self._pieces += 1
            if self._pieces > BODY_PIECES:
                raise h11.RemoteProtocolError(
                    f"a body may come in at most {BODY_PIECES:,} pieces: send larger ones"
                )
        return event


class Connection(H11Protocol):
    """uvicorn's connection with deadlines. It closes after a refusal that came before the end of
    the body."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        connections: Connections,
    ):
        super().__init__(config, state, app_state)
        self.conn = Requests()
        self.all = connections
        self.address = ""
        self.unfinished = 0  # bytes of a request that is not complete
        self.leaving = False
        self._gone = False
        self._swallowed = 0
        self.wait: Wait | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- what uvicorn calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless there is no room for another connection."""
        super().connection_made(transport)
        # So that writing is paused exactly while something is unsent.
        transport.set_write_buffer_limits(high=0)
        self.address = neighbour(self.client[0] if self.client else "")
        if self.all.admit(self):
            self._look()
            return
        self.all.forget(self)
        self._gone = True
        text = "too many connections are in use: try again later"
        self.refuse(ApiError(503, "too_many_connections", text, retry_after=2))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the request, or swallow a little of a body that was refused."""
        if self.leaving:
            self._swallowed += len(data)
            if self._swallowed > SWALLOWED_BYTES:
                self.transport.pause_reading()
            return
        super().data_received(data)
        self._look(len(data))

    def pause_writing(self) -> None:
        """The client does not read as fast as the server writes."""
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        """The client has read everything that the server wrote."""
        super().resume_writing()
        self._look()

    def on_response_complete(self) -> None:
        """Wait for the next request. If the client still sends the body of this one, close
        instead."""
        if self.conn.their_state is h11.SEND_BODY:
            self._close_politely()
        else:
            super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self.refuse(
            ApiError(400, "invalid_http", "this is not a valid HTTP request: send valid HTTP/1.1")
        )

    def timeout_keep_alive_handler(self) -> None:
        """Leave unused connections to the deadlines below."""

    def shutdown(self) -> None:
        """Close, after the answer if one is under way."""
        if self.wait in ("idle", "headers", "leave"):
            self.drop()
        else:
            super().shutdown()

    # --- deadlines -------------------------------------------------------------------------------

    def _waits_for(self) -> Wait | None:
        """Return what the server waits for the client to do; None while the client waits for the
        server."""
        if self.flow.write_paused:
            return "read"
        if self.leaving:
            return "leave"
        if self.cycle is None or self.cycle.response_complete:
            return "headers" if self.unfinished else "idle"
        return "body" if self.cycle.more_body else None

    def _look(self, received: int = 0) -> None:
        """Note what the server waits for now; a new wait has a new deadline. `received` bytes have
        just arrived."""
        if self._gone:
            return
        wait = self._waits_for()
        if received and not self.leaving:
            complete = self.conn.their_state is not h11.SEND_BODY
            if wait in ("idle", "headers"):
                complete = False
            self.all.hold(self, 0 if complete else self.unfinished + received)
            wait = self._waits_for()
        if wait == self.wait or self._gone:
            return
        self._end_wait()
        self.wait = wait
        if wait:
            self._timer = self.loop.call_later(getattr(self.all.caps, wait), self._late)
            self.all.wait(self, wait)

    def _end_wait(self) -> None:
        """Forget the present wait and its deadline."""
        self.all.waiting.pop(self, None)
        if self._timer:
            self._timer.cancel()

    def _late(self) -> None:
        """Close a connection whose client has not done in time what the server waits for."""
        if self.wait in ("headers", "body"):
            text = (
                f"the {self.wait} of the request took too long: send the request again, without a "
                "pause"
            )
            self.refuse(ApiError(408, "request_timeout", text))
        else:
            self.drop()

    # --- ends ------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Close at once, whatever is under way. The kernel forgets what the client has not read."""
        if self.flow.write_paused:
            reset = struct.pack("ii", 1, 0)  # linger for 0 seconds
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        """Give back what the connection held, once."""
        if not self._gone:
            self._gone = True
            self._end_wait()
            self.all.forget(self)

    def refuse(self, refusal: ApiError) -> None:
        """Answer instead of the application, which need not hear of it, and close."""
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(refusal.body).encode()
            headers = [
                ("content-type", "application/json"),
                ("connection", "close"),
                ("content-length", str(len(body))),
                *refusal.headers.items(),
            ]
            reason = STATUS_PHRASES[refusal.status]
            head = h11.Response(status_code=refusal.status, headers=headers, reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._close_politely()

    def _close_politely(self) -> None:
        """Send what is unsent and the end of the stream, and keep the socket for a moment.

        A socket that closes with unread data resets the connection, and the client may lose the
        answer.
        """
        self.leaving = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if not self._gone:
            self.all.hold(self, 0)
        with contextlib.suppress(OSError):  # the client may have gone already
            self.transport.write_eof()
        self._look()

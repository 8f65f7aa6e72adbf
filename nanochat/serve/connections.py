"""Limits the server's connections: their number, memory, and how long they may stall it.

A connection is in one of two states. Either the client waits for the server; this has no deadline
here, because the queue of chats bounds it. Or the server waits for the client to send a request, to
finish its headers or its body, or to read what was sent. Every such wait has a deadline. When there
are too many connections, in total or from one address, the server closes the one of these that has
kept it waiting longest, and refuses a new one only if none of these keeps it waiting.
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
from fastapi import Request
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from nanochat.common import tr, warn
from nanochat.serve.routes.fields import ApiError

HEADER_BYTES = 16 * 1024  # a browser with many cookies sends a few kilobytes
# Chunks or packets that one body may have, and how many bytes allow one more: packets hold 1,460.
BODY_PIECES = 1024
PIECE_BYTES = 512
# How much of a refused body a client may still send, in Caps.leave seconds, so that it gets to read
# the answer: many clients read only after they have sent the whole body, of up to 8 MB.
SWALLOWED_BYTES = 9 << 20
# The kernel's buffer for each direction, which by default grows to some megabytes if a client does
# not read.
SOCKET_BYTES = 64 * 1024
WARNING_SECONDS = 60  # least time between two log lines with the same message
PROBE_SECONDS = 0.5  # how often a client that has stopped sending is checked for having left

# Headers that only a proxy adds. A plain proxy of nginx adds none, but speaks HTTP/1.0.
FORWARDED = (
    "cf-connecting-ip",
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
)

# What the server waits for: a request, the rest of its headers, the rest of its body, for the
# client to read what was sent, or for it to receive the last answer before the connection closes.
Wait = Literal["idle", "headers", "body", "read", "leave"]


@dataclass(frozen=True)
class Caps:
    """Limits on connections: their number, their memory, and the seconds of each kind of Wait."""

    idle: float = 30  # longer than clients keep unused connections, so that clients close first
    headers: float = 10  # headers fit into a few packets
    body: float = 30  # 256 kB at 70 kbit/s
    read: float = 30  # a phone that changes cells is back by then
    leave: float = 10  # 8 MB at 7 Mbit/s
    connections: int = 1024
    per_address: int = 512  # a proxy in front of this server is one address
    # Of all incomplete requests together: two of the largest bodies.
    unfinished_bytes: int = 16 << 20
    # Answers whose clients do not read them; each may be as long as the context.
    unread: int = 64


class Seldom:
    """Logs the same warning at most once a minute, so that no attack can flood the log."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def warn(self, message: str) -> None:
        """Log a message, unless the same one was logged within the last WARNING_SECONDS."""
        now = time.monotonic()
        if now - self._last.get(message, -WARNING_SECONDS) >= WARNING_SECONDS:
            self._last[message] = now
            warn(message)


def neighbour(host: str) -> str:
    """Return the address under which a client is counted: its IPv4 address or IPv6 /64 network.

    IPv6 providers give each customer at least one such network. A `host` that is not an IP address
    is returned unchanged.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, ipaddress.IPv6Address):
        return host
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def owner_of(request: Request) -> str:
    """Return the address that a request counts for."""
    return neighbour(request.client.host if request.client else "")


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address, which only this machine reaches."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(neighbour(host)).is_loopback  # IPv4 if mapped to IPv6
    return host in ("localhost", "::1")


def host_name(host: str) -> str:
    """Return the name or the address in a Host header, without its port."""
    name, _, port = host.rpartition(":")
    if not port.isdigit():
        name = host
    return name.removeprefix("[").removesuffix("]").lower()


def comes_from_here(request: Request) -> bool:
    """Return whether a request comes from this machine, to a local name, and through no proxy.

    A proxy on this machine passes on what others send. One that says nothing of itself is known by
    HTTP/1.0, or by the name of the server that its clients ask for.
    """
    if request.scope.get("http_version") == "1.0":
        return False
    if any(name in request.headers for name in FORWARDED):
        return False
    client = request.client.host if request.client else ""
    return is_loopback(client) and is_loopback(host_name(request.headers.get("host", "")))


class Connections:
    """Counts the open connections by address, and tracks their waits and incomplete requests."""

    def __init__(self, caps: Caps):
        self.caps = caps
        self.seldom = Seldom()
        self.waiting: dict[Connection, None] = {}  # in the order in which they began to wait
        self.per_address: Counter[str] = Counter()
        self.unfinished = 0  # bytes of all incomplete requests

    def admit(self, new: "Connection") -> bool:
        """Count a new connection, and return whether there is room for it.

        If there are too many, in total or from its address, the one of these that has kept the
        server waiting longest is closed to make room. If none keeps it waiting, there is no room.
        """
        self.per_address[new.address] += 1
        if self.per_address[new.address] > self.caps.per_address:
            self.seldom.warn(
                tr(
                    "an address has {per_address} connections, the most it may: older ones close",
                    per_address=self.caps.per_address,
                )
            )
            if not self.make_room(new.address):
                return False
        if self.per_address.total() > self.caps.connections:
            self.seldom.warn(
                tr(
                    "{connections} connections are open, the most allowed: older ones close",
                    connections=self.caps.connections,
                )
            )
            return self.make_room()
        return True

    def make_room(self, address: str | None = None) -> bool:
        """Close the connection that has kept the server waiting longest, if any does.

        With an `address`, only connections from that address are considered. Returns whether a
        connection was closed.
        """
        for connection in self.waiting:
            if address in (None, connection.address):
                connection.drop()
                return True
        return False

    def wait(self, connection: "Connection", wait: Wait) -> None:
        """Record that a connection begins to keep the server waiting.

        If too many clients do not read their answers, the one that stopped reading first is
        disconnected.
        """
        self.waiting[connection] = None
        if wait != "read":
            return
        unread = [other for other in self.waiting if other.wait == "read"]
        if len(unread) > self.caps.unread:
            self.seldom.warn(
                tr(
                    "{unread} clients do not read their answers, the most that may: older ones "
                    "close",
                    unread=self.caps.unread,
                )
            )
            unread[0].drop()

    def hold(self, connection: "Connection", count: int) -> None:
        """Record that the unfinished request of a connection has `count` bytes so far.

        While all unfinished requests together are too large, the one that has kept the server
        waiting longest is refused, or this one if the server waits for none of them.
        """
        self.unfinished += count - connection.unfinished
        connection.unfinished = count
        while self.unfinished > self.caps.unfinished_bytes:
            oldest = next((other for other in self.waiting if other.unfinished), connection)
            self.seldom.warn(tr("unfinished requests hold too much memory: the oldest are refused"))
            text = (
                "the server receives too many requests: try again in 2 seconds, and send the body "
                "without a pause"
            )
            oldest.refuse(ApiError(429, "too_many_bodies", text, retry_after=2))

    def forget(self, connection: "Connection") -> None:
        """Stop counting a connection and the bytes of its request."""
        self.waiting.pop(connection, None)
        self.unfinished -= connection.unfinished
        connection.unfinished = 0
        self.per_address[connection.address] -= 1
        if not self.per_address[connection.address]:
            del self.per_address[connection.address]


class Requests(h11.Connection):
    """Parses HTTP requests, and refuses three kinds that h11 accepts.

    Programs disagree on how to read a request with both Content-Length and Transfer-Encoding. A
    body in more than BODY_PIECES small pieces costs too much work: up to a thousand times that of a
    body in one piece. Headers of more than HEADER_BYTES pass h11 if they arrive in one read.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEADER_BYTES)
        self._pieces = 0
        self._bytes = 0

    def next_event(self) -> Any:
        """Return h11's next event.

        Raises h11.RemoteProtocolError if the request is malformed or refused.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = 0
            self._bytes = 0
            size = len(event.target) + sum(len(name) + len(value) for name, value in event.headers)
            if size > HEADER_BYTES:
                raise h11.RemoteProtocolError(f"headers may have at most {HEADER_BYTES:,} bytes")
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError(
                    "send either Content-Length or Transfer-Encoding, not both"
                )
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > BODY_PIECES + self._bytes // PIECE_BYTES:
                raise h11.RemoteProtocolError(
                    "the pieces of the body are too small: send larger ones"
                )
        return event

    def send(self, event: Any) -> bytes | None:
        """Return the bytes of an event; an answer before the end of the body announces the close.

        Otherwise clients would send the next request on a connection that is about to close. h11
        is not told, since uvicorn would then close at once, and the client might lose the answer.
        """
        data = super().send(event)
        if not isinstance(event, h11.Response) or self.their_state is not h11.SEND_BODY:
            return data
        head = (data or b"").removesuffix(b"\r\n")
        closes = b"\r\nconnection: close\r\n" in head.lower()
        return head + (b"\r\n" if closes else b"connection: close\r\n\r\n")


class Connection(H11Protocol):
    """A uvicorn connection with deadlines.

    It closes if the answer is complete before the client has sent the whole body.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        connections: Connections,
    ):
        super().__init__(config, state, app_state)
        self.conn = Requests()
        self.registry = connections
        self.address = ""
        self.unfinished = 0  # bytes of an incomplete request
        self.leaving = False
        self._gone = False
        self._swallowed = 0
        self.wait: Wait | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- called by uvicorn -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve a new connection, or refuse it if there is no room for it."""
        super().connection_made(transport)
        # With a limit of 0, writing is paused exactly as long as something is unsent.
        transport.set_write_buffer_limits(high=0)
        self.address = neighbour(self.client[0] if self.client else "")
        if self.registry.admit(self):
            self._update_wait()
            return
        self.registry.forget(self)
        self._gone = True
        text = "too many connections are in use: try again later"
        self.refuse(ApiError(503, "too_many_connections", text, retry_after=2))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection, which has closed."""
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes, or discard them if the connection is about to close."""
        if self.leaving:
            self._swallowed += len(data)
            if self._swallowed > SWALLOWED_BYTES:
                self.transport.pause_reading()
            return
        super().data_received(data)
        self._update_wait(len(data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection, now that the client sends nothing more.

        A client that has sent a whole request may still wait for the answer, or may have left. If
        the answer has not begun, an interim response, which clients ignore, makes the system of a
        client that has left reset the connection. Otherwise the client counts as one that has left.
        """
        cycle = self.cycle
        if self.leaving or cycle is None or cycle.more_body or cycle.response_started:
            return False
        if self.conn.their_http_version != b"1.1":  # older clients know no interim responses
            return False
        cycle.keep_alive = False
        interim = h11.InformationalResponse(status_code=100, headers=[])
        self.transport.write(self.conn.send(interim) or b"")
        self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def _probe(self) -> None:
        """Drop the connection if it was reset, which is not noticed while nothing is written."""
        if self._gone or self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.drop()
        else:
            self.loop.call_later(PROBE_SECONDS, self._probe)

    def pause_writing(self) -> None:
        """Begin to wait for the client, which does not read as fast as the server writes."""
        super().pause_writing()
        self._update_wait()

    def resume_writing(self) -> None:
        """End the wait for the client, now that the kernel has taken everything written."""
        super().resume_writing()
        self._update_wait()

    def on_response_complete(self) -> None:
        """Wait for the next request, or close if the client is still sending this one's body."""
        if self.conn.their_state is h11.SEND_BODY:
            self._close_politely()
        else:
            super().on_response_complete()
        self._update_wait()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 or Requests does not accept; `msg` is not sent."""
        self.refuse(
            ApiError(400, "invalid_http", "this is not a valid HTTP request: send valid HTTP/1.1")
        )

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing, because the deadlines below also close unused connections."""

    def shutdown(self) -> None:
        """Close the connection at once, or after the answer if one is still due."""
        if self.wait in ("idle", "headers", "leave"):
            self.drop()
        else:
            super().shutdown()

    # --- deadlines -------------------------------------------------------------------------------

    def _waits_for(self) -> Wait | None:
        """Return what the server waits for, or None if the client waits for the server."""
        if self.flow.write_paused:
            return "read"
        if self.leaving:
            return "leave"
        if self.cycle is None or self.cycle.response_complete:
            return "headers" if self.unfinished else "idle"
        return "body" if self.cycle.more_body else None

    def _update_wait(self, received: int = 0) -> None:
        """Update what the server waits for, and the size of an unfinished request.

        The deadline is replaced only if the wait has changed. `received` is the number of bytes
        that have just arrived.
        """
        if self._gone:
            return
        wait = self._waits_for()
        if received and not self.leaving:
            complete = self.conn.their_state is not h11.SEND_BODY
            if wait in ("idle", "headers"):
                complete = False
            self.registry.hold(self, 0 if complete else self.unfinished + received)
            wait = self._waits_for()
        if wait == self.wait or self._gone:
            return
        self._end_wait()
        self.wait = wait
        if wait:
            self._timer = self.loop.call_later(getattr(self.registry.caps, wait), self._late)
            self.registry.wait(self, wait)

    def _end_wait(self) -> None:
        """End the current wait, and cancel its deadline."""
        self.registry.waiting.pop(self, None)
        if self._timer:
            self._timer.cancel()

    def _late(self) -> None:
        """Refuse the request, or drop the connection, because the client missed the deadline."""
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
        """Close the connection at once, whatever is under way.

        If the client does not read, the kernel discards what is unsent.
        """
        if self.flow.write_paused:
            reset = struct.pack("ii", 1, 0)  # linger for 0 seconds
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        """Stop counting the connection, unless that has been done already."""
        if not self._gone:
            self._gone = True
            self._end_wait()
            self.registry.forget(self)

    def refuse(self, refusal: ApiError) -> None:
        """Send `refusal` instead of the application's answer, unless that has begun, and close.

        This also works before the application has seen the request.
        """
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            path = self.scope["path"] if self.scope else ""
            body = json.dumps(refusal.body_for(path)).encode()
            headers = [
                ("content-type", "application/json"),
                ("connection", "close"),
                ("content-length", str(len(body))),
                *refusal.headers.items(),
            ]
            status = refusal.status_for(path)
            reason = STATUS_PHRASES[status]
            head = h11.Response(status_code=status, headers=headers, reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._close_politely()

    def _close_politely(self) -> None:
        """Finish sending, and close once the client does or a deadline passes.

        Closing a socket with unread data resets the connection, and the client may lose the answer.
        """
        self.leaving = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if not self._gone:
            self.registry.hold(self, 0)
        with contextlib.suppress(OSError):  # the client may have left already
            self.transport.write_eof()
        self._update_wait()

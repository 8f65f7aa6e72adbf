"""Requests to a chat server over plain sockets: a client that misbehaves cannot use a library's."""

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

CHATS = "/v1/chat/completions"
CLOSE = "connection: close\r\n"

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request(
    body: bytes = b"",
    method: str = "POST",
    path: str = CHATS,
    length: int | None = None,
    more: str = "",
) -> bytes:
    """Return the bytes of a request.

    `length` announces another length than the body has, and `more` holds further headers.
    """
    content_length = len(body) if length is None else length
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        f"content-length: {content_length}",
    ]
    head = "".join(f"{line}\r\n" for line in lines)
    return f"{head}{more}\r\n".encode() + body


HEALTH = request(method="GET", path="/health", more=CLOSE)


def question(text: str, **fields: Any) -> bytes:
    """Return the body of a chat with one question."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return the result of some work, or raise asyncio.TimeoutError.

    Unlike asyncio.wait_for, this never loses a cancellation.
    """
    task = asyncio.ensure_future(work)
    # A task whose exception nobody reads makes asyncio complain.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


@contextlib.asynccontextmanager
async def connected(port: int, receive_bytes: int = 0) -> AsyncIterator[Streams]:
    """Connect to the server of a port, with a receive buffer of so many bytes."""
    raw = socket.socket()
    raw.setblocking(False)
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    except BaseException:
        raw.close()
        raise
    reader, writer = await asyncio.open_connection(sock=raw, limit=receive_bytes or 1 << 20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_to(port: int, sent: bytes, seconds: float) -> bytes:
    """Send a request and return the whole answer, which ends with the connection."""
    async with connected(port) as (reader, writer):
        writer.write(sent)
        return await within(reader.read(-1), seconds)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that at least this share of them does not exceed; NaN of none."""
    if not values:
        return math.nan
    rank = max(math.ceil(share * len(values)), 1)
    return sorted(values)[rank - 1]

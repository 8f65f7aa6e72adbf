"""Clients of the chat server: polite ones, and one for every way to misbehave that was ever found to work."""

import asyncio
import contextlib
import functools
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from bench.soak.figures import Requests

PATH = "/v1/chat/completions"
HOLD_SECONDS = 60  # longer than any deadline of the server
CHAT_SECONDS = 120  # after which a polite client gives up
LARGE = 173_000  # bytes

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request(
    body: bytes = b"",
    method: str = "POST",
    path: str = PATH,
    length: int | None = None,
    more: str = "",
) -> bytes:
    """A request. `length` announces another length than the body has; `more` holds further headers."""
    counted = f"content-length: {len(body) if length is None else length}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{counted}{more}\r\n"
    return head.encode() + body


def question(text: str, **fields: Any) -> bytes:
    """The body of a chat of one question."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


@functools.cache
def large_prompt(kind: int) -> bytes:
    """A request of 173 kB: one long text, as many messages as may be, or four times as many."""
    if kind == 0:
        body = question("word " * (LARGE // 5))
    else:
        count = 999 if kind == 1 else 4001
        text = "x" * (LARGE // count - 40)
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(count)]
        body = json.dumps({"messages": turns}).encode()
    return request(body, more="connection: close\r\n")


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of some work, or asyncio.TimeoutError. Unlike asyncio.wait_for, it never loses a cancellation."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(
        lambda ended: ended.cancelled() or ended.exception()
    )  # or asyncio complains
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


@contextlib.asynccontextmanager
async def connected(port: int, receive_bytes: int = 0) -> AsyncIterator[Streams]:
    """A connection to the server, with a receive buffer of so many bytes."""
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


async def ask(port: int, sent: bytes, seen: Requests, complete: bytes = b"") -> None:
    """Send a request, read its answer to the end, and count it. The answer must hold `complete`."""
    start = time.perf_counter()
    try:
        async with connected(port) as (reader, writer):
            writer.write(sent)
            answer = await within(reader.read(-1), CHAT_SECONDS)
    except (OSError, asyncio.TimeoutError) as failure:
        seen.failures[type(failure).__name__] += 1
        return
    status = answer.split(b" ", 2)[1] if answer else b"nothing"
    if status in (b"429", b"503"):
        seen.refused += 1
    elif status == b"200" and complete in answer:
        seen.seconds.append(time.perf_counter() - start)
    else:
        seen.failures[status.decode()] += 1


async def chat(port: int, seen: Requests, stream: bool, tokens: int = 32) -> None:
    """One chat, streamed or whole."""
    body = question("What is the opposite of hot?", stream=stream, max_tokens=tokens)
    await ask(
        port, request(body, more="connection: close\r\n"), seen, b"[DONE]" if stream else b'"usage"'
    )


async def health(port: int, seen: Requests) -> None:
    """One look at /health."""
    await ask(
        port, request(method="GET", path="/health", more="connection: close\r\n"), seen, b'"ok"'
    )


# --- how to misbehave ----------------------------------------------------------------------------


async def _hold(reader: asyncio.StreamReader) -> None:
    """Wait until the server closes; read what comes."""
    with contextlib.suppress(asyncio.TimeoutError):
        await within(reader.read(-1), HOLD_SECONDS)


async def _drip(port: int, begun: bytes) -> None:
    async with connected(port) as (reader, writer):
        writer.write(begun)
        closed = asyncio.ensure_future(_hold(reader))
        while not closed.done():
            writer.write(b"x")
            await asyncio.wait({closed}, timeout=0.5)


async def idle(port: int) -> None:
    """Connect and send nothing."""
    async with connected(port) as (reader, _):
        await _hold(reader)


async def slow_headers(port: int) -> None:
    """Send the headers byte by byte."""
    await _drip(port, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")


async def slow_body(port: int) -> None:
    """Send the body byte by byte."""
    await _drip(port, request(length=100_000))


async def not_reading(port: int, tokens: int = 600) -> None:
    """Ask for a long answer, come back if the server is busy, and read nothing of the answer but its status."""
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    sent = request(question("Tell me everything.", stream=True, max_tokens=tokens, **usage))
    status = b"429"
    while status == b"429":
        async with connected(port, receive_bytes=4096) as (reader, writer):
            writer.write(sent)
            status = (await reader.readexactly(12))[-3:]
            if status == b"200":
                await asyncio.sleep(
                    HOLD_SECONDS
                )  # the reader pauses the socket beyond its own small limit
        await asyncio.sleep(1)


async def large(port: int) -> None:
    """Ask something far too long."""
    async with connected(port) as (reader, writer):
        writer.write(large_prompt(random.randrange(3)))
        await _hold(reader)


async def unfinished(port: int) -> None:
    """Send most of a large body, and never the rest."""
    async with connected(port) as (reader, writer):
        writer.write(request(b"x" * 200_000, length=250_000))
        await _hold(reader)


async def leaving(port: int) -> None:
    """Leave in the body, before the answer or in it."""
    whole = request(question("Tell me everything.", stream=True, max_tokens=200))
    async with connected(port) as (reader, writer):
        writer.write(whole[: random.choice((40, len(whole) - 5, len(whole)))])
        with contextlib.suppress(asyncio.TimeoutError):
            await within(reader.read(300), 0.5)


async def endless(port: int) -> None:
    """Send a body without end after a request that is refused at once."""
    async with connected(port) as (_, writer):
        writer.write(request(length=10**12, more=random.choice(("", "x-path: 1\r\n"))))
        while True:
            writer.write(b"x" * 65536)
            await within(writer.drain(), HOLD_SECONDS)


async def nonsense(port: int) -> None:
    """Send what is not HTTP, or what different programs read differently."""
    sent = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        request(rb'{"\ud800": 1}'),
        request(b"5\r\nhello\r\n0\r\n\r\n", more="transfer-encoding: chunked\r\n"),
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n",
        b"POST "
        + PATH.encode()
        + b" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000,
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        request(
            question("hi", temperature=1e-50, top_k=0, max_tokens=8), more="connection: close\r\n"
        ),
    )
    async with connected(port) as (reader, writer):
        writer.write(random.choice(sent))
        with contextlib.suppress(asyncio.TimeoutError):
            await within(reader.read(-1), 5)


CONDUCTS: Mapping[str, Callable[[int], Awaitable[None]]] = {
    "idle": idle,
    "slow headers": slow_headers,
    "slow body": slow_body,
    "not reading": not_reading,
    "large": large,
    "unfinished": unfinished,
    "leaving": leaving,
    "endless": endless,
    "nonsense": nonsense,
}

"""Clients that misbehave, one for every way that was ever found to work."""

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import Awaitable, Callable, Mapping

from bench.serve.http import CHATS, CLOSE, connected, question, request, within

HOLD_SECONDS = 60  # longer than any deadline of the server
LARGE = 173_000  # bytes


@functools.cache
def large_prompt(messages: int) -> bytes:
    """Return a request of 173 kB with so many messages."""
    text = "x" * (LARGE // messages - 40)
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number in range(messages)]
    return request(json.dumps({"messages": turns}).encode(), more=CLOSE)


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


async def _send(port: int, sent: bytes) -> None:
    async with connected(port) as (reader, writer):
        writer.write(sent)
        await _hold(reader)


async def idle(port: int) -> None:
    """Connect and send nothing."""
    await _send(port, b"")


async def slow_headers(port: int) -> None:
    """Send the headers byte by byte."""
    await _drip(port, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")


async def slow_body(port: int) -> None:
    """Send the body byte by byte."""
    await _drip(port, request(length=100_000))


async def not_reading(port: int) -> None:
    """Ask for a long answer, come back if the server is busy, and read nothing but the status."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = question(
        "Tell me everything.",
        stream=True,
        max_tokens=600,
        stream_options=usage,
    )
    status = b"429"
    while status == b"429":
        async with connected(port, receive_bytes=4096) as (reader, writer):
            writer.write(request(body))
            status = (await reader.readexactly(12))[-3:]
            if status == b"200":
                # The reader pauses the socket beyond its own small limit.
                await asyncio.sleep(HOLD_SECONDS)
        await asyncio.sleep(1)


async def large(port: int) -> None:
    """Ask something far too long: in one message, in as many as may be, or in four times as many."""
    await _send(port, large_prompt(random.choice((1, 999, 4001))))


async def unfinished(port: int) -> None:
    """Send most of a large body, and never the rest."""
    await _send(port, request(b"x" * 200_000, length=250_000))


async def leaving(port: int) -> None:
    """Leave in the body, before the answer or in it."""
    sent = request(question("Tell me everything.", stream=True, max_tokens=200))
    end = random.choice((40, len(sent) - 5, len(sent)))
    async with connected(port) as (reader, writer):
        writer.write(sent[:end])
        with contextlib.suppress(asyncio.TimeoutError):
            await within(reader.read(300), 0.5)


async def endless(port: int) -> None:
    """Send a body without end after a request that is refused at once."""
    more = random.choice(("", "x-path: 1\r\n"))
    async with connected(port) as (_, writer):
        writer.write(request(length=10**12, more=more))
        while True:
            writer.write(b"x" * 65536)
            await within(writer.drain(), HOLD_SECONDS)


async def nonsense(port: int) -> None:
    """Send what is not HTTP, or what different programs read differently."""
    head = b" HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    chunked = "transfer-encoding: chunked\r\n"
    path = CHATS.encode()
    sent = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        request(rb'{"\ud800": 1}'),
        request(b"5\r\nhello\r\n0\r\n\r\n", more=chunked),
        b"GET /health" + head + chunked.encode() + b"\r\nzzz\r\n",
        b"POST " + path + head + b"content-type: application/json\r\n" + chunked.encode() + b"\r\n"
        b"1\r\nx\r\n" * 20_000,
        b"GET /health" + head + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
        request(
            question(
                "hi",
                temperature=1e-50,
                top_k=0,
                max_tokens=8,
            ),
            more=CLOSE,
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

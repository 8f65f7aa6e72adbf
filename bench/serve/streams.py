"""Clients that stream chats from any server with OpenAI's routes, and what they count."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.serve.http import CLOSE, HEALTH, answer_to, connected, percentile, request, within
from nanochat.common import UserError

WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi".split()
)
SECONDS = 300  # after which a client gives up


@dataclass
class Reply:
    """What a client saw of one streamed reply."""

    first_seconds: float = 0.0  # from the request to the first text
    tokens: int = 0  # as the server counts them
    text: str = ""

    def add(self, event: dict[str, Any], seconds: float) -> None:
        """Follow an event that came so many seconds after the request."""
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            if text := delta.get("content"):
                self.first_seconds = self.first_seconds or seconds
                self.text += text
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]


@dataclass
class Load:
    """What was measured of one side with one number of chats, over all rounds."""

    seconds: list[float] = field(default_factory=list)  # CPU seconds of the server, each round
    tokens: list[int] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)  # of every chat

    @property
    def speed(self) -> float:
        """Tokens per CPU second in the median round."""
        rounds = zip(self.tokens, self.seconds, strict=True)
        return median(tokens / seconds for tokens, seconds in rounds)

    @property
    def first_p95(self) -> float:
        """Seconds to the first text that 95 % of the chats did not exceed."""
        return percentile(self.first_seconds, 0.95)


def question(number: int) -> str:
    """Return a question that no other number has."""
    draw = random.Random(number)
    return " ".join(draw.choices(WORDS, k=24))


def body(model: str, messages: Sequence[dict[str, str]], tokens: int, **fields: Any) -> bytes:
    """Return the body of a greedy chat that streams, with its usage at the end."""
    request = {
        "model": model,
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return json.dumps(request).encode()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the body of an answer, whether it is chunked or ends with the connection.

    Raises UserError if the status is not 200.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = head.split(maxsplit=2)[1]
    if status != b"200":
        words = (await reader.read(500)).decode(errors="replace")
        raise UserError(f"a server answered {status.decode()}: {words}")
    if b"transfer-encoding: chunked" not in head:
        while chunk := await reader.read(1 << 16):
            yield chunk
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the server-sent events of an answer that hold JSON."""
    unfinished = b""
    async for chunk in _chunks(reader):
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":
                yield json.loads(content)


async def ask(port: int, sent: bytes) -> Reply:
    """Stream one reply to its end. Raises UserError if the server does not say how many tokens it
    has."""
    reply = Reply()
    start = time.perf_counter()

    async def follow() -> None:
        async with connected(port) as (reader, writer):
            writer.write(request(sent, more=CLOSE))
            async for event in _events(reader):
                reply.add(event, time.perf_counter() - start)

    await within(follow(), SECONDS)
    if not reply.tokens:
        raise UserError("a server ended a reply without its usage, so its tokens cannot be counted")
    return reply


async def ask_all(port: int, bodies: Sequence[bytes]) -> list[Reply]:
    """Stream replies all at once."""
    return list(await asyncio.gather(*(ask(port, sent) for sent in bodies)))


async def health_while(port: int, bodies: Sequence[bytes]) -> list[float]:
    """Return the seconds that /health took, again and again while chats run."""
    chats = asyncio.ensure_future(ask_all(port, bodies))
    times = []
    while not chats.done():
        start = time.perf_counter()
        await answer_to(port, HEALTH, SECONDS)
        times.append(time.perf_counter() - start)
        await asyncio.sleep(0.01)
    await chats
    return times

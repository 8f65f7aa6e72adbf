"""Clients that stream chats from any server with OpenAI's routes, and what they count."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.soak.clients import connected, request, within
from bench.soak.figures import percentile
from nanochat.common import UserError

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau".split()
SECONDS = 300  # after which a client gives up
FREE_SECONDS = 30.0  # for a slot to become free


@dataclass
class Reply:
    """What a client saw of one streamed reply."""

    first_seconds: float = 0.0  # from the request to the first text
    tokens: int = 0  # as the server counts them
    prompt: int = 0
    cached: int = 0  # tokens of the prompt that the server did not read again
    text: str = ""

    def add(self, event: dict[str, Any], seconds: float) -> None:
        """Follow an event that came so many seconds after the request."""
        for choice in event.get("choices", ()):
            if words := (choice.get("delta") or {}).get("content"):
                self.first_seconds = self.first_seconds or seconds
                self.text += words
        if usage := event.get("usage"):
            self.tokens, self.prompt = usage["completion_tokens"], usage["prompt_tokens"]
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass
class Load:
    """What was measured of one side with one number of chats, over all rounds."""

    seconds: list[float] = field(default_factory=list)  # CPU seconds of the server, each round
    tokens: list[int] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)  # of every chat

    @property
    def speed(self) -> float:
        """Tokens per CPU second in the median round."""
        return percentile(
            [count / took for count, took in zip(self.tokens, self.seconds, strict=True)], 0.5
        )

    @property
    def first_p95(self) -> float:
        """Seconds to the first text that 95 % of the chats did not exceed."""
        return percentile(self.first_seconds, 0.95)


def question(number: int) -> str:
    """A question that no other number has."""
    draw = random.Random(number)
    return " ".join(draw.choice(WORDS) for _ in range(24))


def body(model: str, messages: Sequence[dict[str, str]], tokens: int, **fields: Any) -> bytes:
    """The body of a greedy chat that streams, with its usage at the end."""
    asked = {
        "model": model,
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps({**asked, **fields}).encode()


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of an answer, piece by piece, whether it is chunked or ends with the connection. UserError if the
    status is not 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if head.split(b" ", 2)[1] != b"200":
        more = await reader.read(500)
        raise UserError(
            f"a server answered {head.split(maxsplit=2)[1].decode()}: {more.decode(errors='replace')}"
        )
    if b"transfer-encoding: chunked" not in head:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of an answer that hold JSON."""
    held = b""
    async for piece in _pieces(reader):
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":
                yield json.loads(content)


async def ask(port: int, sent: bytes) -> Reply:
    """Stream one reply to its end. UserError if the server does not say how many tokens it has."""
    reply, start = Reply(), time.perf_counter()

    async def follow() -> None:
        async with connected(port) as (reader, writer):
            writer.write(request(sent, more="connection: close\r\n"))
            async for event in _events(reader):
                reply.add(event, time.perf_counter() - start)

    await within(follow(), SECONDS)
    if not reply.tokens:
        raise UserError("a server ended a reply without its usage, so its tokens cannot be counted")
    return reply


async def ask_all(port: int, bodies: Sequence[bytes]) -> list[Reply]:
    """Stream replies all at once."""
    return list(await asyncio.gather(*(ask(port, sent) for sent in bodies)))


# --- ours alone ----------------------------------------------------------------------------------


async def look(port: int) -> tuple[float, dict[str, Any]]:
    """How many seconds /health took, and what it said."""
    start = time.perf_counter()
    async with connected(port) as (reader, writer):
        writer.write(request(method="GET", path="/health", more="connection: close\r\n"))
        answer = await within(reader.read(-1), SECONDS)
    return time.perf_counter() - start, json.loads(answer.partition(b"\r\n\r\n")[2])


async def health_while(port: int, bodies: Sequence[bytes]) -> list[float]:
    """Seconds of every look at /health while chats run."""
    chats = asyncio.ensure_future(ask_all(port, bodies))
    seen = []
    while not chats.done():
        seen.append((await look(port))[0])
        await asyncio.sleep(0.01)
    await chats
    return seen


async def leave(port: int, sent: bytes) -> float:
    """Seconds until no chat runs after the client of the only one has left in the middle of its reply."""
    async with connected(port) as (reader, writer):
        writer.write(request(sent))
        await reader.readuntil(b"data:")
        await asyncio.sleep(0.1)
    start = time.perf_counter()
    while time.perf_counter() - start < FREE_SECONDS:
        if not (await look(port))[1]["chats"]:
            return time.perf_counter() - start
    raise UserError(f"a slot was not free {FREE_SECONDS:.0f} seconds after its client had left")


async def second_turn(port: int, model: str, word: int, tokens: int) -> Reply:
    """A chat of two turns; the second reply, whose `prompt - cached` tokens were read.

    The first reply repeats the token `word`: what a model with random weights would say consists of other tokens when
    it comes back as text.
    """
    messages = [{"role": "user", "content": question(7_000_001)}]
    more = {"ignore_eos": True, "logit_bias": {str(word): 100}}
    first = await ask(port, body(model, messages, tokens, **more))
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": question(7_000_002)},
    ]
    return await ask(port, body(model, messages, tokens, **more))

"""Measures what clients of the chat server feel while as many others misbehave in every known way.

python -m bench.soak --quick             # 20 seconds with 16 clients
python -m bench.soak                     # ten minutes with 64 clients, of which half misbehave
python -m bench.soak --siege             # 1,200 idle sockets, 246 clients that do not read, 200 large prompts

The server runs as its own process on this machine, with an untrained model unless --model_tag names another. Each
client that misbehaves does so in a new way each time. The siege compares a chat with the same chat on an idle server.
The last line is JSON.
"""

import asyncio
import contextlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.soak import clients
from bench.soak.figures import Requests, growth, percentile
from bench.soak.server import Served, serving
from nanochat.common import UserError, log, run
from nanochat.serve.listening import raise_open_files

WATCH_SECONDS = 1.0  # between two looks at /health and at the memory
PROBES = 5  # chats that are measured in each phase of a siege
WARM = 32  # chats that fill all slots first: the first use of a slot takes memory
IDLE, UNREAD, LARGE = 1200, 246, 200  # connections of a siege


@dataclass(frozen=True)
class Config:
    """Put the chat server under load; print what its clients felt as a table and one JSON object."""

    minutes: float = 10.0
    """length of the soak"""
    clients: int = 64
    """clients at the same time; half of them misbehave"""
    quick: bool = False
    """20 seconds with 16 clients"""
    siege: bool = False
    """hold many connections at once instead, and measure /health and the next chat"""
    source: Literal["base", "mid", "sft", "rl"] | None = None
    """stage of a trained model; default: the latest of --model_tag"""
    model_tag: str | None = None
    """tag of a trained model, such as d20; default: a small untrained model"""


@dataclass
class Seen:
    """What happened in a run."""

    chats: Requests = field(default_factory=Requests)
    health: Requests = field(default_factory=Requests)
    memory: list[int] = field(default_factory=list)
    conducts: Counter[str] = field(default_factory=Counter)


async def watch(served: Served, seen: Seen) -> None:
    """Look at /health and at the memory of the server, again and again."""
    while True:
        seen.memory.append(served.memory())
        await clients.health(served.port, seen.health)
        await asyncio.sleep(WATCH_SECONDS)


async def polite(port: int, seen: Seen) -> None:
    """Chat again and again; when told to come back, do so after the 2 seconds that the server asks for."""
    while True:
        refused = seen.chats.refused
        await clients.chat(port, seen.chats, stream=random.random() < 0.5)
        await asyncio.sleep(2 if seen.chats.refused > refused else random.random())


async def rude(port: int, seen: Seen, draw: random.Random) -> None:
    """Misbehave in one way after the other."""
    while True:
        name = draw.choice(list(clients.CONDUCTS))
        seen.conducts[name] += 1
        with contextlib.suppress(
            OSError, asyncio.TimeoutError
        ):  # the server closed the connection, as it should
            await clients.CONDUCTS[name](port)


@contextlib.asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines beside a block; end them after it."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def soak(served: Served, seconds: float, count: int) -> dict[str, Any]:
    """Half of the clients chat, half misbehave."""
    seen, port = Seen(), served.port
    await asyncio.gather(
        *[clients.chat(port, Requests(), stream=True, tokens=600) for _ in range(WARM)]
    )
    some = [polite(port, seen) for _ in range(count - count // 2)]
    others = [rude(port, seen, random.Random(number)) for number in range(count // 2)]
    async with background(watch(served, seen), *some, *others) as tasks:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()  # a client or the watch failed: a bug of this benchmark, or the server is gone
    log(f"{'':<8} answered  refused   failed   p50 ms   p95 ms   p99 ms   max ms")
    for name, requests in (("chats", seen.chats), ("/health", seen.health)):
        log(f"{name:<8} " + " ".join(f"{value!s:>8}" for value in requests.summary().values()))
        for failure, times in requests.failures.items():
            log(f"         failed: {failure}, {times} times")
    log(
        "misbehaved: "
        + ", ".join(f"{name} {times}" for name, times in sorted(seen.conducts.items()))
    )
    return {
        "clients": count,
        "seconds": round(seconds),
        "chats": seen.chats.summary(),
        "health": seen.health.summary(),
        "rss_mb": round(seen.memory[-1] / 1e6, 1),
        "rss_growth_mb": round(growth(seen.memory) / 1e6, 1),
    }


# --- the siege -----------------------------------------------------------------------------------


async def probe(port: int, seconds: float | None = None) -> dict[str, Any]:
    """Chats one after the other, and /health beside them; what the slowest of each took, in seconds."""
    seen = Seen()

    async def looks() -> None:
        while True:
            await clients.health(port, seen.health)
            await asyncio.sleep(0.05)

    async with background(looks()):
        if seconds is not None:
            await asyncio.sleep(seconds)
        for _ in range(PROBES if seconds is None else 0):
            await clients.chat(port, seen.chats, stream=True)
    failed = sum(
        requests.refused + requests.failures.total() for requests in (seen.chats, seen.health)
    )
    slowest = [round(percentile(requests.seconds, 1), 3) for requests in (seen.health, seen.chats)]
    return {"health": slowest[0], "chat": slowest[1], "failed": failed}


async def idle_engine(port: int) -> bool:
    """Whether no chat is being answered."""
    async with clients.connected(port) as (reader, writer):
        writer.write(clients.request(method="GET", path="/health", more="connection: close\r\n"))
        return b'"chats":0' in await reader.read(-1)


async def siege(served: Served) -> dict[str, Any]:
    """Hold ever more connections, and measure in each phase."""
    port, phases, memory = served.port, {}, []

    def told(phase: str, found: dict[str, Any]) -> None:
        phases[phase] = found
        memory.append(served.memory())
        log(
            f"{phase:<34} {found['health']:8.3f} {found['chat']:8.3f} {found['failed']:7} {memory[-1] / 1e6:8.1f}"
        )

    log(f"{'':<34} /health  chat (s)  failed  RSS (MB)   slowest of each")
    await asyncio.gather(
        *[clients.chat(port, Requests(), stream=True, tokens=600) for _ in range(WARM)]
    )
    told("alone", await probe(port))
    async with background(*[clients.idle(port) for _ in range(IDLE)]):
        await asyncio.sleep(1)
        told(f"{IDLE:,} idle sockets", await probe(port))
        async with background(*[clients.not_reading(port) for _ in range(UNREAD)]):
            started = time.monotonic()
            told(f"and {UNREAD} that do not read", await probe(port, seconds=2))
            while not await idle_engine(port):
                await asyncio.sleep(0.2)
            log(f"their answers were complete after {time.monotonic() - started:.1f} s")
            told("their answers complete, unread", await probe(port))
            for number in range(3):
                async with background(*[clients.large(port) for _ in range(LARGE)]):
                    await asyncio.sleep(0)
                    told(f"and {LARGE} large prompts, round {number + 1}", await probe(port))
    told("afterwards", await probe(port))
    late = (
        max(found["chat"] for found in phases.values() if not math.isnan(found["chat"]))
        - phases["alone"]["chat"]
    )
    return {
        "health_max_s": max(found["health"] for found in phases.values()),
        "chat_later_s": round(late, 3),
        "failed": sum(found["failed"] for found in phases.values()),
        "rss_growth_mb": round((memory[-1] - memory[0]) / 1e6, 1),
        "rss_max_mb": round(max(memory) / 1e6, 1),
    }


def main(cfg: Config) -> None:
    """Start the server, put it under load, and print."""
    if cfg.minutes <= 0 or cfg.clients < 2:
        got = f"got {cfg.minutes:g} minutes and {cfg.clients} clients"
        raise UserError(
            f"a soak needs some minutes and at least 2 clients, {got}: try --quick", exit_code=2
        )
    raise_open_files()
    named = {"--source": cfg.source, "--model_tag": cfg.model_tag}
    flags = tuple(f"{flag}={value}" for flag, value in named.items() if value)
    with serving(flags, untrained=not flags) as served:
        if cfg.siege:
            result = asyncio.run(siege(served))
        else:
            seconds, count = (20.0, 16) if cfg.quick else (60 * cfg.minutes, cfg.clients)
            result = asyncio.run(soak(served, seconds, count))
        size = served.log.stat().st_size
    log(f"memory of the server grew by {result['rss_growth_mb']} MB; its log has {size:,} bytes")
    print(json.dumps({"benchmark": "soak", **result, "log_bytes": size}), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

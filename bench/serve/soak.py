"""Measures what clients of the chat server feel while as many others misbehave in every known way.

python -m bench.serve.soak --quick             # 20 seconds with 16 clients
python -m bench.serve.soak                     # ten minutes with 64 clients, of which half misbehave

How: the server runs as its own process on this machine, with a small model of random weights. Polite clients chat again
and again, and come back when they are told to; each of the others misbehaves in a new way each time. The table shows how
many requests were answered and how long they took, and how much the memory of the server grew.
"""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serve import model, rude
from bench.serve.http import CLOSE, HEALTH, answer_to, percentile, question, request
from bench.serve.servers import OUR_ADDRESS, running
from nanochat.common import UserError, log, run
from nanochat.models.qwen.config import QwenConfig
from nanochat.serve.listening import raise_open_files

SOFT_FILES = 1024  # the soft limit of most systems, which the server raises
CHAT_SECONDS = 120  # after which a polite client gives up
WATCH_SECONDS = 1.0  # between two looks at /health and at the memory
RETRY_SECONDS = 2.0  # that the server asks for when it is busy
WARM = 32  # chats that fill all slots first: the first use of a slot takes memory
SHAPE = QwenConfig(
    sequence_len=1024,
    vocab_size=1024,
    n_layer=2,
    n_embd=128,
    n_hidden=256,
    tied=1,
    n_head=2,
    n_kv_head=2,
    head_dim=64,
)


@dataclass(frozen=True)
class Config:
    """Put the chat server under load; print what its clients felt as a table and one JSON object."""

    minutes: float = 10.0
    """length of the soak"""
    clients: int = 64
    """clients at the same time; half of them misbehave"""
    quick: bool = False
    """20 seconds with 16 clients"""


# --- what is counted -------------------------------------------------------------------------------


@dataclass
class Requests:
    """Requests of one kind."""

    seconds: list[float] = field(default_factory=list)  # of every answer
    refused: int = 0  # status 429 or 503, with a time to come back
    failures: Counter[str] = field(default_factory=Counter)  # by their reason

    def summary(self) -> dict[str, Any]:
        """Return counts, and milliseconds of the median, of 95 and 99 percent, and of the slowest."""
        summary: dict[str, Any] = {
            "answered": len(self.seconds),
            "refused": self.refused,
            "failed": self.failures.total(),
        }
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
            time_ms = round(1e3 * percentile(self.seconds, share)) if self.seconds else None
            summary[f"{name}_ms"] = time_ms
        return summary


@dataclass
class Observed:
    """What happened in a run."""

    chats: Requests = field(default_factory=Requests)
    health: Requests = field(default_factory=Requests)
    memory: list[int] = field(default_factory=list)
    conducts: Counter[str] = field(default_factory=Counter)


def growth(samples: Sequence[int]) -> int:
    """Return how far the median of the last fifth of memory samples is above that of the second fifth.

    In the first fifth, a process still takes what it keeps: caches, threads, buffers.
    """
    fifth = max(len(samples) // 5, 1)
    early = samples[fifth : 2 * fifth] or samples[:fifth]
    late = samples[-fifth:]
    return round(percentile(late, 0.5) - percentile(early, 0.5))


# --- the server and its clients --------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A running server: its port, its process, and the file of everything that it writes."""

    port: int
    pid: int
    log: Path

    def memory(self) -> int:
        """Return the resident memory of the process in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return 1024 * int(line.split()[1])


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """Run chat_web on a free port, with a small model of random weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = model.make(folder, SHAPE, text=100_000)
        limited = f'ulimit -S -n {SOFT_FILES}; exec "$@"'
        command = ["bash", "-c", limited, "bash", sys.executable, "-m", "scripts.chat_web"]
        command += ["--headless", "--port=0", f"--model={files.folder}"]
        output = folder / "log"
        with running("ours", command, OUR_ADDRESS, output) as (process, port):
            yield Served(int(port), process.pid, output)


async def ask(port: int, sent: bytes, requests: Requests, complete: bytes) -> None:
    """Send a request, read its answer to the end, and count it. The answer must hold `complete`."""
    start = time.perf_counter()
    try:
        answer = await answer_to(port, sent, CHAT_SECONDS)
    except (OSError, asyncio.TimeoutError) as failure:
        requests.failures[type(failure).__name__] += 1
        return
    status = answer.split(b" ", 2)[1] if answer else b"nothing"
    if status in (b"429", b"503"):
        requests.refused += 1
    elif status == b"200" and complete in answer:
        requests.seconds.append(time.perf_counter() - start)
    else:
        requests.failures[status.decode()] += 1


async def chat(port: int, requests: Requests, stream: bool = True, tokens: int = 32) -> None:
    """Chat once, streamed or whole."""
    body = question(
        "What is the opposite of hot?", stream=stream, max_tokens=tokens, ignore_eos=True
    )
    complete = b"[DONE]" if stream else b'"usage"'
    await ask(port, request(body, more=CLOSE), requests, complete)


async def health(port: int, requests: Requests) -> None:
    """Look once at /health."""
    await ask(port, HEALTH, requests, b'"ok"')


@contextlib.asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines beside a block, and end them after it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the soak --------------------------------------------------------------------------------------


async def watch(served: Served, observed: Observed) -> None:
    """Look at /health and at the memory of the server, again and again."""
    while True:
        observed.memory.append(served.memory())
        await health(served.port, observed.health)
        await asyncio.sleep(WATCH_SECONDS)


async def polite(port: int, observed: Observed) -> None:
    """Chat again and again; when told to come back, do so."""
    while True:
        refused = observed.chats.refused
        await chat(port, observed.chats, stream=random.random() < 0.5)
        was_refused = observed.chats.refused > refused
        await asyncio.sleep(RETRY_SECONDS if was_refused else random.random())


async def misbehave(port: int, observed: Observed, draw: random.Random) -> None:
    """Misbehave in one way after the other."""
    while True:
        name = draw.choice(list(rude.CONDUCTS))
        observed.conducts[name] += 1
        # The server closes the connection, as it should.
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await rude.CONDUCTS[name](port)


async def soak(served: Served, seconds: float, count: int) -> dict[str, Any]:
    """Let half of the clients chat and half misbehave; print and return what was counted."""
    observed = Observed()
    port = served.port
    await asyncio.gather(*(chat(port, Requests(), tokens=600) for _ in range(WARM)))
    rude_count = count // 2
    polite_clients = [polite(port, observed) for _ in range(count - rude_count)]
    rude_clients = [
        misbehave(port, observed, random.Random(number)) for number in range(rude_count)
    ]
    clients = [watch(served, observed), *polite_clients, *rude_clients]
    async with background(*clients) as tasks:
        ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()  # raises: a bug of this benchmark, or the server is gone
    log(f"{'':<8} answered  refused   failed   p50 ms   p95 ms   p99 ms   max ms")
    for name, requests in (("chats", observed.chats), ("/health", observed.health)):
        cells = " ".join(f"{value!s:>8}" for value in requests.summary().values())
        log(f"{name:<8} {cells}")
        for failure, times in requests.failures.items():
            log(f"         failed: {failure}, {times} times")
    conducts = (f"{name} {times}" for name, times in sorted(observed.conducts.items()))
    log(f"misbehaved: {', '.join(conducts)}")
    return {
        "clients": count,
        "seconds": round(seconds),
        "chats": observed.chats.summary(),
        "health": observed.health.summary(),
        "rss_mb": round(observed.memory[-1] / 1e6, 1),
        "rss_growth_mb": round(growth(observed.memory) / 1e6, 1),
    }


def main(cfg: Config) -> None:
    """Start the server, put it under load, and print."""
    if cfg.minutes <= 0 or cfg.clients < 2:
        numbers = f"got {cfg.minutes:g} minutes and {cfg.clients} clients"
        raise UserError(
            f"a soak needs some minutes and at least 2 clients, {numbers}: try --quick", exit_code=2
        )
    raise_open_files()
    with serving() as served:
        seconds, clients = (20.0, 16) if cfg.quick else (60 * cfg.minutes, cfg.clients)
        result = asyncio.run(soak(served, seconds, clients))
        size = served.log.stat().st_size
    log(f"memory of the server grew by {result['rss_growth_mb']} MB; its log has {size:,} bytes")
    print(json.dumps({"benchmark": "soak", **result, "log_bytes": size}), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

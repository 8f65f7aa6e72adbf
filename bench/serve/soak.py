"""Measures what clients of the chat server feel while as many others misbehave in every known way.

python -m bench.serve.soak --quick             # 20 seconds with 16 clients
python -m bench.serve.soak                     # ten minutes with 64 clients, half misbehave

How: the server runs as its own process on this machine, with a small model of random weights.
Polite clients chat again and again, and come back when they are told to; one in four of them is an
agent with tools, whose prompts have up to 2,400 words. Each of the others misbehaves in a new way
each time. The table shows how many requests were answered and how long they
took, and how much the memory of the server grew.
"""

import contextlib
import http.client
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from bench import child, tables
from bench.processes import refuse
from bench.serve import agents, model, rude, servers, streams
from bench.serve.http import percentile, question
from bench.training import QWEN3
from nanochat.common import UserError, log
from nanochat.data.command_line import run

BUSY = ("429", "503")  # statuses with a time to come back
WATCH_SECONDS = 1.0  # between two looks at the memory
RETRY_SECONDS = 2.0  # that the server asks for when it is busy
# Agents with the longest prompt that fill all slots first, because a slot takes memory as it is
# first written. They send one prompt, which the server reads once and copies.
WARM = 32
AGENT_EVERY = 4  # of so many polite clients, one is an agent
SHAPE = replace(
    QWEN3,
    sequence_len=10_240,
    vocab_size=1024,
    n_layer=2,
    n_embd=128,
    n_hidden=256,
    n_head=2,
    n_kv_head=2,
)


@dataclass(frozen=True)
class Config:
    """Put the chat server under load; print what its clients felt."""

    minutes: float = 10.0
    """length of the soak"""
    clients: int = 64
    """clients at the same time; half of them misbehave"""
    quick: bool = False
    """20 seconds with 16 clients"""


@dataclass
class Requests:
    """The chats of polite clients."""

    seconds: list[float] = field(default_factory=list)  # of every answer
    failures: list[str] = field(default_factory=list)  # statuses, and names of exceptions

    def chat(self, port: int, tokens: int = 32) -> bool:
        """Chat once, streamed, and count the answer; return whether the reply was complete."""
        fields = {"max_tokens": tokens, "ignore_eos": True, **streams.STREAMED}
        body = question("What is the opposite of hot?", **fields)
        return self.count(lambda: streams.ask(port, body))

    def agent_turn(self, port: int, draw: random.Random, calls: int | None = None) -> bool:
        """Ask as an agent does after `calls` calls of tools, or some; otherwise like chat()."""
        if calls is None:
            calls = draw.randint(0, agents.CALLS)
        body = agents.body(draw, calls, 32)
        return self.count(lambda: agents.ask(port, body))

    def count(self, ask: Callable[[], object]) -> bool:
        """Send a request and count its answer; return whether the reply was complete."""
        start = time.perf_counter()
        try:
            ask()
        except streams.StatusError as failure:
            self.failures.append(str(failure.status))
            return False
        except (OSError, http.client.HTTPException, UserError) as failure:
            self.failures.append(type(failure).__name__)
            return False
        self.seconds.append(time.perf_counter() - start)
        return True

    def summary(self) -> dict[str, Any]:
        """Return counts, and milliseconds of the median, of 95 and 99 percent, of the slowest."""
        refused = sum(failure in BUSY for failure in self.failures)
        summary: dict[str, Any] = {
            "answered": len(self.seconds),
            "refused": refused,
            "failed": len(self.failures) - refused,
        }
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
            summary[f"{name}_ms"] = None
            if self.seconds:
                summary[f"{name}_ms"] = round(1e3 * percentile(self.seconds, share))
        return summary


@dataclass
class Observed:
    """What happened in a run."""

    chats: Requests = field(default_factory=Requests)
    agents: Requests = field(default_factory=Requests)
    memory: list[int] = field(default_factory=list)
    conducts: list[str] = field(default_factory=list)


def growth(samples: Sequence[int]) -> int:
    """Return how far the memory's median in the last fifth is above that in the second fifth.

    In the first fifth, a process still takes what it keeps: caches, threads, buffers.
    """
    fifth = max(len(samples) // 5, 1)
    early = samples[fifth : 2 * fifth] or samples[:fifth]
    late = samples[-fifth:]
    return round(percentile(late, 0.5) - percentile(early, 0.5))


def watch(pid: int, memory: list[int], stop: Event) -> None:
    """Look at the memory of the server, again and again."""
    while not stop.wait(WATCH_SECONDS):
        memory.append(child.memory_of(pid, "VmRSS"))


def polite(ask: Callable[[], bool], stop: Event) -> None:
    """Ask again and again; when told to come back, do so."""
    pause = 0.0
    while not stop.wait(pause):
        is_complete = ask()
        pause = random.random() if is_complete else RETRY_SECONDS


def misbehave(port: int, conducts: list[str], draw: random.Random, stop: Event) -> None:
    """Misbehave in one way after the other."""
    while not stop.is_set():
        name = draw.choice(list(rude.CONDUCTS))
        conducts.append(name)
        with contextlib.suppress(OSError):  # the server closes the connection, as it should
            rude.CONDUCTS[name](port)


def soak(port: int, pid: int, seconds: float, count: int) -> Observed:
    """Let half of the clients chat and half misbehave; return what was counted."""
    with ThreadPoolExecutor(WARM) as pool:
        for _ in range(WARM):
            pool.submit(Requests().agent_turn, port, random.Random(0), agents.CALLS)
    observed = Observed()
    stop = Event()
    # Threads that do not end with the soak hold a connection until the server ends.
    clients = [Thread(target=watch, args=(pid, observed.memory, stop), daemon=True)]
    for number in range(count // 2):
        arguments = (port, observed.conducts, random.Random(number), stop)
        clients.append(Thread(target=misbehave, args=arguments, daemon=True))
    for number in range(count - count // 2):
        ask = partial(observed.chats.chat, port)
        if number % AGENT_EVERY == 0:
            ask = partial(observed.agents.agent_turn, port, random.Random(number))
        clients.append(Thread(target=polite, args=(ask, stop), daemon=True))
    for client in clients:
        client.start()
    time.sleep(seconds)
    stop.set()
    return deepcopy(observed)  # requests that the end of the server breaks off do not count


def show(observed: Observed) -> dict[str, Any]:
    """Print what was counted, and return it."""
    chats = observed.chats.summary()
    agents_summary = observed.agents.summary()
    rows = [("chats", *chats.values()), ("agents", *agents_summary.values())]
    tables.show(("", *chats), rows)
    failures = observed.chats.failures + observed.agents.failures
    for failure, times in Counter(failures).items():
        if failure not in BUSY:
            log(f"failed: {failure}, {times} times")
    times_of = Counter(observed.conducts)
    conducts = (f"{name} {times}" for name, times in sorted(times_of.items()))
    log(f"misbehaved: {', '.join(conducts)}")
    return {
        "chats": chats,
        "agents": agents_summary,
        "rss_mb": observed.memory[-1] / 1e6,
        "rss_growth_mb": growth(observed.memory) / 1e6,
    }


def main(cfg: Config) -> None:
    """Start the server, put it under load, and print."""
    if cfg.minutes <= 0 or cfg.clients < 2:
        raise refuse(
            f"a soak needs some minutes and at least 2 clients, got {cfg.minutes:g} minutes and "
            f"{cfg.clients} clients: try --quick"
        )
    seconds, clients = (20.0, 16) if cfg.quick else (60 * cfg.minutes, cfg.clients)
    with tempfile.TemporaryDirectory() as name:
        files = model.make(Path(name), SHAPE, text=100_000)
        with servers.ours(files, f"--context={SHAPE.sequence_len}") as server:
            observed = soak(server.port, server.pid, seconds, clients)
        log_bytes = files.log("ours").stat().st_size
    result = show(observed)
    log(f"memory of the server grew by {result['rss_growth_mb']:.1f} MB")
    log(f"its log has {log_bytes:,} bytes")
    result |= {"clients": clients, "seconds": seconds, "log_bytes": log_bytes}
    tables.finish("soak", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

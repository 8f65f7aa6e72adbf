"""Measures decoding by the chat server, alone or beside other servers.

python -m bench.serve --quick                              # ours alone, within 50 seconds
python -m bench.serve --against transformers llama-cpp

What is compared: tokens per CPU second with 1, 8 and 32 greedy chats at once, and how long the
first token takes. All servers have one model of 36 million parameters in Qwen3's shape, whose
weights are random, in bf16, and one thread: ours, transformers with continuous batching, and
llama.cpp's. They take turns, those that wait are paused, and the median round counts.
bench.serve.soak measures the server while half of its clients misbehave, bench.serve.drafts what
guessed tokens save, bench.serve.thoughts what keeping thoughts apart costs, and bench.serve.prompts
how long replies wait beside a long prompt.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench import tables
from bench.processes import check_at_least, check_installed, check_peers
from bench.serve import model, servers, streams
from bench.serve.servers import Server
from bench.serve.streams import Load
from nanochat.common import log, run

CHATS = (1, 8, 32)
WARMUP_TOKENS = 8  # of the replies of servers that warm up
ALONE = 3  # chats in turn where one runs alone, since CPU time is counted in hundredths
PEERS = {"transformers": servers.transformers, "llama-cpp": servers.llama_cpp}
PACKAGES = {"transformers": ("transformers", "uvicorn", "fastapi"), "llama-cpp": ("xllamacpp",)}

Loads = dict[str, dict[int, Load]]  # side -> chats -> what was measured


@dataclass(frozen=True)
class Config:
    """Print the speed of decoding as a table, and one JSON object on the last line."""

    quick: bool = False
    """ours alone, one round of short replies, so that it ends within 50 seconds"""
    against: tuple[Literal["transformers", "llama-cpp"], ...] = ()
    """servers to measure beside ours: transformers, with continuous batching; llama.cpp's, from the
    package xllamacpp"""
    rounds: int = 3
    """rounds of each configuration"""

    @property
    def tokens(self) -> int:
        """The tokens of a reply."""
        return 16 if self.quick else 64


def server_turn(server: Server, chats: int, tokens: int, number: int, load: Load) -> None:
    """Let so many chats run at once, or the only chat three times, and count.

    No two rounds, which are numbered, ask the same questions.
    """
    count = ALONE if chats == 1 else chats
    first = 10_000 * number + 100 * chats
    bodies = [
        streams.body(server.model, first + chat, tokens, **server.fields) for chat in range(count)
    ]
    start = server.cpu_seconds()
    if chats == 1:
        replies = [streams.ask(server.port, body) for body in bodies]
    else:
        replies = streams.ask_all(server.port, bodies)
    seconds = server.cpu_seconds() - start
    load.seconds.append(seconds)
    tokens_of_replies = sum(reply.tokens for reply in replies)
    load.tokens.append(tokens_of_replies)
    load.first_seconds += [reply.first_seconds for reply in replies]


def measure_servers(cfg: Config) -> Loads:
    """Let the servers take turns; the first turns, which are short, do not count."""
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        folder = Path(start(tempfile.TemporaryDirectory()))
        files = model.make(folder, gguf="llama-cpp" in cfg.against)
        sides = [start(servers.ours(files))]
        for peer in cfg.against:
            sides.append(start(PEERS[peer](files)))
        for server in sides:
            for chats in CHATS:
                server_turn(server, chats, WARMUP_TOKENS, 0, Load())
            server.pause()
        loads: Loads = {server.name: {chats: Load() for chats in CHATS} for server in sides}
        for number in range(1, cfg.rounds + 1):
            for chats in CHATS:
                for server in sides:
                    load = loads[server.name][chats]
                    server.resume()
                    server_turn(server, chats, cfg.tokens, number, load)
                    server.pause()
        return loads


def figures(loads: Loads, against: Sequence[str]) -> dict[str, Any]:
    """Return the speeds of every side, and how many times as fast ours is, by number of chats."""
    speeds: dict[str, dict[str, float]] = {}
    for name, by_chats in loads.items():
        speeds[name] = {str(chats): load.speed for chats, load in by_chats.items()}
    ratios: dict[str, dict[str, float]] = {}
    for peer in against:
        ratios[peer] = {
            str(chats): load.speed / loads[peer][chats].speed
            for chats, load in loads["ours"].items()
        }
    return {
        "served_tokens_per_cpu_second": speeds,
        "times_as_fast_as": ratios,
        "first_token_p95_s": {name: load[CHATS[-1]].first_p95 for name, load in loads.items()},
    }


def show(loads: Loads) -> None:
    """Print one line for each side."""
    titles = [f"{chats} chats" for chats in CHATS]
    rows = []
    for name, by_chats in loads.items():
        speeds = [f"{by_chats[chats].speed:,.1f}" for chats in CHATS]
        busiest = by_chats[CHATS[-1]]
        rows.append([name, *speeds, f"{busiest.first_p95:.3f}"])
    tables.show(("tokens per CPU second", *titles, "first token p95 at 32, wall s"), rows)


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, rounds=cfg.rounds)
    check_peers(cfg.quick, cfg.against)
    for peer in cfg.against:
        check_installed(peer, *PACKAGES[peer])
    if cfg.quick:
        cfg = replace(cfg, rounds=1)
    loads = measure_servers(cfg)
    log(f"{cfg.tokens} greedy tokens a chat, one thread each, median of {cfg.rounds} rounds")
    show(loads)
    tables.finish("serve", figures(loads, cfg.against))


if __name__ == "__main__":
    run(main, Config, __doc__)

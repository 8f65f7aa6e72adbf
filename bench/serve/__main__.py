"""Measures decoding by the chat server, alone or beside other servers.

python -m bench.serve --quick                              # ours alone, within 50 seconds
python -m bench.serve --against transformers llama-cpp
python -m bench.serve --against llama-cpp --model DIR --format q8_0 --chats 1 8

What is compared: tokens per CPU second of a long prompt and with 1, 8 and 32 greedy chats at once,
and how long the first token takes. All servers have one model and one thread: ours, transformers
with continuous batching, and llama.cpp's. The model is that of --model, or one of 36 million
parameters in Qwen3's shape, whose weights are random. Its weights are in bf16; with --format,
llama.cpp reads fp32 or its own 8 bits, and ours computes in fp32 or with --weights int8. They take
turns, those that wait are paused, and the median round counts.
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
from nanochat.common import log
from nanochat.data.command_line import run

CHATS = (1, 8, 32)
WARMUP_TOKENS = 8  # of the replies of servers that warm up
ALONE = 3  # chats in turn where one runs alone, since CPU time is counted in hundredths
PEERS = {"transformers": servers.transformers, "llama-cpp": servers.llama_cpp}
PACKAGES = {"transformers": ("transformers", "uvicorn", "fastapi"), "llama-cpp": ("xllamacpp",)}

Format = Literal["bfloat16", "float32", "q8_0"]
OUR_FLAGS: dict[Format, Sequence[str]] = {
    "bfloat16": (),
    "float32": ("--dtype=float32",),
    "q8_0": ("--weights=int8",),
}
Loads = dict[str, dict[int, Load]]  # side -> chats, or 0 for a prompt -> what was measured
PROMPT = 0
PROMPT_WORDS = 120  # of a long prompt, some 400 tokens


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
    model: Path | None = None
    """folder of a published model; default: one with random weights"""
    format: Format = "bfloat16"
    """number format of the weights of ours and of llama.cpp"""
    chats: tuple[int, ...] = CHATS
    """numbers of chats that run at once"""

    @property
    def tokens(self) -> int:
        """The tokens of a reply."""
        return 16 if self.quick else 64


def server_turn(server: Server, chats: int, tokens: int, number: int, load: Load) -> None:
    """Let so many chats run at once, or the only chat three times, and count.

    With PROMPT for `chats`, three long prompts are read one after another, and their tokens count.
    No two rounds, which are numbered, ask the same questions.
    """
    reads = chats == PROMPT
    count = ALONE if chats <= 1 else chats
    first = 10_000 * number + 100 * chats
    words = PROMPT_WORDS if reads else streams.QUESTION_WORDS
    bodies = [
        streams.body(server.model, first + chat, 1 if reads else tokens, words, **server.fields)
        for chat in range(count)
    ]
    start = server.cpu_seconds()
    if chats <= 1:
        replies = [streams.ask(server.port, body) for body in bodies]
    else:
        replies = streams.ask_all(server.port, bodies)
    seconds = server.cpu_seconds() - start
    load.seconds.append(seconds)
    load.tokens.append(sum(reply.prompt_tokens if reads else reply.tokens for reply in replies))
    load.first_seconds += [reply.first_seconds for reply in replies]


def measure_servers(cfg: Config) -> Loads:
    """Let the servers take turns; the first turns, which are short, do not count."""
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        folder = Path(start(tempfile.TemporaryDirectory()))
        format = cfg.format if "llama-cpp" in cfg.against else None
        if cfg.model is None:
            files = model.make(folder, gguf=format)
        else:
            files = model.published_files(cfg.model, folder, gguf=format)
        sides = [start(servers.ours(files, *OUR_FLAGS[cfg.format]))]
        for peer in cfg.against:
            sides.append(start(PEERS[peer](files)))
        turns = (PROMPT, *cfg.chats)
        for server in sides:
            for chats in turns:
                server_turn(server, chats, WARMUP_TOKENS, 0, Load())
            server.pause()
        loads: Loads = {server.name: {chats: Load() for chats in turns} for server in sides}
        for number in range(1, cfg.rounds + 1):
            for chats in turns:
                for server in sides:
                    load = loads[server.name][chats]
                    server.resume()
                    server_turn(server, chats, cfg.tokens, number, load)
                    server.pause()
        return loads


def figures(loads: Loads, against: Sequence[str]) -> dict[str, Any]:
    """Return the speeds of every side, and how many times as fast ours is, by number of chats.

    The number 0 stands for prompts.
    """
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
        "first_token_p95_s": {name: load[max(load)].first_p95 for name, load in loads.items()},
    }


def show(loads: Loads) -> None:
    """Print one line for each side."""
    turns = list(loads["ours"])
    busiest = max(turns)
    titles = ["prompt" if chats == PROMPT else f"{chats} chats" for chats in turns]
    rows = []
    for name, by_chats in loads.items():
        speeds = [f"{by_chats[chats].speed:,.1f}" for chats in turns]
        rows.append([name, *speeds, f"{by_chats[busiest].first_p95:.3f}"])
    last_title = f"first token p95 at {busiest}, wall s"
    tables.show(("tokens per CPU second", *titles, last_title), rows)


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, rounds=cfg.rounds, chats=min(cfg.chats, default=0))
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

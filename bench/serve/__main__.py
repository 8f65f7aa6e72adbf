"""Measures decoding: the engine alone, and the whole chat server beside other servers.

python -m bench.serve --quick                              # the engine alone; ends within 50 seconds
python -m bench.serve --against transformers llama-cpp     # also our server beside theirs

What is compared: tokens per CPU second with 1, 8 and 32 greedy chats at once. The engine alone decodes with our GPT. The
servers all serve one model of 36 million parameters in Qwen3's shape, whose weights are random, each on one thread:
ours, transformers with continuous batching, and llama.cpp's in bf16 and fp32. They take turns, those that wait are
paused, and the median round counts. bench.serve.soak measures the server while half of its clients misbehave.
"""

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench import child
from bench.processes import check_at_least, check_installed, check_upstream
from bench.serve import model, servers, streams
from bench.serve.http import percentile
from bench.serve.servers import Server
from bench.serve.streams import Load
from bench.training import byte_tokenizer, serving_model
from nanochat import device
from nanochat.common import UserError, log, run
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPTConfig
from nanochat.tokenizer import ROLES

CHATS = (1, 8, 32)
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
VOCAB = 32_768  # of the engine's model
QUICK_DEPTH, DEPTH = 4, 12
WARMUP = 3  # decoding steps
ALONE = 3  # chats one after the other where one runs alone, since CPU time is counted in hundredths
PROMPT = 48  # tokens of a prompt, about as many as a question has
FORMATS = ("bfloat16", "float32")  # of llama.cpp
PACKAGES = {"transformers": ("transformers", "uvicorn", "fastapi"), "llama-cpp": ("xllamacpp",)}

Loads = dict[str, dict[int, Load]]  # side -> chats -> what was measured


@dataclass(frozen=True)
class Config:
    """Print the speed of decoding as a table, and one JSON object on the last line."""

    quick: bool = False
    """a model of four layers and few steps, ours alone, so that it ends within 50 seconds"""
    against: tuple[Literal["transformers", "llama-cpp"], ...] = ()
    """servers to measure beside ours: transformers, with continuous batching; llama.cpp's, from the package
    xllamacpp"""
    only_servers: bool = False
    """leave out the engine alone; needs --against"""
    tokens: int = 64
    """tokens of a reply of a server"""
    rounds: int = 3
    """rounds of each configuration"""


# --- the engine alone ------------------------------------------------------------------------------


def random_prompts(count: int) -> list[list[int]]:
    """Return prompts of random tokens, none of them special."""
    draw = random.Random(count)
    tokens = range(VOCAB - len(ROLES))
    return [draw.choices(tokens, k=PROMPT) for _ in range(count)]


def decoding_seconds(
    engine_model: Any,
    tokenizer: Any,
    chats: int,
    steps: int,
) -> float:
    """Return the CPU seconds of a decoding step with so many chats, their prompts left out."""
    engine = Engine(
        engine_model,
        tokenizer,
        slots=chats,
        prefill_tokens=1 << 14,
    )
    sampling = replace(GREEDY, max_tokens=steps + 8)
    for prompt in random_prompts(chats):
        engine.submit(prompt, sampling)
    for _ in range(WARMUP):
        engine.step()

    def decode() -> None:
        for _ in range(steps):
            engine.step()

    return child.seconds_of(decode) / steps


def measure_engine(depth: int, rounds: int) -> dict[str, Any]:
    """Measure the engine alone with a GPT of a depth, the best round of each number of chats; print."""
    torch.set_num_threads(1)
    compute = device.compute_init("cpu")
    heads = max(depth // 2, 1)
    shape = GPTConfig(
        1024,
        VOCAB,
        depth,
        heads,
        heads,
        128 * heads,
    )
    engine_model = serving_model(shape, compute)
    tokenizer = byte_tokenizer(VOCAB)
    best: dict[int, float] = {}
    for _ in range(rounds):
        for chats in CHATS:
            seconds = decoding_seconds(
                engine_model,
                tokenizer,
                chats,
                max(24 // chats, 4),
            )
            best[chats] = min(best.get(chats, seconds), seconds)
    speeds = {str(chats): round(chats / seconds, 1) for chats, seconds in best.items()}
    log(f"the engine with d{depth}, {compute.dtype}, one thread")
    for chats, speed in speeds.items():
        log(f"{chats:>3} chats{speed:>12,.1f} tokens per CPU second")
    dtype = str(compute.dtype).removeprefix("torch.")
    return {
        "depth": depth,
        "dtype": dtype,
        "tokens_per_cpu_second": speeds,
    }


# --- servers ---------------------------------------------------------------------------------------


def chat_body(server: Server, number: int, tokens: int) -> bytes:
    """Return the body of a chat that no other number has."""
    messages = [{"role": "user", "content": streams.question(number)}]
    return streams.body(
        server.model,
        messages,
        tokens,
        **server.fields,
    )


def server_turn(
    server: Server,
    chats: int,
    tokens: int,
    round_number: int,
    load: Load,
) -> None:
    """Let so many chats run at once, or the only chat three times, and count. No two rounds ask the same."""
    first = 10_000 * round_number + 100 * chats
    count = ALONE if chats == 1 else chats
    bodies = [chat_body(server, first + chat, tokens) for chat in range(count)]
    before = server.cpu_seconds()
    if chats == 1:
        replies = [asyncio.run(streams.ask(server.port, body)) for body in bodies]
    else:
        replies = asyncio.run(streams.ask_all(server.port, bodies))
    load.seconds.append(server.cpu_seconds() - before)
    load.tokens.append(sum(reply.tokens for reply in replies))
    load.first_seconds += [reply.first_seconds for reply in replies]


def health_p99(server: Server, tokens: int) -> float:
    """Return the seconds that /health took at p99 while 32 chats ran."""
    bodies = [chat_body(server, 5_000_000 + chat, 2 * tokens) for chat in range(CHATS[-1])]
    return percentile(asyncio.run(streams.health_while(server.port, bodies)), 0.99)


def measure_servers(cfg: Config) -> tuple[Loads, float]:
    """Let the servers take turns; return what was measured, and the p99 of our /health in seconds.

    The first turns, which are short, do not count.
    """
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        folder = Path(start(tempfile.TemporaryDirectory()))
        files = model.make(folder, formats=FORMATS if "llama-cpp" in cfg.against else ())
        sides = [start(servers.ours(files))]
        if "transformers" in cfg.against:
            sides.append(start(servers.transformers(files)))
        if "llama-cpp" in cfg.against:
            sides += [start(servers.llama_cpp(files, name, CHATS[-1])) for name in FORMATS]
        loads: Loads = {server.name: {chats: Load() for chats in CHATS} for server in sides}
        for server in sides:
            for chats in CHATS:
                server_turn(
                    server,
                    chats,
                    8,
                    0,
                    Load(),
                )
            server.pause()
        for number in range(1, cfg.rounds + 1):
            for chats in CHATS:
                for server in sides:
                    server.resume()
                    server_turn(
                        server,
                        chats,
                        cfg.tokens,
                        number,
                        loads[server.name][chats],
                    )
                    server.pause()
        sides[0].resume()
        return loads, health_p99(sides[0], cfg.tokens)


def best_speed(loads: Mapping[str, Mapping[int, Load]], peer: str, chats: int) -> float:
    """Return the tokens per CPU second of a peer, in its faster number format."""
    formats = [load for name, load in loads.items() if name.split()[0] == peer]
    return max(load[chats].speed for load in formats)


def figures(loads: Loads, against: Sequence[str]) -> dict[str, Any]:
    """Return the speeds of every side, and how many times as fast ours is, by the number of chats."""
    speeds: dict[str, dict[str, float]] = {}
    for name, by_chats in loads.items():
        speeds[name] = {str(chats): round(load.speed, 1) for chats, load in by_chats.items()}
    ratios: dict[str, dict[str, float]] = {}
    for peer in against:
        ratios[peer] = {}
        for chats, load in loads["ours"].items():
            ratios[peer][str(chats)] = round(load.speed / best_speed(loads, peer, chats), 2)
    firsts = {name: round(by_chats[CHATS[-1]].first_p95, 3) for name, by_chats in loads.items()}
    return {
        "served_tokens_per_cpu_second": speeds,
        "times_as_fast_as": ratios,
        "first_token_p95_s": firsts,
    }


def table(loads: Loads) -> str:
    """Return one line for each side."""
    titles = "".join(f"{chats:>6} chats" for chats in CHATS)
    lines = [f"{'tokens per CPU second':<22}{titles}   first token p95 at 32, wall s"]
    for name, by_chats in loads.items():
        speeds = "".join(f"{by_chats[chats].speed:>12,.1f}" for chats in CHATS)
        lines.append(f"{name:<22}{speeds}{by_chats[CHATS[-1]].first_p95:>14.3f}")
    return "\n".join(lines)


# --- command line ----------------------------------------------------------------------------------


def check(cfg: Config) -> None:
    """Raise UserError (code 2) for flags that cannot be measured."""
    check_at_least(1, rounds=cfg.rounds)
    if not 2 <= cfg.tokens <= 256:
        raise UserError(f"--tokens must be from 2 to 256, got {cfg.tokens}", exit_code=2)
    if cfg.only_servers and not cfg.against:
        raise UserError("--only_servers needs a server to compare with: add --against", exit_code=2)
    check_upstream(cfg.quick, cfg.against)
    for peer in cfg.against:
        check_installed(peer, *PACKAGES.get(peer, ()))


def main(cfg: Config) -> None:
    """Measure and print."""
    check(cfg)
    result: dict[str, Any] = {"benchmark": "serve"}
    if not cfg.only_servers:
        result |= measure_engine(QUICK_DEPTH if cfg.quick else DEPTH, cfg.rounds)
    if cfg.against:
        loads, health_seconds = measure_servers(cfg)
        log(f"{cfg.tokens} greedy tokens a chat, one thread each, median of {cfg.rounds} rounds")
        log(table(loads))
        health_ms = round(1e3 * health_seconds, 1)
        log(f"/health of ours at p99 with {CHATS[-1]} chats: {health_ms} ms")
        result |= {**figures(loads, cfg.against), "health_p99_ms": health_ms}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

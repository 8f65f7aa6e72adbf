"""Measures inference: speed beside the memory's bandwidth, prompts that are not read again, exactness of batches,
several adapters in one batch, and the whole server beside other servers.

python -m bench.serve --quick                                  # ends within 50 seconds
python -m bench.serve                                          # more steps, and a model larger than the caches
python -m bench.serve --against transformers llama-cpp         # also our server beside theirs, with one model
python -m bench.serve --against upstream --upstream DIR        # DIR: a checkout of karpathy/nanochat

One thread each, CPU seconds. Configurations take turns. Of the engine alone the best round counts, of servers the
median. `--against` also measures what the clients of our server wait for. The last line is JSON.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench.serve import adapters, against, engine, sides
from bench.upstream import check_checkout
from nanochat import device
from nanochat.common import UserError, log, run
from nanochat.generate.sampling import Sampling

BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class Config:
    """Print the engine's figures as a table, and one JSON object on the last line."""

    quick: bool = False
    """a model of four layers and few steps, so that it ends within 50 seconds"""
    against: tuple[Literal["transformers", "llama-cpp", "upstream"], ...] = ()
    """servers to measure beside ours: transformers, with continuous batching; llama.cpp's, from the package
    xllamacpp; upstream's engine, which needs --upstream"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat, for --against upstream"""
    only_servers: bool = False
    """leave out the engine alone; needs --against"""
    tokens: int = 64
    """tokens of a reply of a server"""
    depth: int = 12
    """layers of the engine's model; 12 has 440 MB of matrices in fp32"""
    steps: int = 24
    """decoding steps per round of the engine"""
    rounds: int = 3
    """rounds of each configuration"""
    rank: int = 8
    """rank of the adapters"""


def check(cfg: Config) -> None:
    """UserError (code 2) for flags that cannot be measured."""
    for flag, value in (("--rounds", cfg.rounds), ("--steps", cfg.steps), ("--depth", cfg.depth)):
        if value < 1:
            raise UserError(f"{flag} must be at least 1, got {value}", exit_code=2)
    if not 2 <= cfg.tokens <= 256:
        raise UserError(f"--tokens must be from 2 to 256, got {cfg.tokens}", exit_code=2)
    if cfg.quick and cfg.against:
        raise UserError("--quick measures ours alone: leave out --quick or --against", exit_code=2)
    if cfg.only_servers and not cfg.against:
        raise UserError("--only_servers needs a server to compare with: add --against", exit_code=2)
    if ("upstream" in cfg.against) != (cfg.upstream is not None):
        raise UserError(
            "--against upstream and --upstream DIR belong together: give both or neither",
            exit_code=2,
        )
    if cfg.upstream is not None:
        check_checkout("--upstream", cfg.upstream)
    sides.check_installed(cfg.against)


def engine_figures(cfg: Config) -> dict[str, Any]:
    """Measure the engine alone and print."""
    compute = device.compute_init("cpu")
    depth, steps, rounds = (4, 8, 2) if cfg.quick else (cfg.depth, cfg.steps, cfg.rounds)
    words = engine.tokenizer(engine.VOCAB)
    model = engine.untrained(depth, compute, compute.dtype, engine.VOCAB)
    held = engine.weight_bytes(model)
    compute.operations.serve(model)  # as the server holds it
    greedy, drawn = engine.GREEDY, Sampling(1.0, 50, ignore_eos=True)
    best: dict[tuple[int, str], float] = {}
    memory = 0.0
    for _ in range(rounds):
        memory = max(memory, engine.bandwidth())
        for chats in BATCHES:
            for name, sampling in (("greedy", greedy), ("top_k 50", drawn)):
                seconds = engine.decoding(model, words, chats, max(steps // chats, 4), sampling)
                best[chats, name] = min(best.get((chats, name), seconds), seconds)
    used = held / best[1, "greedy"] / memory
    log(f"d{depth}, {compute.dtype}, {held / 1e6:,.0f} MB of matrices, one thread")
    for (chats, name), seconds in best.items():
        log(
            f"{chats:>3} chats {name:<9} {chats / seconds:9,.1f} tokens per CPU second {1000 * seconds:9.2f} ms a step"
        )
    log(f"one chat reads {used:.0%} of {memory / 1e9:.1f} GB/s")
    turn = engine.second_turn(model, words, 300 if cfg.quick else 900, 12)
    log(
        f"second turn: {turn.read} of {turn.tokens} tokens read, {turn.seconds:.3f} CPU s; cold {turn.cold_seconds:.3f}"
    )
    small = engine.untrained(2, compute, torch.float32, 2048)
    same = engine.exact(
        small, engine.tokenizer(2048), 8 if cfg.quick else 32, 12 if cfg.quick else 24
    )
    log(
        f"fp32 replies: {same.batched} of {same.rows} equal batched and alone, {same.reused} with a prefix hit and cold"
    )
    layers, channels = (4, 256) if cfg.quick else (12, 768)
    speeds = adapters.compare(layers, channels, cfg.rank, 2 * steps, 2 * rounds, compute)
    for name, speed in speeds.items():
        share = speed / speeds["base"]
        log(
            f"{adapters.ROWS} rows, adapters: {name:<5} {speed:9,.1f} tokens per CPU second, {share:.2f} of the base"
        )
    return {
        "depth": depth,
        "dtype": str(compute.dtype).removeprefix("torch."),
        "tokens_per_cpu_second": {str(n): round(n / best[n, "greedy"], 1) for n in BATCHES},
        "batch_32_to_1": round(32 * best[1, "greedy"] / best[32, "greedy"], 2),
        "bandwidth_used": round(used, 3),
        "second_turn_read": turn.read,
        "second_turn_tokens": turn.tokens,
        "second_turn_to_cold": round(turn.seconds / turn.cold_seconds, 3),
        "adapter_rows_per_cpu_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "rows": same.rows,
        "batched_equal": same.batched,
        "prefix_equal": same.reused,
    }


def main(cfg: Config) -> None:
    """Measure and print."""
    check(cfg)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "serve"}
    if not cfg.only_servers:
        result |= engine_figures(cfg)
    if cfg.against:
        result |= against.run(cfg.against, cfg.upstream, cfg.rounds, cfg.tokens)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Measures what several ranks cost on a CPU: the speed of two ranks beside one, and the bytes each rank sends per step.

python -m bench.ranks --quick            # ends within 50 seconds: uncompiled, fewer rounds
python -m bench.ranks                    # like the training scripts: compiled where that is faster
python -m bench.ranks --model qwen3      # fine-tuning of an adapter instead of pretraining

Every rank has one thread. The groups take turns, one step each, so that a busy machine slows them equally. Two ranks
that share nothing show what the machine itself leaves of twice the speed: both read one memory. The last line is JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch

from bench.finetune.__main__ import SHAPES
from bench.ranks.group import D4, Ranks, Task, Timed, wire_bytes_per_parameter
from nanochat import device
from nanochat.common import log, run
from nanochat.device import Compute
from nanochat.models.qwen.config import QwenConfig
from nanochat.runtime.parallel import Sharding

TUNED = (
    2 * 2 * 6 * 512
)  # tokens of a step: two ranks take two passes of six rows, as the guides' settings have it


def share_of_ideal(one: Sequence[list[Timed]], many: Sequence[list[Timed]], of: str) -> float:
    """The share of the ideal N-fold speed that N ranks reach, by the median step.

    Wall time is the slowest rank's; CPU time is summed over the ranks."""
    ranks = len(many[0])
    if of == "cpu_seconds":
        return median(step[0].cpu_seconds for step in one) / median(
            sum(r.cpu_seconds for r in step) for step in many
        )
    return median(step[0].seconds for step in one) / (
        ranks * median(max(r.seconds for r in step) for step in many)
    )


@dataclass(frozen=True)
class Config:
    """Print the speed of two ranks beside one and the bytes sent, and one JSON object on the last line."""

    quick: bool = False
    """run uncompiled for three rounds, and --shard=grad only, so that it ends within 50 seconds"""
    rounds: int = 5
    """timed steps per group"""
    shard: tuple[Sharding, ...] = ("none", "grad", "full")
    """how the two ranks share the model, like --shard of the training scripts; each is measured"""
    model: Literal["gpt", "qwen3", "qwen3.5"] = "gpt"
    """what is trained; gpt: a GPT of four layers, as base_train does. The others: the shapes of bench.finetune, as
    scripts.finetune trains them"""
    bigram_rows: int = 131_072
    """rows of a GPT's table of pairs, by default as many as base_train gives it; 0: none"""
    lora_rank: int = 8
    """rank of the adapter of a Qwen; 0: it is trained in full"""
    compile: bool | None = None
    """compile the step; default: as the training scripts do in long runs"""


def task(cfg: Config, ranks: int, mode: Sharding | None, compiled: bool) -> Task:
    """What `ranks` ranks train by these flags."""
    if cfg.model == "gpt":
        return Task(ranks, mode, compiled=compiled, shape=replace(D4, bigram_rows=cfg.bigram_rows))
    shape = QwenConfig(**{**SHAPES[cfg.model], "sequence_len": 512})
    return Task(ranks, mode, compiled=compiled, shape=shape, lora_rank=cfg.lora_rank, tokens=TUNED)


def compiles(cfg: Config, compute: Compute) -> bool:
    """Whether the step is compiled."""
    unneeded = cfg.model == "gpt" and compute.operations.needs_no_compiler(
        D4.head_dim, getattr(torch, Task.dtype)
    )
    wanted = not unneeded if cfg.compile is None else cfg.compile
    return wanted and not device.compiler_missing(compute)


def main(cfg: Config) -> None:
    """Measure and print."""
    modes: tuple[Sharding, ...] = ("grad",) if cfg.quick else cfg.shard
    compiled = not cfg.quick and compiles(cfg, device.compute_init("cpu"))
    ways: tuple[Sharding | None, ...] = (None, *modes)
    tasks = [task(cfg, 1, "none", compiled), *(task(cfg, 2, way, compiled) for way in ways)]
    groups: list[Ranks] = []
    try:
        for each in tasks:  # one by one, so that those that started are closed if another one fails
            groups.append(Ranks(each))
        rounds = [[group.step() for group in groups] for _ in range(3 if cfg.quick else cfg.rounds)]
    finally:
        for group in groups:
            group.close()
    one, *pairs = zip(*rounds, strict=True)
    names = ("apart", *modes)
    speeds = {
        name: share_of_ideal(one, two, "seconds") for name, two in zip(names, pairs, strict=True)
    }
    on_cpu = {
        name: share_of_ideal(one, two, "cpu_seconds")
        for name, two in zip(names, pairs, strict=True)
    }
    for name, steps in zip(
        ("one rank", *(f"two, {name}" for name in names)), (one, *pairs), strict=True
    ):
        wall = median(max(timed.seconds for timed in step) for step in steps)
        cpu = median(sum(timed.cpu_seconds for timed in step) for step in steps)
        log(
            f"{name:<12}{wall:8.3f} s a step{cpu:8.3f} CPU s{tasks[0].tokens / wall:10,.0f} tokens/s"
        )
    for name in names:
        what = "nothing shared" if name == "apart" else f"--shard={name}"
        log(
            f"{what:<14} two ranks reach {speeds[name]:.2f} of twice one rank's speed, {on_cpu[name]:.2f} by CPU time"
        )
    result = {
        "benchmark": "ranks",
        "model": cfg.model,
        "lora_rank": cfg.lora_rank if cfg.model != "gpt" else None,
        "compiled": compiled,
        "two_ranks_of_ideal": speeds,
        "two_ranks_of_ideal_cpu": on_cpu,
    }
    if cfg.model == "gpt":
        result["wire_bytes_per_parameter"] = wire = {
            mode: wire_bytes_per_parameter(mode=mode) for mode in modes
        }
        for mode, sent in wire.items():
            log(
                f"--shard={mode:<5} four ranks, two passes: each rank sends {sent:.2f} bytes per parameter and step"
            )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Measures what several ranks cost on a CPU: the speed of two ranks beside one, and the bytes each rank sends per step.

python -m bench.ranks --quick            # ends within 50 seconds: uncompiled, fewer rounds
python -m bench.ranks                    # like the training scripts: compiled where there is a compiler

Every rank has one thread. The groups take turns, one step each, so that a busy machine slows them equally. The last
line is JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.ranks.group import STEP_TOKENS, Ranks, Task, Timed, wire_bytes_per_parameter
from nanochat import device
from nanochat.common import log, run
from nanochat.runtime.parallel import Sharding


def share_of_ideal(one: Sequence[list[Timed]], many: Sequence[list[Timed]], of: str) -> float:
    """The share of the ideal N-fold speed that N ranks reach, by the median step.

    Wall time is the slowest rank's; CPU time is summed over the ranks."""
    ranks = len(many[0])
    if of == "cpu_seconds":
        return median(step[0].cpu_seconds for step in one) / median(sum(r.cpu_seconds for r in step) for step in many)
    return median(step[0].seconds for step in one) / (ranks * median(max(r.seconds for r in step) for step in many))


@dataclass(frozen=True)
class Config:
    """Print the speed of two ranks beside one and the bytes sent, and one JSON object on the last line."""

    quick: bool = False
    """run uncompiled for three rounds, and count bytes for --shard=grad only, so that it ends within 50 seconds"""
    rounds: int = 5
    """timed steps per group"""
    shard: Sharding = "grad"
    """how the two ranks share the model: none, grad or full, like --shard of the training scripts"""


def main(cfg: Config) -> None:
    """Measure and print."""
    compiled = not cfg.quick and not device.compiler_missing(device.compute_init("cpu"))
    groups = [Ranks(Task(1, compiled=compiled)), Ranks(Task(2, cfg.shard, compiled=compiled))]
    try:
        rounds = [[group.step() for group in groups] for _ in range(3 if cfg.quick else cfg.rounds)]
    finally:
        for group in groups:
            group.close()
    one, two = zip(*rounds, strict=True)
    for name, steps in (("one rank", one), ("two ranks", two)):
        wall = median(max(timed.seconds for timed in step) for step in steps)
        cpu = median(sum(timed.cpu_seconds for timed in step) for step in steps)
        log(f"{name:<12}{wall:8.3f} s a step{cpu:8.3f} CPU s{STEP_TOKENS / wall:10,.0f} tokens/s")
    modes: tuple[Sharding, ...] = ("grad",) if cfg.quick else ("none", "grad", "full")
    wire = {mode: wire_bytes_per_parameter(mode=mode) for mode in modes}
    for mode, sent in wire.items():
        log(f"--shard={mode:<5} four ranks, two passes: each rank sends {sent:.2f} bytes per parameter and step")
    result = {"benchmark": "ranks", "compiled": compiled, "two_ranks_of_ideal": share_of_ideal(one, two, "seconds"),
              "two_ranks_of_ideal_cpu": share_of_ideal(one, two, "cpu_seconds"),
              "wire_bytes_per_parameter": wire["grad"]}  # fmt: skip
    print(json.dumps({name: round(x, 3) if isinstance(x, float) else x for name, x in result.items()}), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

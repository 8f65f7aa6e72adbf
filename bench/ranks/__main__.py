"""What ranks cost on a CPU, one thread each: the speed of two beside one, and the bytes that each sends in a step.

python -m bench.ranks --quick            # within 50 seconds, uncompiled, fewer rounds
python -m bench.ranks                    # as the training scripts do it: compiled where there is a compiler

The groups of processes take turns, a step each, so that a busy machine slows all alike. The last line is JSON.
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
    """How much of N ranks' ideal speed is reached, by the median step: wall time is the slowest rank's, CPU the sum."""
    ranks = len(many[0])
    if of == "cpu_seconds":
        return median(step[0].cpu_seconds for step in one) / median(sum(r.cpu_seconds for r in step) for step in many)
    return median(step[0].seconds for step in one) / (ranks * median(max(r.seconds for r in step) for step in many))


@dataclass(frozen=True)
class Config:
    """Speed of two ranks beside one, and bytes sent: a table, and as the last line one JSON object."""

    quick: bool = False
    """uncompiled, three rounds, the default mode's bytes only: ends within 50 seconds"""
    rounds: int = 5
    """steps of each group"""
    shard: Sharding = "grad"
    """mode of the two ranks"""


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
        log(f"--shard={mode:<5} four ranks, two passes: {sent:.2f} bytes sent per parameter and step")
    result = {"benchmark": "ranks", "compiled": compiled, "two_ranks_of_ideal": share_of_ideal(one, two, "seconds"),
              "two_ranks_of_ideal_cpu": share_of_ideal(one, two, "cpu_seconds"),
              "wire_bytes_per_parameter": wire["grad"]}  # fmt: skip
    print(json.dumps({name: round(x, 3) if isinstance(x, float) else x for name, x in result.items()}), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

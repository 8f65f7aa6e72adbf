"""Measures the speed of two ranks on a CPU beside one rank, for each way to share the model.

python -m bench.train.ranks --quick      # ends within 50 seconds: uncompiled, three rounds
python -m bench.train.ranks              # compiled where base_train compiles

How: every rank has one thread and trains the model of bench.train on 8,192 tokens a step, or on
half of 16,384. The groups take turns, one step each. Two ranks that share nothing show what the
machine itself leaves of twice the speed, because both read one memory. The JSON object holds the
share of twice one rank's speed that two ranks reach.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench import tables
from bench.processes import ROOT, Side, side
from bench.training import D4
from nanochat.data.command_line import run

STEP_TOKENS = 16384  # over all ranks
BIGRAM_ROWS = 131_072  # of the table of pairs, as base_train has them
ROUNDS = 5  # timed steps of each group
MODES = ("none", "grad", "full")  # of --shard of the training scripts
APART = "apart"  # two ranks that share nothing


@dataclass(frozen=True)
class Config:
    """Print the speed of two ranks beside one, and one JSON object on the last line."""

    quick: bool = False
    """run uncompiled for three rounds, and shard gradients only, so that it ends within 50
    seconds"""


@dataclass(frozen=True)
class Group:
    """Ranks that make a step at the same time."""

    ranks: int
    mode: str  # of sharding, or APART
    compile: bool | None  # None: where base_train compiles


@dataclass(frozen=True)
class Seconds:
    """The median step of a group."""

    wall: float  # of its slowest rank
    cpu: float  # summed over its ranks


def median_step(steps: Sequence[Sequence[Mapping[str, float]]]) -> Seconds:
    """Return the median over steps, each of which has the seconds of all ranks."""
    wall = [max(rank["wall_seconds"] for rank in ranks) for ranks in steps]
    cpu = [sum(rank["cpu_seconds"] for rank in ranks) for ranks in steps]
    return Seconds(median(wall), median(cpu))


@contextlib.contextmanager
def ranks_of(group: Group) -> Iterator[list[Side]]:
    """Start the ranks of a group; they end with the context."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = []
        for number in range(group.ranks):
            task: dict[str, Any] = {
                "shape": asdict(replace(D4, bigram_rows=BIGRAM_ROWS)),
                "compile": group.compile,
                "mode": group.mode,
                "tokens": STEP_TOKENS // group.ranks,
                "meeting": f"file://{Path(folder) / 'meeting'}",
            }
            rank = number
            world_size = group.ranks
            if group.mode == APART:
                task |= {"mode": "none", "meeting": f"{task['meeting']}-{number}"}
                rank = 0
                world_size = 1
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
            }
            if sys.platform == "linux":
                variables["GLOO_SOCKET_IFNAME"] = "lo"
            name = f"rank {number} of {group.ranks}, {group.mode}"
            process = side(name, "bench.train.rank_side", task, ROOT, **variables)
            processes.append(stack.enter_context(process))
        yield processes


def measure(groups: Sequence[Group], rounds: int) -> list[Seconds]:
    """Let the groups take turns of one step; return the median step of each group."""
    with contextlib.ExitStack() as stack:
        group_ranks = [stack.enter_context(ranks_of(group)) for group in groups]
        for ranks in group_ranks:
            for rank in ranks:
                rank.answer()  # the rank is warm
        steps: list[list[Any]] = [[] for _ in groups]
        for _ in range(rounds):
            for ranks, group_steps in zip(group_ranks, steps, strict=True):
                for rank in ranks:
                    rank.send("step")
                group_steps.append([rank.answer() for rank in ranks])
        return [median_step(group_steps) for group_steps in steps]


def main(cfg: Config) -> None:
    """Measure and print."""
    modes = ("grad",) if cfg.quick else MODES
    pairs = (APART, *modes)
    compile_step = False if cfg.quick else None
    groups = [Group(1, "none", compile_step), *(Group(2, mode, compile_step) for mode in pairs)]
    single, *others = measure(groups, 3 if cfg.quick else ROUNDS)
    rows = [["one rank", f"{single.wall:.3f}", f"{single.cpu:.3f}", "", ""]]
    speeds = {}
    cpu_speeds = {}
    for mode, pair in zip(pairs, others, strict=True):
        speeds[mode] = single.wall / (2 * pair.wall)
        cpu_speeds[mode] = single.cpu / pair.cpu
        row = [
            f"two, {mode}",
            f"{pair.wall:.3f}",
            f"{pair.cpu:.3f}",
            f"{speeds[mode]:.2f}",
            f"{cpu_speeds[mode]:.2f}",
        ]
        rows.append(row)
    tables.show(("", "s a step", "CPU s", "of twice one", "by CPU time"), rows)
    result = {"two_ranks_of_ideal": speeds, "two_ranks_of_ideal_cpu": cpu_speeds}
    tables.finish("ranks", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Measures the speed of two ranks on a CPU beside one rank, for each way to share the model.

python -m bench.train.ranks --quick      # ends within 50 seconds: uncompiled, fewer rounds
python -m bench.train.ranks              # compiled where base_train compiles

How: every rank has one thread and trains the model of bench.train on 8,192 tokens a step, or on half of 16,384. The
groups take turns, one step each. Two ranks that share nothing show what the machine itself leaves of twice the speed,
because both read one memory. The JSON object holds the share of twice one rank's speed that two ranks reach.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from bench.processes import check_at_least
from bench.training import D4, Trainer, random_model, random_passes
from nanochat import device
from nanochat.common import UserError, base_dir, log, run
from nanochat.gpt import GPTConfig
from nanochat.platforms import host
from nanochat.runtime.parallel import Sharding

STEP_TOKENS = 16384
PASSES = 2  # per step on each rank
APART = "apart"  # two ranks that share nothing
WARMUP = 2  # steps


@dataclass(frozen=True)
class Config:
    """Print the speed of two ranks beside one, and one JSON object on the last line."""

    quick: bool = False
    """run uncompiled for three rounds, and --shard=grad only, so that it ends within 50 seconds"""
    rounds: int = 5
    """timed steps per group"""
    shard: tuple[Sharding, ...] = ("none", "grad", "full")
    """how the two ranks share the model, like --shard of the training scripts; each is measured"""
    bigram_rows: int = 131_072
    """rows of the table of pairs, by default as many as base_train gives it; 0: none"""
    compile: bool | None = None
    """compile the step; default: as base_train does in long runs"""


@dataclass(frozen=True)
class Task:
    """What a group of ranks trains."""

    ranks: int
    mode: str  # of sharding, or APART
    shape: GPTConfig
    compile: bool | None = None
    tokens: int = STEP_TOKENS  # per step, over all ranks


@dataclass(frozen=True)
class Timed:
    """One step of one rank."""

    seconds: float
    cpu_seconds: float


# --- a rank ----------------------------------------------------------------------------------------


def train_as_rank(rank: int, task: Task, folder: str, pipe: Connection) -> None:
    """Join the group, make the model, and make a step for each request: the body of a process."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # only the parent prints to standard output
    meeting = Path(folder) / "meeting"
    if task.mode == APART:
        meeting = meeting.with_name(f"meeting-{rank}")
        rank, task = 0, replace(task, ranks=1, mode="none", tokens=task.tokens // task.ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(task.ranks)}
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=task.ranks
    )
    host.use_compile_cache(base_dir())
    compute = device.compute_init("cpu")
    trainer = Trainer(random_model(task.shape, compute), compute, mode=task.mode)
    length = task.shape.sequence_len
    rows = task.tokens // length // task.ranks // PASSES
    trainer.compile(rows, length, task.compile)
    step = 0
    while step < WARMUP or pipe.recv():
        seed = step * task.ranks + rank
        passes = random_passes(task.shape.vocab_size, PASSES, rows, length, seed)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.step(passes)
        timed = Timed(time.perf_counter() - wall, time.process_time() - cpu)
        step += 1
        if step >= WARMUP:
            pipe.send(timed)
    device.compute_cleanup()


class Group:
    """Ranks that train one model together, each in a process that waits for `step`."""

    def __init__(self, task: Task, folder: str):
        context = multiprocessing.get_context("forkserver")
        # So that torch is imported once, and not in each process.
        context.set_forkserver_preload(["torch.distributed.fsdp", "bench.training"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(task.ranks):
            own_end, rank_end = context.Pipe()
            process = context.Process(
                target=train_as_rank, args=(rank, task, folder, rank_end), daemon=True
            )
            process.start()
            rank_end.close()  # so that recv() raises EOFError when the process ends
            self._pipes.append(own_end)
            self._processes.append(process)

    def answers(self) -> list[Timed]:
        """Return the timings of the step that all ranks make."""
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError as end:
            raise UserError("a rank ended; its error is printed above") from end

    def step(self) -> list[Timed]:
        """Make one step."""
        for pipe in self._pipes:
            pipe.send(True)
        return self.answers()

    def close(self) -> None:
        """End the processes; a process that does not end within 10 seconds is killed."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(False)
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()


@contextlib.contextmanager
def group_of(task: Task) -> Iterator[Group]:
    """Start the ranks of a task, and wait until they are warm; they end with the context."""
    with tempfile.TemporaryDirectory() as folder:
        group = Group(task, folder)
        try:
            group.answers()
            yield group
        finally:
            group.close()


# --- figures ---------------------------------------------------------------------------------------


Steps = Sequence[Sequence[Timed]]  # of a group, each with the timings of its ranks


def wall_seconds(steps: Steps) -> float:
    """Return the wall seconds of the median step, which are those of its slowest rank."""
    return median(max(timed.seconds for timed in step) for step in steps)


def cpu_seconds(steps: Steps) -> float:
    """Return the CPU seconds of the median step, summed over its ranks."""
    return median(sum(timed.cpu_seconds for timed in step) for step in steps)


def measure(tasks: Sequence[Task], rounds: int) -> list[list[list[Timed]]]:
    """Let the groups take turns of one step; return the steps of each group."""
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(group_of(task)) for task in tasks]
        steps: list[list[list[Timed]]] = [[] for _ in groups]
        for _ in range(rounds):
            for group, group_steps in zip(groups, steps, strict=True):
                group_steps.append(group.step())
        return steps


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, rounds=cfg.rounds)
    modes = ("grad",) if cfg.quick else cfg.shard
    compile_step = False if cfg.quick else cfg.compile
    shape = replace(D4, bigram_rows=cfg.bigram_rows)
    single = Task(1, "none", shape, compile_step)
    pairs = {mode: Task(2, mode, shape, compile_step) for mode in (APART, *modes)}
    single_steps, *twos = measure([single, *pairs.values()], 3 if cfg.quick else cfg.rounds)
    log(f"{'':<12}{'s a step':>10}{'CPU s':>10}{'of twice one':>14}{'by CPU time':>14}")
    log(f"{'one rank':<12}{wall_seconds(single_steps):>10.3f}{cpu_seconds(single_steps):>10.3f}")
    speeds, cpu_speeds = {}, {}
    for mode, two in zip(pairs, twos, strict=True):
        speeds[mode] = wall_seconds(single_steps) / (2 * wall_seconds(two))
        cpu_speeds[mode] = cpu_seconds(single_steps) / cpu_seconds(two)
        log(
            f"{'two, ' + mode:<12}{wall_seconds(two):>10.3f}{cpu_seconds(two):>10.3f}"
            f"{speeds[mode]:>14.2f}{cpu_speeds[mode]:>14.2f}"
        )
    result = {
        "benchmark": "ranks",
        "two_ranks_of_ideal": speeds,
        "two_ranks_of_ideal_cpu": cpu_speeds,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""What ranks cost on a CPU, one thread each: the speed of two beside one, and the bytes that each sends in a step.

python -m bench.ranks --quick            # within 50 seconds, uncompiled, fewer rounds
python -m bench.ranks                    # as the training scripts do it: compiled where there is a compiler

The groups of processes take turns, a step each, so that a busy machine slows all alike. The last line is JSON.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.wire import Wire
from nanochat import dataloader, device
from nanochat.common import UserError, base_dir, log, run
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.platforms import host
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.train import compile as compiling
from nanochat.train import loop
from nanochat.train.optim import Optimizers, Rates

# Also bench.train's model: 43 % of its parameters are matrices, which the bytes sent depend on.
D4 = GPTConfig(sequence_len=512, vocab_size=4096, n_layer=4, n_head=4, n_kv_head=4, n_embd=256, window_pattern="L")
STEP_TOKENS, PASSES = 16384, 2


@dataclass(frozen=True)
class Task:
    """What a group of ranks trains."""

    ranks: int
    mode: Sharding = "grad"
    dtype: str = "bfloat16"
    compiled: bool = False
    shape: GPTConfig = D4
    tokens: int = STEP_TOKENS  # of a step, over all ranks
    passes: int = PASSES  # of each rank


@dataclass(frozen=True)
class Timed:
    """A step of a rank."""

    seconds: float
    cpu_seconds: float
    wire_bytes: float  # sent by this rank, per parameter


class Ranks:
    """Processes that train one model together; each waits until it is asked for a step."""

    def __init__(self, task: Task):
        self.task, self._folder = task, tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", __name__])  # imports once for all
        self._pipes, self._processes = [], []
        for rank in range(task.ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, asdict(task) | {"shape": asdict(task.shape)}, self._folder.name, theirs)
            self._processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()  # so that reading ends with the process
            self._pipes.append(ours)
        try:
            for pipe in self._pipes:
                pipe.recv()  # ready: compiled, and warm
        except EOFError as end:
            self.close()
            raise UserError(f"a process of {task} ended before its first step; what it said is above") from end

    def step(self) -> list[Timed]:
        """One step, by rank."""
        for pipe in self._pipes:
            pipe.send(True)
        return [Timed(**pipe.recv()) for pipe in self._pipes]

    def close(self) -> None:
        """End the processes; those that do not listen are killed."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(False)
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()
        self._folder.cleanup()


def _rank(rank: int, task: dict[str, Any], folder: str, pipe: Connection) -> None:
    """One process: join the others, make the model, and take steps until it is killed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(task["ranks"]),
                   "NANOCHAT_DTYPE": task["dtype"]}  # fmt: skip
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=task["ranks"])
    sys.stdout = sys.stderr  # the table is the parent's
    host.use_compile_cache(base_dir() / "compile_cache")
    step = training_step(Task(**{**task, "shape": GPTConfig(**task["shape"])}), device.compute_init("cpu"))
    for number in range(2):
        step(number)
    pipe.send(True)
    number = 2
    while pipe.recv():
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        sent = step(number)
        pipe.send({"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu, "wire_bytes": sent})
        number += 1
    device.compute_cleanup()


def training_step(task: Task, compute: Compute) -> Any:
    """A function that takes the step of a number and returns the bytes it sent for each parameter."""
    model = GPT(task.shape, compute.dtype, operations=compute.operations)
    model.init_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    parallel.shard(model, model.shard_groups(), compute, task.mode)
    optimizers = Optimizers(model, model.parameter_roles(), task.shape.n_embd, Rates(), 1.0, compute.dtype)
    T, scale = task.shape.sequence_len, loop.LossScale()
    rows = task.tokens // T // compute.world_size // task.passes
    fast = compiling.compiled(model, task.compiled, (rows, T), compute, model.compile_groups())

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number * compute.world_size + compute.rank)
        cells = torch.randint(0, task.shape.vocab_size, (task.passes, rows, T + 1), generator=generator)
        batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in cells]
        work = dataloader.Step(0, task.tokens, batches)
        with Wire() as wire:
            loop.update(fast, optimizers, work, scale, compute)
        return sum(wire.bytes.values()) / count

    return step


def wire_bytes_per_parameter(ranks: int = 4, mode: Sharding = "grad") -> float:
    """Bytes that a rank sends in a step of two passes for each parameter: bf16 parameters, gradients reduced in fp32.

    The number depends on the matrices' share of the parameters, so the shape is D4's; a step is short.
    """
    group = Ranks(Task(ranks, mode, tokens=ranks * PASSES * D4.sequence_len))
    try:
        return max(timed.wire_bytes for timed in group.step())
    finally:
        group.close()


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

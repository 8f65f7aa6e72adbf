"""Ranks for benchmarks: processes on this CPU that train one model together and take a step when asked."""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from bench.finetune.ours import Tuned
from bench.ranks.wire import Wire
from bench.updates import update
from nanochat import dataloader, device
from nanochat.common import UserError, base_dir
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.nn.lora import LoraConfig
from nanochat.platforms import host
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.step import Safeguards
from nanochat.train import compile as compiling
from nanochat.train.optim import Optimizers, Rates

# bench.train and bench.data use this model too. The bytes sent depend on the share of matrices: 43 % of its parameters.
D4 = GPTConfig(
    sequence_len=512,
    vocab_size=4096,
    n_layer=4,
    n_head=4,
    n_kv_head=4,
    n_embd=256,
    window_pattern="L",
)
STEP_TOKENS, PASSES = 16384, 2
Passes = Sequence[
    tuple[torch.Tensor, torch.Tensor]
]  # inputs and targets of each pass, int64 (B, T) each


@dataclass(frozen=True)
class Task:
    """What a group of ranks trains."""

    ranks: int
    mode: Sharding | None = (
        "grad"  # None: each rank trains a model of its own, on its share of the tokens
    )
    dtype: str = "bfloat16"
    compiled: bool = False
    shape: GPTConfig | QwenConfig = D4
    lora_rank: int = 0  # of the adapter of a QwenConfig; 0: it is trained in full
    tokens: int = STEP_TOKENS  # per step, over all ranks
    passes: int = PASSES  # per step on each rank


@dataclass(frozen=True)
class Timed:
    """One step of one rank."""

    seconds: float
    cpu_seconds: float
    wire_bytes: float | None = None  # what this rank sent, per parameter, if it was counted


class Ranks:
    """Processes that train one model together; they wait until `step` is called."""

    def __init__(self, task: Task):
        self.task, self._folder = task, tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch.distributed.fsdp", __name__]
        )  # so that torch is imported once, not in each process
        self._pipes, self._processes = [], []
        for rank in range(task.ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, task, self._folder.name, theirs)
            self._processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()  # so that recv() raises EOFError when the process ends
            self._pipes.append(ours)
        try:
            for pipe in self._pipes:
                pipe.recv()  # the rank is ready: compiled and warmed up
        except EOFError as end:
            self.close()
            raise UserError(
                f"a process of {task} ended before its first step; its error is printed above"
            ) from end

    def step(self, count: bool = False) -> list[Timed]:
        """Take one step; the timings by rank. `count` what the ranks send, which no compiled code takes part in."""
        for pipe in self._pipes:
            pipe.send("count" if count else "step")
        return [Timed(**pipe.recv()) for pipe in self._pipes]

    def close(self) -> None:
        """End the processes; a process that does not end within 10 seconds is killed."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send("")
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()
        self._folder.cleanup()


def _rank(rank: int, task: Task, folder: str, pipe: Connection) -> None:
    """The body of one process: join the group, make the model, and take a step for each request."""
    torch.set_num_threads(1)
    meeting = Path(folder) / "meeting"
    if task.mode is None:
        meeting = meeting.with_name(f"meeting-{rank}")
        rank, task = 0, replace(task, ranks=1, tokens=task.tokens // task.ranks)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(task.ranks),
        "NANOCHAT_DTYPE": task.dtype,
    }
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=task.ranks
    )
    sys.stdout = sys.stderr  # only the parent prints to standard output
    host.use_compile_cache(base_dir())
    step = training_step(task, device.compute_init("cpu"))
    for number in range(2):
        step(number)
    pipe.send(True)
    number = 2
    while asked := pipe.recv():
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        sent = step(number, asked == "count")
        pipe.send(
            {
                "seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
                "wire_bytes": sent,
            }
        )
        number += 1
    device.compute_cleanup()


def training_step(task: Task, compute: Compute) -> Callable[..., float | None]:
    """A function that takes step `number` and, if asked to, returns how many bytes this rank sent per parameter."""
    T = task.shape.sequence_len
    rows = task.tokens // T // compute.world_size // task.passes
    if isinstance(task.shape, QwenConfig):
        tuned = Tuned(task.shape, task.lora_rank, LoraConfig.targets, compute, task.mode or "none")
        if task.compiled:
            tuned.compile(rows, T)
        count, take = tuned.parameters, tuned.step
    else:
        count, take = _pretraining(task, task.shape, rows, compute)

    def step(number: int, counting: bool = False) -> float | None:
        generator = torch.Generator().manual_seed(number * compute.world_size + compute.rank)
        cells = torch.randint(
            0, task.shape.vocab_size, (task.passes, rows, T + 1), generator=generator
        )
        work = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in cells]
        if not counting:  # torch runs no compiled code below a dispatch mode
            take(work)
            return None
        with Wire() as wire:
            take(work)
        return sum(wire.bytes.values()) / count

    return step


def _pretraining(
    task: Task, shape: GPTConfig, rows: int, compute: Compute
) -> tuple[int, Callable[[Passes], float]]:
    """The number of parameters of a GPT, and a function that takes a step as base_train does and returns the loss."""
    model = GPT(shape, compute.dtype, operations=compute.operations)
    model.init_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    parallel.shard(model, model.shard_groups(), compute, task.mode or "none")
    optimizers = Optimizers(
        model, model.parameter_roles(), shape.n_embd, Rates(), 1.0, compute.dtype
    )
    safeguards = Safeguards(spikes=None)
    fast = compiling.compiled(
        model, task.compiled, (rows, shape.sequence_len), compute, model.compile_groups()
    )

    def take(passes: Passes) -> float:
        return update(
            fast, optimizers, dataloader.Step(0, task.tokens, list(passes)), safeguards, compute
        ).loss

    return count, take


def wire_bytes_per_parameter(ranks: int = 4, mode: Sharding = "grad") -> float:
    """Bytes per parameter that a rank sends in a step of two passes, with bf16 parameters and fp32 gradients.

    The number depends on the share of matrices among the parameters, so the model is D4; the rows are few, because
    their number does not matter.
    """
    group = Ranks(Task(ranks, mode, tokens=ranks * PASSES * D4.sequence_len))
    try:
        return max(timed.wire_bytes or 0.0 for timed in group.step(count=True))
    finally:
        group.close()

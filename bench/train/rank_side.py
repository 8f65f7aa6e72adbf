"""One rank of a group, in a process of its own. Only bench.train.ranks starts this file."""

import itertools
import os
import time

import torch
import torch.distributed as dist

from bench import child
from bench.batches import random_passes
from bench.training import Trainer, random_model
from nanochat import device
from nanochat.common import base_dir
from nanochat.gpt import GPTConfig
from nanochat.platforms import host

PASSES = 2  # per step
WARMUP = 2  # steps


def main() -> None:
    """Join the group, warm up, and make a step for each request."""
    answer = child.answers()
    task = child.task()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=task["meeting"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    host.use_compile_cache(base_dir())
    compute = device.compute_init("cpu")
    shape = GPTConfig(**task["shape"])
    trainer = Trainer(random_model(shape, compute), compute, mode=task["mode"])
    rows = task["tokens"] // shape.sequence_len // PASSES
    trainer.compile(rows, shape.sequence_len, task["compile"])
    numbers = itertools.count()

    def timed_step() -> dict[str, float]:
        seed = next(numbers) * compute.world_size + compute.rank
        passes = random_passes(shape.vocab_size, PASSES, rows, shape.sequence_len, seed)
        dist.barrier()
        start = time.perf_counter()
        cpu_seconds = child.seconds_of(lambda: trainer.step(passes))
        return {"wall_seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds}

    for _ in range(WARMUP):
        timed_step()
    answer("ready")
    for _ in child.requests():
        answer(timed_step())
    device.compute_cleanup()


if __name__ == "__main__":
    main()

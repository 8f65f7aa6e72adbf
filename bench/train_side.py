"""One side of bench.train, in a process of its own: its `nanochat` is the one that PYTHONPATH names.

It takes its task as JSON in its first argument, says `ready`, and then answers each line of its input, a number of
steps, with a line of JSON: CPU seconds and loss of each step, and the most memory held. Used by bench.train only.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs, targets, int64 (B, T) each


@dataclass(frozen=True)
class Side:
    """What is measured: `step` trains on a batch and returns its loss in nats."""

    step: Callable[[Batch], float]
    parameters: int


def batches(path: str, size: int) -> Iterator[Batch]:
    """Endless batches of `size` rows, in the order of the file."""
    rows = np.load(path, mmap_mode="r")
    first = 0
    while True:
        numbers = np.arange(first, first + size) % len(rows)
        cells = torch.from_numpy(rows[numbers].astype(np.int64))
        yield cells[:, :-1].contiguous(), cells[:, 1:].contiguous()
        first += size


def ours(task: dict[str, Any]) -> Side:
    """This repository's training step, as its scripts take it."""
    from nanochat import dataloader, device, loop
    from nanochat.gpt import GPT, GPTConfig
    from nanochat.optim import Optimizers, Rates

    compute = device.compute_init("cpu")
    config = GPTConfig(**task["shape"])
    model = GPT(config, compute.dtype)
    model.init_weights()
    rates = Rates(**task["rates"])
    optimizers = Optimizers(model, model.parameter_roles(), config.n_embd, rates, 1.0, compute.dtype)
    shape = (task["rows_per_step"], config.sequence_len)
    fast = loop.compiled(model, task["compiled"], shape, compute, model.blocks)
    scale = loop.LossScale()

    def step(batch: Batch) -> float:
        work = dataloader.Step(0, batch[1].numel(), [batch])
        return loop.update(fast, optimizers, work, scale, compute).loss

    return Side(step, sum(p.numel() for p in model.parameters()))


def upstream(task: dict[str, Any]) -> Side:
    """karpathy/nanochat's training step, as its base_train takes it."""
    from nanochat.gpt import GPT, GPTConfig

    if not hasattr(GPT, "setup_optimizer"):
        raise SystemExit("this nanochat's GPT has no setup_optimizer; give a checkout of 2026, such as the newest")
    model: Any = GPT(GPTConfig(**task["shape"]))  # upstream's, which a type checker does not see
    model.init_weights()
    optimizer = model.setup_optimizer(
        **{name: rate for name, rate in task["rates"].items() if name != "matrix_optimizer"}
    )
    fast = torch.compile(model, dynamic=False) if task["compiled"] else model

    def step(batch: Batch) -> float:
        loss = fast(*batch)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return Side(step, sum(p.numel() for p in model.parameters()))


def matmuls(task: dict[str, Any]) -> Side:
    """Every matrix of a training step multiplied forward and backward, in bf16, and nothing else."""
    shape, tokens = task["shape"], task["rows_per_step"] * task["shape"]["sequence_len"]
    width, layers = shape["n_embd"], shape["n_layer"]
    generator = torch.Generator().manual_seed(1)

    def filled(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).bfloat16()

    sizes = [(width, width, 4 * layers), (width, 4 * width, layers), (4 * width, width, layers),
             (width, shape["vocab_size"], 1)]  # fmt: skip
    work = [(filled(tokens, i), filled(o, i), filled(tokens, o), count) for i, o, count in sizes]

    def step(batch: Batch) -> float:
        for x, weight, gradient, count in work:
            for _ in range(count):  # the product, and the gradients of its two factors
                torch.mm(x, weight.mT)
                torch.mm(gradient, weight)
                torch.mm(gradient.mT, x)
        return 0.0

    return Side(step, sum(weight.numel() * count for _, weight, _, count in work))


def serve(task: dict[str, Any], requests: TextIO, reply: Callable[[dict[str, Any]], None]) -> None:
    """Make the side, warm it up, and answer requests until the input ends."""
    torch.set_num_threads(1)
    torch.manual_seed(42)
    side = {"ours": ours, "upstream": upstream, "matmuls": matmuls}[task["side"]](task)
    coming = batches(task["rows"], task["rows_per_step"])
    first = [side.step(next(coming)) for _ in range(task["warmup"])]
    reply({"ready": True, "parameters": side.parameters, "losses": first})
    for line in requests:
        seconds, losses = [], []
        for _ in range(int(line)):
            start = time.process_time()
            losses.append(side.step(next(coming)))
            seconds.append(time.process_time() - start)
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        reply({"seconds": seconds, "losses": losses, "peak_bytes": peak})


def main() -> None:
    """Answers go to the standard output; what either nanochat prints there goes to the standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), sys.stdin, lambda answer: print(json.dumps(answer), file=answers, flush=True))


if __name__ == "__main__":
    main()

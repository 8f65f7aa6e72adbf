"""Runs one side of bench.gpu in its own process; PYTHONPATH decides whose `nanochat` it imports.

The first argument is the task as JSON. The last line of output is JSON with the seconds of each timed step.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Batches = list[tuple[Tensor, Tensor]]  # inputs, targets (B, T) int64 of each pass, in pinned memory
WARMUP = 3


@dataclass(frozen=True)
class Side:
    """What is measured. `step` trains on the batches of one step and returns the loss in nats."""

    step: Callable[[Batches], float]
    attention: str
    about: dict[str, Any]


@dataclass(frozen=True)
class Work:
    """One step in the form that bench.updates takes."""

    num_targets: int
    micro_batches: Sequence[tuple[Tensor, ...]]
    extras: tuple[str, ...] = ()


def ours(task: dict[str, Any]) -> Side:
    """This repository's training step, with the calls that base_train makes."""
    from bench.updates import update
    from nanochat import device
    from nanochat.checkpoint_manager.families import on_meta
    from nanochat.gpt import GPTConfig
    from nanochat.step import Safeguards
    from nanochat.train import compile as compiling
    from nanochat.train.optim import Optimizers, Rates

    compute = device.compute_init(task["device"])
    shape = GPTConfig(**task["shape"])
    model = on_meta(shape, compute, task["fp8"])
    model.to_empty(device=compute.device)
    model.init_weights()
    optimizers = Optimizers(
        model, model.parameter_roles(), shape.n_embd, Rates(), 1.0, compute.dtype
    )
    wanted = None if task["compile"] else False  # None: compile where it works
    fast = compiling.compiled(
        model, wanted, (task["rows"], shape.sequence_len), compute, model.compile_groups()
    )
    safeguards = Safeguards.start(compute, {})
    safeguards.spikes = None

    def step(batches: Batches) -> float:
        work = Work(sum(targets.numel() for _, targets in batches), batches)
        return update(fast, optimizers, work, safeguards, compute).loss

    peak, _ = device.peak_flops(compute)
    chosen = compute.operations.name if compute.device_type == "cuda" else "the device's own"
    return Side(step, chosen, {"peak_flops": peak, "device": device.describe(compute)})


def _multiplies_in_fp8(module: torch.nn.Module, name: str) -> bool:
    """Whether upstream's base_train, given --fp8, lets a module multiply in FP8: if it is a large matrix."""
    sides = (
        (module.in_features, module.out_features) if isinstance(module, torch.nn.Linear) else (0, 0)
    )
    return min(sides) >= 128 and not any(side % 16 for side in sides)


def upstream(task: dict[str, Any]) -> Side:
    """karpathy/nanochat's training step, with the calls that its base_train makes."""
    from nanochat import flash_attention
    from nanochat.gpt import GPT, GPTConfig

    torch.set_float32_matmul_precision("high")
    where = torch.device(task["device"])
    with torch.device("meta"):
        model: Any = GPT(
            GPTConfig(**task["shape"])
        )  # upstream's class, which the type checker cannot see
    model.to_empty(device=where)
    model.init_weights()
    optimizer = model.setup_optimizer(
        unembedding_lr=0.008, embedding_lr=0.3, matrix_lr=0.02, scalar_lr=0.5, weight_decay=0.28
    )
    if task["fp8"]:
        from nanochat import fp8

        fp8.convert_to_float8_training(model, module_filter_fn=_multiplies_in_fp8)
    fast = torch.compile(model, dynamic=False) if task["compile"] else model

    def step(batches: Batches) -> float:
        loss = torch.zeros(())
        for inputs, targets in batches:
            loss = fast(inputs.to(where, non_blocking=True), targets.to(where, non_blocking=True))
            (loss / len(batches)).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return Side(
        step,
        "FlashAttention 3" if getattr(flash_attention, "USE_FA3", False) else "torch's own",
        {},
    )


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Warm up, then measure the wall time of each step. A step ends by reading its loss, which waits for the device."""
    torch.manual_seed(42)
    start = time.perf_counter()
    side = {"ours": ours, "upstream": upstream}[task["side"]](task)
    module = getattr(torch, task["device"]) if task["device"] != "cpu" else None
    T, vocab = task["shape"]["sequence_len"], task["shape"]["vocab_size"]

    def draw() -> Batches:
        cells = [torch.randint(0, vocab, (task["rows"], T + 1)) for _ in range(task["passes"])]
        pairs = [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in cells]
        return pairs if module is None else [(x.pin_memory(), y.pin_memory()) for x, y in pairs]

    seconds, loss, started = [], 0.0, 0.0
    for number in range(WARMUP + task["steps"]):
        batches = draw()
        if module is not None:
            module.synchronize()
        begin = time.perf_counter()
        if number == 0:
            started = begin - start
        loss = side.step(batches)
        if module is not None:
            module.synchronize()
        seconds.append(time.perf_counter() - begin)
    memory = module.max_memory_allocated() if module is not None else 0
    return {
        "seconds": seconds[WARMUP:],
        "loss": loss,
        "memory": memory,
        "start": started + seconds[0],
        "attention": side.attention,
        **side.about,
    }


def main() -> None:
    """Print the answer to standard output; whatever either nanochat prints is sent to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(measure(json.loads(sys.argv[1]))), file=answers, flush=True)


if __name__ == "__main__":
    main()

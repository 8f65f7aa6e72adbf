"""Runs one side of bench.gpu in a process of its own, and answers with its seconds."""

import time
from collections.abc import Callable
from typing import Any

import torch

from bench import child
from bench.batches import Passes, pinned, random_passes

Step = Callable[[Passes], float]  # trains on the passes of one step; the loss in nats
WARMUP = 3  # steps


def ours(task: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    """Return this repository's training step, as base_train makes it, and what it runs on."""
    from bench.training import Trainer, random_model
    from nanochat import device
    from nanochat.gpt import GPTConfig

    compute = device.compute_init(task["device"])
    shape = GPTConfig(**task["shape"])
    trainer = Trainer(random_model(shape, compute, fp8=task["fp8"]), compute)
    where_it_works = None
    requested = where_it_works if task["compile"] else False
    trainer.compile(task["rows"], shape.sequence_len, requested)
    peak, _ = device.peak_flops(compute)
    attention = "the device's own"
    if compute.device_type == "cuda":
        attention = compute.operations.name
    description = device.describe(compute)
    about = {"peak_flops": peak, "device": description, "attention": attention}
    return trainer.step, about


def _multiplies_in_fp8(module: torch.nn.Module, name: str) -> bool:
    """Return whether upstream's base_train, given --fp8, lets a module multiply in FP8."""
    if not isinstance(module, torch.nn.Linear):
        return False
    sides = (module.in_features, module.out_features)
    return min(sides) >= 128 and not any(size % 16 for size in sides)


def upstream(task: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    """Return karpathy/nanochat's training step, and what it attends with."""
    from bench.upstream import RATES, Upstream
    from nanochat import flash_attention

    torch.set_float32_matmul_precision("high")
    device = torch.device(task["device"])
    trainer = Upstream(task["shape"], device, weight_decay=0.28, **RATES)
    if task["fp8"]:
        from nanochat import fp8

        fp8.convert_to_float8_training(trainer.model, module_filter_fn=_multiplies_in_fp8)
    if task["compile"]:
        trainer.compile()
    has_flash = getattr(flash_attention, "USE_FA3", False)
    return trainer.step, {"attention": "FlashAttention 3" if has_flash else "torch's own"}


def main() -> None:
    """Warm up, then measure the wall time of each step.

    A step ends by reading its loss, which waits for the device.
    """
    answer = child.answers()
    task = child.task()
    torch.manual_seed(42)
    start = time.perf_counter()
    make = {"ours": ours, "upstream": upstream}[task["side"]]
    train, about = make(task)
    module = getattr(torch, task["device"]) if task["device"] != "cpu" else None
    shape = task["shape"]
    size = (shape["vocab_size"], task["passes"], task["rows"], shape["sequence_len"])
    seconds: list[float] = []
    start_seconds = loss = 0.0
    for step in range(WARMUP + task["steps"]):
        passes = random_passes(*size, seed=step)
        if module is not None:
            passes = pinned(passes)
            module.synchronize()
        begin = time.perf_counter()
        loss = train(passes)
        if module is not None:
            module.synchronize()
        seconds.append(time.perf_counter() - begin)
        if step == 0:
            start_seconds = time.perf_counter() - start
    answer(
        {
            "seconds": seconds[WARMUP:],
            "loss": loss,
            "memory": module.max_memory_allocated() if module is not None else 0,
            "start": start_seconds,
            **about,
        }
    )


if __name__ == "__main__":
    main()

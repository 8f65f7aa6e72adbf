"""Runs one side of bench.gpu in a process of its own, and answers with the seconds of each timed step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import child

Passes = list[tuple[Tensor, Tensor]]  # inputs, targets (B, T) int64 of each pass, in pinned memory
WARMUP = 3  # steps


@dataclass(frozen=True)
class Side:
    """What is measured."""

    step: Callable[[Passes], float]  # trains on the passes of one step; the loss in nats
    attention: str
    about: dict[str, Any]


def ours(task: dict[str, Any]) -> Side:
    """Return this repository's training step, with the calls that base_train makes."""
    from bench.training import Trainer, random_model
    from nanochat import device
    from nanochat.gpt import GPTConfig

    compute = device.compute_init(task["device"])
    shape = GPTConfig(**task["shape"])
    trainer = Trainer(random_model(shape, compute, fp8=task["fp8"]), compute)
    compile_where_it_works = None
    requested = compile_where_it_works if task["compile"] else False
    trainer.compile(task["rows"], shape.sequence_len, requested)
    peak, _ = device.peak_flops(compute)
    attention = "the device's own"
    if compute.device_type == "cuda":
        attention = compute.operations.name
    about = {"peak_flops": peak, "device": device.describe(compute)}
    return Side(trainer.step, attention, about)


def _multiplies_in_fp8(module: torch.nn.Module, name: str) -> bool:
    """Return whether upstream's base_train, given --fp8, lets a module multiply in FP8."""
    if not isinstance(module, torch.nn.Linear):
        return False
    sides = (module.in_features, module.out_features)
    return min(sides) >= 128 and not any(size % 16 for size in sides)


def upstream(task: dict[str, Any]) -> Side:
    """Return karpathy/nanochat's training step, with the calls that its base_train makes."""
    from nanochat import flash_attention
    from nanochat.gpt import GPT, GPTConfig

    torch.set_float32_matmul_precision("high")
    device = torch.device(task["device"])
    with torch.device("meta"):
        model: Any = GPT(GPTConfig(**task["shape"]))  # a class that the type checker cannot see
    model.to_empty(device=device)
    model.init_weights()
    optimizer = model.setup_optimizer(
        unembedding_lr=0.008,
        embedding_lr=0.3,
        matrix_lr=0.02,
        scalar_lr=0.5,
        weight_decay=0.28,
    )
    if task["fp8"]:
        from nanochat import fp8

        fp8.convert_to_float8_training(model, module_filter_fn=_multiplies_in_fp8)
    compiled = torch.compile(model, dynamic=False) if task["compile"] else model

    def step(passes: Passes) -> float:
        loss = torch.zeros(())
        for inputs, targets in passes:
            inputs = inputs.to(device, non_blocking=True)
            loss = compiled(inputs, targets.to(device, non_blocking=True))
            (loss / len(passes)).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.item()

    has_flash = getattr(flash_attention, "USE_FA3", False)
    return Side(step, "FlashAttention 3" if has_flash else "torch's own", {})


def main() -> None:
    """Warm up, then measure the wall time of each step.

    A step ends by reading its loss, which waits for the device.
    """
    answer = child.answers()
    task = child.task()
    torch.manual_seed(42)
    start = time.perf_counter()
    side = {"ours": ours, "upstream": upstream}[task["side"]](task)
    module = getattr(torch, task["device"]) if task["device"] != "cpu" else None
    size = (task["rows"], task["shape"]["sequence_len"] + 1)

    def random_pass() -> tuple[Tensor, Tensor]:
        cells = torch.randint(0, task["shape"]["vocab_size"], size)
        inputs, targets = cells[:, :-1].contiguous(), cells[:, 1:].contiguous()
        if module is None:
            return inputs, targets
        return inputs.pin_memory(), targets.pin_memory()

    seconds: list[float] = []
    start_seconds = loss = 0.0
    for step in range(WARMUP + task["steps"]):
        passes = [random_pass() for _ in range(task["passes"])]
        if module is not None:
            module.synchronize()
        begin = time.perf_counter()
        loss = side.step(passes)
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
            "attention": side.attention,
            **side.about,
        }
    )


if __name__ == "__main__":
    main()

"""Inside the emulated NPU, for bench.npu_ops: what one training step asks of the device, as one JSON object.

python -m tests.emulated_npu -- python -m bench.npu_side '{"kernels": "auto", "depth": 12, ...}'
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanochat import device
from nanochat.gpt import GPT, GPTConfig
from nanochat.train import loop
from nanochat.train.optim import Optimizers, Rates


class Batch:
    """One row of random tokens, in pinned memory as the loader has it."""

    def __init__(self, shape: GPTConfig, compute: device.Compute, seed: int):
        generator = torch.Generator().manual_seed(seed)
        row = torch.randint(0, shape.vocab_size, (1, shape.sequence_len + 1), generator=generator)
        parts = (row[:, :-1].contiguous(), row[:, 1:].contiguous())
        self.micro_batches: Sequence[tuple[Tensor, ...]] = [tuple(device.pin(part, compute) for part in parts)]
        self.num_targets = shape.sequence_len


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Take two steps, so that caches are filled, and count the third."""
    from tests.emulated_npu import log

    torch.set_num_threads(1)
    # Rank 0 alone speaks, and only numbers are wanted here.
    compute = replace(device.compute_init("npu", task["kernels"]), rank=1)
    heads = task["width"] // 128
    shape = GPTConfig(task["length"], task["vocab_size"], task["depth"], heads, heads, task["width"])
    model = GPT(shape, dtype=compute.dtype, operations=compute.operations)
    model.init_weights()
    model.to(compute.device)
    optimizers = Optimizers(model, model.parameter_roles(), shape.n_embd, Rates(), 1.0, compute.dtype)
    scale = loop.LossScale.start(compute, {})
    for seed in (1, 2):
        loop.update(model, optimizers, Batch(shape, compute, seed), scale, compute)
    parts: list[Any] = []  # records of what belongs to the optimizer, though the main thread launches it too

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*given: Any) -> Any:
            with log.record() as seen:
                result = work(*given)
            parts.append(seen)
            return result

        return watch

    optimizers.step = watched(optimizers.step)  # type: ignore[method-assign]
    compute.operations.square_sums = watched(compute.operations.square_sums)
    batch = Batch(shape, compute, 3)
    device.synchronize(compute)
    with log.record() as seen:
        outcome = loop.update(model, optimizers, batch, scale, compute)
    if outcome.skipped:
        raise RuntimeError(f"the counted step was skipped: loss {outcome.loss}, norm {outcome.grad_norm}")
    optimizer = sum((part.operators for part in parts), Counter())
    return {
        "loss": outcome.loss,
        "forward": dict(seen.by_phase["forward"] - optimizer),
        "backward": dict(seen.by_phase["backward"]),
        "optimizer": dict(optimizer),
        "synchronisations": dict(seen.synchronisations),
        "copies": dict(seen.copies),
        "copied_bytes": dict(seen.copied_bytes),
        "unsupported": dict(seen.unsupported),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)

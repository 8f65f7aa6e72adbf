"""Takes training steps on the emulated NPU for bench.npu_ops, and prints what one of them asks of the device as JSON.

python -m tests.emulated_npu -- python -m bench.npu_ops.side '{"kernels": "auto", "depth": 12, ...}'
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bench.updates import update
from nanochat import device
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime import graphs
from nanochat.step import Safeguards
from nanochat.train.optim import Optimizers, Rates
from nanochat.train.sizes import table_rows


class Batch:
    """One row of random tokens in pinned memory, like the loader's."""

    extras: tuple[str, ...] = ()

    def __init__(self, shape: GPTConfig, compute: device.Compute, seed: int):
        generator = torch.Generator().manual_seed(seed)
        row = torch.randint(0, shape.vocab_size, (1, shape.sequence_len + 1), generator=generator)
        parts = (row[:, :-1].contiguous(), row[:, 1:].contiguous())
        self.micro_batches: Sequence[tuple[Tensor, ...]] = [
            tuple(device.pin(part, compute) for part in parts)
        ]
        self.num_targets = shape.sequence_len


def shape_of(task: dict[str, Any]) -> GPTConfig:
    """The model that base_train makes of this depth and width."""
    heads, pairs = task["width"] // 128, table_rows("auto", task["vocab_size"])
    return GPTConfig(
        task["length"],
        task["vocab_size"],
        task["depth"],
        heads,
        heads,
        task["width"],
        bigram_rows=pairs,
        offset_layers=task["depth"],
    )


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Take a step to fill the caches, one more to capture Muon's if it is captured, and count the next."""
    from tests.emulated_npu import log

    torch.set_num_threads(1)
    # Only rank 0 logs, and the output here must be numbers only.
    compute = replace(device.compute_init("npu", task["kernels"]), rank=1)
    compute.operations.stacks_matrices |= task["stacked"]
    shape = shape_of(task)
    model = GPT(shape, dtype=compute.dtype, operations=compute.operations)
    model.init_weights()
    model.to(compute.device)
    optimizers = Optimizers(
        model, model.parameter_roles(), shape.n_embd, Rates(), 1.0, compute.dtype
    )
    safeguards = Safeguards.start(compute, {})
    passes: nn.Module = model
    with log.record() as captured:
        if task["graphs"]:
            graphs.check(compute)
            passes = graphs.GraphedModel(model, (1, shape.sequence_len), compute)
            optimizers.capture(compute.platform)
    with log.record() as before:
        for seed in range(1, 3 if task["graphs"] else 2):
            update(passes, optimizers, Batch(shape, compute, seed), safeguards, compute)
    # The optimizer launches its operators in the same thread as the forward pass, so they are recorded separately.
    parts: list[Any] = []

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
        outcome = update(passes, optimizers, batch, safeguards, compute)
    if outcome.skipped:
        raise RuntimeError(
            f"the counted step was skipped: loss {outcome.loss}, norm {outcome.grad_norm}"
        )
    optimizer = sum((part.operators for part in parts), Counter())
    optimizer_bytes = sum((part.bytes_by_phase["forward"] for part in parts), Counter())
    moved = {**seen.bytes_by_phase, "optimizer": optimizer_bytes}
    moved["forward"] = moved["forward"] - optimizer_bytes
    return {
        "loss": outcome.loss,
        "forward": dict(seen.by_phase["forward"] - optimizer),
        "backward": dict(seen.by_phase["backward"]),
        "optimizer": dict(optimizer),
        "bytes": {phase: dict(names) for phase, names in moved.items()},
        "synchronisations": dict(seen.synchronisations),
        "captured": dict(captured.captured + before.captured),
        "copies": dict(seen.copies),
        "copied_bytes": dict(seen.copied_bytes),
        "unsupported": dict(seen.unsupported),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)

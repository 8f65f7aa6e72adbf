"""Makes training steps on the emulated NPU, and answers with what one of them asks of the device.

bench.npu_ops starts this file, for our step or for that of a checkout which is first on PYTHONPATH.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import child
from bench.batches import Passes, pinned, random_passes

ROOT = Path(__file__).resolve().parent.parent.parent
WEIGHT_DECAY = 0.28  # upstream's default; the counts do not depend on it
HEAD_DIM = 128

Task = dict[str, Any]


def emulator_log() -> Any:
    """Return the counters of the emulated NPU; a checkout's own `tests` may be on the path."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.emulated_npu import log
    finally:
        sys.path.remove(str(ROOT))
    return log


def shape_of(task: Task) -> dict[str, Any]:
    """Return the fields of a GPTConfig that upstream has too."""
    heads = task["width"] // HEAD_DIM
    return {
        "sequence_len": task["length"],
        "vocab_size": task["vocab_size"],
        "n_layer": task["depth"],
        "n_head": heads,
        "n_kv_head": heads,
        "n_embd": task["width"],
    }


def row(task: Task, seed: int) -> Passes:
    """Return a pass of one row of random tokens."""
    return pinned(random_passes(task["vocab_size"], 1, 1, task["length"], seed))


def counts_of(step: Any, optimizer: Sequence[Any], **more: Any) -> dict[str, Any]:
    """Return what a step asked of the device, from the records of the step and of its optimizer.

    The optimizer launches its operators in the same thread as the forward pass, so it is recorded
    separately.
    """
    operators = sum((record.operators for record in optimizer), Counter())
    moved_bytes = sum((record.bytes_by_phase["forward"] for record in optimizer), Counter())
    moved = {**step.bytes_by_phase, "optimizer": moved_bytes}
    moved["forward"] = moved["forward"] - moved_bytes
    return {
        "forward": dict(step.by_phase["forward"] - operators),
        "backward": dict(step.by_phase["backward"]),
        "optimizer": dict(operators),
        "bytes": {phase: dict(names) for phase, names in moved.items()},
        "synchronisations": dict(step.synchronisations),
        "copies": dict(step.copies),
        "unsupported": dict(step.unsupported),
        **more,
    }


def ours(task: Task) -> dict[str, Any]:
    """Make a step to fill the caches, and one more to capture Muon's graph; count the next."""
    from bench.training import Trainer, random_model
    from nanochat import device
    from nanochat.gpt import GPTConfig
    from nanochat.runtime import graphs
    from nanochat.train.sizes import table_rows

    log = emulator_log()
    compute = replace(device.compute_init("npu", task["kernels"]), rank=1)  # only rank 0 logs
    compute.operations.muon.stacks = True  # as published ports do, with any kernels
    shape = GPTConfig(
        **shape_of(task),
        bigram_rows=table_rows("auto", task["vocab_size"]),
        offset_layers=task["depth"],
        exclusive_layers=task["depth"],
    )
    trainer = Trainer(random_model(shape, compute), compute)
    with log.record() as warmup:
        if task["graphs"]:
            graphs.check(compute)
            trainer.passes = graphs.GraphedModel(trainer.model, (1, task["length"]), compute)
            trainer.optimizers.capture(compute.platform)
            trainer.step(row(task, 2))
        trainer.step(row(task, 1))
    optimizer: list[Any] = []

    def recorded(work: Callable[..., Any]) -> Callable[..., Any]:
        def work_and_record(*arguments: Any) -> Any:
            with log.record() as record:
                result = work(*arguments)
            optimizer.append(record)
            return result

        return work_and_record

    trainer.optimizers.step = recorded(trainer.optimizers.step)  # type: ignore[method-assign]
    compute.operations.square_sums = recorded(compute.operations.square_sums)
    passes = row(task, 3)
    device.synchronize(compute)
    with log.record() as step:
        trainer.step(passes)
    return counts_of(step, optimizer, captured=dict(warmup.captured))


def cast_weights() -> Counter[str]:
    """Make F.linear cast a weight whose dtype is not its input's, and return the counter of casts.

    torch_npu multiplies two dtypes, which the emulated NPU refuses. Upstream's own Linear casts its
    weight like this.
    """
    original = F.linear
    casts: Counter[str] = Counter()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dtype != x.dtype:
            casts["weights"] += 1
            weight = weight.to(x.dtype)
        return original(x, weight, bias)

    F.linear = linear  # type: ignore[assignment]
    return casts


def port(task: Task) -> dict[str, Any]:
    """Make a step of karpathy/nanochat or of a port of it, and count the next.

    The ports of 2026 have kept the calls of upstream's training script.
    """
    import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]  # as ports do

    from bench.upstream import Upstream

    log = emulator_log()
    casts = cast_weights()
    trainer = Upstream(shape_of(task), torch.device("npu", 0), weight_decay=WEIGHT_DECAY)
    trainer.step(row(task, 1))
    casts.clear()
    torch.npu.synchronize()  # type: ignore[attr-defined]
    with log.record() as step:
        loss = trainer.backward(row(task, 3))
        with log.record() as optimizer:
            trainer.optimizer.step()
        trainer.model.zero_grad(set_to_none=True)
        loss.item()
    captured = dict(step.captured)
    return counts_of(step, [optimizer], captured=captured, casts=casts["weights"])


def main() -> None:
    """Count a step and answer."""
    answer = child.answers()
    task = child.task()
    torch.set_num_threads(1)
    answer(port(task) if task["port"] else ours(task))


if __name__ == "__main__":
    main()

"""Takes training steps of another nanochat on the emulated NPU, and prints what one of them asks of the device as JSON.

bench.npu_ops starts this file with a checkout first on PYTHONPATH, so that `nanochat` is the checkout's. The steps make
the calls that the training script of karpathy/nanochat makes, and the ports of 2026 have kept: the model is built
without data, filled on the device, and given its own optimizer.

python -m tests.emulated_npu -- python bench/npu_ops/port.py '{"depth": 12, "width": 768, ...}'
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
WEIGHT_DECAY = 0.28  # upstream's default; the counts do not depend on it


def emulator_log() -> Any:
    """The counters of the emulated NPU, imported from this repository although another `nanochat` is on the path."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.emulated_npu import log
    finally:
        sys.path.remove(str(ROOT))
    return log


def cast_weights() -> Counter[str]:
    """Make F.linear cast a weight whose dtype is not its input's, and return the counter of these casts.

    torch_npu multiplies two dtypes, which the emulated NPU refuses. Upstream's own Linear casts its weight like this.
    """
    original, casts = F.linear, Counter[str]()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dtype != x.dtype:
            casts["weights"] += 1
            weight = weight.to(x.dtype)
        return original(x, weight, bias)

    F.linear = linear  # type: ignore[assignment]
    return casts


def batch(task: dict[str, Any], seed: int) -> tuple[Tensor, Tensor]:
    """One row of random tokens and its targets in pinned memory, like upstream's loader."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, task["vocab_size"], (1, task["length"] + 1), generator=generator)
    return row[:, :-1].contiguous().pin_memory(), row[:, 1:].contiguous().pin_memory()


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Take a step to fill the optimizer's state, and count the next."""
    import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]  # ports import it in their training script

    log = emulator_log()
    casts = cast_weights()
    from nanochat.gpt import GPT, GPTConfig

    if not hasattr(GPT, "setup_optimizer"):
        raise SystemExit(
            "the GPT of this nanochat has no setup_optimizer; give a checkout of 2026, such as the newest"
        )
    torch.set_num_threads(1)
    device, heads = torch.device("npu", 0), task["width"] // 128
    shape: Any = GPTConfig(
        sequence_len=task["length"],
        vocab_size=task["vocab_size"],
        n_layer=task["depth"],
        n_head=heads,
        n_kv_head=heads,
        n_embd=task["width"],
    )
    with torch.device("meta"):
        model: Any = GPT(shape)
    model.to_empty(device=device)
    model.init_weights()
    optimizer = model.setup_optimizer(weight_decay=WEIGHT_DECAY)
    parts: list[Any] = []

    def step(seed: int) -> float:
        x, y = (part.to(device, non_blocking=True) for part in batch(task, seed))
        loss = model(x, y)
        said = loss.detach()
        (loss / 1).backward()  # upstream divides by the number of passes of a step
        with log.record() as seen:
            optimizer.step()
        parts.append(seen)
        model.zero_grad(set_to_none=True)
        return said.item()

    step(1)
    parts.clear()
    casts.clear()
    torch.npu.synchronize()  # type: ignore[attr-defined]
    with log.record() as seen:
        loss = step(3)
    (optimizer_part,) = parts
    moved = {**seen.bytes_by_phase, "optimizer": optimizer_part.bytes_by_phase["forward"]}
    moved["forward"] = moved["forward"] - moved["optimizer"]
    return {
        "loss": loss,
        "forward": dict(seen.by_phase["forward"] - optimizer_part.operators),
        "backward": dict(seen.by_phase["backward"]),
        "optimizer": dict(optimizer_part.operators),
        "bytes": {phase: dict(names) for phase, names in moved.items()},
        "synchronisations": dict(seen.synchronisations),
        "captured": dict(seen.captured),
        "copies": dict(seen.copies),
        "copied_bytes": dict(seen.copied_bytes),
        "unsupported": dict(seen.unsupported),
        "casts": casts["weights"],
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)

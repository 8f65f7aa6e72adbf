"""Measures fine-tuning on one CPU thread beside transformers and peft: speed and peak memory.

python -m bench.finetune --quick                      # ours alone on small shapes, in 50 seconds
python -m bench.finetune --against transformers       # minutes; needs transformers and peft
python -m bench.finetune --against matmuls --shapes qwen3-moe --modes lora

What is compared: a step of an adapter and a step of the whole model, in small Qwen3 (dense and with
experts) and Qwen3.5 shapes and the shape of SmolLM2-135M, with random weights, on random tokens. The
side "matmuls" computes nothing but the matrix products of such a step (bench/finetune/matmuls.py),
so that our speed beside its speed is the share of our step that they take. How: every side is a
process of its own; the sides of a row take turns, one step each, so that a busy machine slows them
equally. The median step counts, in CPU seconds. Each row is printed as soon as it is measured. Our
step is compiled, as scripts.finetune does where the run is long enough to repay it; transformers'
Trainer does not compile unless it is asked to.
"""

import contextlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from bench import tables
from bench.processes import (
    STEP_TITLES,
    Steps,
    check_at_least,
    check_installed,
    check_peers,
    own_dtype,
    side,
    train_in_turns,
)
from bench.training import QWEN3
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.common import log
from nanochat.data.command_line import run
from nanochat.models.llama import LlamaConfig
from nanochat.models.qwen.config import QwenConfig

Shape = Literal["qwen3", "qwen3-moe", "qwen3.5", "smollm2"]
Mode = Literal["lora", "full"]
RANKS: dict[Mode, int] = {"lora": 8, "full": 0}
BATCH = (4, 512)  # rows of a step, and tokens of a row
QUICK_BATCH = (2, 256)
SHAPES: dict[Shape, QwenConfig] = {
    "qwen3": replace(QWEN3, n_hidden=1536),
    "qwen3-moe": replace(
        QWEN3,
        mlps="E",
        n_experts=16,
        experts_per_token=4,
        n_expert_hidden=256,
    ),
    "qwen3.5": replace(
        QWEN3,
        n_hidden=1536,
        n_head=4,
        n_kv_head=2,
        head_dim=128,
        rotary_dim=32,
        layers="DDDA",
        zero_centred=1,
        output_gate=1,
        delta_key_heads=8,
        delta_value_heads=8,
        rope_theta=10_000_000.0,
    ),
    "smollm2": LlamaConfig(  # SmolLM2-135M
        vocab_size=49_152,
        n_layer=30,
        n_embd=576,
        n_head=9,
        n_kv_head=3,
        head_dim=64,
        n_hidden=1536,
        rope_theta=100_000.0,
        norm_eps=1e-5,
    ),
}
SMALL = {"n_layer": 4, "n_embd": 256, "n_hidden": 768, "vocab_size": 4096}


@dataclass(frozen=True)
class Config:
    """Print speed and memory of fine-tuning as a table, and one JSON object on the last line."""

    quick: bool = False
    """small shapes, few steps, ours alone and not compiled, so that it ends within 50 seconds"""
    against: tuple[Literal["transformers", "matmuls"], ...] = ()
    """what to measure beside ours: transformers with peft's adapters, or the bare matrix products"""
    shapes: tuple[Shape, ...] = get_args(Shape)
    """shapes to measure"""
    modes: tuple[Mode, ...] = get_args(Mode)
    """what is trained: an adapter (lora) or the whole model (full)"""
    steps: int = 3
    """timed steps of each side; more steps give steadier medians"""


def measure(
    shape: QwenConfig, rank: int, dtype: str, batch: tuple[int, int], cfg: Config
) -> dict[str, Steps]:
    """Let the sides take turns of one step; the first step of each is not timed.

    `batch` is the rows of a step, and the tokens of a row.
    """
    task = {
        "shape": asdict(shape),
        "published": published(shape),
        "rank": rank,
        "dtype": dtype,
        "compile": not cfg.quick,
        "batch": batch,
    }
    with contextlib.ExitStack() as stack:
        processes = {}
        for name in ("ours", *cfg.against):
            own_task = {**task, "side": name}
            process = side(name, "bench.finetune.side", own_task, NANOCHAT_DTYPE=dtype)
            processes[name] = stack.enter_context(process)
        return train_in_turns(processes, 1, cfg.steps)


def figures(results: Mapping[str, Steps], tokens: int) -> dict[str, float]:
    """Return our speed and memory, and how they compare with each other side."""
    ours = results["ours"]
    summary = {
        "tokens_per_cpu_second": ours.speed(tokens),
        "peak_gb": ours.peak_bytes / 1e9,
    }
    for name, peer in results.items():
        if name != "ours":
            summary[f"vs_{name}"] = ours.speed(tokens) / peer.speed(tokens)
            if name != "matmuls":
                summary[f"memory_vs_{name}"] = ours.peak_bytes / peer.peak_bytes
    return summary


def cells(name: str, steps: Steps, tokens: int) -> list[str]:
    """Return a side's row of the table; bare products have neither a loss nor a memory to show."""
    figures = steps.cells(tokens)
    return [name, *figures[:2]] if name == "matmuls" else [name, *figures]


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, steps=cfg.steps)
    check_peers(cfg.quick, cfg.against)
    if "transformers" in cfg.against:
        check_installed("transformers", "transformers", "peft")
    dtype = own_dtype()
    batch = BATCH
    if cfg.quick:
        cfg = replace(cfg, steps=2)
        batch = QUICK_BATCH
    step_tokens = math.prod(batch)
    log(f"{step_tokens:,} tokens a step, {dtype}, median of {cfg.steps} steps")
    result: dict[str, Any] = {"dtype": dtype, "quick": cfg.quick}
    for name, mode in itertools.product(cfg.shapes, cfg.modes):
        shape = SHAPES[name]
        if cfg.quick:
            shape = replace(shape, **SMALL)
        row = f"{name} {mode}"
        results = measure(shape, RANKS[mode], dtype, batch, cfg)
        result[row] = figures(results, step_tokens)
        sides = [cells(side_name, steps, step_tokens) for side_name, steps in results.items()]
        tables.show((row, *STEP_TITLES), sides)
    tables.finish("finetune", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

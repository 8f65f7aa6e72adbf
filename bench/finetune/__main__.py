"""Measures fine-tuning on one CPU thread beside transformers and peft: tokens per CPU second, and peak memory.

python -m bench.finetune --quick                      # ours alone on small shapes, within 50 seconds
python -m bench.finetune --against transformers       # minutes; transformers and peft must be installed

What is compared: a step of an adapter and a step of the whole model, in small Qwen3 and Qwen3.5 shapes with random
weights, on random tokens. How: every side is a process of its own; the two sides of a row take turns, one step each, so
that a busy machine slows them equally. The median step counts, in CPU seconds.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

from bench.processes import check_at_least, check_installed, check_upstream, side
from nanochat import device
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.common import UserError, log, run
from nanochat.models.lora import LoraConfig
from nanochat.models.qwen.config import QwenConfig

RANK = 8
QWEN3 = QwenConfig(
    sequence_len=2048,
    vocab_size=32_768,
    n_layer=8,
    n_embd=512,
    n_hidden=1536,
    tied=1,
    n_head=8,
    n_kv_head=4,
    head_dim=64,
)
SHAPES = {
    "qwen3": QWEN3,
    "qwen3.5": replace(
        QWEN3,
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
}
SMALL = {"n_layer": 4, "n_embd": 256, "n_hidden": 768, "vocab_size": 4096}


@dataclass(frozen=True)
class Config:
    """Print speed and memory of fine-tuning as a table, and one JSON object on the last line."""

    quick: bool = False
    """small shapes, few steps, ours alone and not compiled, so that it ends within 50 seconds"""
    against: tuple[Literal["transformers"], ...] = ()
    """what to measure beside ours: transformers, with peft's adapters"""
    families: tuple[Literal["qwen3", "qwen3.5"], ...] = ("qwen3", "qwen3.5")
    """shapes to measure"""
    steps: int = 3
    """timed steps of each side; more steps give steadier medians"""
    rows: int = 4
    """rows of a step"""
    tokens: int = 512
    """tokens of a row"""
    checkpoint_activations: bool = False
    """compute each layer again in the backward pass, on both sides"""
    compile: bool = True
    """compile our step, as scripts.finetune does where the run is long enough to repay it; transformers' Trainer does
    not compile unless it is asked to"""


@dataclass
class Measured:
    """What was measured of one side."""

    parameters: int
    losses: list[float]
    seconds: list[float] = field(default_factory=list)  # CPU seconds of each timed step
    peak_bytes: int = 0

    def speed(self, tokens: int) -> float:
        """Return the tokens per CPU second of the median step."""
        return tokens / median(self.seconds)


def measure(
    sides: Sequence[str],
    shape: QwenConfig,
    rank: int,
    dtype: str,
    cfg: Config,
    targets: Sequence[str] = LoraConfig.targets,
) -> dict[str, Measured]:
    """Let the sides take turns of one step; the first step of each is not timed."""
    task = {
        "shape": asdict(shape),
        "published": published(shape),
        "rank": rank,
        "dtype": dtype,
        "rows": cfg.rows,
        "tokens": cfg.tokens,
        "targets": list(targets),
        "checkpoints": cfg.checkpoint_activations,
        "compile": cfg.compile,
    }
    module = "bench.finetune.side"
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                side(name, module, {**task, "side": name}, NANOCHAT_DTYPE=dtype)
            )
            for name in sides
        }
        results = {name: Measured(**process.answer()) for name, process in processes.items()}
        for _ in range(cfg.steps):
            for name, process in processes.items():
                answer = process.ask(1)
                results[name].seconds += answer["seconds"]
                results[name].losses += answer["losses"]
                results[name].peak_bytes = answer["peak_bytes"]
    return results


def figures(results: dict[str, Measured], tokens: int) -> dict[str, float]:
    """Return our speed and memory, and how they compare with each other side."""
    ours = results["ours"]
    summary = {
        "tokens_per_cpu_second": round(ours.speed(tokens), 1),
        "peak_gb": round(ours.peak_bytes / 1e9, 3),
    }
    for name, peer in results.items():
        if name != "ours":
            summary[f"vs_{name}"] = round(ours.speed(tokens) / peer.speed(tokens), 3)
            summary[f"memory_vs_{name}"] = round(ours.peak_bytes / peer.peak_bytes, 3)
    return summary


def table(title: str, results: dict[str, Measured], tokens: int) -> str:
    """Return one line for each side."""
    lines = []
    for name, result in results.items():
        speed = f"{result.speed(tokens):>10,.0f} tokens/CPU s{result.peak_bytes / 1e9:>8.2f} GB"
        losses = f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"
        lines.append(f"{title:<14}{name:<14}{speed}  {result.parameters:,} parameters, {losses}")
    return "\n".join(lines)


def check(cfg: Config) -> None:
    """Raise UserError (code 2) for flags that cannot be measured."""
    check_at_least(1, steps=cfg.steps, rows=cfg.rows, tokens=cfg.tokens)
    longest = QWEN3.sequence_len
    if cfg.tokens > longest:
        raise UserError(f"--tokens must be at most {longest:,}, got {cfg.tokens:,}", exit_code=2)
    check_upstream(cfg.quick, cfg.against)
    if cfg.against:
        check_installed("transformers", "transformers", "peft")


def main(cfg: Config) -> None:
    """Measure and print."""
    check(cfg)
    compute = device.compute_init("cpu")
    dtype = str(compute.platform.best_dtype()[0]).removeprefix("torch.")
    if cfg.quick:
        cfg = replace(cfg, steps=2, rows=2, tokens=min(cfg.tokens, 256), compile=False)
    tokens = cfg.rows * cfg.tokens
    log(f"{cfg.rows} rows of {cfg.tokens} tokens, {dtype}, one thread, median of {cfg.steps} steps")
    result: dict[str, Any] = {"benchmark": "finetune", "dtype": dtype, "quick": cfg.quick}
    for family in cfg.families:
        shape = replace(SHAPES[family], **(SMALL if cfg.quick else {}))
        for mode, rank in (("lora", RANK), ("full", 0)):
            title = f"{family} {mode}"
            results = measure(["ours", *cfg.against], shape, rank, dtype, cfg)
            log(table(title, results, tokens))
            result[title] = figures(results, tokens)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

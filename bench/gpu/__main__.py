"""Measures training on one accelerator beside upstream nanochat: tokens per second, MFU, memory.

python -m bench.gpu --depth 12 --upstream DIR     # DIR: a checkout of karpathy/nanochat
python -m bench.gpu --depth 20 --rows 8 --no-compile

How: each run is a process that has the device to itself. The sides take turns, ours first and last,
so that a device that heats up slows both. Both sides train compiled models on random tokens,
because speed does not depend on the tokens. Upstream uses FlashAttention 3 where its package can
load it, and masks windows elsewhere; NANOCHAT_FLASH_KERNEL makes ours use the same kernel. The
table says what either side attends with.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import tables
from bench.processes import ROOT, answer_of, check_at_least, check_peers, upstream_shape
from nanochat.data.command_line import run
from nanochat.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Config:
    """Print training speed on one accelerator, and one JSON object on the last line."""

    depth: int = 12
    """number of layers; the model has 64 x depth channels in heads of 128"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat to measure beside ours; default: ours alone"""
    rows: int = 16
    """rows per pass; lower it when memory runs out"""
    passes: int = 4
    """passes per step"""
    max_seq_len: int = 2048
    """tokens per row"""
    vocab_size: int = 32768
    """tokens in the vocabulary"""
    steps: int = 10
    """timed steps per run, after three steps of warm-up"""
    rounds: int = 2
    """runs per side; ours runs once more when there is an upstream"""
    compile: bool = True
    """compile the models of both sides with torch.compile"""
    fp8: bool = False
    """train both sides in FP8: ours by base_train --matmul=fp8, upstream's by its --fp8"""
    device_type: str = "cuda"
    """cuda or npu; cpu only tries this benchmark out, since bench.train is the one for CPUs"""


Runs = Sequence[tuple[str, dict[str, Any]]]  # whose run it was, and what it measured


def shape_of(cfg: Config) -> GPTConfig:
    """Return the model that both sides train at this depth."""
    heads = max(cfg.depth * 64 // 128, 1)
    return GPTConfig(cfg.max_seq_len, cfg.vocab_size, cfg.depth, heads, heads, heads * 128)


def measure(side: str, cfg: Config) -> dict[str, Any]:
    """Run one side in its own process."""
    shape = shape_of(cfg)
    task = {
        "side": side,
        "shape": upstream_shape(shape) if side == "upstream" else asdict(shape),
        "rows": cfg.rows,
        "passes": cfg.passes,
        "steps": cfg.steps,
        "compile": cfg.compile,
        "fp8": cfg.fp8,
        "device": cfg.device_type,
    }
    home = cfg.upstream if side == "upstream" and cfg.upstream else ROOT
    variables = {"NANOCHAT_DEVICE": cfg.device_type}
    if not cfg.compile:  # upstream compiles its optimizer unless this variable forbids it
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return answer_of(side, "bench.gpu.side", task, home, **variables)


def figures(cfg: Config, runs: Runs) -> dict[str, Any]:
    """Return the JSON object; speeds come from the median step over all runs of a side."""
    tokens = cfg.rows * cfg.passes * cfg.max_seq_len
    with torch.device("meta"):
        flops = GPT(shape_of(cfg)).flops_per_token()
    by_side: dict[str, list[dict[str, Any]]] = {}
    for side, answer in runs:
        by_side.setdefault(side, []).append(answer)
    first = by_side["ours"][0]
    result: dict[str, Any] = {
        "depth": cfg.depth,
        "compiled": cfg.compile,
        "fp8": cfg.fp8,
        "device": first["device"],
        "tokens_per_step": tokens,
    }
    for side, answers in by_side.items():
        speed = tokens / median(step for answer in answers for step in answer["seconds"])
        result[side] = {
            "tokens_per_second": speed,
            "mfu_percent": 100 * speed * flops / first["peak_flops"],
            "memory_gb": max(answer["memory"] for answer in answers) / 1e9,
            "seconds_to_first_step": answers[0]["start"],
            "loss": answers[-1]["loss"],
            "attention": answers[0]["attention"],
        }
    if "upstream" in result:
        ratio = result["ours"]["tokens_per_second"] / result["upstream"]["tokens_per_second"]
        result["vs_upstream"] = ratio
    return result


def main(cfg: Config) -> None:
    """Run the sides in turns, and print their figures."""
    check_peers(quick=False, upstream=cfg.upstream)
    counts = ("depth", "rows", "passes", "steps", "rounds")
    check_at_least(1, **{name: getattr(cfg, name) for name in counts})
    sides = ["ours"] * cfg.rounds
    if cfg.upstream is not None:
        sides = ["ours", "upstream"] * cfg.rounds + ["ours"]
    runs = [(side, measure(side, cfg)) for side in sides]
    result = figures(cfg, runs)
    rows = []
    for side in dict.fromkeys(sides):
        speed, mfu, memory, start, loss, attention = result[side].values()
        cells = [f"{speed:,.0f}", f"{mfu:.1f}", f"{memory:.1f}", f"{start:.0f}", f"{loss:.3f}"]
        rows.append([side, *cells, attention])
    titles = ("side", "tokens/s", "MFU, %", "GB", "s to the first step", "loss", "attention")
    tables.show(titles, rows)
    tables.finish("gpu", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

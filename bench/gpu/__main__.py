"""Measures training on one accelerator beside upstream nanochat: tokens per second of wall time, MFU, memory.

python -m bench.gpu --depth 12 --upstream DIR     # DIR: a checkout of karpathy/nanochat
python -m bench.gpu --depth 20 --rows 8 --no-compile

Each run is a process that has the device to itself. The sides take turns, ours first and last, so that a device that
heats up slows both. Both sides train compiled models on random tokens, because speed does not depend on the tokens.
Upstream uses FlashAttention 3 where its package can load it, and masks windows elsewhere; NANOCHAT_FLASH_KERNEL makes
ours use the same kernel. The lines say what either side attends with.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.upstream import shape_for
from nanochat.common import UserError, log, run
from nanochat.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Config:
    """Print training speed on one accelerator: one line per run, and one JSON object on the last line."""

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
    """train both sides with --fp8, as their base_train does"""
    device_type: str = "cuda"
    """cuda or npu; cpu only tries this benchmark out, since bench.train is the one for CPUs"""


def shape_of(cfg: Config) -> GPTConfig:
    """The model that both sides train at this depth."""
    heads = max(cfg.depth * 64 // 128, 1)
    return GPTConfig(cfg.max_seq_len, cfg.vocab_size, cfg.depth, heads, heads, heads * 128)


def measure(side: str, cfg: Config) -> dict[str, Any]:
    """Run one side in its own process; a failure is a UserError with the last lines it printed."""
    task = {
        "side": side,
        "shape": shape_for(side, shape_of(cfg)),
        "rows": cfg.rows,
        "passes": cfg.passes,
        "steps": cfg.steps,
        "compile": cfg.compile,
        "fp8": cfg.fp8,
        "device": cfg.device_type,
    }
    home = cfg.upstream.resolve() if side == "upstream" and cfg.upstream else ROOT
    alone = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    own = {"PYTHONPATH": str(home), "NANOCHAT_DEVICE": cfg.device_type}
    eager = (
        {} if cfg.compile else {"TORCHDYNAMO_DISABLE": "1"}
    )  # upstream decorates its optimizer with torch.compile
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        done = subprocess.run(
            [sys.executable, str(ROOT / "bench" / "gpu" / "side.py"), json.dumps(task)],
            cwd=home,
            env={**alone, **own, **eager},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        errors.seek(0)
        words = [line for line in errors.read().splitlines() if line.strip()][-5:]
    raise UserError(
        f"{side} ended with code {done.returncode}; its last lines:\n  " + "\n  ".join(words)
    )


def figures(cfg: Config, runs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The JSON object; speeds come from the median step over all runs of a side."""
    tokens = cfg.rows * cfg.passes * cfg.max_seq_len
    with torch.device("meta"):
        flops = GPT(shape_of(cfg)).flops_per_token()
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "depth": cfg.depth,
        "compiled": cfg.compile,
        "fp8": cfg.fp8,
    }
    own = [told for side, told in runs if side == "ours"]
    peak = own[0]["peak_flops"]
    result |= {
        "device": own[0]["device"],
        "attention": own[0]["attention"],
        "tokens_per_step": tokens,
    }
    speeds: dict[str, float] = {}
    for side, prefix in (("ours", ""), ("upstream", "upstream_")):
        if told := [told for name, told in runs if name == side]:
            speeds[side] = tokens / median(second for one in told for second in one["seconds"])
            result[f"{prefix}tokens_per_second"] = round(speeds[side])
            result[f"{prefix}mfu_percent"] = round(100 * speeds[side] * flops / peak, 2)
            result[f"{prefix}memory_gb"] = round(max(one["memory"] for one in told) / 1e9, 2)
    if "upstream" in speeds:
        theirs = next(told for side, told in runs if side == "upstream")
        result["upstream_attention"] = theirs["attention"]
        result["vs_upstream"] = round(speeds["ours"] / speeds["upstream"], 4)
    return result


def main(cfg: Config) -> None:
    """Run the sides in turns, and print their figures."""
    if cfg.upstream is not None and not (cfg.upstream / "nanochat" / "gpt.py").is_file():
        raise UserError(
            f"--upstream must name a checkout of karpathy/nanochat, got {cfg.upstream}, which has no nanochat/gpt.py. "
            "Clone the repository, and give the folder that holds its README.",
            exit_code=2,
        )
    for name in ("depth", "rows", "passes", "steps", "rounds"):
        if getattr(cfg, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(cfg, name)}", exit_code=2)
    sides = (["ours", "upstream"] if cfg.upstream is not None else ["ours"]) * cfg.rounds
    sides += ["ours"] if cfg.upstream is not None else []
    runs = []
    for side in sides:
        told = measure(side, cfg)
        runs.append((side, told))
        log(
            f"{side:<10}{1000 * median(told['seconds']):>9.1f} ms per step, first step done after "
            f"{told['start']:.0f} s, {told['memory'] / 1e9:.1f} GB, attention: {told['attention']}, "
            f"loss {told['loss']:.3f}"
        )
    print(json.dumps(figures(cfg, runs)), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Training on one accelerator, ours beside upstream nanochat's: tokens a second by the clock, MFU, memory.

python -m bench.gpu --depth 12 --upstream DIR     # DIR: a checkout of karpathy/nanochat
python -m bench.gpu --depth 20 --rows 8 --no-compile

Each side is a process that has the device alone; they take turns, ours first and last, so that a device that heats up
slows both. Both train compiled on random tokens: speed does not depend on them. Upstream's attention is FlashAttention
3 where its package can load it; NANOCHAT_FLASH_KERNEL gives ours the same.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nanochat.common import UserError, log, run
from nanochat.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Config:
    """Training speed on one accelerator: a line for each run, and as the last line one JSON object."""

    depth: int = 12
    """layers; channels are 64 x depth, heads have 128"""
    upstream: Path | None = None
    """a checkout of karpathy/nanochat to run beside ours"""
    rows: int = 16
    """rows of a pass"""
    passes: int = 4
    """passes of a step"""
    max_seq_len: int = 2048
    """tokens of a row"""
    vocab_size: int = 32768
    """tokens of the vocabulary"""
    steps: int = 10
    """timed steps of a run, after three"""
    rounds: int = 2
    """runs of each side"""
    compile: bool = True
    """torch.compile, on both sides"""
    device_type: str = "cuda"
    """cuda or npu; cpu for a trial, where bench.train is the benchmark"""


def shape_of(cfg: Config) -> GPTConfig:
    """The model of a depth, as both sides have it."""
    heads = max(cfg.depth * 64 // 128, 1)
    return GPTConfig(cfg.max_seq_len, cfg.vocab_size, cfg.depth, heads, heads, heads * 128)


def measure(side: str, cfg: Config) -> dict[str, Any]:
    """One run of a side, in a process of its own; UserError with its last words if it fails."""
    task = {"side": side, "shape": asdict(shape_of(cfg)), "rows": cfg.rows, "passes": cfg.passes, "steps": cfg.steps,
            "compile": cfg.compile, "device": cfg.device_type}  # fmt: skip
    home = cfg.upstream.resolve() if side == "upstream" and cfg.upstream else ROOT
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    own = {"PYTHONPATH": str(home), "NANOCHAT_DEVICE": cfg.device_type}
    eager = {} if cfg.compile else {"TORCHDYNAMO_DISABLE": "1"}  # upstream decorates its optimizer with torch.compile
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        done = subprocess.run(
            [sys.executable, str(ROOT / "bench" / "gpu" / "side.py"), json.dumps(task)],
            cwd=home, env={**alone, **own, **eager}, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        errors.seek(0)
        words = [line for line in errors.read().splitlines() if line.strip()][-5:]
    raise UserError(f"{side} ended with code {done.returncode}:\n  " + "\n  ".join(words))


def figures(cfg: Config, runs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The JSON object, from the median step of all runs of a side."""
    tokens = cfg.rows * cfg.passes * cfg.max_seq_len
    with torch.device("meta"):
        flops = GPT(shape_of(cfg)).flops_per_token()
    result: dict[str, Any] = {"benchmark": "gpu", "depth": cfg.depth, "compiled": cfg.compile}
    own = [told for side, told in runs if side == "ours"]
    peak = own[0]["peak_flops"]
    result |= {"device": own[0]["device"], "attention": own[0]["attention"], "tokens_per_step": tokens}
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
    """Measure in turns."""
    if cfg.upstream is not None and not (cfg.upstream / "nanochat" / "gpt.py").is_file():
        raise UserError(
            f"--upstream must name a checkout of karpathy/nanochat, got {cfg.upstream}, which has no nanochat/gpt.py", 2
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
        log(f"{side:<10}{1000 * median(told['seconds']):>9.1f} ms a step, first step after {told['start']:.0f} s, "
            f"{told['memory'] / 1e9:.1f} GB, attention: {told['attention']}, loss {told['loss']:.3f}")  # fmt: skip
    print(json.dumps(figures(cfg, runs)), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Operators that one training step launches on an NPU, counted on the emulated one, beside plain kernels.

python -m bench.npu_ops --quick              # twelve narrow layers: ends within 50 seconds
python -m bench.npu_ops                      # d12 as it is trained: 768 channels, vocabulary 32,768
python -m bench.npu_ops --chip 910_93xx --depth 8

An eager NPU is bound by the host that launches operators, so their number is its speed where a pass holds few tokens.
One row of 2,048 tokens; views and allocations are no operators. Plain is the same code with --kernels plain.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import UserError, log, run

ROOT = Path(__file__).resolve().parent.parent.parent
PHASES = ("forward", "backward", "optimizer")
LENGTH = 2048
# A step sends its inputs and targets to the device, and reads the figures of its log from there: once.
BATCH_COPIES, LOG_READS = 2, 1


@dataclass(frozen=True)
class Task:
    """What a process on the emulated NPU counts."""

    kernels: str
    depth: int
    width: int
    vocab_size: int
    chip: str
    length: int = LENGTH


def count(task: Task) -> dict[str, Any]:
    """The counts of one step, from a process on the emulated NPU; UserError with its last words if it fails."""
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NANOCHAT_DTYPE", "NANOCHAT_DEVICE", "NANOCHAT_KERNELS")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    asked = json.dumps({name: value for name, value in vars(task).items() if name != "chip"})
    side = [sys.executable, "-m", "bench.npu_ops.side", asked]
    command = [sys.executable, "-m", "tests.emulated_npu", "--chip", task.chip, "--", *side]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        done = subprocess.run(
            command, cwd=ROOT, env={**inherited, **own}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        errors.seek(0)
        words = [line for line in errors.read().splitlines() if line.strip()][-5:]
    raise UserError(
        f"counting with --kernels {task.kernels} failed with code {done.returncode}:\n  " + "\n  ".join(words)
    )


def operators(counts: Mapping[str, Any], *phases: str) -> int:
    """Operators launched in some phases, by default in the whole step."""
    return sum(sum(counts[phase].values()) for phase in phases or PHASES)


def per_layer(deep: Mapping[str, Any], shallow: Mapping[str, Any], layers: int, *phases: str) -> float:
    """Operators that each of `layers` more layers adds."""
    return (operators(deep, *phases) - operators(shallow, *phases)) / layers


def extra(counts: Mapping[str, Any]) -> tuple[int, int, int]:
    """Host synchronisations besides the log's, copies besides the batch's and the log's, and fallbacks."""
    copies = Counter(counts["copies"]) - Counter({"host to device": BATCH_COPIES, "device to host": LOG_READS})
    return (
        sum(counts["synchronisations"].values()) - LOG_READS,
        copies.total(),
        sum(counts["unsupported"].values()),
    )


def figures(fused: Mapping[str, Any], plain: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The JSON object. Ratios are of operators; `model_vs_plain` leaves the optimizer out."""
    syncs, copies, unsupported = extra(fused)
    model = ("forward", "backward")
    return {
        "benchmark": "npu_ops",
        "chip": task.chip,
        "depth": task.depth,
        "width": task.width,
        "operators_vs_plain": round(operators(fused) / operators(plain), 4),
        "model_vs_plain": round(operators(fused, *model) / operators(plain, *model), 4),
        "operators": operators(fused),
        "plain_operators": operators(plain),
        **{phase: operators(fused, phase) for phase in PHASES},
        "host_syncs": syncs,
        "copies": copies,
        "unsupported": unsupported,
    }


def table(fused: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """A line for each phase, and the most frequent operators of either side."""
    lines = [f"{'':<12}{'fused':>8}{'plain':>8}{'ratio':>8}   most frequent"]
    for phase in (*PHASES, "step"):
        phases = PHASES if phase == "step" else (phase,)
        ours, theirs = operators(fused, *phases), operators(plain, *phases)
        most = sum((Counter(fused[p]) for p in phases), Counter()).most_common(5)
        words = ", ".join(f"{name} {n}" for name, n in most)
        lines.append(f"{phase:<12}{ours:>8}{theirs:>8}{ours / theirs:>8.2f}   {words}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Config:
    """Operators of one training step on the emulated NPU: a table, and as the last line one JSON object."""

    quick: bool = False
    """twelve narrow layers and a small vocabulary: counts depend on neither"""
    depth: int = 12
    """layers"""
    chip: str = "910B3"
    """the chip to emulate: 910B3 or 910_93xx; others have no fused kernels to train with"""
    layers: bool = False
    """count four layers fewer too, and say what a layer adds"""


def main(cfg: Config) -> None:
    """Count both sides."""
    if cfg.chip not in ("910B3", "910_93xx"):
        raise UserError(f"--chip must be 910B3 or 910_93xx, got {cfg.chip!r}", exit_code=2)
    if cfg.depth < 5:
        raise UserError(f"--depth must be at least 5, got {cfg.depth}", exit_code=2)
    width, vocab_size = (256, 1024) if cfg.quick else (-(-cfg.depth * 64 // 128) * 128, 32768)
    task = Task("auto", cfg.depth, width, vocab_size, cfg.chip)
    fused = count(task)
    plain = count(Task("plain", cfg.depth, width, vocab_size, cfg.chip))
    log(f"one step of {cfg.depth} layers, {width} channels, 1 x {LENGTH} tokens on an emulated {cfg.chip}")
    log(table(fused, plain))
    for side, counts in (("fused", fused), ("plain", plain)):
        log(f"{side}: waits {counts['synchronisations']}, copies {counts['copies']}, "
            f"unsupported {counts['unsupported']}")  # fmt: skip
    result = figures(fused, plain, task)
    if cfg.layers:
        shallow = count(Task("auto", cfg.depth - 4, width, vocab_size, cfg.chip))
        model = per_layer(fused, shallow, 4, "forward", "backward")
        step = per_layer(fused, shallow, 4, "optimizer")
        rest = operators(fused, "forward", "backward") - model * cfg.depth
        log(f"a layer adds {model} operators to a pass and {step} to the optimizer; {rest} of a pass are no layer's")
        result |= {"per_layer": model, "per_pass": rest, "optimizer_per_layer": step}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

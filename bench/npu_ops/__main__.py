"""Counts the operators of one training step, and the bytes that they move, on the emulated NPU.

python -m bench.npu_ops --quick              # twelve narrow layers; two CPU minutes
python -m bench.npu_ops                      # d12 at its real size: 768 channels, 32,768 tokens
python -m bench.npu_ops --chip 910_93xx --depth 8
python -m bench.npu_ops --quick --against ../nanochat ../nanochat-npu   # upstream and ports

What is compared: our step with the fused kernels, the same code with --kernels plain, and the steps
of other checkouts, uncompiled and in bf16, each with its own model and optimizer. The fused side is
counted once more with its passes and its Muon step captured as graphs. The step has one row of
2,048 tokens.

How: the host launches the operators of an uncompiled step one by one, and their number limits
passes of few tokens. Larger passes are limited by matmuls, and by the bytes that all other
operators move, the vector operators. Such an operator counts every tensor that it reads and every
tensor that it writes once; a tensor that is changed in place counts twice, a lookup counts the rows
that it finds. Matmuls and attention are left out of the bytes, views and allocations are left out
of both.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import tables
from bench.processes import ROOT, Side, check_at_least, check_checkout, environment, refuse
from nanochat.common import log
from nanochat.data.command_line import run

PHASES = ("forward", "backward", "optimizer")
MODEL = ("forward", "backward")
LENGTH = 2048
MATMULS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear")
CHIPS = ("910B3", "910_93xx")
SHALLOWER = 4  # layers
# Every step copies its inputs and its targets to the device, and reads its log's figures once.
BATCH_COPIES = 2
LOG_READS = 1
UNSET = ("NANOCHAT_DTYPE", "NANOCHAT_DEVICE", "NANOCHAT_KERNELS")

Counts = Mapping[str, Any]  # of one step, as bench/npu_ops/side.py answers


@dataclass(frozen=True)
class Config:
    """Print the operators of one training step as a table, and as one JSON object."""

    quick: bool = False
    """use narrow layers and a small vocabulary; the counts do not depend on them"""
    depth: int = 12
    """number of layers, at least 5"""
    chip: str = "910B3"
    """chip to emulate, 910B3 or 910_93xx; the other chips have no fused kernels for training"""
    against: tuple[Path, ...] = ()
    """folders of checkouts of karpathy/nanochat, or of ports of it, to count beside ours; default:
    ours alone"""
    layers: bool = False
    """also count a model of four layers fewer, and print how many operators a layer adds"""


@dataclass(frozen=True)
class Task:
    """One step to count."""

    kernels: str
    depth: int
    width: int
    vocab_size: int
    chip: str
    length: int = LENGTH
    graphs: bool = False


def count(task: Task, checkout: Path | None = None) -> dict[str, Any]:
    """Count one step of ours, or of another checkout, in a process on the emulated NPU."""
    name = f"counting with --kernels {task.kernels}"
    home = ROOT
    variables = {}
    if task.graphs:
        variables["TASK_QUEUE_ENABLE"] = "1"
    if checkout is not None:
        name = f"counting the step of {checkout}"
        home = checkout.resolve()
        variables = {"TORCHDYNAMO_DISABLE": "1", "NANOCHAT_DTYPE": "bfloat16"}
        settings = home / "configs/global.yaml"
        if settings.is_file():  # one port reads its settings from the file that a variable names
            variables["NANOCHAT_CONFIG"] = str(settings)
    own_environment = environment(home)
    for variable in UNSET:
        own_environment.pop(variable, None)
    emulator = [sys.executable, "-m", "tests.emulated_npu", "--chip", task.chip, "--"]
    arguments = json.dumps({**asdict(task), "port": checkout is not None})
    program = [sys.executable, str(ROOT / "bench/npu_ops/side.py"), arguments]
    side = Side(name, [*emulator, *program], {**own_environment, **variables}, ROOT)
    try:
        return side.answer()
    finally:
        side.close()


def operators(counts: Counts, phases: Sequence[str] = PHASES) -> int:
    """Return how many operators were launched in these phases."""
    return sum(sum(counts[phase].values()) for phase in phases)


def vector_bytes(counts: Counts, phases: Sequence[str] = PHASES) -> int:
    """Return how many bytes the operators that are neither matmuls nor attention moved."""
    total = 0
    for phase in phases:
        for name, size in counts["bytes"][phase].items():
            if name not in MATMULS and "attention" not in name:
                total += size
    return total


def summary(counts: Counts, fused: Counts, length: int) -> dict[str, Any]:
    """Return the figures of a side; ours with fused kernels as shares of them.

    Waits and copies are those beyond what every step needs.
    """
    needed = Counter({"host to device": BATCH_COPIES, "device to host": LOG_READS})
    return {
        **{phase: operators(counts, [phase]) for phase in PHASES},
        "operators": operators(counts),
        "fused_of_operators": operators(fused) / operators(counts),
        "vector_bytes_per_token": round(vector_bytes(counts) / length),
        "fused_of_vector_bytes": vector_bytes(fused) / vector_bytes(counts),
        "waits": sum(counts["synchronisations"].values()) - LOG_READS,
        "copies": (Counter(counts["copies"]) - needed).total(),
        "unsupported": sum(counts["unsupported"].values()),
        "weights_cast": counts.get("casts", 0),
    }


def show(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one line for each side."""
    rows = []
    for name, figures in summaries.items():
        row = [
            name,
            *(figures[phase] for phase in PHASES),
            figures["operators"],
            f"{figures['fused_of_operators']:.3f}",
            figures["vector_bytes_per_token"] // 1000,
            f"{figures['fused_of_vector_bytes']:.3f}",
            figures["waits"],
            figures["weights_cast"],
        ]
        rows.append(row)
    titles = ("", *PHASES, "operators", "fused of it", "kB a token", "fused of it")
    tables.show((*titles, "waits", "weights cast"), rows)


def per_layer(fused: Counts, shallow: Counts, depth: int) -> dict[str, float]:
    """Return how many operators a layer adds to passes and optimizer, and the others of a pass."""
    model = (operators(fused, MODEL) - operators(shallow, MODEL)) / SHALLOWER
    optimizer = (operators(fused, ["optimizer"]) - operators(shallow, ["optimizer"])) / SHALLOWER
    return {
        "per_layer": model,
        "per_pass": operators(fused, MODEL) - model * depth,
        "optimizer_per_layer": optimizer,
    }


def main(cfg: Config) -> None:
    """Count both sides and print the figures."""
    if cfg.chip not in CHIPS:
        raise refuse(f"--chip must be {' or '.join(CHIPS)}, got {cfg.chip!r}")
    check_at_least(SHALLOWER + 1, depth=cfg.depth)
    for folder in cfg.against:
        check_checkout("--against", folder)
    width = 256
    vocab_size = 1024
    if not cfg.quick:
        width = -(-cfg.depth * 64 // 128) * 128
        vocab_size = 32768
    task = Task("auto", cfg.depth, width, vocab_size, cfg.chip)
    fused = count(task)
    sides = {
        "fused": fused,
        "plain": count(replace(task, kernels="plain")),
        **{str(folder): count(task, folder) for folder in cfg.against},
    }
    log(
        f"one step of {cfg.depth} layers with {width} channels on 1 x {LENGTH} tokens, on an "
        f"emulated {cfg.chip}"
    )
    summaries = {name: summary(counts, fused, LENGTH) for name, counts in sides.items()}
    show(summaries)
    captured = count(replace(task, graphs=True))
    in_graphs = sum(captured["captured"].values())
    log(f"with graphs: {operators(captured)} launches, {in_graphs} more in the graphs")
    result: dict[str, Any] = {
        "chip": cfg.chip,
        "depth": cfg.depth,
        "width": width,
        "launches_with_graphs": operators(captured),
        **summaries,
    }
    if cfg.layers:
        shallow = count(replace(task, depth=cfg.depth - SHALLOWER))
        added = per_layer(fused, shallow, cfg.depth)
        log(
            f"each layer adds {added['per_layer']} operators to a pass and "
            f"{added['optimizer_per_layer']} to the optimizer; "
            f"a pass has {added['per_pass']} others"
        )
        result |= added
    tables.finish("npu_ops", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

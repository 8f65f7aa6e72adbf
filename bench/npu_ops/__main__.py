"""Counts the operators of one training step, and the bytes that they move, on the emulated NPU.

python -m bench.npu_ops --quick              # twelve narrow layers; two CPU minutes without a 16-bit matrix unit
python -m bench.npu_ops                      # d12 at its real size: 768 channels, a vocabulary of 32,768
python -m bench.npu_ops --chip 910_93xx --depth 8
python -m bench.npu_ops --quick --against ../nanochat ../nanochat-npu   # checkouts of upstream and of ports of it

What is compared: our step with the fused kernels, the same code with --kernels plain, and the steps of other checkouts,
uncompiled and in bf16, each with its own model and optimizer. The fused side is counted once more with its passes and
its Muon step captured as graphs. The step has one row of 2,048 tokens.

How: the host launches the operators of an uncompiled step one by one, and their number limits passes of few tokens.
Larger passes are limited by matmuls, and by the bytes that all other operators move, the vector operators. Such an
operator counts every tensor that it reads and every tensor that it writes once; a tensor that is changed in place counts
twice, a lookup counts the rows that it finds. Matmuls and attention are left out of the bytes, views and allocations are
left out of both.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.processes import ROOT, Side, check_at_least, check_checkout, environment
from nanochat.common import UserError, log, run

PHASES = ("forward", "backward", "optimizer")
MODEL = ("forward", "backward")
LENGTH = 2048
MATMULS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear")
CHIPS = ("910B3", "910_93xx")
SHALLOWER = 4  # layers
# Every step copies its inputs and its targets to the device, and reads the figures for its log from there once.
BATCH_COPIES, LOG_READS = 2, 1
UNSET = ("NANOCHAT_DTYPE", "NANOCHAT_DEVICE", "NANOCHAT_KERNELS")

Counts = Mapping[str, Any]  # of one step, as bench/npu_ops/side.py answers


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
    home, variables = ROOT, {}
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
    side = Side(
        name,
        [*emulator, *program],
        {**own_environment, **variables},
        ROOT,
    )
    try:
        return side.answer()
    finally:
        side.close()


# --- figures ---------------------------------------------------------------------------------------


def operators(counts: Counts, phases: Sequence[str] = PHASES) -> int:
    """Return how many operators were launched in these phases."""
    return sum(sum(counts[phase].values()) for phase in phases)


def vector_only(names: Mapping[str, int]) -> Counter[str]:
    """Return the entries of operators that are neither matmuls nor attention."""
    kept_names = (name for name in names if name not in MATMULS and "attention" not in name)
    return Counter({name: names[name] for name in kept_names})


def vector_bytes(counts: Counts, phases: Sequence[str] = PHASES) -> int:
    """Return how many bytes the vector operators of these phases moved."""
    return sum(vector_only(counts["bytes"][phase]).total() for phase in phases)


def extra(counts: Counts) -> dict[str, int]:
    """Return synchronisations and copies beyond those that every step needs, and fallbacks to the CPU."""
    needed = Counter({"host to device": BATCH_COPIES, "device to host": LOG_READS})
    return {
        "host_syncs": sum(counts["synchronisations"].values()) - LOG_READS,
        "copies": (Counter(counts["copies"]) - needed).total(),
        "unsupported": sum(counts["unsupported"].values()),
    }


def figures(
    fused: Counts,
    plain: Counts,
    captured: Counts,
    task: Task,
) -> dict[str, Any]:
    """Return the JSON object. Ratios compare with the plain side; `model_vs_plain` leaves the optimizer out."""
    own_bytes, plain_bytes = vector_bytes(fused), vector_bytes(plain)
    model_ratio = operators(fused, MODEL) / operators(plain, MODEL)
    return {
        "benchmark": "npu_ops",
        "chip": task.chip,
        "depth": task.depth,
        "width": task.width,
        "operators_vs_plain": round(operators(fused) / operators(plain), 4),
        "model_vs_plain": round(model_ratio, 4),
        "operators": operators(fused),
        "plain_operators": operators(plain),
        **{phase: operators(fused, [phase]) for phase in PHASES},
        "vector_bytes_per_token": round(own_bytes / task.length),
        "plain_vector_bytes_per_token": round(plain_bytes / task.length),
        "vector_bytes_vs_plain": round(own_bytes / plain_bytes, 4),
        "launches_with_graphs": operators(captured),
        **extra(fused),
    }


def beside(fused: Counts, port: Counts, length: int) -> dict[str, Any]:
    """Return the counts of one port, and ours as shares of them."""
    own_bytes, port_bytes = vector_bytes(fused), vector_bytes(port)
    return {
        "operators": operators(port),
        "ours_of_operators": round(operators(fused) / operators(port), 4),
        "vector_bytes_per_token": round(port_bytes / length),
        "ours_of_vector_bytes": round(own_bytes / port_bytes, 4),
        **extra(port),
    }


def table(fused: Counts, plain: Counts, length: int) -> str:
    """Return operators, then kB of vector operators a token: one line per phase, and what weighs most."""
    lines = []
    for unit in ("operators", "kB a token"):
        lines.append(f"{unit:<12}{'fused':>8}{'plain':>8}{'ratio':>8}   most")
        for title, phases in (*((phase, [phase]) for phase in PHASES), ("step", PHASES)):
            by_name: Counter[str] = Counter()
            if unit == "operators":
                ours, theirs = operators(fused, phases), operators(plain, phases)
                for phase in phases:
                    by_name += Counter(fused[phase])
            else:
                divisor = 1000 * length
                ours = vector_bytes(fused, phases) // divisor
                theirs = vector_bytes(plain, phases) // divisor
                for phase in phases:
                    by_name += vector_only(fused["bytes"][phase])
                by_name = Counter({name: moved // divisor for name, moved in by_name.items()})
            heaviest = ", ".join(f"{name} {number}" for name, number in by_name.most_common(5))
            lines.append(
                f"{title:<12}{ours:>8}{theirs:>8}{ours / max(theirs, 1):>8.2f}   {heaviest}"
            )
    return "\n".join(lines)


def ports_table(fused: Counts, ports: Mapping[str, Counts], length: int) -> str:
    """Return one line for our side and for each port."""
    width = max(12, *(len(name) + 2 for name in ports))
    titles = (*PHASES, "operators", "ours of it", "kB a token", "ours of it", "host syncs")
    lines = ["".ljust(width) + "".join(f"{title:>12}" for title in titles)]
    for name, counts in {"fused": fused, **ports}.items():
        about = beside(fused, counts, length)
        cells = [
            *(operators(counts, [phase]) for phase in PHASES),
            about["operators"],
            f"{about['ours_of_operators']:.3f}",
            about["vector_bytes_per_token"] // 1000,
            f"{about['ours_of_vector_bytes']:.3f}",
            about["host_syncs"],
        ]
        lines.append(name.ljust(width) + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def names_of(checkouts: Sequence[Path]) -> dict[str, Path]:
    """Return the checkouts by the names of their folders, or by their paths where two names are the same."""
    names = Counter(folder.resolve().name for folder in checkouts)
    by_name: dict[str, Path] = {}
    for folder in checkouts:
        name = folder.resolve().name
        by_name[name if names[name] == 1 else str(folder)] = folder
    return by_name


def per_layer(fused: Counts, shallow: Counts, depth: int) -> dict[str, float]:
    """Return how many operators a layer adds to the passes and to the optimizer, and how many others a pass has."""
    model = (operators(fused, MODEL) - operators(shallow, MODEL)) / SHALLOWER
    optimizer = (operators(fused, ["optimizer"]) - operators(shallow, ["optimizer"])) / SHALLOWER
    other_operators = operators(fused, MODEL) - model * depth
    return {
        "per_layer": model,
        "per_pass": other_operators,
        "optimizer_per_layer": optimizer,
    }


# --- command line ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Print the operators of one training step as a table, and as one JSON object on the last line."""

    quick: bool = False
    """use narrow layers and a small vocabulary; the counts do not depend on them"""
    depth: int = 12
    """number of layers, at least 5"""
    chip: str = "910B3"
    """chip to emulate, 910B3 or 910_93xx; the other chips have no fused kernels for training"""
    against: tuple[Path, ...] = ()
    """folders of checkouts of karpathy/nanochat, or of ports of it, to count beside ours; default: ours alone"""
    layers: bool = False
    """also count a model of four layers fewer, and print how many operators a layer adds"""


def main(cfg: Config) -> None:
    """Count both sides and print the figures."""
    if cfg.chip not in CHIPS:
        raise UserError(f"--chip must be {' or '.join(CHIPS)}, got {cfg.chip!r}", exit_code=2)
    check_at_least(SHALLOWER + 1, depth=cfg.depth)
    for folder in cfg.against:
        check_checkout("--against", folder)
    width, vocab_size = 256, 1024
    if not cfg.quick:
        width, vocab_size = -(-cfg.depth * 64 // 128) * 128, 32768
    task = Task(
        "auto",
        cfg.depth,
        width,
        vocab_size,
        cfg.chip,
    )
    sides = {
        "fused": count(task),
        "plain": count(replace(task, kernels="plain")),
        "captured": count(replace(task, graphs=True)),
    }
    fused, plain, captured = sides.values()
    log(
        f"one step of {cfg.depth} layers with {width} channels on 1 x {LENGTH} tokens, on an emulated {cfg.chip}"
    )
    log(table(fused, plain, LENGTH))
    result = figures(
        fused,
        plain,
        captured,
        task,
    )
    in_graphs = sum(captured["captured"].values())
    log(f"with graphs: {operators(captured)} launches, {in_graphs} more in the graphs")
    ports = {name: count(task, folder) for name, folder in names_of(cfg.against).items()}
    if ports:
        log(ports_table(fused, ports, LENGTH))
        result["against"] = {name: beside(fused, counts, LENGTH) for name, counts in ports.items()}
    for name, counts in {
        "fused": fused,
        "plain": plain,
        **ports,
    }.items():
        log(
            f"{name}: waits {counts['synchronisations']}, copies {counts['copies']}, unsupported "
            f"{counts['unsupported']}, weights cast for the emulator {counts.get('casts', 0)}"
        )
    if cfg.layers:
        added = per_layer(fused, count(replace(task, depth=cfg.depth - SHALLOWER)), cfg.depth)
        log(
            f"each layer adds {added['per_layer']} operators to a pass and {added['optimizer_per_layer']} to the "
            f"optimizer; a pass has {added['per_pass']} others"
        )
        result |= added
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

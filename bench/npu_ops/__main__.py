"""Counts the operators of one training step, and the bytes that they move, on the emulated NPU.

python -m bench.npu_ops --quick              # twelve narrow layers; two CPU minutes without a 16-bit matrix unit
python -m bench.npu_ops                      # d12 at its real size: 768 channels, a vocabulary of 32,768
python -m bench.npu_ops --chip 910_93xx --depth 8
python -m bench.npu_ops --quick --against ../nanochat ../nanochat-npu   # checkouts of upstream and of ports of it

The host launches the operators of an uncompiled step one by one: their number limits passes of few tokens. Larger
passes are limited by matmuls, and by the bytes that all other operators move, the vector operators. Such an operator
counts every tensor that it reads and every tensor that it writes once; a tensor that is changed in place counts twice,
a lookup counts the rows that it finds. Matmuls and attention are left out of the bytes, views and allocations are left
out of both. The step has one row of 2,048 tokens.

The plain side runs the same code with --kernels plain, and with Muon's matrices stacked, as published ports have them.
The fused side is counted a second time with its passes and its Muon step captured as graphs (--graphs).

--against counts the steps of other checkouts too, uncompiled and in bf16, each with its own model and optimizer. Their
models are not ours: an older port lacks parts that this one has. torch_npu multiplies a weight and an input of two
dtypes, and the emulated NPU does not, so such a weight is cast first; the last lines say how many were.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.upstream import check_checkout
from nanochat.common import UserError, log, run

ROOT = Path(__file__).resolve().parent.parent.parent
PHASES = ("forward", "backward", "optimizer")
LENGTH = 2048
MATMULS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear")
# Every step copies its inputs and its targets to the device, and reads the figures for its log from there once.
BATCH_COPIES, LOG_READS = 2, 1


@dataclass(frozen=True)
class Task:
    """One step to count, in a process on the emulated NPU."""

    kernels: str
    depth: int
    width: int
    vocab_size: int
    chip: str
    length: int = LENGTH
    stacked: bool = True  # Muon steps matrices of one shape together, with any kernels
    graphs: bool = False


def count(task: Task, checkout: Path | None = None) -> dict[str, Any]:
    """Count one step of ours, or of another checkout, in a process on the emulated NPU.

    A process that fails is a UserError with the last lines it printed.
    """
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    unset = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "NANOCHAT_DTYPE",
        "NANOCHAT_DEVICE",
        "NANOCHAT_KERNELS",
    )
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    asked = json.dumps({name: value for name, value in vars(task).items() if name != "chip"})
    if checkout is None:
        own |= {"PYTHONPATH": str(ROOT)} | ({"TASK_QUEUE_ENABLE": "1"} if task.graphs else {})
        side, what = (
            [sys.executable, "-m", "bench.npu_ops.side", asked],
            f"with --kernels {task.kernels}",
        )
    else:
        own |= port_environment(checkout)
        side, what = (
            [sys.executable, str(ROOT / "bench/npu_ops/port.py"), asked],
            f"the step of {checkout}",
        )
    command = [sys.executable, "-m", "tests.emulated_npu", "--chip", task.chip, "--", *side]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**inherited, **own},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        errors.seek(0)
        words = [line for line in errors.read().splitlines() if line.strip()][-5:]
    raise UserError(
        f"counting {what} failed with code {done.returncode}; its last lines:\n  "
        + "\n  ".join(words)
    )


def port_environment(checkout: Path) -> dict[str, str]:
    """The environment in which a checkout's own `nanochat` is imported, uncompiled and in bf16."""
    settings = (
        checkout / "configs/global.yaml"
    )  # one port reads its settings from the file that a variable names
    return {
        "PYTHONPATH": str(checkout.resolve()),
        "TORCHDYNAMO_DISABLE": "1",
        "NANOCHAT_DTYPE": "bfloat16",
        **({"NANOCHAT_CONFIG": str(settings.resolve())} if settings.is_file() else {}),
    }


def operators(counts: Mapping[str, Any], *phases: str) -> int:
    """How many operators were launched in these phases; without phases, in the whole step."""
    return sum(sum(counts[phase].values()) for phase in phases or PHASES)


def vector_bytes(counts: Mapping[str, Any], *phases: str) -> int:
    """How many bytes the vector operators of these phases moved; without phases, of the whole step."""
    moved = (counts["bytes"][phase].items() for phase in phases or PHASES)
    return sum(number for names in moved for name, number in names if vector_only(name))


def vector_only(name: str) -> bool:
    """Whether an operator is neither a matmul nor attention."""
    return name not in MATMULS and "attention" not in name


def per_layer(
    deep: Mapping[str, Any], shallow: Mapping[str, Any], layers: int, *phases: str
) -> float:
    """How many operators each of the `layers` additional layers adds."""
    return (operators(deep, *phases) - operators(shallow, *phases)) / layers


def extra(counts: Mapping[str, Any]) -> tuple[int, int, int]:
    """Synchronisations and copies beyond those that every step needs, and operators that fell back to the CPU."""
    copies = Counter(counts["copies"]) - Counter(
        {"host to device": BATCH_COPIES, "device to host": LOG_READS}
    )
    return (
        sum(counts["synchronisations"].values()) - LOG_READS,
        copies.total(),
        sum(counts["unsupported"].values()),
    )


def beside(fused: Mapping[str, Any], port: Mapping[str, Any], length: int) -> dict[str, Any]:
    """What the JSON object says of one port: its counts, and ours as shares of them."""
    ours, theirs = vector_bytes(fused) / length, vector_bytes(port) / length
    syncs, copies, unsupported = extra(port)
    return {
        "operators": operators(port),
        "ours_of_operators": round(operators(fused) / operators(port), 4),
        "vector_bytes_per_token": round(theirs),
        "ours_of_vector_bytes": round(ours / theirs, 4),
        "host_syncs": syncs,
        "copies": copies,
        "unsupported": unsupported,
    }


def against_table(
    fused: Mapping[str, Any], ports: Mapping[str, Mapping[str, Any]], length: int
) -> str:
    """One line for our side and for each port: operators by phase, kB of vector operators a token, host syncs."""
    wide = max(12, *(len(name) + 2 for name in ports))
    columns = (*PHASES, "operators", "ours of it", "kB a token", "ours of it", "host syncs")
    lines = ["".ljust(wide) + "".join(name.rjust(12) for name in columns)]
    for name, counts in {"fused": fused, **ports}.items():
        said = beside(fused, counts, length)
        cells = [str(operators(counts, phase)) for phase in PHASES]
        cells += [str(said["operators"]), f"{said['ours_of_operators']:.3f}"]
        cells += [
            str(said["vector_bytes_per_token"] // 1000),
            f"{said['ours_of_vector_bytes']:.3f}",
        ]
        lines.append(
            name.ljust(wide) + "".join(cell.rjust(12) for cell in (*cells, str(said["host_syncs"])))
        )
    return "\n".join(lines)


def names_of(checkouts: Sequence[Path]) -> dict[str, Path]:
    """The checkouts by the names of their folders, or by their whole paths where two folders have one name."""
    short = [folder.resolve().name for folder in checkouts]
    return {
        name if short.count(name) == 1 else str(folder): folder
        for name, folder in zip(short, checkouts, strict=True)
    }


def figures(
    fused: Mapping[str, Any], plain: Mapping[str, Any], captured: Mapping[str, Any], task: Task
) -> dict[str, Any]:
    """The JSON object. Ratios compare with the plain side; `model_vs_plain` leaves the optimizer out."""
    syncs, copies, unsupported = extra(fused)
    model = ("forward", "backward")
    ours, theirs = vector_bytes(fused) / task.length, vector_bytes(plain) / task.length
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
        "vector_bytes_per_token": round(ours),
        "plain_vector_bytes_per_token": round(theirs),
        "vector_bytes_vs_plain": round(ours / theirs, 4),
        "launches_with_graphs": operators(captured),
        "host_syncs": syncs,
        "copies": copies,
        "unsupported": unsupported,
    }


def table(fused: Mapping[str, Any], plain: Mapping[str, Any], length: int) -> str:
    """Operators, then kB of vector operators a token: one line per phase, with what weighs most on our side."""
    lines = []
    for what in ("operators", "kB a token"):
        lines.append(f"{what:<12}{'fused':>8}{'plain':>8}{'ratio':>8}   most")
        for phase in (*PHASES, "step"):
            phases = PHASES if phase == "step" else (phase,)
            if what == "operators":
                ours, theirs = operators(fused, *phases), operators(plain, *phases)
                most = sum((Counter(fused[p]) for p in phases), Counter()).most_common(5)
            else:
                ours, theirs = (
                    vector_bytes(side, *phases) // 1000 // length for side in (fused, plain)
                )
                moved = sum((Counter(fused["bytes"][p]) for p in phases), Counter())
                vector = {
                    name: n // 1000 // length for name, n in moved.items() if vector_only(name)
                }
                most = Counter(vector).most_common(5)
            words = ", ".join(f"{name} {n}" for name, n in most)
            lines.append(f"{phase:<12}{ours:>8}{theirs:>8}{ours / max(theirs, 1):>8.2f}   {words}")
    return "\n".join(lines)


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
    if cfg.chip not in ("910B3", "910_93xx"):
        raise UserError(f"--chip must be 910B3 or 910_93xx, got {cfg.chip!r}", exit_code=2)
    if cfg.depth < 5:
        raise UserError(f"--depth must be at least 5, got {cfg.depth}", exit_code=2)
    checkouts = names_of(cfg.against)
    for folder in cfg.against:
        check_checkout("--against", folder)
    width, vocab_size = (256, 1024) if cfg.quick else (-(-cfg.depth * 64 // 128) * 128, 32768)
    task = Task("auto", cfg.depth, width, vocab_size, cfg.chip)
    fused = count(task)
    plain = count(Task("plain", cfg.depth, width, vocab_size, cfg.chip))
    captured = count(Task("auto", cfg.depth, width, vocab_size, cfg.chip, graphs=True))
    log(
        f"one step of {cfg.depth} layers with {width} channels on 1 x {LENGTH} tokens, on an emulated {cfg.chip}"
    )
    log(table(fused, plain, LENGTH))
    for side, counts in (("fused", fused), ("plain", plain)):
        log(
            f"{side}: waits {counts['synchronisations']}, copies {counts['copies']}, "
            f"unsupported {counts['unsupported']}"
        )
    result = figures(fused, plain, captured, task)
    log(
        f"with graphs: {operators(captured)} launches, {sum(captured['captured'].values())} more in the graphs"
    )
    if checkouts:
        ports = {name: count(task, folder) for name, folder in checkouts.items()}
        log(against_table(fused, ports, LENGTH))
        for name, counts in ports.items():
            log(
                f"{name}: waits {counts['synchronisations']}, copies {counts['copies']}, "
                f"unsupported {counts['unsupported']}, weights cast for the emulator {counts['casts']}"
            )
        result["against"] = {name: beside(fused, counts, LENGTH) for name, counts in ports.items()}
    if cfg.layers:
        shallow = count(Task("auto", cfg.depth - 4, width, vocab_size, cfg.chip))
        model = per_layer(fused, shallow, 4, "forward", "backward")
        step = per_layer(fused, shallow, 4, "optimizer")
        rest = operators(fused, "forward", "backward") - model * cfg.depth
        log(
            f"each layer adds {model} operators to a pass and {step} to the optimizer; a pass has {rest} others"
        )
        result |= {"per_layer": model, "per_pass": rest, "optimizer_per_layer": step}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

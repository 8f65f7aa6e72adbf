"""Trains models of growing depth in the same way, and plots bits per byte against training FLOPs.

python -m runs.miniseries                        # d2 to d8 on a CPU, d10 to d20 elsewhere
python -m runs.miniseries --quick                # three tiny models in about a minute; only shows that it works
python -m runs.miniseries --depths 2 4 6         # other depths
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat import device
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError, atomic_path, base_dir, log, read_json, write_json
from nanochat.data.command_line import run
from nanochat.data.corpora import resolve
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime.tracking import read_metrics
from nanochat.tokenizer import tokenizer_dir

ON_CPU, ELSEWHERE = (2, 4, 6, 8), (10, 12, 14, 16, 18, 20)
CPU_RATIO = (
    1.0  # tokens per parameter; at base_train's default of 12, d8 alone would take a CPU two days
)
QUICK_DEPTHS, QUICK_CHANNELS = (1, 2, 3), 32  # channels per layer, and per head
QUICK = (
    "--max_seq_len=128",
    "--window_pattern=L",
    "--total_batch_size=2048",
    "--num_iterations=60",
    "--no_compile",
    "--eval_every=20",
    "--eval_tokens=8192",
)


@dataclass(frozen=True)
class Config:
    """Train the series; its files have their own folder. The same command resumes a series that was stopped."""

    depths: tuple[int, ...] = ()
    """layers of each model; default: 2 4 6 8 on a CPU, 10 12 14 16 18 20 elsewhere"""
    data: str | None = None
    """name of the corpus; default: the only one that is prepared"""
    target_param_data_ratio: float | None = None
    """training tokens per parameter of the matrices and the head; default: 1 on a CPU, base_train's elsewhere"""
    quick: bool = False
    """train three tiny models for sixty steps each, only to show that it works"""


@dataclass(frozen=True)
class Point:
    """One validation of a run."""

    flops: float  # of training up to this validation
    bits_per_byte: float


@dataclass(frozen=True)
class Run:
    """One model of the series."""

    depth: int
    parameters: int
    seconds: float  # of training
    points: list[Point]


def flags(depth: int, corpus: str, cfg: Config, on_cpu: bool) -> list[str]:
    """The flags of base_train for a model of the series."""
    chosen = [f"--depth={depth}", f"--data={corpus}", f"--model_tag=d{depth}"]
    if cfg.quick:
        return [
            *chosen,
            f"--model_dim={QUICK_CHANNELS * depth}",
            f"--head_dim={QUICK_CHANNELS}",
            *QUICK,
        ]
    ratio = cfg.target_param_data_ratio or (CPU_RATIO if on_cpu else None)
    return chosen if ratio is None else [*chosen, f"--target_param_data_ratio={ratio:g}"]


def measured(folder: Path, depth: int) -> Run:
    """Read a finished run's folder, and work out the FLOPs of its validations."""
    step = max(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))
    with torch.device("meta"):
        model = GPT(GPTConfig(**read_json(folder / f"step_{step:06d}" / "meta.json")["model"]))
    lines = read_metrics(folder)
    tokens = round(lines[0]["tokens_per_second"] * lines[0]["seconds"])  # per step
    points = [
        Point(float(line["step"] * tokens * model.flops_per_token()), line["val_bpb"])
        for line in lines
        if line.get("val_bpb") is not None
    ]
    return Run(depth, model.parameter_counts()["total"], lines[-1]["total_seconds"], points)


def draw(series: Sequence[Run], title: str, path: Path) -> None:
    """Draw one line per model, and one through their ends, to a PNG file."""
    from matplotlib.figure import Figure  # needs no display and keeps no global state
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.subplots()
    for model in series:
        flops, bits = [p.flops for p in model.points], [p.bits_per_byte for p in model.points]
        axes.plot(
            flops,
            bits,
            alpha=0.6,
            label=f"d{model.depth}, {model.parameters / 1e6:.1f} M parameters",
        )
    ends = [model.points[-1] for model in series]
    axes.plot([p.flops for p in ends], [p.bits_per_byte for p in ends], "ko--", label="ends")
    axes.set(xscale="log", xlabel="FLOPs of training", ylabel="bits per byte", title=title)
    axes.xaxis.set_minor_formatter(NullFormatter())  # minor labels would overlap
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def prepare(base: Path, corpus: str) -> None:
    """Make a base folder for the series that shares corpus and tokenizer with the user's base folder."""
    base.mkdir(parents=True, exist_ok=True)
    if not tokenizer_dir(corpus).is_dir():
        raise UserError(
            f"{corpus} has no tokenizer; train one: python -m scripts.tok_train --data {corpus}", 2
        )
    for name in ("base_data", "tokenizer"):
        shared = base_dir() / name
        shared.mkdir(exist_ok=True)
        if not (base / name).is_symlink():
            (base / name).symlink_to(shared.resolve(), target_is_directory=True)


def processes() -> int:
    """Return the number of processes of a run: NPROC_PER_NODE, or else one for each device."""
    chosen = os.environ.get("NPROC_PER_NODE")
    if chosen is None:
        module = device.PLATFORMS[device.device_type]().module
        return module.device_count() if module is not None else 1
    if not chosen.isdecimal() or int(chosen) < 1:
        raise UserError(
            f"NPROC_PER_NODE must be the number of processes, 1 or more, got {chosen}; "
            "leave it out to use every device",
            2,
        )
    return int(chosen)


def train(depth: int, corpus: str, base: Path, cfg: Config, on_cpu: bool) -> None:
    """Train one model on all devices of this host, or on as many as NPROC_PER_NODE says."""
    count = processes()
    start = [sys.executable, "-m"]
    if count > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc_per_node={count}", "-m"]
    command = [
        *start,
        "scripts.base_train",
        *(["--"] if count > 1 else []),
        *flags(depth, corpus, cfg, on_cpu),
    ]
    log(f"== d{depth}: {' '.join(command[1:])}")
    code = subprocess.run(command, env={**os.environ, "NANOCHAT_BASE_DIR": str(base)}).returncode
    if code:
        raise UserError(
            f"the run d{depth} ended with code {code}; fix what it reports, and type the same command to resume",
            code,
        )


def main(cfg: Config) -> None:
    """Train the series, draw the picture, and print the figures as JSON."""
    on_cpu = device.device_type == "cpu"
    depths = (
        QUICK_DEPTHS
        if cfg.quick and not cfg.depths
        else cfg.depths or (ON_CPU if on_cpu else ELSEWHERE)
    )
    if min(depths) < 1 or len(set(depths)) < len(depths):
        raise UserError(
            f"--depths must be different numbers of at least 1, got {' '.join(map(str, depths))}", 2
        )
    corpus = resolve(cfg.data).name
    base = base_dir() / "miniseries" / ("quick" if cfg.quick else corpus)
    prepare(base, corpus)
    series = []
    for depth in sorted(depths):
        train(depth, corpus, base, cfg, on_cpu)
        series.append(
            measured(base / checkpoint_dir("base", f"d{depth}").relative_to(base_dir()), depth)
        )
    picture = base / "miniseries.png"
    draw(series, f"{corpus}, on {device.device_type}", picture)
    result = {
        "benchmark": "miniseries",
        "corpus": corpus,
        "picture": str(picture),
        "runs": [asdict(r) for r in series],
    }
    write_json(base / "miniseries.json", result)
    for model in series:
        end = model.points[-1]
        log(
            f"d{model.depth}: {end.flops:.3g} FLOPs, {end.bits_per_byte:.4f} bits per byte, {model.seconds:.0f} s"
        )
    log(f"picture: {picture}")
    print(json.dumps(result))


if __name__ == "__main__":
    run(main, Config, __doc__)

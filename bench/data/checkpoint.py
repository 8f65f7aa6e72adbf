"""Measures saving and loading a checkpoint beside the raw disk.

python -m bench.data.checkpoint --quick                # writes 0.5 GB, ends within 50 seconds
python -m bench.data.checkpoint                        # writes 2.0 GB
python -m bench.data.checkpoint --folder /mnt/disk     # measures this disk, not the base folder's

How: raw writes and saves take turns, because the speed of a disk varies, and both sync their files.
A raw write replaces its previous file only when the new one is complete, as a save does, because
blocks written a moment ago are faster to overwrite. Ours is the save of a training stage: hashed,
described, and renamed at the end.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench import tables
from bench.training import Trainer, byte_tokenizer, random_model
from nanochat import device
from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager import save as saving
from nanochat.checkpoint_manager.locate import make_meta
from nanochat.common import base_dir, log
from nanochat.data.command_line import run
from nanochat.gpt import GPTConfig

BLOCK = 1 << 24  # bytes per raw write
# Parameters and optimizer state have 0.4 and 2.0 GB; the largest tensors are 16 and 67 MB.
QUICK = GPTConfig(128, 8192, n_layer=8, n_head=4, n_kv_head=4, n_embd=512)
LARGE = GPTConfig(128, 16384, n_layer=10, n_head=8, n_kv_head=8, n_embd=1024)


@dataclass(frozen=True)
class Config:
    """Print the speed of checkpoints as a table, and as one JSON object on the last line."""

    quick: bool = False
    """write 0.5 GB instead of 2.0 GB"""
    folder: Path | None = None
    """folder on the disk to measure; default: the base folder"""


def write_raw(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write and sync the same bytes, and nothing else."""
    with open(folder / "new", "wb", buffering=0) as file:
        for tensor in tensors.values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), BLOCK):
                file.write(data[start : start + BLOCK])
        os.fsync(file.fileno())
    os.replace(folder / "new", folder / "raw")


class Stage:
    """A model and its optimizer state, like those of a training stage."""

    def __init__(self, shape: GPTConfig):
        compute = device.compute_init("cpu")
        self.trainer = Trainer(random_model(shape, compute), compute)
        self.tokenizer = byte_tokenizer(1024)
        self.meta = make_meta("base", shape, {}, 10, {})
        for state, _, _ in self.trainer.optimizers.state().values():
            state.fill_(1.0)  # pages of zeros may take no memory

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint: parameters and optimizer state."""
        tensors = {name: value.detach() for name, value in self.trainer.model.named_parameters()}
        for name, (value, _, _) in self.trainer.optimizers.state().items():
            tensors[name] = value
        return tensors

    def save(self, folder: Path) -> Path:
        """Save a checkpoint the way a stage does, and return its folder."""
        trainer = self.trainer
        saving.save_checkpoint(
            folder, 1, trainer.model, trainer.optimizers, self.tokenizer, self.meta, trainer.compute
        )
        return folder / "step_000001"


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the wall seconds of some work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(stage: Stage, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Let the writers take turns; return the bytes per second of each round, by writer."""
    tensors = stage.tensors()
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_raw(tensors, folder)  # the first write of a process is slow
    speeds: dict[str, list[float]] = {"raw": [], "ours": []}
    for _ in range(rounds):
        speeds["raw"].append(size / seconds_of(lambda: write_raw(tensors, folder)))
        speeds["ours"].append(size / seconds_of(lambda: stage.save(folder / "run")))
    return speeds


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    stage = Stage(QUICK if cfg.quick else LARGE)
    with tempfile.TemporaryDirectory(dir=cfg.folder or base_dir()) as name:
        folder = Path(name)
        speeds = measure(stage, folder, 4 if cfg.quick else 8)
        step = folder / "run" / "step_000001"
        load = seconds_of(lambda: load_file(step / "model.safetensors"))
        check = seconds_of(lambda: step_files.verify(step))
    log(f"MB/s of {len(speeds['ours'])} rounds, including the sync")
    rows = []
    for writer, values in speeds.items():
        figures = (median(values), max(values), min(values))
        rows.append([writer, *(f"{value / 1e6:,.0f}" for value in figures)])
    tables.show(("", "median", "best", "worst"), rows)
    pairs = zip(speeds["ours"], speeds["raw"], strict=True)
    share = median(ours / raw for ours, raw in pairs)
    log(f"ours / raw: {share:.2f}; load: {load:.3f} s, checking the hash {check:.2f} s")
    result = {
        "ours_of_raw": share,
        "raw_mb_s": median(speeds["raw"]) / 1e6,
        "ours_mb_s": median(speeds["ours"]) / 1e6,
        "load_seconds": load,
    }
    tables.finish("checkpoint", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

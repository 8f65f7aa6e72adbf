"""Measures saving a checkpoint beside the raw disk, safetensors' writer and torch.save.

python -m bench.data.checkpoint --quick                # writes 0.5 GB, ends within 50 seconds
python -m bench.data.checkpoint                        # writes 2.0 GB
python -m bench.data.checkpoint --folder /mnt/disk     # measures this disk, not the base folder's

How: the writers take turns, because the speed of a disk varies, and each takes each place in the order equally often.
A writer's time includes syncing its file. Each writer replaces its previous file only when the new one is complete,
because blocks written a moment ago are faster to overwrite. Ours is the save of a training stage: hashed, described,
and renamed at the end. It is also measured for how long training stands still while such a save is written beside it.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.training import Trainer, byte_tokenizer, random_model, random_passes
from nanochat import device
from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager import save as saving
from nanochat.checkpoint_manager.locate import make_meta
from nanochat.checkpoint_manager.parts.background import Saver
from nanochat.common import base_dir, fsync_path, log, run
from nanochat.gpt import GPTConfig

BLOCK = 1 << 24  # bytes per raw write
# Parameters and optimizer state have 0.4 and 2.0 GB; the largest tensors are tables of 16 and 67 MB.
QUICK = GPTConfig(
    128,
    8192,
    8,
    4,
    4,
    512,
)
LARGE = GPTConfig(
    128,
    16384,
    10,
    8,
    8,
    1024,
)
SAVES = 4  # beside training; the first, which takes the memory for the copies, does not count

Tensors = dict[str, Tensor]


def write_raw(tensors: Tensors, folder: Path) -> None:
    """Write and sync the same bytes, and nothing else."""
    with open(folder / "new", "wb", buffering=0) as file:
        for tensor in tensors.values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), BLOCK):
                file.write(data[start : start + BLOCK])
        os.fsync(file.fileno())
    os.replace(folder / "new", folder / "raw")


def write_safetensors(tensors: Tensors, folder: Path) -> None:
    """Write with safetensors and sync; no hash."""
    save_file(tensors, folder / "new")
    fsync_path(folder / "new")
    os.replace(folder / "new", folder / "theirs.safetensors")


def write_torch(tensors: Tensors, folder: Path) -> None:
    """Write with torch.save and sync; no hash."""
    torch.save(tensors, folder / "new")
    fsync_path(folder / "new")
    os.replace(folder / "new", folder / "theirs.pt")


class Stage:
    """A model and its optimizer state, like those of a training stage."""

    def __init__(self, shape: GPTConfig):
        compute = device.compute_init("cpu")
        self.shape = shape
        self.trainer = Trainer(random_model(shape, compute), compute)
        self.tokenizer = byte_tokenizer(1024)
        self.meta = make_meta(
            "base",
            shape,
            {},
            10,
            {},
        )
        for state, _, _ in self.trainer.optimizers.state().values():
            state.fill_(1.0)  # pages of zeros may take no memory

    def tensors(self) -> Tensors:
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

    def step(self) -> None:
        """Make one update."""
        self.trainer.step(
            random_passes(
                self.shape.vocab_size,
                1,
                2,
                self.shape.sequence_len,
                0,
            )
        )

    def standstill(self, folder: Path) -> float:
        """Train beside saves; return the median share of a save for which training stood still."""
        trainer = self.trainer
        shares = []
        with Saver(trainer.compute, keep=1, files="one") as saver:
            trainer.optimizers.before_step = saver.settle
            for number in range(SAVES):
                saver.save(
                    folder, number, trainer.model, trainer.optimizers, self.tokenizer, self.meta
                )
                self.step()
                while saver.busy:
                    self.step()
                shares.append(saver.waited / saver.took)
        return median(shares[1:])


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the wall seconds of some work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Config:
    """Print the speed of checkpoints as a table, and as one JSON object on the last line."""

    quick: bool = False
    """write 0.5 GB instead of 2.0 GB"""
    folder: Path | None = None
    """folder on the disk to measure; default: the base folder"""


def measure(stage: Stage, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Let the writers take turns; return the bytes per second of each round, by writer."""
    tensors = stage.tensors()
    size = sum(tensor.nbytes for tensor in tensors.values())
    writers: dict[str, Callable[[], Any]] = {
        "raw": lambda: write_raw(tensors, folder),
        "safetensors": lambda: write_safetensors(tensors, folder),
        "torch.save": lambda: write_torch(tensors, folder),
        "ours": lambda: stage.save(folder / "run"),
    }
    write_raw(tensors, folder)  # the first write of a process is slow
    speeds: dict[str, list[float]] = {name: [] for name in writers}
    for number in range(rounds):
        first = number % len(writers)
        names = list(writers)
        for name in names[first:] + names[:first]:
            speeds[name].append(size / seconds_of(writers[name]))
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
        torch_load = seconds_of(lambda: torch.load(folder / "theirs.pt", weights_only=True))
        standstill = stage.standstill(folder / "beside")
    log(f"MB/s of {len(speeds['ours'])} rounds, including the sync")
    for writer, values in speeds.items():
        low, middle, high = min(values) / 1e6, median(values) / 1e6, max(values) / 1e6
        log(f"{writer:<12} median {middle:7,.0f}   best {high:7,.0f}   worst {low:7,.0f}")
    pairs = zip(speeds["ours"], speeds["raw"], strict=True)
    share = median(ours / raw for ours, raw in pairs)
    log(
        f"ours / raw: {share:.2f} in the median round; training stands still for {standstill:.1%} of a save"
    )
    log(f"load: {load:.3f} s, checking the hash {check:.2f} s, torch.load {torch_load:.2f} s")
    result = {
        "benchmark": "checkpoint",
        "ours_of_raw": round(share, 3),
        "raw_mb_s": round(median(speeds["raw"]) / 1e6),
        "ours_mb_s": round(median(speeds["ours"]) / 1e6),
        "load_seconds": round(load, 4),
        "standstill_share": round(standstill, 4),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

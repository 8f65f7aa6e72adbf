"""Measures saving and loading a checkpoint beside the raw disk, safetensors' writer and torch.save.

python -m bench.checkpoint --quick                # writes 0.5 GB, ends within 50 seconds
python -m bench.checkpoint                        # writes 2.0 GB
python -m bench.checkpoint --folder /mnt/disk     # measures this disk, not the base folder's
python -m bench.checkpoint --still                # measures for how long training stands still, in both forms

The writers take turns, because the speed of a disk varies. A writer's time includes syncing its file. Each writer
replaces its previous file only when the new one is complete, because blocks written a moment ago are faster to
overwrite. Ours is the save that a training stage makes: hashed, described, and renamed at the end. Memory is what a
save needs beyond the parameters. With --still a model of 90 M parameters trains while its saves are written: training
stands still while a save is begun, and before an update that waits for the copy. The last line is JSON.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.updates import update
from nanochat import device
from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager import save as saving
from nanochat.checkpoint_manager.locate import make_meta
from nanochat.checkpoint_manager.parts.background import Saver
from nanochat.checkpoint_manager.parts.model import Files
from nanochat.common import UserError, base_dir, fsync_path, log, run
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.step import Safeguards
from nanochat.tokenizer import BYTES, PATTERNS, Tokenizer
from nanochat.train.optim import Optimizers, Rates

BLOCK = 1 << 24  # bytes per raw write
# Parameters and optimizer state have 0.4 and 2.0 GB; the largest tensors are tables of 16 and 67 MB.
QUICK = GPTConfig(sequence_len=128, vocab_size=8192, n_layer=8, n_head=4, n_kv_head=4, n_embd=512)
LARGE = GPTConfig(
    sequence_len=128, vocab_size=16384, n_layer=10, n_head=8, n_kv_head=8, n_embd=1024
)
STILL = GPTConfig(
    sequence_len=128, vocab_size=16384, n_layer=10, n_head=4, n_kv_head=4, n_embd=512
)  # 90 M parameters
ROWS, SAVES = 2, 4  # rows of a step beside a save; saves of each form
FORMS: tuple[Files, ...] = ("one", "per_rank")
SHARDED = GPTConfig(
    sequence_len=128, vocab_size=32768, n_layer=2, n_head=4, n_kv_head=4, n_embd=512
)


def raw(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write and sync the same bytes, and nothing else."""
    with open(folder / "new", "wb", buffering=0) as file:
        for tensor in tensors.values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), BLOCK):
                file.write(data[start : start + BLOCK])
        os.fsync(file.fileno())
    os.replace(folder / "new", folder / "raw")


def safetensors_save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write with safetensors and sync; no hash."""
    save_file(tensors, folder / "new")
    fsync_path(folder / "new")
    os.replace(folder / "new", folder / "theirs.safetensors")


def torch_save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write with torch.save and sync; no hash."""
    torch.save(tensors, folder / "new")
    fsync_path(folder / "new")
    os.replace(folder / "new", folder / "theirs.pt")


THEIRS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "raw": raw,
    "safetensors": safetensors_save,
    "torch.save": torch_save,
}


class Run:
    """A model and its optimizer state, like those of a training stage."""

    def __init__(self, shape: GPTConfig, compute: Compute, mode: Sharding = "grad"):
        self.shape, self.compute = shape, compute
        self.model = GPT(shape)
        self.model.init_weights()
        groups = [
            *self.model.value_embeds.values(),
            self.model.wte,
            *self.model.blocks,
            self.model.lm_head,
        ]
        parallel.shard(self.model, groups, compute, mode)
        self.optimizers = Optimizers(
            self.model, self.model.parameter_roles(), shape.n_embd, Rates(), 1.0, compute.dtype
        )
        for state, _, _ in self.optimizers.state().values():
            state.fill_(1.0)  # pages of zeros may take no memory
        self.tokenizer = Tokenizer(
            [bytes([i]) for i in range(BYTES)], "nanochat", PATTERNS["nanochat"]
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint: parameters and optimizer state."""
        parameters = {name: value.detach() for name, value in self.model.named_parameters()}
        return {
            **parameters,
            **{name: value for name, (value, _, _) in self.optimizers.state().items()},
        }

    def save(self, folder: Path, step: int = 1) -> None:
        """Save a checkpoint the way a stage does: hashed, described, and renamed at the end."""
        meta = make_meta("base", self.shape, {}, 10, {})
        saving.save_checkpoint(
            folder, step, self.model, self.optimizers, self.tokenizer, meta, self.compute
        )

    def step(self) -> None:
        """One update on random tokens."""
        self.optimizers.schedule(0.01, 0.95, 1.0)
        safeguards = Safeguards(spikes=None)
        update(self.model, self.optimizers, Batch(self.shape), safeguards, self.compute)


class Batch:
    """A pass of random tokens."""

    extras: tuple[str, ...] = ()

    def __init__(self, shape: GPTConfig):
        idx = torch.randint(0, shape.vocab_size, (ROWS, shape.sequence_len))
        self.micro_batches, self.num_targets = [(idx, idx.roll(-1, 1))], idx.numel()


@dataclass(frozen=True)
class Still:
    """One save beside training."""

    waited: float  # seconds for which training stood still
    took: float  # seconds from its beginning until it was on disk

    @property
    def share(self) -> float:
        """The part of the save for which training stood still."""
        return self.waited / self.took


def standstills(held: Run, folder: Path, files: Files) -> list[Still]:
    """Train and save by turns; the first save, which takes the memory for copies, counts too, as the first entry."""
    found: list[Still] = []
    held.step()
    with Saver(held.compute, keep=1, files=files) as saver:
        held.optimizers.before_step = saver.settle
        for number in range(SAVES):
            meta = make_meta("base", held.shape, {}, 10, {})
            saver.save(folder, number, held.model, held.optimizers, held.tokenizer, meta)
            held.step()
            while parallel.least(int(not saver.busy), held.compute) == 0:
                held.step()
            found.append(Still(saver.waited, saver.took))
    return found


def seconds(work: Callable[[], Any]) -> float:
    """Wall seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def anonymous_bytes() -> int:
    """Bytes of this process's memory that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Peak:
    """Measures how far this process's memory rises above its level on entry."""

    def __enter__(self) -> "Peak":
        self.before = self.most = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        """Bytes above the level on entry, at most."""
        return self.most - self.before


def _rank(rank: int, folder: str, work: Callable[[Compute, Path], Any], found: Any) -> None:
    """One of two ranks."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "NANOCHAT_DTYPE": "float32",
    }
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # only the parent prints to standard output
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found.put(work(device.compute_init("cpu"), Path(folder)))
    device.compute_cleanup()


def on_two_ranks(folder: Path, work: Callable[[Compute, Path], Any]) -> list[Any]:
    """What two ranks found, in any order."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, str(folder), work, found), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    (folder / "meeting").unlink(missing_ok=True)
    if any(process.exitcode for process in ranks):
        raise UserError("a rank failed while it saved; its error is printed above")
    return [found.get() for _ in ranks]


def _extra_of_rank(compute: Compute, folder: Path) -> int:
    """Save a sharded model twice; the extra memory of the second save."""
    held = Run(SHARDED, compute)
    for step in (1, 2):
        with Peak() as peak:
            held.save(folder / "run", step)
    return peak.extra


def extra_tensors(folder: Path) -> float:
    """Extra memory of a save by two ranks, in sizes of the largest tensor, on the rank that needs more."""
    return max(on_two_ranks(folder, _extra_of_rank)) / (4 * SHARDED.padded_vocab * SHARDED.n_embd)


def _still_of_rank(compute: Compute, folder: Path) -> dict[Files, list[Still]]:
    held = Run(STILL, compute, "full")
    return {files: standstills(held, folder / files, files) for files in FORMS}


def _share(saves: list[Still]) -> float:
    """The median share of all saves but the first."""
    return median(save.share for save in saves[1:])


def still(cfg: "Config") -> None:
    """Measure and print for how long training stands still while it saves."""
    alone = Run(STILL, replace(device.compute_init("cpu"), rank=0, world_size=1))
    log(
        f"a model of {alone.model.parameter_counts()['total'] / 1e6:.0f} M parameters, {ROWS} rows a step, median of "
        f"{SAVES - 1} saves; the first, which takes the memory, in brackets"
    )
    shares = {}

    def show(how: str, saves: list[Still]) -> None:
        waited, took = (
            median(one.waited for one in saves[1:]),
            median(one.took for one in saves[1:]),
        )
        shares[how] = round(_share(saves), 4)
        log(
            f"{how:<18} stood still {waited:6.3f} s of {took:5.2f} s ({100 * shares[how]:.1f} %)   first "
            f"({saves[0].waited:.3f} s of {saves[0].took:.2f} s)"
        )

    with tempfile.TemporaryDirectory(dir=cfg.folder or base_dir()) as name:
        for files in FORMS:
            show(f"{files}, 1 rank", standstills(alone, Path(name) / files, files))
        del alone
        both = on_two_ranks(Path(name), _still_of_rank)
    for files in FORMS:  # the figures of the rank that stood still for longer
        show(f"{files}, 2 ranks", max((ranks[files] for ranks in both), key=_share))
    print(json.dumps({"benchmark": "checkpoint_still", **shares}), flush=True)


@dataclass(frozen=True)
class Config:
    """Print the speed of checkpoints as a table, and as one JSON object on the last line."""

    quick: bool = False
    """write 0.5 GB instead of 2.0 GB"""
    still: bool = False
    """measure only for how long training stands still while a save is written beside it"""
    folder: Path | None = None
    """folder on the disk to measure; default: the base folder"""


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    if cfg.still:
        still(cfg)
        return
    held = Run(
        QUICK if cfg.quick else LARGE, replace(device.compute_init("cpu"), rank=0, world_size=1)
    )
    tensors = held.tensors()
    size = sum(4 * tensor.numel() for tensor in tensors.values())
    with tempfile.TemporaryDirectory(dir=cfg.folder or base_dir()) as name:
        folder = Path(name)
        writers = {
            kind: lambda write=write: write(tensors, folder) for kind, write in THEIRS.items()
        }
        writers["ours"] = lambda: held.save(folder / "run")
        raw(tensors, folder)  # the first write of a process is slow
        rounds = []
        # A disk slows down within a round, so each writer takes each place in the order equally often.
        for number in range(4 if cfg.quick else 8):
            order = list(writers)[number % 4 :] + list(writers)[: number % 4]
            rounds.append({kind: size / seconds(writers[kind]) for kind in order})
        with Peak() as peak:
            held.save(folder / "run")
        final = folder / "run" / "step_000001"
        load = {
            "mmap": seconds(lambda: load_file(final / "model.safetensors")),
            "check": seconds(lambda: step_files.verify(final)),
            "torch.load": seconds(lambda: torch.load(folder / "theirs.pt", weights_only=True)),
        }
        with Peak() as loading:
            loaded = load_file(final / "model.safetensors")
        del loaded
        sharded = extra_tensors(folder)
    log(
        f"{size / 1e9:.2f} GB in {len(tensors)} tensors, {len(rounds)} rounds, MB/s including the sync"
    )
    for kind in writers:
        speeds = [one[kind] / 1e6 for one in rounds]
        log(
            f"{kind:<12} median {median(speeds):7,.0f}   best {max(speeds):7,.0f}   worst {min(speeds):7,.0f}"
        )
    share = median(one["ours"] / one["raw"] for one in rounds)
    best = max(one["ours"] for one in rounds) / max(one["raw"] for one in rounds)
    log(f"ours / raw: {share:.2f} in the median round, {best:.2f} by the best round of each")
    log(
        f"load: mmap {load['mmap']:.3f} s ({loading.extra / 1e6:.0f} MB), checking the hash {load['check']:.2f} s, "
        f"torch.load {load['torch.load']:.2f} s"
    )
    one_rank = peak.extra / (4 * held.shape.padded_vocab * held.shape.n_embd)
    log(
        f"extra memory of a save, in sizes of the largest tensor: {one_rank:.2f} on one rank, {sharded:.2f} on two"
    )
    result = {
        "benchmark": "checkpoint",
        "gb": round(size / 1e9, 2),
        "ours_of_raw": round(share, 3),
        "raw_mb_s": round(median(r["raw"] for r in rounds) / 1e6),
        "ours_mb_s": round(median(r["ours"] for r in rounds) / 1e6),
        "load_seconds": round(load["mmap"], 4),
        "extra_tensors_one_rank": round(one_rank, 2),
        "extra_tensors_two_ranks": round(sharded, 2),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Speed and memory of a checkpoint beside the raw disk, safetensors' own writer and torch.save.

python -m bench.checkpoint --quick                # 0.5 GB: ends within 50 seconds
python -m bench.checkpoint                        # 2.0 GB
python -m bench.checkpoint --folder /mnt/disk     # another disk than that of the base folder

The writers take turns, since a disk's speed varies; each is synced before its clock stops, and replaces its last file
when the new one is there, as blocks written a moment ago are faster. Ours is a save as a stage takes it: hashed,
described, named at the end. Memory is what a save holds beyond the parameters. The last line is JSON.
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

from nanochat import device
from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager import save as saving
from nanochat.checkpoint_manager.locate import make_meta
from nanochat.common import UserError, base_dir, fsync_path, log, run
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime import parallel
from nanochat.tokenizer import BYTES, PATTERNS, Tokenizer
from nanochat.train.optim import Optimizers, Rates

BLOCK = 1 << 24  # bytes of a raw write
# Parameters and state of 0.4 and 2.0 GB; tables of 16 and 67 MB are the largest tensors.
QUICK = GPTConfig(sequence_len=128, vocab_size=8192, n_layer=8, n_head=4, n_kv_head=4, n_embd=512)
LARGE = GPTConfig(sequence_len=128, vocab_size=16384, n_layer=10, n_head=8, n_kv_head=8, n_embd=1024)
SHARDED = GPTConfig(sequence_len=128, vocab_size=32768, n_layer=2, n_head=4, n_kv_head=4, n_embd=512)


def raw(tensors: dict[str, Tensor], folder: Path) -> None:
    """The same bytes, written and synced, nothing else."""
    with open(folder / "new", "wb", buffering=0) as file:
        for tensor in tensors.values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), BLOCK):
                file.write(data[start : start + BLOCK])
        os.fsync(file.fileno())
    os.replace(folder / "new", folder / "raw")


def safetensors_save(tensors: dict[str, Tensor], folder: Path) -> None:
    """safetensors' writer, synced, without a hash."""
    save_file(tensors, folder / "new")
    fsync_path(folder / "new")
    os.replace(folder / "new", folder / "theirs.safetensors")


def torch_save(tensors: dict[str, Tensor], folder: Path) -> None:
    """torch.save, synced, without a hash."""
    torch.save(tensors, folder / "new")
    fsync_path(folder / "new")
    os.replace(folder / "new", folder / "theirs.pt")


THEIRS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "raw": raw, "safetensors": safetensors_save, "torch.save": torch_save
}  # fmt: skip


class Run:
    """A model and its optimizer state, as a stage has them."""

    def __init__(self, shape: GPTConfig, compute: Compute):
        self.shape, self.compute = shape, compute
        self.model = GPT(shape)
        self.model.init_weights()
        groups = [*self.model.value_embeds.values(), self.model.wte, *self.model.blocks, self.model.lm_head]
        parallel.shard(self.model, groups, compute)
        self.optimizers = Optimizers(
            self.model, self.model.parameter_roles(), shape.n_embd, Rates(), 1.0, compute.dtype
        )
        for state, _, _ in self.optimizers.state().values():
            state.fill_(1.0)  # zeros may have no memory of their own
        self.tokenizer = Tokenizer([bytes([i]) for i in range(BYTES)], "nanochat", PATTERNS["nanochat"])

    def tensors(self) -> dict[str, Tensor]:
        """All that a step holds."""
        parameters = {name: value.detach() for name, value in self.model.named_parameters()}
        return {**parameters, **{name: value for name, (value, _, _) in self.optimizers.state().items()}}

    def save(self, folder: Path, step: int = 1) -> None:
        """A step as a stage saves it: hashed, described, named at the end."""
        meta = make_meta("base", self.shape, {}, 10, {})
        saving.save_checkpoint(folder, step, self.model, self.optimizers, self.tokenizer, meta, self.compute)


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of some work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The most memory of this process while it lasts, beyond what it had before."""

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
        return self.most - self.before


def _rank(rank: int, folder: str, found: Any) -> None:
    """One of two ranks: save a sharded model twice, and say what the second save took."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NANOCHAT_DTYPE": "float32"}
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # the table is the parent's
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    compute = device.compute_init("cpu")
    held = Run(SHARDED, compute)
    for step in (1, 2):
        with Peak() as peak:
            held.save(Path(folder) / "run", step)
    found.put((rank, peak.extra))
    device.compute_cleanup()


def extra_tensors(folder: Path) -> float:
    """How many of the largest tensor a save of two ranks holds beyond their parameters, on the rank that takes most."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(folder), found), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise UserError("a rank that was to save ended with an error, which is above")
    extras = [found.get()[1] for _ in ranks]
    largest = 4 * SHARDED.padded_vocab * SHARDED.n_embd
    return max(extras) / largest


@dataclass(frozen=True)
class Config:
    """Checkpoints beside the raw disk: a table, and as the last line one JSON object."""

    quick: bool = False
    """0.5 GB in place of 2.0"""
    folder: Path | None = None
    """where to write; default the base folder"""


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    held = Run(QUICK if cfg.quick else LARGE, replace(device.compute_init("cpu"), rank=0, world_size=1))
    tensors = held.tensors()
    size = sum(4 * tensor.numel() for tensor in tensors.values())
    with tempfile.TemporaryDirectory(dir=cfg.folder or base_dir()) as name:
        folder = Path(name)
        writers = {kind: lambda write=write: write(tensors, folder) for kind, write in THEIRS.items()}
        writers["ours"] = lambda: held.save(folder / "run")
        raw(tensors, folder)  # the first write of a process is slow
        rounds = []
        for number in range(
            4 if cfg.quick else 8
        ):  # each goes first, second, third and last as often: a disk tires within a round
            order = list(writers)[number % 4 :] + list(writers)[: number % 4]
            rounds.append({kind: size / seconds(writers[kind]) for kind in order})
        with Peak() as peak:
            held.save(folder / "run")
        final = folder / "run" / "step_000001"
        load = {"mmap": seconds(lambda: load_file(final / "model.safetensors")),
                "check": seconds(lambda: step_files.verify(final)),
                "torch.load": seconds(lambda: torch.load(folder / "theirs.pt", weights_only=True))}  # fmt: skip
        with Peak() as loading:
            loaded = load_file(final / "model.safetensors")
        del loaded
        sharded = extra_tensors(folder)
    log(f"{size / 1e9:.2f} GB in {len(tensors)} tensors, {len(rounds)} rounds, MB/s synced")
    for kind in writers:
        speeds = [one[kind] / 1e6 for one in rounds]
        log(f"{kind:<12} median {median(speeds):7,.0f}   best {max(speeds):7,.0f}   worst {min(speeds):7,.0f}")
    share = median(one["ours"] / one["raw"] for one in rounds)
    best = max(one["ours"] for one in rounds) / max(one["raw"] for one in rounds)
    log(f"ours / raw: {share:.2f} by the median round, {best:.2f} by the best of each")
    log(f"load: mmap {load['mmap']:.3f} s ({loading.extra / 1e6:.0f} MB), check of the hash {load['check']:.2f} s, "
        f"torch.load {load['torch.load']:.2f} s")  # fmt: skip
    one_rank = peak.extra / (4 * held.shape.padded_vocab * held.shape.n_embd)
    log(f"extra memory of a save: {one_rank:.2f} of a tensor by one rank, {sharded:.2f} of the largest by two")
    result = {"benchmark": "checkpoint", "gb": round(size / 1e9, 2), "ours_of_raw": round(share, 3),
              "raw_mb_s": round(median(r["raw"] for r in rounds) / 1e6),
              "ours_mb_s": round(median(r["ours"] for r in rounds) / 1e6), "load_seconds": round(load["mmap"], 4),
              "extra_tensors_one_rank": round(one_rank, 2), "extra_tensors_two_ranks": round(sharded, 2)}  # fmt: skip
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Forecasts the memory of fine-tuning: one rank's step runs on tensors without data, and the bytes of those that live
at the same time are counted.

forecast() starts this file as a process of its own, because the step's other ranks are only imagined: a process group
that sends nothing stands in for them.
"""

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat import device
from nanochat.checkpoint_manager.families import cast_matrices, on_meta
from nanochat.common import UserError
from nanochat.context import Packed
from nanochat.device import DTYPES, MASTER, Compute
from nanochat.models.lora import LoraConfig, add_adapters
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.operations import Operations
from nanochat.runtime import parallel
from nanochat.train.optim import OneRate, Optimizers

ROOT = Path(__file__).resolve().parent.parent.parent
SHALLOW = 8  # layers, so many that the largest sum comes at the same moment as in a deep model
OF_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # the step must not join these ranks


@dataclass(frozen=True)
class Tuning:
    """A step of fine-tuning, as far as its memory depends on it."""

    shape: QwenConfig  # its sequence_len is the length of a row
    lora: LoraConfig | None  # None: every parameter is trained
    rows: int = 1  # of a pass on one rank
    several_passes: bool = False  # whether gradients of several passes add up in a step
    checkpoint_activations: bool = False
    offload_activations: bool = False
    shard: parallel.Sharding = "grad"
    ranks: int = 1
    dtype: str = "bfloat16"  # to compute in
    on_host: bool = (
        False  # whether the device is the host itself, so that nothing can be moved to its memory
    )

    @property
    def offloads(self) -> bool:
        """Whether the inputs of layers wait in the host's memory."""
        return self.offload_activations and not self.on_host


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    held: int  # between steps: weights, masters and the moments of AdamW
    peak: int  # in a step, including what is held


def forecast(tuning: Tuning) -> Memory:
    """The memory that a step takes on each card. UserError if the step cannot be run, with the reason."""
    task = json.dumps({**asdict(tuning), "shape": asdict(tuning.shape)})
    kept = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHER}
    own = {
        "NANOCHAT_DEVICE": "cpu",
        "NANOCHAT_DTYPE": "float32",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "nanochat.planner.forecast", task]
    done = subprocess.run(
        command, env=kept | own, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [
            "it said nothing"
        ]
        raise UserError(f"the memory of a step could not be forecast: {reason[0]}")
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


class Ledger(TorchDispatchMode):
    """Counts the bytes of all storages that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._bytes: dict[int, int] = {}  # of each living storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and not device.is_sharded(
                leaf
            ):  # a DTensor's own storage is its local tensor
                self.enter(leaf.untyped_storage())
        return made

    def enter(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its present size, until it is gone."""
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = 0
            weakref.finalize(storage, self._leave, key)
        self._set(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage, if the storage is counted."""
        if storage._cdata in self._bytes:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._bytes[key]
        self._bytes[key] = size
        self.peak = max(self.peak, self.now)

    def _leave(self, key: int) -> None:
        self.now -= self._bytes.pop(key)


def _put_aside(x: Tensor) -> Callable[[], Tensor]:
    """Act as Qwen.put_aside() on a card that is not there: what moves to the host does not count until it is back."""
    shape = x.shape
    dtype = x.dtype
    return lambda: torch.empty(shape, dtype=dtype)


def _watch_resizing(ledger: Ledger) -> None:
    """Let the ledger know when a storage changes its size, as FSDP2 frees what it has gathered; no dispatch sees it."""
    resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        ledger.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]


def prepared(tuning: Tuning, compute: Compute) -> Qwen:
    """The model as fine-tuning prepares it, on meta and sharded."""
    model: Qwen = on_meta(tuning.shape, compute)
    model.put_aside = _put_aside
    cast_matrices(model, compute.dtype if tuning.lora else MASTER)
    if tuning.lora:
        add_adapters(model, tuning.lora)
    model.checkpoints, model.offloads = tuning.checkpoint_activations, tuning.offloads
    parallel.shard(model, model.shard_groups(), compute, tuning.shard)
    return model


def optimizers_of(model: Qwen, compute: Compute) -> Optimizers:
    """The optimizers of fine-tuning; their memory does not depend on the rate."""
    return Optimizers(
        model, model.parameter_roles(), model.config.n_embd, OneRate(1e-4), 1.0, compute.dtype
    )


def take_step(tuning: Tuning, model: Qwen, optimizers: Optimizers) -> None:
    """One step over tokens that do not matter; the gradients stay."""
    passes = 2 if tuning.several_passes else 1
    for number in range(passes):
        parallel.sync_gradients(model, number == passes - 1)
        tokens = torch.zeros((tuning.rows, tuning.shape.sequence_len), dtype=torch.long)
        model(tokens, tokens.clone(), "sum", context=Packed(tokens.clone())).backward()
    optimizers.step()


def count(tuning: Tuning, compute: Compute, ledger: Ledger) -> Memory:
    """Run a step without data, beside the moments that AdamW has from its first step on, and count."""
    gc.collect()  # what an earlier model has left
    start, model = ledger.now, prepared(tuning, compute)
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        model.to_empty(device="cpu")
        optimizers = optimizers_of(model, compute)
        optimizers.state()
        held, ledger.peak = ledger.now, 0
        model.train()
        take_step(tuning, model, optimizers)
    return Memory(held - start, ledger.peak - start)


def of_all_layers(tuning: Tuning, compute: Compute) -> Memory:
    """What count() says of a model, from two shallower ones where it is deep: every layer of a kind adds as much."""
    compute = replace(
        compute, world_size=tuning.ranks, dtype=DTYPES[tuning.dtype], operations=Operations()
    )
    if tuning.ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=tuning.ranks
        )
    layers, period = tuning.shape.n_layer, len(tuning.shape.layers)
    few = -(-SHALLOW // period) * period
    more = few + max(few // 2 // period, 1) * period
    ledger = Ledger()
    _watch_resizing(ledger)
    if layers <= more or layers % period:
        return count(tuning, compute, ledger)
    less, deeper = (
        count(replace(tuning, shape=replace(tuning.shape, n_layer=n)), compute, ledger)
        for n in (few, more)
    )
    left = (layers - more) / (more - few)
    held, peak = (
        value + round(left * (value - before))
        for before, value in ((less.held, deeper.held), (less.peak, deeper.peak))
    )
    return Memory(held, peak)


def main() -> None:
    """Count what the first argument asks for, and print the result as JSON."""
    task = json.loads(sys.argv[1])
    lora = task["lora"] and LoraConfig(
        **{**task["lora"], "targets": tuple(task["lora"]["targets"])}
    )
    tuning = Tuning(**{**task, "shape": QwenConfig(**task["shape"]), "lora": lora})
    print(json.dumps(asdict(of_all_layers(tuning, device.compute_init("cpu")))))


if __name__ == "__main__":
    main()

"""Forecasts the memory of fine-tuning by running one rank's step on tensors without data.

A ledger counts the bytes of all tensors that exist at the same time. forecast() runs this module in
a separate process, because the other ranks of the step do not exist, and a process group that sends
nothing replaces them.
"""

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat import device
from nanochat.checkpoint_manager.families import cast_matrices, families, family_of, on_meta
from nanochat.common import UserError, tr
from nanochat.context import Packed
from nanochat.device import DTYPES, MASTER, Compute
from nanochat.models.lora import LoraConfig, add_adapters
from nanochat.models.nf4 import BITS, hold_in_nf4
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.optim import OneRate, Optimizers
from nanochat.platforms.operations import Operations
from nanochat.runtime import parallel

ROOT = Path(__file__).resolve().parent.parent.parent
SHALLOW = 3  # with this many layers, memory peaks at the same moment as in a deep model
# Environment variables of a launcher, which are removed so that the step does not join its ranks.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Tuning:
    """The settings of a fine-tuning step that decide how much memory it takes."""

    shape: QwenConfig  # its sequence_len is the length of a row
    lora: LoraConfig | None  # None: every parameter is trained
    rows: int = 1  # rows of a pass on one rank
    several_passes: bool = False  # whether gradients of several passes add up in a step
    checkpoint_activations: bool = False
    offload_activations: bool = False
    shard: parallel.Sharding = "grad"
    ranks: int = 1
    ranks_on_host: int | None = None  # None: as many as the launcher says, or else all
    dtype: str = "bfloat16"  # number format of the computation
    on_host: bool = False  # whether the device is the host, whose memory offloading would not save
    base_bits: int = 16  # 4: the frozen matrices are in NF4

    @property
    def offloads(self) -> bool:
        """True if the inputs of layers are kept in host memory until the backward pass."""
        return self.offload_activations and not self.on_host

    def on_servers_of(self, cards: int) -> "Tuning":
        """Return the settings on as few servers of `cards` cards as possible, which share evenly.

        Every server holds a copy of the model.
        """
        servers = math.ceil(self.ranks / cards)
        if servers == 1:
            return self
        return replace(self, ranks_on_host=math.ceil(self.ranks / servers))


@dataclass(frozen=True)
class Memory:
    """The memory that one rank takes, in bytes."""

    state: int  # between steps: weights, masters and the moments of AdamW
    peak: int  # in a step, including the state


def forecast(tuning: Tuning) -> Memory:
    """Return the memory that a fine-tuning step takes on each card.

    Raises UserError with the reason if the step cannot be simulated.
    """
    (memory,) = forecasts([tuning])
    return memory


def forecasts(tunings: Sequence[Tuning]) -> Iterator[Memory]:
    """Yield what forecast() returns for each of `tunings`; one process makes all of them.

    The process ends when the caller closes the iterator.

    Raises UserError with the reason if a step cannot be simulated.
    """
    task = json.dumps([_as_json(tuning) for tuning in tunings])
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
    }
    environment |= {
        "NANOCHAT_DEVICE": "cpu",
        "NANOCHAT_DTYPE": "float32",
        "NANOCHAT_KERNELS": "plain",  # the user's choice is for another device
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "nanochat.planner.forecast"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(task)
            process.stdin.close()
            try:
                for line in process.stdout:
                    if line.startswith("{"):  # other lines are log lines
                        yield Memory(**json.loads(line))
            except GeneratorExit:  # the caller needs no more of them
                process.kill()
                raise
        if process.returncode:
            errors.seek(0)
            messages = [line.strip() for line in errors if line.strip()]
            reason = messages[-1] if messages else tr("it said nothing")
            raise UserError(
                tr("the memory of a step could not be forecast: {reason}", reason=reason)
            )


class Ledger(TorchDispatchMode):
    """Counts the bytes of living storages that operators create in this mode, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._bytes: dict[int, int] = {}  # living storage -> its size

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # The storage of a DTensor is counted with its local tensor.
            if isinstance(leaf, Tensor) and not device.is_sharded(leaf):
                self.enter(leaf.untyped_storage())
        return result

    def enter(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its current size until it is freed."""
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = 0
            weakref.finalize(storage, self._leave, key)
        self._set(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage if it is being counted."""
        if storage._cdata in self._bytes:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._bytes[key]
        self._bytes[key] = size
        self.peak = max(self.peak, self.now)

    def _leave(self, key: int) -> None:
        self.now -= self._bytes.pop(key)


def _offload_tensor(x: Tensor) -> Callable[[], Tensor]:
    """Return a function that creates a tensor like `x`; this replaces Qwen's offload_tensor().

    Host memory does not count, so the function does not keep `x`, which is freed in the meantime.
    """
    shape = x.shape
    dtype = x.dtype
    return lambda: torch.empty(shape, dtype=dtype)


def _watch_resizing(ledger: Ledger) -> None:
    """Patch torch so that the ledger is told whenever a storage is resized.

    FSDP2 frees gathered parameters by resizing, which dispatch modes do not see.
    """
    resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        ledger.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]


def build_model(tuning: Tuning, compute: Compute) -> Qwen:
    """Return the model on the meta device, prepared and sharded as in fine-tuning."""
    model: Qwen = on_meta(tuning.shape, compute)
    model.offload_tensor = _offload_tensor
    cast_matrices(model, compute.dtype if tuning.lora else MASTER)
    if tuning.lora:
        add_adapters(model, tuning.lora)
    if tuning.base_bits == BITS:
        hold_in_nf4(model, compute.dtype)
    model.checkpoints = tuning.checkpoint_activations
    model.offloads = tuning.offloads
    groups = model.shard_groups()
    parallel.shard(model, groups, compute, tuning.shard, ranks_on_host=tuning.ranks_on_host)
    return model


def build_optimizers(model: Qwen, compute: Compute) -> Optimizers:
    """Return the optimizers of fine-tuning; the arbitrary learning rate does not affect memory."""
    return Optimizers(
        model, model.parameter_roles(), model.config.n_embd, OneRate(1e-4), 1.0, compute.dtype
    )


def take_step(tuning: Tuning, model: Qwen, optimizers: Optimizers) -> None:
    """Run one step on arbitrary tokens, and keep the gradients."""
    passes = 2 if tuning.several_passes else 1
    for number in range(passes):
        parallel.sync_gradients(model, number == passes - 1)
        tokens = torch.zeros((tuning.rows, tuning.shape.sequence_len), dtype=torch.long)
        context = Packed(tokens.clone())
        model(tokens, tokens.clone(), "sum", context=context).backward()
    optimizers.step()


def count(tuning: Tuning, compute: Compute, ledger: Ledger) -> Memory:
    """Return the memory of a step, including AdamW's moments, by running it without data."""
    gc.collect()  # frees the tensors of an earlier model
    start = ledger.now
    model = build_model(tuning, compute)
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        model.to_empty(device="cpu")
        optimizers = build_optimizers(model, compute)
        optimizers.state()
        state = ledger.now
        ledger.peak = 0
        model.train()
        take_step(tuning, model, optimizers)
    return Memory(state - start, ledger.peak - start)


def count_all_layers(tuning: Tuning, compute: Compute, ledger: Ledger) -> Memory:
    """Return the memory of a step of the whole model.

    If a deep model repeats its pattern of layers a whole number of times, its memory is
    extrapolated from two shallow models, because each repetition adds the same number of bytes.
    """
    compute = replace(
        compute,
        world_size=tuning.ranks,
        dtype=DTYPES[tuning.dtype],
        operations=Operations(),
    )
    if tuning.ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
        torch.distributed.init_process_group("fake", store=store, rank=0, world_size=tuning.ranks)
    layers = tuning.shape.n_layer
    period = tuning.shape.period
    shallow_layers = math.ceil(SHALLOW / period) * period
    deeper_layers = shallow_layers + max(shallow_layers // 2 // period, 1) * period
    if layers <= deeper_layers or layers % period:
        return count(tuning, compute, ledger)
    shallow = count(_with_layers(tuning, shallow_layers), compute, ledger)
    deeper = count(_with_layers(tuning, deeper_layers), compute, ledger)
    factor = (layers - deeper_layers) / (deeper_layers - shallow_layers)
    return Memory(
        state=deeper.state + round(factor * (deeper.state - shallow.state)),
        peak=deeper.peak + round(factor * (deeper.peak - shallow.peak)),
    )


def _with_layers(tuning: Tuning, layers: int) -> Tuning:
    return replace(tuning, shape=replace(tuning.shape, n_layer=layers))


def _as_json(tuning: Tuning) -> dict[str, Any]:
    """Return settings as a dict for tuning_of(), with the name of the model's family."""
    shape = tuning.shape
    return {**asdict(tuning), "shape": asdict(shape), "family": family_of(shape)}


def tuning_of(task: dict[str, Any]) -> Tuning:
    """Return the settings that forecasts() has written as JSON."""
    task = dict(task)
    shape = families()[task.pop("family")].config(**task["shape"])
    lora = None
    if task["lora"]:
        lora = LoraConfig(**{**task["lora"], "targets": tuple(task["lora"]["targets"])})
    return Tuning(**{**task, "shape": shape, "lora": lora})


def main() -> None:
    """Read settings as a JSON list, and print the memory of each step as a line of JSON."""
    compute = device.compute_init("cpu")
    ledger = Ledger()
    _watch_resizing(ledger)
    for task in json.load(sys.stdin):
        memory = count_all_layers(tuning_of(task), compute, ledger)
        print(json.dumps(asdict(memory)), flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

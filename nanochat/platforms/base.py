"""The interface between the rest of the project and a device.

Each vendor's folder has one subclass of Platform, and device.py lists them in a table. Platform's
defaults suit an accelerator whose module in torch has the functions of torch.cuda.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import torch

from nanochat.common import UserError, tr, warn
from nanochat.model import Model
from nanochat.platforms import host
from nanochat.platforms.operations import KernelChoice, Matmul, Operations


class Chip(Protocol):
    """A kind of card that nanochat.planner can plan for."""

    @property
    def name(self) -> str: ...

    @property
    def trains(self) -> bool: ...

    @property
    def tflops(self) -> float: ...  # 0 if the peak is unknown

    @property
    def memory_gib(self) -> float: ...


@dataclass(frozen=True)
class Trace:
    """A vendor's profile of some steps: mean milliseconds per step, and every operator call."""

    computing_ms: float
    communication_ms: float
    exposed_ms: float  # communication that overlapped with no computation
    idle_ms: float
    operators: list[tuple[str, float]]  # name and microseconds of each call in all traced steps
    path: Path  # the trace, for a viewer


class Tracer(Protocol):
    """Drives a vendor's profiler.

    Call start() before the warm-up step, step() after each step, and finish() at the end.
    """

    def start(self) -> None: ...

    def step(self) -> None: ...

    def finish(self) -> Trace: ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype`, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_bf16(model: Model, matmul: Matmul) -> None:
    """Raise UserError (exit code 2) if a model does not compute in bf16, which `matmul` needs."""
    if model.dtype != torch.bfloat16:
        raise UserError(
            tr(
                "--matmul {matmul} needs a model that computes in bfloat16, but this one "
                "computes in {dtype_name}: leave --matmul out, or set NANOCHAT_DTYPE=bfloat16",
                matmul=matmul,
                dtype_name=dtype_name(model.dtype),
            ),
            exit_code=2,
        )


def requested_kernels(flag: str) -> KernelChoice:
    """Return the kernels to use: `flag` (--kernels) or, if it is auto, those of NANOCHAT_KERNELS.

    Returns auto if NANOCHAT_KERNELS is needed but not set. Raises UserError (exit code 2) if its
    value is not valid.
    """
    name = flag
    if flag == "auto":
        name = os.environ.get("NANOCHAT_KERNELS") or "auto"
    for choice in get_args(KernelChoice):
        if name == choice:
            return choice
    raise UserError(
        tr("NANOCHAT_KERNELS must be auto, fused or plain, got {name!r}", name=name), exit_code=2
    )


class Platform:
    """One kind of device, and the one device of that kind that this process uses."""

    name = ""  # the device type, as torch and --device_type call it
    backend = ""  # the backend of the collectives
    # Whether the device has its own memory, to which host tensors are copied. Otherwise it uses
    # host memory, which all ranks on a host share.
    has_own_memory = True
    # Whether host tensors can be page-locked, so that copies of them overlap with computation.
    pins_memory = True
    # Whether the device is used only if a flag or NANOCHAT_DEVICE names it.
    must_be_named = False
    # Whether the device computes while the host does something else: operators are queued, and
    # checkpoints are written during training.
    runs_beside_host = True
    # The number of tokens in a pass that suits the device, or None for as many as its memory holds.
    pass_tokens: int | None = None
    split_tokens = 10 << 20  # tokens of a split on which bits per byte are measured
    evaluation_rows = 32  # rows in a pass without gradients
    # Whether decoding steps are replayed as captured graphs by default.
    replays_replies = False
    # Whether reinforcement learning trains on trees of replies by default.
    prefers_trees = False
    # Whether the layers of a published model, which are alike, are compiled as one code for all.
    # That takes a quarter of the time, but a step takes a little more time and memory.
    compiles_layers = False
    shards_sparse_tables = True  # whether FSDP2 also shards tables whose rows are seldom used
    long_run_seconds = math.inf  # a run that takes longer gets a warning

    @property
    def context(self) -> tuple[int, str]:
        """The default number of tokens in a row, and the reason for it in the user's language."""
        return 2048, tr("the default")

    def __init__(self, index: int = 0):
        """Choose a device by its `index` among those that this process sees, without opening it."""
        self.index = index

    @property
    def module(self) -> Any:
        """The torch module that drives the device, such as torch.cuda, or None for the host."""
        return getattr(torch, self.name)

    # --- choosing --------------------------------------------------------------------------------

    def unavailable(self) -> str:
        """Return why this process cannot use a device of this kind, or "" if it can."""
        raise NotImplementedError

    def idle_cards(self) -> str:
        """Return advice if this host has cards that cannot be used, or "" otherwise."""
        return ""

    def count(self) -> int:
        """Return the number of devices of this kind that this process sees."""
        return int(self.module.device_count())

    def is_slow(self) -> bool:
        """Return whether the device is so slow for its kind that a speedrun should be small."""
        return False

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """Return the number format that suits the device best, and the reason."""
        raise NotImplementedError

    def lacks_dtype(self, dtype: torch.dtype) -> str:
        """Return why the device cannot compute in `dtype`, or "" if it can."""
        return ""

    def slow_dtype(self, dtype: torch.dtype) -> str:
        """Return a warning that another format computes faster than `dtype`, or "" if none does."""
        return ""

    # --- the number format of matrices ------------------------------------------------------------

    def use_matmul(self, model: Model, matmul: Matmul, operations: Operations) -> None:
        """Make a model's large matrices multiply in the format `matmul` during training.

        "auto" means the format in which the model computes. `operations` are those that the model
        uses. Raises UserError (exit code 2) if the device or the model does not support the format.
        """
        if matmul == "bf16":
            check_bf16(model, matmul)
        if matmul == "fp8":
            self.use_fp8(model)
        if matmul == "int8":
            self.use_int8(model, operations)

    def has_fp8(self) -> bool:
        """Return whether the device multiplies in FP8."""
        return False

    def use_fp8(self, model: Model) -> None:
        """Make a model's large matrices multiply in FP8 during training.

        Raises UserError (exit code 2) if the device or the model does not support FP8.
        """
        raise UserError(
            tr(
                "--matmul fp8 needs a GPU that multiplies in FP8 (compute capability 8.9 or "
                "later), but the device is {describe}: leave --matmul out",
                describe=self.describe(),
            ),
            exit_code=2,
        )

    def use_int8(self, model: Model, operations: Operations) -> None:
        """Make a model's large matrices multiply in 8-bit integers during training.

        Raises UserError (exit code 2) if the device or the model does not support this.
        """
        raise UserError(
            tr(
                "--matmul int8 needs the C++ kernels for CPUs, but the device is {describe}: "
                "leave --matmul out",
                describe=self.describe(),
            ),
            exit_code=2,
        )

    def preset_matmul(self, dtype: torch.dtype, operations: Operations | None = None) -> Matmul:
        """Return the matrix format that presets choose on this device for a GPT in `dtype`.

        It has fewer bits than `dtype` only if training is then faster and learns nearly as well.
        `operations` are those that the model uses, or None for the device's usual ones.
        """
        return "auto"

    # --- opening ---------------------------------------------------------------------------------

    def open(self) -> torch.device:
        """Open the device for this process, and return it.

        Warns if other processes hold much of its memory. Raises UserError if the device cannot be
        opened.
        """
        count = self.count()
        if self.index >= count:
            raise UserError(
                tr(
                    "this host shows {count} {name} device(s), but the launcher started local "
                    "rank {index}; use --nproc_per_node={count} or fewer",
                    count=count,
                    name=self.name,
                    index=self.index,
                )
            )
        try:
            self.module.set_device(self.index)
            free, total = self.module.mem_get_info()
        except RuntimeError as failure:
            raise UserError(self.cannot_open(str(failure))) from failure
        in_use = self.in_use(free, total)
        if in_use:
            warn(in_use)
        torch.set_float32_matmul_precision("high")
        return torch.device(self.name, self.index)

    def cannot_open(self, failure: str) -> str:
        """Return a message that says why the device cannot be opened, and what may help."""
        raise NotImplementedError

    def in_use(self, free: int, total: int) -> str:
        """Return a warning if other processes hold much of the memory, or "" otherwise."""
        return ""

    def describe(self) -> str:
        """Return a description of the device for the user."""
        return f"{self.name} {self.module.get_device_name(self.index)}"

    # --- ranks -----------------------------------------------------------------------------------

    @property
    def collectives(self) -> str:
        """The backends for init_process_group(), with gloo for CPU tensors."""
        return f"cpu:gloo,{self.name}:{self.backend}"

    def prepare_collectives(self) -> int:
        """Set the backend's environment variables, and return the collectives' time-out in seconds.

        Variables that the user has set are kept. By default, none are set.
        """
        return 2400

    def ranks_met(self, rank: int, local_rank: int, world_size: int) -> None:
        """Prepare this rank for its first collective on the device.

        Called after all ranks have joined the process group, and also for a single rank.
        """

    def prepare_sharding(self) -> None:
        """Make FSDP2 work on this device; to be called before a model is sharded."""

    def communicates(self, operator: str) -> bool:
        """Return whether the operator that a trace calls `operator` is a collective."""
        return self.backend in operator.lower()

    # --- work ------------------------------------------------------------------------------------

    def operations(self, choice: KernelChoice) -> Operations:
        """Return the operations that models use on this device.

        Raises UserError if the kernels of `choice` are not available.
        """
        raise NotImplementedError

    def cannot_train(self) -> str:
        """Return why models cannot be trained on this device, or "" if they can."""
        return ""

    def refuse_fused(self, choice: KernelChoice) -> None:
        """Raise UserError if `choice` is fused, for platforms that have no fused kernels."""
        if choice == "fused":
            raise UserError(
                tr(
                    "--kernels fused was asked for, but the device is {name}, which has no fused "
                    "kernels of its own; leave --kernels out",
                    name=self.name,
                )
            )

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        self.module.synchronize()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Let the copies made in this block overlap with the computations of other threads.

        The copies are complete when the block ends.
        """
        stream = self.module.Stream(device=self.index)
        with self.module.stream(stream):
            yield
        stream.synchronize()

    def clear_overflow(self) -> None:
        """Clear the overflow flag of a chip whose overflows saturate instead of giving inf."""

    def overflows(self) -> list[torch.Tensor]:
        """Return a list of tensors (1,), nonzero if a number overflowed since clear_overflow().

        The list is empty for a chip on which overflows give inf.
        """
        return []

    def explain(self, failure: RuntimeError) -> str:
        """Return what a known error means and what the user can do, or "" for an unknown error."""
        if isinstance(failure, torch.OutOfMemoryError):
            return tr(
                "out of memory. Free the device, or take a smaller model, fewer rows a pass "
                "(--device_batch_size) or shorter rows"
            )
        return ""

    def tracer(self, folder: Path, name: str, steps: int) -> Tracer | None:
        """Return a tracer of `steps` steps that writes into `folder` under `name`.

        Returns None if torch's profiler must be used instead.
        """
        return None

    def int8_missing(self, dtype: torch.dtype) -> str:
        """Return why 8-bit matrices are unsupported or no faster for serving a model in `dtype`.

        Returns "" if they are faster.
        """
        return f"8-bit matrices are for CPUs, and this device is {self.name}"

    # --- memory and speed ------------------------------------------------------------------------

    def memory_total(self) -> int:
        """Return the size of the device's memory in bytes."""
        return int(self.module.mem_get_info()[1])

    def memory_reachable(self) -> int:
        """Return the bytes of memory that this process holds or can still allocate."""
        free, _ = self.module.mem_get_info()
        return int(free + self.module.memory_reserved())

    def memory_free(self) -> int:
        """Return the bytes of device memory that no process holds."""
        return int(self.module.mem_get_info()[0])

    def memory_peak(self) -> int:
        """Return the largest number of bytes that this process has had allocated at one time.

        start_memory_watch() resets the peak.
        """
        return int(self.module.max_memory_allocated())

    def start_memory_watch(self) -> None:
        """Free cached memory, and reset the peaks that memory_peak() and memory_taken() return."""
        self.module.empty_cache()
        self.module.reset_peak_memory_stats()

    def memory_taken(self) -> int:
        """Return the peak number of bytes reserved by this process since start_memory_watch()."""
        self.synchronize()
        return int(self.module.max_memory_reserved())

    def usual_mfu(self) -> float:
        """Return the share of peak FLOP/s to assume for training before a step is measured."""
        return 0.4

    def peak_flops(self) -> tuple[float, str] | None:
        """Return the published or estimated peak FLOP/s and its source, or None if unknown."""
        return None

    def chips(self) -> Sequence[Chip]:
        """Return the kinds of cards that nanochat.planner can plan for, on this host or others."""
        return ()

    def chips_called(self, name: str) -> Sequence[Chip]:
        """Return the kinds of cards that `name` may mean: one, several if ambiguous, or none."""
        return [chip for chip in self.chips() if chip.name.lower() == name.strip().lower()]

    @property
    def chip(self) -> Chip | None:
        """The kind of card that this process uses, or None if it is unknown."""
        return None

    # --- graphs ----------------------------------------------------------------------------------

    def graphs_missing(self) -> str:
        """Return why operators cannot be captured and replayed as a graph, or "" if they can."""
        return ""

    def graphed(
        self,
        call: torch.nn.Module,
        samples: tuple[torch.Tensor, ...],
    ) -> Callable[..., Any]:
        """Return a version of the module `call` that runs forward and backward in one launch each.

        Inputs must have the shapes of `samples`. Capturing runs the module a few times and may
        leave gradients in its parameters. The module's arguments and results must be tensors, and
        the module must not wait for the device.
        """
        return self.module.make_graphed_callables(call, samples)

    def captured(self, work: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        """Return a function that repeats `work` as one launch, on the same tensors.

        `work` must have run once before. Its results are undefined until the first replay, and the
        tensors that `work` creates live as long as the returned function. Functions with the same
        `pool` share memory, so a replay of one may overwrite the results of the others.
        """
        graph = self.new_graph()
        with self.module.graph(graph, pool=pool):
            work()
        return graph.replay

    def graph_pool(self) -> Any:
        """Return a new `pool` for captured(), which several captured functions can share."""
        return self.module.graph_pool_handle()

    def new_graph(self) -> Any:
        """Return an empty graph for captured()."""
        raise NotImplementedError

    # --- the compiler ----------------------------------------------------------------------------

    def compiler_missing(self) -> str:
        """Return why torch.compile cannot be used, or "" if it can."""
        return ""

    def prepare_compiling(self) -> None:
        """Make torch's compiler reuse what earlier processes compiled.

        A platform may also make compiled training deterministic here.
        """
        host.prepare_compiling()

    @contextlib.contextmanager
    def saving_memory(self, tokens: int) -> Iterator[None]:
        """Let models compiled in this block save memory if `tokens`, the size of a pass, is large.

        By default, this does nothing.
        """
        yield

    def finish_compiling(self) -> None:
        """Give memory that the compiler has freed back to the system."""
        host.give_freed_memory_back()

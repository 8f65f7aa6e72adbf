"""What the rest of the project asks of a device.

Each vendor's folder has one subclass of Platform, and device.py has their table. The
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

from nanochat.common import UserError, warn
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
    def tflops(self) -> float: ...  # 0 where no peak is known

    @property
    def memory_gib(self) -> float: ...


@dataclass(frozen=True)
class Trace:
    """What a vendor's own profiler measured: mean milliseconds of a step, and every operator."""

    computing_ms: float
    communication_ms: float
    exposed_ms: float  # communication that nothing was computed beside
    idle_ms: float
    operators: list[tuple[str, float]]  # name and microseconds of every call, over all traced steps
    path: Path  # of the trace, for a viewer


class Tracer(Protocol):
    """A vendor's own profiler: start() before the step in which it settles, step() after each step."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def finish(self) -> Trace: ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a number format, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def requested_kernels(flag: str) -> KernelChoice:
    """Return what --kernels says, or NANOCHAT_KERNELS where the flag says auto."""
    name = flag
    if flag == "auto":
        name = os.environ.get("NANOCHAT_KERNELS") or "auto"
    for choice in get_args(KernelChoice):
        if name == choice:
            return choice
    raise UserError(f"NANOCHAT_KERNELS must be auto, fused or plain, got {name!r}", exit_code=2)


class Platform:
    """One kind of device, and the one device of that kind that this process uses."""

    name = ""  # of the device type, as torch and --device_type call it
    backend = ""  # of the collectives
    # Whether it has memory of its own, which host tensors are copied to. Otherwise it uses the
    # host's, and all ranks of a host share that.
    has_own_memory = True
    # Whether it computes while the host does something else: operators are queued, and a checkpoint
    # is written beside training.
    runs_beside_host = True
    # Tokens of a row unless the user says otherwise, and why.
    context: tuple[int, str] = (2048, "the default")
    # Tokens of a pass that suit the device; None: as many as its memory holds.
    pass_tokens: int | None = None
    split_tokens = 10 << 20  # tokens of a split to measure bits per byte on
    evaluation_rows = 32  # rows of a pass without gradients
    # Whether decoding steps are replayed as captured graphs unless the user says otherwise.
    replays_replies = False
    # Whether reinforcement learning trains on trees of replies unless the user says otherwise.
    prefers_trees = False
    shards_sparse_tables = True  # whether FSDP2 splits tables of which a step uses few rows
    long_run_seconds = math.inf  # a run that takes longer gets a warning

    def __init__(self, index: int = 0):
        """Name the device by its number among those that this process sees; open nothing."""
        self.index = index

    @property
    def module(self) -> Any:
        """The part of torch that drives the device, such as torch.cuda; None for the host."""
        return getattr(torch, self.name)

    # --- choosing --------------------------------------------------------------------------------

    def unavailable(self) -> str:
        """Return why no such device can be used in this process; "" if one can."""
        raise NotImplementedError

    def idle_cards(self) -> str:
        """Return what to do about cards that cannot be used; "" if this host has no such cards."""
        return ""

    def count(self) -> int:
        """Return how many such devices this process sees."""
        return int(self.module.device_count())

    def is_slow(self) -> bool:
        """Return whether it is several times slower than others of its kind: a speedrun is small then."""
        return False

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """Return the number format to compute in, and why."""
        raise NotImplementedError

    def lacks_dtype(self, dtype: torch.dtype) -> str:
        """Return why the device cannot compute in the format of NANOCHAT_DTYPE; "" if it can."""
        return ""

    # --- the number format of matrices ------------------------------------------------------------

    def use_matmul(self, model: Model, matmul: Matmul, operations: Operations) -> None:
        """Let the large matrices of a model multiply in a number format in training.

        `operations` are those of the model. auto multiplies in the format that the model computes
        in. Raises UserError (code 2) if the device or the model cannot multiply as requested.
        """
        if matmul == "bf16" and model.dtype != torch.bfloat16:
            raise UserError(
                "--matmul bf16 needs a model that computes in bfloat16, but this one computes in "
                f"{dtype_name(model.dtype)}: leave --matmul out, or set NANOCHAT_DTYPE=bfloat16",
                exit_code=2,
            )
        if matmul == "fp8":
            self.use_fp8(model)
        if matmul == "int8":
            self.use_int8(model, operations)

    def use_fp8(self, model: Model) -> None:
        """Let the large matrices of a model multiply in FP8 in training.

        Raises UserError (code 2) if that cannot be done.
        """
        raise UserError(
            "--matmul fp8 needs a GPU that multiplies in FP8 (compute capability 8.9 or later), "
            f"but the device is {self.describe()}: leave --matmul out",
            exit_code=2,
        )

    def use_int8(self, model: Model, operations: Operations) -> None:
        """Let the large matrices of a model multiply in integers of 8 bits in training.

        Raises UserError (code 2) if that cannot be done.
        """
        raise UserError(
            "--matmul int8 needs the C++ kernels for CPUs, but the device is "
            f"{self.describe()}: leave --matmul out",
            exit_code=2,
        )

    def preset_matmul(self, dtype: torch.dtype) -> Matmul:
        """Return the number format that presets of a GPT in `dtype` ask for on this device.

        It is coarser than `dtype` only where such training is faster and learns nearly as well.
        """
        return "auto"

    # --- opening ---------------------------------------------------------------------------------

    def open(self) -> torch.device:
        """Take the device for this process; warn if it is in use.

        Raises UserError if the device cannot be opened.
        """
        count = self.count()
        if self.index >= count:
            raise UserError(
                f"this host shows {count} {self.name} device(s), but the launcher started local rank {self.index}; "
                f"use --nproc_per_node={count} or fewer"
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
        """Return why the device could not be opened, and what may help."""
        raise NotImplementedError

    def in_use(self, free: int, total: int) -> str:
        """Return a warning about memory that other processes hold; "" if nearly all is free."""
        return ""

    def describe(self) -> str:
        """Return the device in words."""
        return f"{self.name} {self.module.get_device_name(self.index)}"

    # --- ranks -----------------------------------------------------------------------------------

    @property
    def collectives(self) -> str:
        """The backends of the process group; CPU tensors always go over gloo."""
        return f"cpu:gloo,{self.name}:{self.backend}"

    def prepare_collectives(self) -> int:
        """Set the collectives' environment where the user has not; return their time-out in seconds."""
        return 2400

    def ranks_met(self, rank: int, local_rank: int, world_size: int) -> None:
        """Do what needs all ranks before their first collective on the device.

        They have joined the process group.
        """

    def prepare_sharding(self) -> None:
        """Make FSDP2 work on this device, before a model is sharded."""

    def communicates(self, operator: str) -> bool:
        """Return whether an operator of a trace, by its name, is a collective."""
        return self.backend in operator.lower()

    # --- work ------------------------------------------------------------------------------------

    def operations(self, choice: KernelChoice) -> Operations:
        """Return how models compute on this device; log the choice.

        Raises UserError if what was asked for cannot be had.
        """
        raise NotImplementedError

    def cannot_train(self) -> str:
        """Return why models cannot be trained on this device; "" if they can."""
        return ""

    def refuse_fused(self, choice: KernelChoice) -> None:
        """Raise UserError if fused kernels were asked for on a platform that has none."""
        if choice == "fused":
            raise UserError(
                f"--kernels fused was asked for, but the device is {self.name}, which has no fused kernels of its own; "
                "leave --kernels out"
            )

    def synchronize(self) -> None:
        """Wait until the device has done everything that it was given."""
        self.module.synchronize()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Let copies inside this block run beside what other threads let the device compute.

        They are done at the end of the block.
        """
        stream = self.module.Stream(device=self.index)
        with self.module.stream(stream):
            yield
        stream.synchronize()

    def clear_overflow(self) -> None:
        """Forget earlier overflows, on a chip that saturates where others give inf."""

    def overflows(self) -> list[torch.Tensor]:
        """Return (1,), not 0 if anything overflowed since clear_overflow(), on a chip that saturates."""
        return []

    def explain(self, failure: RuntimeError) -> str:
        """Return what a known error means and what the user can do; "" for an unknown error."""
        if isinstance(failure, torch.OutOfMemoryError):
            return "out of memory. Free the device, or take a smaller --depth, --device_batch_size or --max_seq_len"
        return ""

    def tracer(self, folder: Path, name: str, steps: int) -> Tracer | None:
        """Return the vendor's own profiler, which writes into a folder under a name.

        None where torch's profiler serves.
        """
        return None

    def int8_missing(self, dtype: torch.dtype) -> str:
        """Return why matrices in 8 bits would not make a served model in `dtype` faster here.

        "" if they would.
        """
        return f"8-bit matrices are for CPUs, and this device is {self.name}"

    # --- memory and speed ------------------------------------------------------------------------

    def memory_total(self) -> int:
        """Return the bytes of the device's memory."""
        return int(self.module.mem_get_info()[1])

    def memory_reachable(self) -> int:
        """Return the bytes that this process holds or may still take."""
        free, _ = self.module.mem_get_info()
        return int(free + self.module.memory_reserved())

    def memory_free(self) -> int:
        """Return the bytes of the device's memory that nobody holds."""
        return int(self.module.mem_get_info()[0])

    def memory_peak(self) -> int:
        """Return the most bytes that this process has had allocated."""
        return int(self.module.max_memory_allocated())

    def start_memory_watch(self) -> None:
        """Give cached memory back to the device; memory_taken() counts from here."""
        self.module.empty_cache()
        self.module.reset_peak_memory_stats()

    def memory_taken(self) -> int:
        """Return the most bytes that this process took since start_memory_watch()."""
        self.synchronize()
        return int(self.module.max_memory_reserved())

    def usual_mfu(self) -> float:
        """Return the share of the peak that training usually reaches, before a step was measured."""
        return 0.4

    def peak_flops(self) -> tuple[float, str] | None:
        """Return FLOP/s by the data sheet, and their source; None where no data sheet is known."""
        return None

    def chips(self) -> Sequence[Chip]:
        """Return the kinds of cards that nanochat.planner can plan for, also those of other hosts."""
        return ()

    @property
    def chip(self) -> Chip | None:
        """The kind of the card that this process uses; None where it is not known."""
        return None

    # --- graphs ----------------------------------------------------------------------------------

    def graphs_missing(self) -> str:
        """Return why sequences of operators cannot be captured and replayed here; "" if they can."""
        return ""

    def graphed(
        self,
        call: torch.nn.Module,
        samples: tuple[torch.Tensor, ...],
    ) -> Callable[..., Any]:
        """Return a call whose forward and backward pass each replay as one launch.

        Its inputs have the samples' shapes. The module runs a few times, and gradients of its
        parameters may be left behind. Its arguments and results are tensors, and it must not wait
        for the device.
        """
        return self.module.make_graphed_callables(call, samples)

    def captured(self, work: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        """Return a function that repeats `work` as one launch, on the same tensors.

        `work` must have run once before. What it computes now is undefined until the first replay,
        and tensors that it makes live as long as the function. With a `pool`, they share memory
        with those of other functions, and a replay overwrites the results of others.
        """
        graph = self.new_graph()
        with self.module.graph(graph, pool=pool):
            work()
        return graph.replay

    def graph_pool(self) -> Any:
        """Return memory for captured() that graphs share whose results are used at once."""
        return self.module.graph_pool_handle()

    def new_graph(self) -> Any:
        """Return an empty graph."""
        raise NotImplementedError

    # --- the compiler ----------------------------------------------------------------------------

    def compiler_missing(self) -> str:
        """Return why torch.compile cannot be used; "" if it can."""
        return ""

    def prepare_compiling(self) -> None:
        """Let torch's compiler use its cache, and repeat compiled training bit for bit."""
        host.prepare_compiling()

    @contextlib.contextmanager
    def saving_memory(self, tokens: int) -> Iterator[None]:
        """Let a model compiled here, for passes of `tokens`, keep less for its backward pass."""
        yield

    def finish_compiling(self) -> None:
        """Give back the memory that the compiler has used."""
        host.give_freed_memory_back()

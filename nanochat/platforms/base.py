"""What the rest of the project asks of a device. Each vendor's file has one subclass, and device.py has their table.

The defaults suit an accelerator whose module in torch has the functions of torch.cuda.
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
from nanochat.platforms.operations import KernelChoice, Operations


class Chip(Protocol):
    """A kind of card, as nanochat.planner plans for it."""

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
    """What a vendor's own profiler measured: milliseconds of a step on average, and every operator that ran."""

    computing_ms: float
    communication_ms: float
    exposed_ms: float  # communication that nothing was computed beside
    idle_ms: float
    operators: list[tuple[str, float]]  # name and microseconds of every call, over all traced steps
    path: Path  # of the trace, for a viewer


class Tracer(Protocol):
    """A vendor's own profiler: start() before the step in which the profiler settles, step() after each step."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def finish(self) -> Trace: ...


def requested_kernels(flag: str) -> KernelChoice:
    """auto, fused or plain: what --kernels says, and NANOCHAT_KERNELS where the flag says auto."""
    name = (os.environ.get("NANOCHAT_KERNELS") or "auto") if flag == "auto" else flag
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
        """`index` is the number of the device among those that this process sees; opens nothing."""
        self.index = index

    @property
    def module(self) -> Any:
        """The part of torch that drives the device, such as torch.cuda; None for the host."""
        return getattr(torch, self.name)

    # --- choosing and opening --------------------------------------------------------------------

    def unavailable(self) -> str:
        """Why no such device can be used in this process; "" if one can."""
        raise NotImplementedError

    def idle_cards(self) -> str:
        """What to do about cards that this host has and that cannot be used; "" if there are no such cards."""
        return ""

    def count(self) -> int:
        """How many such devices this process sees."""
        return int(self.module.device_count())

    def is_slow(self) -> bool:
        """Whether it takes several times as long as others of its kind, so that a speedrun should be a small one."""
        return False

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """The number format to compute in, and why."""
        raise NotImplementedError

    def lacks_dtype(self, dtype: torch.dtype) -> str:
        """Why the device cannot compute in the format that NANOCHAT_DTYPE asks for; "" if the device can."""
        return ""

    def use_fp8(self, model: Model) -> None:
        """Let the large matrices of a model multiply in eight bits in training. UserError if that cannot be done."""
        raise UserError(
            f"--fp8 needs a GPU that multiplies in FP8 (compute capability 8.9 or later), but the device is "
            f"{self.describe()}: leave the flag out"
        )

    def open(self) -> torch.device:
        """Take the device for this process. UserError if the device cannot be opened; a warning if it is in use."""
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
        if in_use := self.in_use(free, total):
            warn(in_use)
        torch.set_float32_matmul_precision("high")
        return torch.device(self.name, self.index)

    def cannot_open(self, failure: str) -> str:
        """Why the device could not be opened, and what may help."""
        raise NotImplementedError

    def in_use(self, free: int, total: int) -> str:
        """A warning about a device whose memory other processes hold; "" if the device is nearly empty."""
        return ""

    def describe(self) -> str:
        """The device in words."""
        return f"{self.name} {self.module.get_device_name(self.index)}"

    # --- ranks -----------------------------------------------------------------------------------

    @property
    def collectives(self) -> str:
        """The backends of the process group; CPU tensors always go over gloo."""
        return f"cpu:gloo,{self.name}:{self.backend}"

    def prepare_collectives(self) -> int:
        """Set the environment of the collectives where the user has not; returns their time-out in seconds."""
        return 2400

    def ranks_met(self, rank: int, local_rank: int, world_size: int) -> None:
        """Do what needs all ranks, after they have joined the process group and before their first collective on the
        device."""

    def prepare_sharding(self) -> None:
        """Make FSDP2 work on this device, before a model is sharded."""

    def communicates(self, operator: str) -> bool:
        """Whether an operator of a trace, by its name, is a collective."""
        return self.backend in operator.lower()

    # --- work ------------------------------------------------------------------------------------

    def operations(self, choice: KernelChoice) -> Operations:
        """How models compute on this device; logs the choice. UserError if what was asked for cannot be had."""
        raise NotImplementedError

    def cannot_train(self) -> str:
        """Why models cannot be trained on this device; "" if they can."""
        return ""

    def refuse_fused(self, choice: KernelChoice) -> None:
        """UserError if fused kernels were asked for on a platform that has none."""
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
        """Copies inside this block run beside what other threads let the device compute; they are done at its end."""
        stream = self.module.Stream(device=self.index)
        with self.module.stream(stream):
            yield
        stream.synchronize()

    def clear_overflow(self) -> None:
        """Forget earlier overflows, on a chip that saturates where others give inf."""

    def overflows(self) -> list[torch.Tensor]:
        """On a chip that saturates: (1,), not 0 if anything overflowed since clear_overflow(). Else nothing."""
        return []

    def explain(self, failure: RuntimeError) -> str:
        """What a known error of the device means and what the user can do; "" for an unknown error."""
        if isinstance(failure, torch.OutOfMemoryError):
            return "out of memory. Free the device, or take a smaller --depth, --device_batch_size or --max_seq_len"
        return ""

    def tracer(self, folder: Path, name: str, steps: int) -> Tracer | None:
        """The vendor's own profiler, which writes into a folder under a name; None where torch's profiler serves."""
        return None

    def int8_missing(self, dtype: torch.dtype) -> str:
        """Return why matrices in 8 bits would not make a served model in `dtype` faster here.

        "" if they would.
        """
        return f"8-bit matrices are for CPUs, and this device is {self.name}"

    # --- memory and speed ------------------------------------------------------------------------

    def memory_total(self) -> int:
        """Bytes of the device's memory."""
        return int(self.module.mem_get_info()[1])

    def memory_reachable(self) -> int:
        """Bytes that this process holds or may still take; memory that other processes hold is left out."""
        free, _ = self.module.mem_get_info()
        return int(free + self.module.memory_reserved())

    def memory_free(self) -> int:
        """Bytes of the device's memory that nobody holds."""
        return int(self.module.mem_get_info()[0])

    def memory_peak(self) -> int:
        """Bytes that this process has allocated at most."""
        return int(self.module.max_memory_allocated())

    def start_memory_watch(self) -> None:
        """Give cached memory back to the device; memory_taken() counts from here."""
        self.module.empty_cache()
        self.module.reset_peak_memory_stats()

    def memory_taken(self) -> int:
        """Bytes that this process has taken from the device at most since start_memory_watch()."""
        self.synchronize()
        return int(self.module.max_memory_reserved())

    def usual_mfu(self) -> float:
        """The share of the peak that training usually reaches, to tell its time before a step was measured."""
        return 0.4

    def peak_flops(self) -> tuple[float, str] | None:
        """FLOP/s by the data sheet, and their source; None where no data sheet is known."""
        return None

    def chips(self) -> Sequence[Chip]:
        """The kinds of cards that nanochat.planner can plan for, whether or not this host has one."""
        return ()

    @property
    def chip(self) -> Chip | None:
        """The kind of the card that this process uses; None where it is not known."""
        return None

    # --- graphs ----------------------------------------------------------------------------------

    def graphs_missing(self) -> str:
        """Why sequences of operators cannot be captured and replayed on this device; "" if they can."""
        return ""

    def graphed(
        self, call: torch.nn.Module, samples: tuple[torch.Tensor, ...]
    ) -> Callable[..., Any]:
        """A call whose forward and backward pass each replay as one launch, on inputs of the samples' shapes.

        The module runs a few times, and gradients of its parameters may be left behind. Its arguments and results are
        tensors, and it must not wait for the device.
        """
        return self.module.make_graphed_callables(call, samples)

    def captured(self, work: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        """A function that repeats `work` as one launch, on the same tensors. `work` must have run once before; what it
        computes now is undefined until the first replay, and tensors that it makes live as long as the function. With
        a `pool`, they share memory with those of other functions, and a replay overwrites the results of others."""
        graph = self.new_graph()
        with self.module.graph(graph, pool=pool):
            work()
        return graph.replay

    def graph_pool(self) -> Any:
        """Memory that graphs share whose results are used before another one is replayed; for captured()."""
        return self.module.graph_pool_handle()

    def new_graph(self) -> Any:
        """An empty graph."""
        raise NotImplementedError

    # --- the compiler ----------------------------------------------------------------------------

    def compiler_missing(self) -> str:
        """Why torch.compile cannot be used; "" if it can."""
        return ""

    def prepare_compiling(self) -> None:
        """Set up torch's compiler: use its cache, and repeat compiled training on this device bit for bit."""
        host.prepare_compiling()

    @contextlib.contextmanager
    def saving_memory(self, tokens: int) -> Iterator[None]:
        """Let a model that is compiled here, for passes of `tokens`, keep less for its backward pass."""
        yield

    def finish_compiling(self) -> None:
        """Give back the memory that the compiler has used."""
        host.give_freed_memory_back()

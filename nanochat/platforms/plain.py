"""The host as a device, in plain torch, to which the optional folder cpu/ adds kernels."""

import contextlib
import os
import resource
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from nanochat.common import tr
from nanochat.data import limits
from nanochat.platforms import host
from nanochat.platforms.base import Platform, dtype_name
from nanochat.platforms.operations import KernelChoice, Operations

PASS_TOKENS = 4096  # tokens in a pass: larger passes do not fit the caches


class Host(Platform):
    """The host's processor, with torch's own operators."""

    name = "cpu"
    backend = "gloo"
    has_own_memory = False
    pins_memory = False
    runs_beside_host = False
    pass_tokens = PASS_TOKENS
    split_tokens = 1 << 18
    evaluation_rows = 4
    prefers_trees = True
    shards_sparse_tables = False
    long_run_seconds = 3600

    @property
    def context(self) -> tuple[int, str]:
        """Implement Platform.context."""
        return 512, tr("a CPU")

    @property
    def module(self) -> None:
        """The driver module: None, because the host needs none."""
        return None

    def unavailable(self) -> str:
        """Return "", because every machine has a CPU."""
        return ""

    def count(self) -> int:
        """Return 1, however many ranks share the host."""
        return 1

    def is_slow(self) -> bool:
        """Return whether the processor lacks AVX-512, with which steps are 2 to 3 times as fast."""
        return "avx512f" not in host.cpu_flags()

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """Return bf16 if the processor multiplies it faster than fp32, or else fp32, and why."""
        faster, reason = host.bf16_unit()
        return (torch.bfloat16 if faster else torch.float32), reason

    def slow_dtype(self, dtype: torch.dtype) -> str:
        """Return a warning if `dtype` is bf16 and fp32 is faster, or "" otherwise."""
        faster, reason = host.bf16_unit()
        if dtype != torch.bfloat16 or faster:
            return ""
        return tr("float32 computes faster than bfloat16 here: {reason}", reason=reason)

    def open(self) -> torch.device:
        """Return the CPU device, and make malloc keep freed memory for the next step.

        torch gets no more threads than the CPU quota of a container allows, unless OMP_NUM_THREADS
        says otherwise.
        """
        host.keep_freed_memory()
        allowed = limits.cores()
        if "OMP_NUM_THREADS" not in os.environ and allowed < torch.get_num_threads():
            torch.set_num_threads(allowed)
        return torch.device("cpu")

    def finish_compiling(self) -> None:
        """Give back what the compiler has freed, and the libraries that only importing torch needed.

        In a small run these are a tenth of the process's memory.
        """
        super().finish_compiling()
        host.unmap_unused_code()

    def describe(self) -> str:
        """Return the processor's name and the number of threads that torch uses."""
        threads = torch.get_num_threads()
        return tr("{cpu}, {threads} thread(s)", cpu=host.cpu_model(), threads=threads)

    @property
    def collectives(self) -> str:
        """The process group's backend, gloo."""
        return self.backend

    def prepare_sharding(self) -> None:
        """Fix FSDP2 if it cannot train on CPUs, as in torch 2.7."""
        if not _has_averages():
            _fix_fsdp()

    def operations(self, choice: KernelChoice) -> Operations:
        """Return plain-torch operations; if `choice` is plain, Muon updates matrices one by one.

        Raises UserError if fused kernels were requested.
        """
        self.refuse_fused(choice)
        return Operations(stacks_matrices=choice != "plain")

    def default_operations(self) -> Operations:
        """Return operations for a Compute that is created without operations, as in tests."""
        return Operations()

    def synchronize(self) -> None:
        """Do nothing, because the host queues no work."""

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Do nothing, because copies overlap with other threads' work anyway."""
        yield

    def int8_missing(self, dtype: torch.dtype) -> str:
        """Return "" if `dtype` is bf16, or else a message that 8-bit matrices are no faster."""
        if dtype == torch.bfloat16:
            return ""
        name = dtype_name(dtype)
        return tr(
            "8-bit matrices are faster only where a CPU computes in bfloat16, or in fp32 with "
            "AVX2 and the C++ kernels, and this one computes in {name}",
            name=name,
        )

    def memory_total(self) -> int:
        """Return the size of physical memory in bytes, or the limit of the container if smaller."""
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(physical, limits.memory_limit() or physical)

    def memory_reachable(self) -> int:
        """Return the size of physical memory in bytes, as if no other process used any."""
        return self.memory_total()

    def memory_free(self) -> int:
        """Return the bytes that this process can still take; see host.memory_free()."""
        return host.memory_free()

    def memory_peak(self) -> int:
        """Return this process's peak resident memory in bytes."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def start_memory_watch(self) -> None:
        """Do nothing, because memory_taken() is not supported on the host."""

    def memory_taken(self) -> int:
        """Raise NotImplementedError, because the memory of a pass is not measured on the host."""
        raise NotImplementedError("passes are not probed on the host")

    def graphs_missing(self) -> str:
        """Return why graphs are not used: a CPU launches no operators that a graph could hold."""
        return tr("the device is a CPU, which launches no operators that a graph could hold")

    def compiler_missing(self) -> str:
        """Return what torch.compile needs but the host lacks, or "" if nothing is missing."""
        if host.compiler() is None:
            return tr("no C++ compiler (g++) was found")
        headers = sysconfig.get_paths()["include"]
        if not os.path.exists(os.path.join(headers, "Python.h")):
            return tr("Python's headers (python3-dev) were not found")
        return ""

    def prepare_compiling(self) -> None:
        """Use the compiler's cache, and make torch deterministic if it has several threads."""
        super().prepare_compiling()
        os.environ.setdefault("TORCH_WARM_POOL", "0")  # these processes only compile for GPUs
        if torch.get_num_threads() > 1:
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Filling new memory is slow and only for debugging.
            deterministic: Any = torch.utils.deterministic
            deterministic.fill_uninitialized_memory = False

    @contextlib.contextmanager
    def saving_memory(self, tokens: int) -> Iterator[None]:
        """Make models compiled in this block recompute cheap values if `tokens` is above 4,096.

        Recomputing norms, rotations and squares in the backward pass saves half the memory of
        activations, and 5 % of the time at 16,384 tokens. At 4,096 tokens it would take 5 % longer.
        """
        if tokens <= PASS_TOKENS:
            yield
            return
        # The settings of the part of the compiler that decides what to keep.
        from torch._functorch import config

        # Reasons for which the compiler would keep values that are cheap to recompute.
        reasons = ("materialized_backward", "used_far_apart", "long_fusible_chains", "reductions")
        settings = {f"ban_recompute_{reason}": False for reason in reasons}
        with config.patch(settings):
            yield


def _has_averages() -> bool:
    """Return whether gloo can average, which FSDP2 requires. In torch 2.7 it cannot."""
    try:
        dist.all_reduce(torch.ones(1), dist.ReduceOp.AVG)
    except RuntimeError:
        return False
    return True


def _fix_fsdp() -> None:
    """Add the two features that FSDP2 of torch 2.7 lacks on CPUs.

    FSDP2 requests averages, but gloo's all-reduce then raises an error, and its reduce-scatter
    silently returns the sum. So FSDP2 is made to sum and divide instead, as it does for fp16. With
    replicas, FSDP2 also waits for an event that a CPU stream never records.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def factors(
        scattered: dist.ProcessGroup,
        replicated: dist.ProcessGroup | None,
        *_: object,
    ) -> tuple[float, float]:  # before and after the sum
        ranks = scattered.size()
        if replicated is not None:
            ranks *= replicated.size()
        return 1.0, float(ranks)

    _fsdp_collectives._get_gradient_divide_factors = factors  # type: ignore[assignment]
    torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()  # type: ignore[assignment,method-assign]

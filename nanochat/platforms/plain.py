"""The host as a device, in plain torch: what remains where the appendix of CPUs is torn out."""

import contextlib
import os
import resource
import sys
import sysconfig
from collections.abc import Iterator

import torch
import torch.distributed as dist

from nanochat.common import tr
from nanochat.platforms import host
from nanochat.platforms.base import Platform
from nanochat.platforms.operations import KernelChoice, Operations

PASS_TOKENS = 4096  # tokens of a pass: larger passes only fall out of the caches


class Host(Platform):
    """The host's processor, with torch's own operators."""

    name = "cpu"
    backend = "gloo"
    has_own_memory = False
    runs_beside_host = False
    context = (512, "a CPU")
    pass_tokens = PASS_TOKENS
    split_tokens = 1 << 18
    evaluation_rows = 4
    prefers_trees = True
    shards_sparse_tables = False
    long_run_seconds = 3600

    @property
    def module(self) -> None:
        """The host needs no driver."""
        return None

    def unavailable(self) -> str:
        """Every machine has a CPU."""
        return ""

    def count(self) -> int:
        """One, however many ranks share the host."""
        return 1

    def is_slow(self) -> bool:
        """Whether the processor has no registers of 512 bits, which double or triple the speed of a step."""
        return "avx512f" not in host.cpu_flags()

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """bf16 where the processor multiplies it faster than fp32; elsewhere bf16 is emulated, or no faster."""
        faster, reason = host.bf16_unit()
        return (torch.bfloat16 if faster else torch.float32), reason

    def open(self) -> torch.device:
        """Nothing can fail; freed memory is kept for the next step."""
        host.keep_freed_memory()
        return torch.device("cpu")

    def describe(self) -> str:
        """The processor's name, and how many threads torch uses."""
        return f"{host.cpu_model()}, {torch.get_num_threads()} thread(s)"

    @property
    def collectives(self) -> str:
        """gloo alone."""
        return self.backend

    def prepare_sharding(self) -> None:
        """Fix FSDP2 of torch 2.7, which cannot train on CPUs."""
        if not _has_averages():
            _fix_fsdp()

    def operations(self, choice: KernelChoice) -> Operations:
        """Plain torch; fused kernels are refused."""
        self.refuse_fused(choice)
        return Operations(stacks_matrices=choice != "plain")

    def default_operations(self) -> Operations:
        """Return the operations of a Compute that no launcher made, such as a test's."""
        return Operations()

    def synchronize(self) -> None:
        """The host is always done."""

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Copies are made by the thread that asks for them."""
        yield

    def int8_missing(self, dtype: torch.dtype) -> str:
        """See Platform.int8_missing."""
        if dtype == torch.bfloat16:
            return ""
        name = str(dtype).removeprefix("torch.")
        return (
            "8-bit matrices are faster only where a CPU computes in bfloat16, and this one "
            f"computes in {name}"
        )

    def memory_total(self) -> int:
        """Bytes of physical memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_reachable(self) -> int:
        """All physical memory: the system can take pages back from other processes."""
        return self.memory_total()

    def memory_free(self) -> int:
        """Bytes that this process may still take without others having to swap, within a container's limit."""
        return host.memory_free()

    def memory_peak(self) -> int:
        """Bytes of this process that were resident at most."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def start_memory_watch(self) -> None:
        """The host has nothing to reset."""

    def memory_taken(self) -> int:
        """Nobody asks this of the host."""
        raise NotImplementedError("passes are not probed on the host")

    def graphs_missing(self) -> str:
        """The host launches nothing."""
        return tr("the device is a CPU, which launches no operators that a graph could hold")

    def compiler_missing(self) -> str:
        """What torch.compile lacks on the host."""
        if host.compiler() is None:
            return "no C++ compiler (g++) was found"
        if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
            return "Python's headers (python3-dev) were not found"
        return ""

    def prepare_compiling(self) -> None:
        """As for every device; and several compiled threads would otherwise add to a row of a table in any order."""
        super().prepare_compiling()
        os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes that compile for GPUs alone
        if torch.get_num_threads() > 1:
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Filling new memory is for debugging, and slow.
            torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]

    @contextlib.contextmanager
    def saving_memory(self, tokens: int) -> Iterator[None]:
        """In passes too large for the caches, recompute in the backward pass what costs no matmul (norms, rotations,
        squares): half the memory of activations, and 5 % less time at 16,384 tokens. At 4,096 tokens recomputing would
        take 5 % more time."""
        if tokens <= PASS_TOKENS:
            yield
            return
        from torch._functorch import config  # of the part of the compiler that decides what is kept

        # The reasons for which the compiler keeps values that are cheap to recompute.
        reasons = ("materialized_backward", "used_far_apart", "long_fusible_chains", "reductions")
        with config.patch({f"ban_recompute_{reason}": False for reason in reasons}):
            yield


def _has_averages() -> bool:
    """Whether gloo can average, which FSDP2 asks for; gloo of torch 2.7 cannot."""
    try:
        dist.all_reduce(torch.ones(1), dist.ReduceOp.AVG)
    except RuntimeError:
        return False
    return True


def _fix_fsdp() -> None:
    """Give FSDP2 of torch 2.7 the two things that it lacks on CPUs.

    FSDP2 asks for averages: gloo's all-reduce raises, and its reduce-scatter gives the sum without a word. FSDP2 is
    told to sum and divide instead, as it does for fp16. And with replicas FSDP2 waits for an event that a host's stream
    never gave.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    def factors(
        scattered: dist.ProcessGroup, replicated: dist.ProcessGroup | None, *_: object
    ) -> tuple[float, float]:  # before and after the sum
        return 1.0, float(scattered.size() * (replicated.size() if replicated is not None else 1))

    _fsdp_collectives._get_gradient_divide_factors = factors  # type: ignore[assignment]
    torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()  # type: ignore[assignment,method-assign]

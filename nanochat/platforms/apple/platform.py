"""A Mac's GPU (MPS): one device and one rank, in plain torch, without compiler, graphs or pinning.

Nobody has run this file on a Mac. tests/platforms/test_apple.py checks the functions of torch.mps
that it calls, and the operators of a training, against torch's published wheel for macOS.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from nanochat.common import UserError, tr, warn
from nanochat.platforms import host
from nanochat.platforms.base import Platform
from nanochat.platforms.operations import KernelChoice, Operations


class Apple(Platform):
    """The GPU of a Mac with Apple silicon."""

    name = "mps"
    backend = "gloo"
    must_be_named = True
    pins_memory = False

    def unavailable(self) -> str:
        """Return why this process cannot use a Mac's GPU, or "" if it can."""
        return "" if torch.backends.mps.is_available() else tr("torch sees no GPU of a Mac")

    def is_slow(self) -> bool:
        """Return True: nobody has measured this GPU, so a speedrun is small."""
        return True

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """Return fp32, because nobody has measured bf16 on this GPU."""
        return torch.float32, tr("NANOCHAT_DTYPE may name another")

    def lacks_dtype(self, dtype: torch.dtype) -> str:
        """Return that bf16 needs macOS 14 if `dtype` is bf16 and macOS is older, or "" otherwise."""
        if dtype != torch.bfloat16 or torch.backends.mps.is_macos_or_newer(14, 0):
            return ""
        return tr(
            "bfloat16 was asked for, but a Mac's GPU has bf16 from macOS 14 on; "
            "leave it out to use float32"
        )

    def open(self) -> torch.device:
        """Return the GPU, and warn that nobody has tried it.

        Copies between host and GPU then wait. Raises UserError (exit code 2) for a job of several
        ranks.
        """
        ranks = host.read_ranks(met=dist.is_initialized()).world_size
        if ranks > 1:
            raise UserError(
                tr(
                    "a Mac's GPU computes with one rank, got {ranks}; start the script without "
                    "torchrun, or give --device_type=cpu",
                    ranks=ranks,
                ),
                exit_code=2,
            )
        warn(tr("nobody has run nanochat on a Mac's GPU yet, so check its losses against a CPU's"))
        _make_copies_wait()
        return torch.device(self.name, 0)

    def describe(self) -> str:
        """Return the device type and the name of the GPU."""
        return f"{self.name} {torch.backends.mps.get_name()}"

    @property
    def collectives(self) -> str:
        """The process group's backend, gloo, for a launcher that starts a single rank."""
        return self.backend

    def operations(self, choice: KernelChoice) -> Operations:
        """Return plain-torch operations. Raises UserError if fused kernels were requested."""
        self.refuse_fused(choice)
        return Operations(stacks_matrices=choice != "plain")

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Complete the block's copies when it ends; there is no second stream for them."""
        yield
        self.synchronize()

    def explain(self, failure: RuntimeError) -> str:
        """Implement Platform.explain: a lack of memory is a plain RuntimeError on this GPU."""
        if "out of memory" in str(failure):
            failure = torch.OutOfMemoryError(str(failure))
        return super().explain(failure)

    def memory_total(self) -> int:
        """Return the bytes that Metal recommends a process to use at most, of the Mac's memory."""
        return int(torch.mps.recommended_max_memory())

    def memory_reachable(self) -> int:
        """Return memory_total(), because Metal does not say what other processes hold."""
        return self.memory_total()

    def memory_free(self) -> int:
        """Return what this process has left of memory_total()."""
        return max(self.memory_total() - self.memory_peak(), 0)

    def memory_peak(self) -> int:
        """Return the bytes that Metal has allocated for this process, with torch's cache.

        torch records no peaks here, but its cache keeps memory that tensors have left.
        """
        return int(torch.mps.driver_allocated_memory())

    def start_memory_watch(self) -> None:
        """Free cached memory, so that memory_taken() starts from what tensors hold."""
        torch.mps.empty_cache()

    def memory_taken(self) -> int:
        """Return the bytes allocated for this process, which only empty_cache() reduces."""
        self.synchronize()
        return self.memory_peak()

    def graphs_missing(self) -> str:
        """Return that no graphs can be captured on a Mac's GPU."""
        return tr("a Mac's GPU captures no graphs")

    def compiler_missing(self) -> str:
        """Return that torch.compile is off, because nobody has tried it on a Mac's GPU."""
        return tr("off on a Mac's GPU")


def _make_copies_wait() -> None:
    """Make Tensor.to() and Tensor.copy_() ignore non_blocking.

    torch 2.13 otherwise copies to this GPU from host memory that may have been freed meanwhile, and
    the numbers are silently wrong (issues 139550 and 189690 of PyTorch).
    """

    def waiting(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(method)
        def copy(*args: Any, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
            return method(*args, **kwargs)

        return copy

    for name in ("to", "copy_"):
        setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name)))

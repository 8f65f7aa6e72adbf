"""Chooses and opens the device that this process computes on.

Every higher layer asks this module instead of naming a vendor.

At import `device_type`, `backend` and `reason` are chosen, but nothing is initialised;
compute_init() does that. The choice is what NANOCHAT_DEVICE names or, by default, the first usable
one of npu, cuda and cpu; mps must be named. If NANOCHAT_DEVICE names a device that cannot be used,
the three are empty, and the first use raises the reason. The differences between devices are in
nanochat/platforms/, which has one Platform class for each.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist

from nanochat.common import Pulse, UserError, appendix, base_dir, tr, warn
from nanochat.data.command_line import complain
from nanochat.platforms import host
from nanochat.platforms.base import Chip, Platform, dtype_name, requested_kernels
from nanochat.platforms.operations import Operations
from nanochat.platforms.plain import Host

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MASTER = torch.float32  # the format in which parameters are trained and saved
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# In order of preference. A new vendor needs a folder in platforms/ and an entry here.
VENDORS = {
    "npu": ("ascend", "Ascend"),
    "cuda": ("nvidia", "Nvidia"),
    "mps": ("apple", "Apple"),  # only if it is named, because nobody has run it on a Mac
    "cpu": ("cpu", "Cpu"),
}
MEASURE = "python check_npu.py --bench"  # the command that measures cards for nanochat.planner


def _platforms() -> dict[str, type[Platform]]:
    """Return a dict from device type to platform class, for the vendors that this copy supports.

    The CPU is always included: if its folder is missing, its class is Host, which is plain torch.
    """
    platforms: dict[str, type[Platform]] = {}
    for name, (folder, class_name) in VENDORS.items():
        module = appendix(f"nanochat.platforms.{folder}.platform")
        if module is not None:
            platforms[name] = getattr(module, class_name)
    platforms.setdefault("cpu", Host)
    return platforms


PLATFORMS = _platforms()


def choose(requested: str | None) -> tuple[str, str, str]:
    """Return (device type, backend, reason) for the requested device, or the first usable one.

    The order is npu, cuda, cpu; mps must be requested. Raises UserError if the requested device is
    unknown (exit code 2) or cannot be used.
    """
    if requested:
        if requested not in PLATFORMS:
            raise UserError(
                tr(
                    "the device must be one of {platforms}, got {asked!r}",
                    platforms=", ".join(PLATFORMS),
                    asked=requested,
                ),
                exit_code=2,
            )
        if why := PLATFORMS[requested]().unavailable():
            raise UserError(
                tr(
                    "device {asked} was asked for but cannot be used: {why}. Name no device "
                    "to use the best that works.",
                    asked=requested,
                    why=why,
                )
            )
        return requested, PLATFORMS[requested].backend, tr("asked for")
    passed_over = []
    for name, platform in PLATFORMS.items():
        why = platform().unavailable()
        if platform.must_be_named:
            if not why:
                passed_over.append(tr("{name} only with --device_type={name}", name=name))
            continue
        if not why:
            return name, platform.backend, tr("; ").join(passed_over) or tr("first choice")
        passed_over.append(tr("no {name}: {why}", name=name, why=why))
    raise AssertionError("the CPU is always there")


_refusal: UserError | None = None
try:
    device_type, backend, reason = choose(os.environ.get("NANOCHAT_DEVICE"))
except UserError as _mistake:  # raised at the first use, because an import must not end a program
    device_type = backend = reason = ""
    _refusal = UserError(tr("{mistake} (NANOCHAT_DEVICE)", mistake=_mistake), _mistake.exit_code)


def chosen() -> tuple[str, str, str]:
    """Return (device type, backend, reason) as chosen at import.

    Raises UserError if NANOCHAT_DEVICE names a device that is unknown (exit code 2) or cannot be
    used.
    """
    if _refusal is not None and not device_type:
        raise _refusal
    return device_type, backend, reason


def check_idle_cards(chosen: str) -> None:
    """Raise UserError if the CPU was chosen only because this host's cards cannot be used."""
    if PLATFORMS[chosen].has_own_memory or os.environ.get("NANOCHAT_DEVICE"):
        return
    for platform in PLATFORMS.values():
        if why := platform().idle_cards():
            raise UserError(why)


@dataclass(frozen=True)
class Compute:
    """This process's device, its number format and its rank, as compute_init() returns them."""

    device: torch.device
    device_type: str
    backend: str
    rank: int
    local_rank: int
    world_size: int
    dtype: torch.dtype
    dtype_reason: str
    platform: Platform = field(default_factory=PLATFORMS["cpu"], compare=False, repr=False)
    # The operators that models use.
    operations: Operations = field(
        default_factory=lambda: cast(Host, PLATFORMS["cpu"]()).default_operations(),
        compare=False,
        repr=False,
    )
    pulse: Pulse = field(default_factory=Pulse, compare=False, repr=False)
    ending: contextlib.ExitStack = field(
        default_factory=contextlib.ExitStack, compare=False, repr=False
    )
    """Clean-up that must run while the ranks can still communicate, even if the work fails."""

    def __post_init__(self) -> None:
        assert self.platform.name == self.device_type, (self.platform.name, self.device_type)

    @property
    def main(self) -> bool:
        """True on rank 0, which logs and writes the files that a job needs only once."""
        return self.rank == 0

    @property
    def scaler(self) -> bool:
        """True if the loss must be scaled, because fp16 has too few exponent bits for gradients."""
        return self.dtype == torch.float16

    @property
    def chip(self) -> Chip | None:
        """The kind of card, or None if it is unknown."""
        return self.platform.chip

    def in_format(self, name: str) -> Compute:
        """Return this device with the number format that --dtype names; "auto" changes nothing.

        Warns if another format computes faster. Raises UserError if the device lacks the format.
        """
        if name == "auto":
            return self
        return replace(self, dtype=_usable(self.platform, name), dtype_reason="--dtype")


def _dtype(platform: Platform) -> tuple[torch.dtype, str]:
    """Return the number format to compute in, and the reason for it.

    NANOCHAT_DTYPE names it; otherwise it is the best that the device has. Raises UserError if the
    format is unknown (exit code 2) or the device lacks it.
    """
    requested = os.environ.get("NANOCHAT_DTYPE")
    if not requested:
        return platform.best_dtype()
    if requested not in DTYPES:
        raise UserError(
            tr(
                "NANOCHAT_DTYPE must be one of {dtypes}, got {asked!r}",
                dtypes=", ".join(DTYPES),
                asked=requested,
            ),
            exit_code=2,
        )
    return _usable(platform, requested), "NANOCHAT_DTYPE"


def _usable(platform: Platform, name: str) -> torch.dtype:
    """Return the number format called `name`, and warn if another one computes faster.

    Raises UserError if the device lacks it.
    """
    dtype = DTYPES[name]
    if why := platform.lacks_dtype(dtype):
        raise UserError(why)
    if slow := platform.slow_dtype(dtype):
        warn(slow)
    return dtype


def compute_init(requested: str | None = None, kernels: str = "auto") -> Compute:
    """Open this process's device, join the process group under torchrun, and return a Compute.

    `requested` is a device type, or None or "" for the one chosen at import; `kernels` is the value
    of --kernels. On every device, CPU tensors are exchanged over gloo, so that ranks can share a
    flag without touching the accelerator. Raises UserError if the device, NANOCHAT_DTYPE or
    `kernels` cannot be used, if the CPU was chosen only because this host's cards cannot be used,
    or if the launcher's variables are incomplete or invalid, or name a port that is taken.
    """
    name, collectives, why = choose(requested) if requested else chosen()
    if not requested:
        check_idle_cards(name)
    place = host.read_ranks(met=dist.is_initialized())
    rank, local_rank, world_size = place.rank, place.local_rank, place.world_size
    platform = PLATFORMS[name](local_rank)
    device = platform.open()
    dtype, dtype_reason = _dtype(platform)
    if place.meets and not dist.is_initialized():
        _join(platform)
    platform.ranks_met(rank, local_rank, world_size)
    if rank == 0:
        job = ""
        if world_size > 1:
            job = tr(
                ", {ranks} ranks over {collectives}", ranks=world_size, collectives=collectives
            )
        short = dtype_name(dtype)
        print(
            tr(
                "device: {describe} ({why}) | {short} ({dtype_reason}){job}",
                describe=platform.describe(),
                why=why,
                short=short,
                dtype_reason=dtype_reason,
                job=job,
            ),
            flush=True,
        )
    operations = platform.operations(requested_kernels(kernels))
    return Compute(
        device,
        name,
        collectives,
        rank,
        local_rank,
        world_size,
        dtype,
        dtype_reason,
        platform,
        operations,
    )


def _join(platform: Platform) -> None:
    """Join the process group that the launcher's variables describe.

    Raises UserError if the port at which the ranks meet is taken.
    """
    seconds = platform.prepare_collectives()
    try:
        dist.init_process_group(platform.collectives, timeout=datetime.timedelta(seconds=seconds))
    except dist.DistNetworkError as failure:
        if "EADDRINUSE" not in str(failure):
            raise
        raise UserError(port_words(os.environ.get("MASTER_PORT", ""))) from failure


def port_words(port: str) -> str:
    """Return the message that another process uses MASTER_PORT, the port at which the ranks meet.

    The message says what to do, and names a free port.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        free = probe.getsockname()[1]
    return tr(
        "MASTER_PORT={port} is taken by another process on this host; start again with a free one on every host, "
        "such as MASTER_PORT={free} (torchrun: --master_port), or with torchrun --standalone",
        port=port,
        free=free,
    )


def planned() -> list[Chip]:
    """Return every kind of card that the planner can plan for, from all vendors."""
    return [chip for platform in PLATFORMS.values() for chip in platform().chips()]


def chips_called(name: str) -> list[Chip]:
    """Return the kinds of cards, from all vendors, that `name` may mean."""
    return [chip for platform in PLATFORMS.values() for chip in platform().chips_called(name)]


def cards() -> tuple[Chip | None, int]:
    """Return the kind of this host's cards, or None if it is unknown, and how many are visible.

    Returns (None, 0) if the planner knows no cards of this vendor.
    """
    platform = PLATFORMS[chosen()[0]]()
    return (platform.chip, platform.count()) if platform.chips() else (None, 0)


def compute_cleanup() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        if torch.__version__.startswith("2.7."):
            # The group's destructor holds the GIL while it waits for gloo's threads, which may need
            # the GIL to free their last tensors: let them finish first.
            time.sleep(0.2)
        dist.destroy_process_group()


def with_compute(work: Callable[[Any, Compute], Any]) -> Callable[[Any], None]:
    """Return a main function for run() that opens the device before it calls `work`.

    The device is the one that the flags name, or else the one chosen at import. At the end, the
    process leaves its process group. A known error of the device becomes a UserError.
    """

    def main(cfg: Any) -> None:
        host.use_compile_cache(base_dir())
        compute = compute_init(cfg.device_type, getattr(cfg, "kernels", "auto"))
        try:
            work(cfg, compute)
        except RuntimeError as failure:
            words = compute.platform.explain(failure)
            if not words:
                raise
            raise UserError(
                tr(
                    "{words}. It said: {splitlines}",
                    words=words,
                    splitlines=str(failure).splitlines()[0],
                )
            ) from failure
        finally:
            compute_cleanup()

    return main


def describe(compute: Compute) -> str:
    """Return the name of the device and, for a CPU, the number of torch's threads."""
    return compute.platform.describe()


def summary(compute: Compute, parameters: int) -> dict[str, str | int | float]:
    """Return a dict of what a report says about the device and the size of a trained model."""
    dtype = dtype_name(compute.dtype)
    return {
        "device": describe(compute),
        "ranks": compute.world_size,
        "dtype": dtype,
        "parameters": parameters,
        "memory_gb": memory_peak(compute) / 1e9,
    }


def barrier(compute: Compute) -> None:
    """Wait until every rank has reached this point."""
    if compute.world_size > 1:
        dist.barrier()


def synchronize(compute: Compute) -> None:
    """Wait until the device has finished all queued work; a CPU queues none."""
    compute.platform.synchronize()


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is sharded over ranks.

    This does not import DTensor, which would take two seconds.
    """
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, or a plain tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def seed_all(seed: int) -> None:
    """Seed torch's generators on every device."""
    torch.manual_seed(seed)


def clear_overflow(compute: Compute) -> None:
    """Forget earlier overflows in fp16, on a chip that saturates instead of giving inf."""
    if compute.scaler:
        compute.platform.clear_overflow()


def overflows(compute: Compute) -> list[torch.Tensor]:
    """Return a list of flags (1,); one is nonzero if anything overflowed since clear_overflow().

    The list is empty for formats other than fp16, and on chips that give inf instead of saturating.
    """
    return compute.platform.overflows() if compute.scaler else []


def pin(tensor: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Return a host tensor in page-locked memory, so that copying it overlaps with computation.

    If that does not speed up copies to the device, the tensor is returned unchanged.
    """
    return tensor.pin_memory() if compute.platform.pins_memory else tensor


def to_device(tensor: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Return a host tensor on the device; the copy does not wait if the tensor is pinned."""
    if not compute.platform.has_own_memory:
        return tensor
    return tensor.to(compute.device, non_blocking=True)


def memory_total(compute: Compute) -> int:
    """Return the size in bytes of the device's memory or, for a CPU, of the physical memory."""
    return compute.platform.memory_total()


def memory_peak(compute: Compute) -> int:
    """Return this process's peak memory in bytes: the device's or, for a CPU, resident memory."""
    return compute.platform.memory_peak()


def peak_flops(compute: Compute) -> tuple[float, str]:
    """Return the peak FLOP/s that MFU is measured against, and where this value comes from.

    NANOCHAT_PEAK_TFLOPS overrides it. A known accelerator has its published or estimated dense
    peak. On any other device, including a CPU, the speed of matrix products is measured. Raises
    UserError (exit code 2) if the variable is not a number above 0.
    """
    if override := os.environ.get("NANOCHAT_PEAK_TFLOPS"):
        peak = 0.0
        with contextlib.suppress(ValueError):
            peak = float(override) * 1e12
        if not 0 < peak < math.inf:  # NaN is in no range
            raise UserError(
                tr(
                    "NANOCHAT_PEAK_TFLOPS must be a number above 0, got {override!r}",
                    override=override,
                ),
                exit_code=2,
            )
        return peak, "NANOCHAT_PEAK_TFLOPS"
    return compute.platform.peak_flops() or _matmul_flops(compute)


def _matmul_flops(compute: Compute) -> tuple[float, str]:
    """Return the FLOP/s of matrix products measured now, and a note on what was measured.

    Timing a single product on an accelerator would include its launch, and the MFU would look too
    good. So on an accelerator, larger products and more of them are queued until they take a tenth
    of a second together.
    """
    if not compute.platform.runs_beside_host:
        best = min(_matmul_seconds(compute, 1024, 1) for _ in range(5))
        return 2 * 1024**3 / best, tr("a matmul of 1024 x 1024 x 1024 measured at start")
    size, count = 512, 1
    while (seconds := _matmul_seconds(compute, size, count)) < 0.1 and count < 1 << 20:
        size, count = (2 * size, 1) if size < 8192 and seconds < 0.01 else (size, 2 * count)
    seconds = min(seconds, _matmul_seconds(compute, size, count))
    return (
        2 * size**3 * count / seconds,
        tr(
            "unknown peak; {count} matmuls of {size} x {size} x {size} measured at start",
            count=count,
            size=size,
        ),
    )


def _matmul_seconds(compute: Compute, size: int, count: int) -> float:
    """Return the seconds that `count` square matrix products take, queued one after another."""
    a = torch.ones(size, size, dtype=compute.dtype, device=compute.device)
    torch.mm(a, a)  # the first product of a size may have to be compiled or loaded
    synchronize(compute)
    start = time.perf_counter()
    for _ in range(count):
        torch.mm(a, a)
    synchronize(compute)
    return time.perf_counter() - start


def compiler_missing(compute: Compute) -> str:
    """Return why torch.compile cannot be used here, or "" if it can."""
    return compute.platform.compiler_missing()


# For shell scripts: the device, its number format, how many there are, "slow" or "fast", the
# --matmul that presets of a GPT ask for, and "fp8" or "no".
if __name__ == "__main__":
    try:
        _name = chosen()[0]
        check_idle_cards(_name)
        with contextlib.redirect_stdout(sys.stderr):  # scripts read stdout, and CPUs may compile
            _platform = PLATFORMS[_name]()
            _dtype_chosen = _dtype(_platform)[0]
            _format = dtype_name(_dtype_chosen)
            _speed = "slow" if _platform.is_slow() else "fast"
            _matmul = _platform.preset_matmul(_dtype_chosen)
            _eight_bits = "fp8" if _platform.has_fp8() else "no"
        print(_name, _format, _platform.count(), _speed, _matmul, _eight_bits)
    except UserError as _mistake:
        complain(tr("error: {mistake}", mistake=_mistake))
        sys.exit(_mistake.exit_code)

"""The device layer: which accelerator, which collectives, which number format; nothing else names a vendor.

At import `device_type`, `backend` and `reason` are chosen (npu > cuda > cpu, NANOCHAT_DEVICE overrides) and nothing
is initialised; `compute_init()` does that. One `Row` per device says what differs.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import resource
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist

from nanochat.common import Pulse, UserError, base_dir, warn
from nanochat.platforms import ascend
from nanochat.platforms import cpu as host
from nanochat.platforms import nvidia as gpus

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MASTER = torch.float32  # the format parameters are trained and kept in
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Row:
    """What one kind of device needs: its collectives, how to probe it, and its best number format."""

    backend: str
    unavailable: Callable[[], str]  # "" if usable, else why not
    best_dtype: Callable[[], tuple[torch.dtype, str]]
    module: Callable[[], types.ModuleType | None]  # torch.cuda, torch.npu, or None for the host


def _no_cuda_reason() -> str:
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def _no_npu_reason() -> str:
    """Try to import torch_npu; every failure (no CANN, a wrong version) is a reason, not an error."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    if why := ascend.prepare_loading(torch.__version__):  # torch and torch_npu share their first two numbers
        return f"torch_npu could not be loaded: {why}"
    try:
        usable = importlib.import_module("torch_npu").npu.is_available()
    except Exception as failure:  # the edge to a foreign library, which raises anything; the reason is shown
        return f"torch_npu could not be loaded: {ascend.cannot_load(str(failure) or repr(failure))}"
    return "" if usable else "torch_npu loaded, but sees no NPU"


def _cpu_dtype() -> tuple[torch.dtype, str]:
    """bf16 pays only where the processor multiplies it in hardware; elsewhere it is emulated and slower."""
    if unit := host.bf16_unit():
        return torch.bfloat16, f"the CPU has {unit}"
    return torch.float32, "the CPU has neither AMX nor AVX512-BF16"


def _cuda_dtype() -> tuple[torch.dtype, str]:
    major, minor = torch.cuda.get_device_capability()
    if major >= 8:
        return torch.bfloat16, f"compute capability {major}.{minor}"
    if major >= 7:
        return torch.float16, f"compute capability {major}.{minor} has no bf16; a gradient scaler is used"
    return torch.float32, f"compute capability {major}.{minor}"


def _npu_dtype() -> tuple[torch.dtype, str]:
    if torch.npu.is_bf16_supported():  # type: ignore[attr-defined]
        return torch.bfloat16, "the NPU has bf16"
    known = chip("npu")
    return torch.float16, "the NPU has no bf16; " + (
        "a gradient scaler is used" if known is None or known.trains else "for inference only"
    )


def chip(name: str) -> ascend.Chip | None:
    """The Ascend chip of this process, by its SoC version; None on other devices, and for one that is not known."""
    return ascend.chip_of(torch.npu.get_soc_version()) if name == "npu" else None  # type: ignore[attr-defined]


ROWS = {
    "npu": Row("hccl", _no_npu_reason, _npu_dtype, lambda: torch.npu),  # type: ignore[attr-defined]
    "cuda": Row("nccl", _no_cuda_reason, _cuda_dtype, lambda: torch.cuda),
    "cpu": Row("gloo", str, _cpu_dtype, lambda: None),
}


def choose(asked: str | None) -> tuple[str, str, str]:
    """Return (device type, backend, reason): the one asked for, or the first usable of npu, cuda, cpu.

    A device that was asked for and is not usable is a UserError that says why.
    """
    if asked:
        if asked not in ROWS:
            raise UserError(f"the device must be one of {', '.join(ROWS)}, got {asked!r}", exit_code=2)
        if why := ROWS[asked].unavailable():
            raise UserError(
                f"device {asked} was asked for but cannot be used: {why}. Leave it out to take what is there."
            )
        return asked, ROWS[asked].backend, "asked for"
    passed_over = []
    for name, row in ROWS.items():
        why = row.unavailable()
        if not why:
            return name, row.backend, "; ".join(passed_over) or "first choice"
        passed_over.append(f"no {name}: {why}")
    raise AssertionError("the CPU is always there")


try:
    device_type, backend, reason = choose(os.environ.get("NANOCHAT_DEVICE"))
except UserError as _mistake:  # at import there is no script edge to print it
    print(f"error: {_mistake} (NANOCHAT_DEVICE)", file=sys.stderr)
    sys.exit(_mistake.exit_code)


@dataclass(frozen=True)
class Compute:
    """Where this process computes: one per process, made by compute_init()."""

    device: torch.device
    device_type: str
    backend: str
    rank: int
    local_rank: int
    world_size: int
    dtype: torch.dtype
    dtype_reason: str
    chip: ascend.Chip | None = None  # of an NPU whose SoC version is known
    pulse: Pulse = field(default_factory=Pulse, compare=False)

    @property
    def main(self) -> bool:
        """Whether this is the rank that logs and writes."""
        return self.rank == 0

    @property
    def scaler(self) -> bool:
        """Whether gradients need a loss scale: fp16 has too few exponent bits for them."""
        return self.dtype == torch.float16


def _dtype(name: str) -> tuple[torch.dtype, str]:
    asked = os.environ.get("NANOCHAT_DTYPE")
    if not asked:
        return ROWS[name].best_dtype()
    if asked not in DTYPES:
        raise UserError(f"NANOCHAT_DTYPE must be one of {', '.join(DTYPES)}, got {asked!r}", exit_code=2)
    if asked == "bfloat16" and name == "npu" and not torch.npu.is_bf16_supported():  # type: ignore[attr-defined]
        raise UserError("NANOCHAT_DTYPE=bfloat16 was asked for, but this NPU has no bf16; leave it out to use float16")
    return DTYPES[asked], "NANOCHAT_DTYPE"


def compute_init(asked: str | None = None) -> Compute:
    """Take this process's device and, under torchrun, join the process group.

    `asked` is a device type, or None or "" for the one chosen at import. CPU tensors go over gloo on every device,
    so that a flag can be shared between ranks without touching the accelerator.
    """
    name, collectives, why = choose(asked) if asked else (device_type, backend, reason)
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    module = ROWS[name].module()
    if module is not None:
        count = module.device_count()
        if local_rank >= count:
            raise UserError(
                f"this host shows {count} {name} device(s), but the launcher started local rank {local_rank}; "
                f"use --nproc_per_node={count} or fewer"
            )
        _take(module, name, local_rank)
        torch.set_float32_matmul_precision("high")
    else:
        host.keep_freed_memory()
    device = torch.device(name, local_rank) if module is not None else torch.device("cpu")
    dtype, dtype_reason = _dtype(name)
    if "RANK" in os.environ and not dist.is_initialized():
        _join(name, collectives)
    compute = Compute(device, name, collectives, rank, local_rank, world_size, dtype, dtype_reason, chip(name))
    if name == "npu" and world_size > 1:
        _choose_port_block(compute)
    if compute.main:
        ranks = f", {world_size} ranks over {collectives}" if world_size > 1 else ""
        short = str(dtype).removeprefix("torch.")
        print(f"device: {describe(compute)} ({why}) | {short} ({dtype_reason}){ranks}", flush=True)
    return compute


def cards() -> tuple[ascend.Chip | None, int]:
    """The Ascend chip of this host's cards, and how many are visible; (None, 0) where the device is another."""
    return (chip("npu"), torch.npu.device_count()) if device_type == "npu" else (None, 0)  # type: ignore[attr-defined]


def _take(module: types.ModuleType, name: str, index: int) -> None:
    """Make a device this process's own; UserError where it cannot be opened, a warning where it is in use."""
    words = ascend if name == "npu" else gpus
    try:
        module.set_device(index)
        free, total = module.mem_get_info()
    except RuntimeError as failure:
        raise UserError(words.cannot_open(index, str(failure))) from failure
    if in_use := words.in_use(index, free, total):
        warn(in_use)


def _join(name: str, collectives: str) -> None:
    """Join the process group that the launcher's variables name; CPU tensors go over gloo."""
    both = collectives if collectives == "gloo" else f"cpu:gloo,{name}:{collectives}"
    seconds = ascend.prepare_collectives() if name == "npu" else 2400
    try:
        dist.init_process_group(both, timeout=datetime.timedelta(seconds=seconds))
    except dist.DistNetworkError as failure:
        if "EADDRINUSE" not in str(failure):
            raise
        raise UserError(ascend.port_words(os.environ.get("MASTER_PORT", ""))) from failure


def _choose_port_block(compute: Compute) -> None:
    """Give this job's collectives a block of ports of their own, the same for all ranks of a host."""
    if given := os.environ.get("HCCL_IF_BASE_PORT"):
        if compute.local_rank == 0 and given.isdigit() and (taken := ascend.hold_block(int(given))):
            raise UserError(ascend.block_words(int(given), taken))
        return
    blocks = torch.zeros(compute.world_size, dtype=torch.int64)
    if compute.local_rank == 0:
        blocks[compute.rank] = ascend.free_block(hold=True)
    dist.all_reduce(blocks)
    if base := int(blocks[compute.rank - compute.local_rank]):
        os.environ["HCCL_IF_BASE_PORT"] = str(base)


def compute_cleanup() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        if torch.__version__.startswith("2.7."):  # its destructor holds Python's lock and waits for gloo's threads,
            time.sleep(0.2)  # which may want it to drop the last tensors: let them have it first
        dist.destroy_process_group()


def with_compute(work: Callable[[Any, Compute], Any]) -> Callable[[Any], None]:
    """A main for common.run(): take the device that the flags name, work there, and leave the process group."""

    def main(cfg: Any) -> None:
        host.use_compile_cache(base_dir() / "compile_cache")
        compute = compute_init(cfg.device_type)
        try:
            work(cfg, compute)
        except RuntimeError as failure:
            words = ascend.explain(str(failure)) if compute.device_type == "npu" else ""
            if not words and isinstance(failure, torch.OutOfMemoryError):
                words = (
                    "out of memory. Free the device, or take a smaller --depth, --device_batch_size or --max_seq_len"
                )
            if not words:
                raise
            raise UserError(f"{words}. It said: {str(failure).splitlines()[0]}") from failure
        finally:
            compute_cleanup()

    return main


def describe(compute: Compute) -> str:
    """The device in words: its name, or for the host the processor's and how many threads torch uses."""
    module = ROWS[compute.device_type].module()
    if module is not None:
        return f"{compute.device_type} {module.get_device_name(compute.local_rank)}"
    return f"{host.cpu_model()}, {torch.get_num_threads()} thread(s)"


def summary(compute: Compute, parameters: int) -> dict[str, str | int | float]:
    """What a report says of where a model of so many parameters was trained."""
    dtype = str(compute.dtype).removeprefix("torch.")
    return {"device": describe(compute), "ranks": compute.world_size, "dtype": dtype, "parameters": parameters,
            "memory_gb": memory_peak(compute) / 1e9}  # fmt: skip


def barrier(compute: Compute) -> None:
    """Wait until every rank is here."""
    if compute.world_size > 1:
        dist.barrier()


def synchronize(compute: Compute) -> None:
    """Wait until the device has done what it was given; the host is always done."""
    module = ROWS[compute.device_type].module()
    if module is not None:
        module.synchronize()


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over ranks; asked by a method, since importing its class costs two seconds."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this rank holds; a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def seed_all(seed: int) -> None:
    """Seed torch's generators on every device."""
    torch.manual_seed(seed)


def clear_overflow(compute: Compute) -> None:
    """Forget what overflowed before, on a chip that saturates where others give inf."""
    if compute.chip is not None and compute.chip.saturates and compute.scaler:
        torch.npu.amp.GradScaler.clear_npu_overflow_flag()  # type: ignore[attr-defined]


def overflows(compute: Compute) -> list[torch.Tensor]:
    """On a chip that saturates, as its GradScaler asks: (1,), not 0 if anything overflowed since; else nothing."""
    if compute.chip is None or not compute.chip.saturates or not compute.scaler:
        return []
    status = torch.zeros(8, dtype=torch.float32, device=compute.device)
    import torch_npu  # pyright: ignore[reportMissingImports]

    return [torch_npu.npu_get_float_status(status)[:1]]


def pin(tensor: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Page-lock a host tensor where copies to the device can then run beside computation."""
    return tensor if compute.device_type == "cpu" else tensor.pin_memory()


def to_device(tensor: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Copy a host tensor to the device, without waiting if it is pinned."""
    return tensor if compute.device_type == "cpu" else tensor.to(compute.device, non_blocking=True)


def memory_total(compute: Compute) -> int:
    """Bytes of the device's memory; for the host, of physical memory."""
    module = ROWS[compute.device_type].module()
    if module is not None:
        return int(module.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_peak(compute: Compute) -> int:
    """Bytes this process has held at most: allocated on the device, or resident on the host."""
    module = ROWS[compute.device_type].module()
    if module is not None:
        return int(module.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_flops(compute: Compute) -> tuple[float, str]:
    """The FLOP/s that MFU is measured against, and where the number comes from.

    NANOCHAT_PEAK_TFLOPS overrides; an accelerator takes its data sheet's dense peak; the host, which has none,
    the speed of a matmul measured now.
    """
    if override := os.environ.get("NANOCHAT_PEAK_TFLOPS"):
        try:
            return float(override) * 1e12, "NANOCHAT_PEAK_TFLOPS"
        except ValueError as mistake:
            raise UserError(f"NANOCHAT_PEAK_TFLOPS must be a number, got {override!r}", exit_code=2) from mistake
    if compute.device_type == "cuda":
        name = torch.cuda.get_device_name(compute.local_rank)
        if tflops := gpus.peak_tflops(name):
            return tflops * 1e12, f"{name}, data sheet, bf16 dense"
    if compute.chip is not None:
        return compute.chip.tflops * 1e12, f"{compute.chip.name}, {compute.chip.source} dense"
    return _matmul_flops(compute), "a matmul of 1024 x 1024 x 1024 measured at start"


def _matmul_flops(compute: Compute) -> float:
    a = torch.ones(1024, 1024, dtype=compute.dtype, device=compute.device)
    best = float("inf")
    for _ in range(5):
        synchronize(compute)
        start = time.perf_counter()
        torch.mm(a, a)
        synchronize(compute)
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def compiler_missing(compute: Compute) -> str:
    """Why torch.compile cannot be used here, or "" if it can."""
    return {"npu": "off on NPUs", "cpu": host.compiler_missing()}.get(compute.device_type, "")


if __name__ == "__main__":  # for shell scripts: the device, its number format, and how many there are
    _module = ROWS[device_type].module()
    _format = str(_dtype(device_type)[0]).removeprefix("torch.")
    print(device_type, _format, _module.device_count() if _module is not None else 1)

"""The host, which every device has beside it: the processor, the C library's memory, the compiler's cache."""

import contextlib
import ctypes
import os
from pathlib import Path


def cpu_flags() -> frozenset[str]:
    """The processor's features, as Linux lists them; empty elsewhere."""
    return frozenset(_cpuinfo("flags").split())


def bf16_unit() -> str:
    """The unit of the processor that multiplies bf16 in hardware; "" if there is none."""
    flags = cpu_flags()
    return next((flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags), "")


def cpu_model() -> str:
    """The processor's name, or "CPU" if the system does not tell."""
    return _cpuinfo("model name") or "CPU"


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((line.partition(":")[2].strip() for line in f if line.startswith(key)), "")
    except OSError:
        return ""


def use_compile_cache(folder: Path) -> None:
    """Keep compiled kernels in this folder, where later stages and runs find them.

    Call this early: the first optimizer imports torch's compiler, which then settles on a folder of its own.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def keep_freed_memory() -> None:
    """Let glibc's malloc keep memory that one step frees for the next step, in blocks of up to 32 MB, its maximum.

    Otherwise malloc maps larger tensors from fresh, zeroed pages each time and gives the pages back, which costs a
    tenth of a training step's CPU seconds (dev/LOG.md). Other C libraries have no such option and are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        option = ctypes.CDLL(None).mallopt
        for name, size in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap threshold, trim threshold, top pad
            option(name, size)


def give_freed_memory_back() -> None:
    """Return freed memory from the C library to the system, if the library can (glibc): 0.5 GB after compiling."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)

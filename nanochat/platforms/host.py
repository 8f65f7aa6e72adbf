"""The host beside every device: its processor, the memory of its C library, the cache of its compiler."""

import contextlib
import ctypes
import os
from pathlib import Path


def cpu_flags() -> frozenset[str]:
    """The processor's features, as Linux lists them; empty elsewhere."""
    return frozenset(_cpuinfo("flags").split())


def bf16_unit() -> str:
    """The unit that multiplies bf16 in hardware, or ""."""
    flags = cpu_flags()
    return next((flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags), "")


def cpu_model() -> str:
    """The processor's name."""
    return _cpuinfo("model name") or "CPU"


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((line.partition(":")[2].strip() for line in f if line.startswith(key)), "")
    except OSError:
        return ""


def use_compile_cache(folder: Path) -> None:
    """Keep compiled kernels in a folder of ours, so that later stages and runs find them.

    It must come early: the first optimizer imports torch's compiler, which then settles on a folder of its own.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what a step frees for the next one, in blocks up to 32 MB (the most it allows).

    It maps larger tensors from fresh, zeroed pages each time otherwise, and gives them back: a tenth of a training
    step's CPU seconds (dev/LOG.md). Other C libraries have no such option and stay as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        option = ctypes.CDLL(None).mallopt
        for name, size in ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap threshold, trim threshold, top pad
            option(name, size)


def give_freed_memory_back() -> None:
    """Give back what the C library holds of freed memory, where it can (glibc): after compiling, 0.5 GB."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)

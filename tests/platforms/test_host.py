"""Freed memory of the host's C library."""

import ctypes
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.platforms import host

STEP = """
import ctypes, sys
import torch
from nanochat.platforms import host

class Held(ctypes.Structure):  # glibc's struct mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used free top".split()]

if sys.argv[1] == "keep":
    host.keep_freed_memory()
ask = ctypes.CDLL(None).mallinfo2
ask.restype = Held
before = ask().mapped
saved = torch.empty(28 << 20, dtype=torch.uint8)
print((ask().mapped - before) >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc, or one before 2.33")
@pytest.mark.parametrize(("how", "mapped"), [("give", 28), ("keep", 0)])
def test_large_tensors_come_from_memory_that_stays_when_they_are_freed(how: str, mapped: int) -> None:
    done = subprocess.run([sys.executable, "-c", STEP, how], capture_output=True, text=True, check=True)
    assert int(done.stdout) == mapped, "MB mapped from fresh pages"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can")
def test_it_gives_freed_memory_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()

    blocks = [b"x" * 2**14 for _ in range(4096)]  # 64 MB in blocks too small to be mapped by themselves
    del blocks[:-1]  # the last one keeps the heap from shrinking by itself
    before = resident()
    host.give_freed_memory_back()
    assert before - resident() > 2**25

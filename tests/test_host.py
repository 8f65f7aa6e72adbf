"""The host's processor, compiler and allocator."""

import ctypes
import subprocess
import sys

import pytest

STEP = """
import ctypes, sys
import torch
from nanochat import host

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

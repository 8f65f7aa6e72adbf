"""The host's processor, compiler and allocator."""

import platform
import subprocess
import sys

import pytest

STEP = """
import sys
import torch
from nanochat import host

def resident():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))

if sys.argv[1] == "keep":
    host.keep_freed_memory()
for _ in range(2):
    before = resident()
    saved = [torch.empty(28 << 20, dtype=torch.uint8).fill_(1) for _ in range(10)]
    full = resident()
    del saved
print((resident() - before) / (full - before) if full > before + 1000 else 1)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's malloc has no such option")
@pytest.mark.parametrize(("how", "kept"), [("give", False), ("keep", True)])
def test_tensors_that_a_step_frees_stay_for_the_next_one(how: str, kept: bool) -> None:
    done = subprocess.run([sys.executable, "-c", STEP, how], capture_output=True, text=True, check=True)
    assert (float(done.stdout) > 0.9) == kept, done.stdout

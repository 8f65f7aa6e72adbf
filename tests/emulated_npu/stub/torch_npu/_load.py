"""Loads the compiled device, configures it, and registers it with torch under the name `npu`."""

import atexit
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "emulated_npu_device"
WIDE = [torch.float64, torch.complex64, torch.complex128, torch.complex32]
# Every dtype can be moved, cleared and converted; only floating-point numbers can be multiplied as matrices.
ANY_DTYPE = ["copy", "fill", "zero", "clone"]
PRODUCTS = ["mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear"]
MATRIX_UNITS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]


@lru_cache(maxsize=1)
def emulated() -> dict[str, Any]:
    """What to emulate: library, chip (the fields of a Chip), devices, strict, deferred."""
    text = os.environ.get("NANOCHAT_EMULATED_NPU")
    if not text:
        raise ImportError(
            "this torch_npu is an emulation: start the program with python -m tests.emulated_npu -- CMD..."
        )
    return json.loads(text)


def visible_devices() -> int:
    """How many devices ASCEND_RT_VISIBLE_DEVICES leaves: the runtime stops at the first number that is no device."""
    all_devices = int(emulated()["devices"])
    asked = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if asked is None:
        return all_devices
    count = 0
    for word in asked.split(","):
        if not word.strip().isdigit() or int(word) >= all_devices:
            break
        count += 1
    return count


@lru_cache(maxsize=1)
def device() -> Any:
    """The compiled device, with the limits of the emulated chip."""
    said = emulated()
    if said["torch"] != torch.__version__.split("+")[0]:
        raise ImportError(
            f"this emulation was made for torch {said['torch']}, and this Python has {torch.__version__}: start "
            "python -m tests.emulated_npu with the Python that the command uses (.venv/bin/python)"
        )
    loader = importlib.machinery.ExtensionFileLoader(NAME, said["library"])
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    chip = said["chip"]
    lacking = [] if chip["bf16"] else [torch.bfloat16]
    refused, by_name = [], {}
    if said["strict"]:
        refused = WIDE + lacking
        # torch's GradScaler computes the inverse of its scale in float64
        by_name = {name: lacking for name in [*ANY_DTYPE, "reciprocal"]} | {
            name: refused + INTEGERS for name in PRODUCTS
        }
    words = (Path(__file__).parent / "supported_operators.txt").read_text(encoding="utf-8").split()
    module.configure(
        visible_devices(), int(chip["memory"]), bool(said["deferred"]),
        os.environ.get("TORCH_NPU_FALLBACK_CPU_DISABLE") == "1", chip["saturates"],
        chip["soc"] >= 220, chip["name"],  # the first generation has no multi-tensor kernels
        slow_products(), refused, by_name, {word.removesuffix("_") for word in words},
    )  # fmt: skip
    return module


def slow_products() -> list[torch.dtype]:
    """The 16-bit dtypes that this host multiplies faster in fp32, because its processor has no matrix unit for them."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return []
    return [dtype for dtype, units in MATRIX_UNITS.items() if not flags.intersection(units)]


def version() -> str:
    """The version of the real package that fits this torch."""
    major, minor, rest = torch.__version__.split("+")[0].split(".", 2)
    return f"{major}.{minor}.{rest}"


def join_torch(module: types.ModuleType) -> None:
    """Register torch.npu, tensor.npu() and the backend "hccl"."""
    torch._register_device_module("npu", module)
    sys.modules["torch.npu"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    if dist.is_available():
        dist.Backend.register_backend("hccl", _hccl, devices=["npu"])
    print_from_the_host()
    atexit.register(_let_autograd_finish)


def _let_autograd_finish() -> None:
    """At the end of the program, wait until autograd's threads sleep.

    After a backward pass has returned, these threads drop the last references to its Python functions. A thread that
    asks for the interpreter while the interpreter ends is killed, and the whole process with it.
    """
    end, before = time.monotonic() + 10, None
    while time.monotonic() < end:
        now = _autograd_threads()
        if now == before and all(state == "S" for state, _ in now):
            return
        before = now
        time.sleep(0.002)  # so that the threads get the interpreter


def _autograd_threads() -> list[tuple[str, str]]:
    """The state of each of autograd's threads, and how often it has gone to sleep; empty where there is no /proc."""
    threads = []
    for folder in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            if lines["Name"].strip().startswith("pt_autograd"):
                threads.append((lines["State"].strip()[0], lines["voluntary_ctxt_switches"].strip()))
    return threads


def _hccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return device().make_hccl(dist.ProcessGroupGloo(store, rank, size, timeout))


def replace_scaled_dot_product_attention() -> None:
    """Make F.scaled_dot_product_attention use the chip's fused kernel, where the real package does."""
    if emulated()["chip"]["fused_attention"]:
        from torch_npu import _attention

        library = torch.library.Library("aten", "IMPL")
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl("scaled_dot_product_attention", _attention.scaled_dot_product_attention, key)
        _kept.append(library)  # deleting it would remove the registration


_kept: list[Any] = []


def print_from_the_host() -> None:
    """Make repr() copy a tensor to the host first, since torch would compute on the device in float64."""
    original = torch._tensor_str._tensor_str

    def from_the_host(self: torch.Tensor, indent: int) -> str:
        return original(self.detach().cpu() if self.device.type == "npu" else self, indent)

    torch._tensor_str._tensor_str = from_the_host

"""Which device is chosen and why, without initialising any; number formats; what a Compute is asked."""

import os
import resource
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanochat import device
from nanochat.common import UserError, log
from nanochat.device import Compute, choose, compute_init
from nanochat.platforms import host
from nanochat.platforms.ascend.platform import Ascend
from nanochat.platforms.cpu.platform import Cpu
from nanochat.platforms.nvidia.platform import Nvidia
from tests.support.tiny_model import on_cpu, pretend

ROOT = Path(__file__).resolve().parent.parent
CPU = on_cpu()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of the machine that runs the tests."""
    for name in "NANOCHAT_DEVICE NANOCHAT_DTYPE NANOCHAT_PEAK_TFLOPS RANK LOCAL_RANK WORLD_SIZE CXX".split():
        monkeypatch.delenv(name, raising=False)


def available(monkeypatch: pytest.MonkeyPatch, *usable: str) -> None:
    """Pretend that no other accelerator can be used."""
    for name in ("npu", "cuda"):
        why = "" if name in usable else f"{name} is broken"
        monkeypatch.setattr(device.PLATFORMS[name], "unavailable", lambda self, why=why: why)


# --- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        (("npu", "cuda"), ("npu", "hccl", "first choice")),
        (("cuda",), ("cuda", "nccl", "no npu: npu is broken")),
        ((), ("cpu", "gloo", "no npu: npu is broken; no cuda: cuda is broken")),
    ],
)
def test_the_first_usable_device_is_chosen_and_the_others_are_named(
    usable: tuple[str, ...], expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch, *usable)
    assert choose(None) == expected
    assert choose("") == expected


def test_a_device_that_was_asked_for_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, "cuda")
    assert choose("cuda") == ("cuda", "nccl", "asked for")
    assert choose("cpu") == ("cpu", "gloo", "asked for")
    with pytest.raises(UserError, match="npu is broken") as refused:
        choose("npu")
    assert refused.value.exit_code == 1


def imported() -> dict[str, Any]:
    """The variables of a fresh import of the module; the real module is left alone."""
    return runpy.run_path(str(ROOT / "nanochat" / "device.py"))


def test_the_environment_chooses_at_import(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NANOCHAT_DEVICE", "cpu")
    module = imported()
    assert (module["device_type"], module["backend"], module["reason"]) == ("cpu", "gloo", "asked for")
    monkeypatch.setenv("NANOCHAT_DEVICE", "gpu")
    module = imported()  # ends nothing
    for use in (module["chosen"], module["cards"], module["compute_init"]):
        with pytest.raises(UserError, match=r"one of npu, cuda, mps, cpu, got 'gpu' \(NANOCHAT_DEVICE\)") as refused:
            use()
        assert refused.value.exit_code == 2
    assert capsys.readouterr().err == ""
    assert module["compute_init"]("cpu").device_type == "cpu"  # a flag names another one


def test_cards_that_cannot_be_used_are_refused_unless_the_cpu_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    available(monkeypatch)
    monkeypatch.setattr(device, "device_type", "cpu")
    monkeypatch.setenv("ASCEND_ROOT_PREFIX", str(tmp_path))
    assert compute_init().device_type == "cpu"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci_manager").touch()
    assert compute_init().device_type == "cpu"
    (tmp_path / "dev" / "davinci0").touch()
    with pytest.raises(UserError) as refused:
        compute_init()
    assert refused.value.exit_code == 1
    for words in ("dev/davinci0", "npu is broken", "setup_ascend.sh", "check_npu.py", "NANOCHAT_DEVICE=cpu"):
        assert words in str(refused.value)
    assert compute_init("cpu").device_type == "cpu"
    monkeypatch.setenv("NANOCHAT_DEVICE", "cpu")
    assert compute_init().device_type == "cpu"
    monkeypatch.delenv("NANOCHAT_DEVICE")
    available(monkeypatch, "cuda")  # a GPU that works is no fault to stop at
    monkeypatch.setattr(device, "device_type", "cuda")
    device.check_idle_cards("cuda")


# --- number formats ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "flags", "expected", "why"),
    [
        ("AuthenticAMD", "avx512f avx512_bf16", torch.bfloat16, "the CPU has avx512_bf16"),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", torch.bfloat16, "the CPU has amx_bf16"),
        ("GenuineIntel", "avx512f avx512_bf16", torch.float32, "slower than fp32"),
        ("AuthenticAMD", "avx2 avx512f", torch.float32, "neither"),
    ],
)
def test_a_cpu_computes_in_bf16_only_where_that_is_faster(
    vendor: str, flags: str, expected: torch.dtype, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_cpuinfo", {"vendor_id": vendor, "flags": flags, "model name": "X"}.get)
    compute = compute_init("cpu")
    assert compute.dtype == expected
    assert why in compute.dtype_reason


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float16), ((6, 1), torch.float32)],
)
def test_a_gpu_computes_in_what_its_generation_has(
    capability: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert Nvidia().best_dtype()[0] == expected


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_environment_overrides_the_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", name)
    compute = compute_init("cpu")
    assert (compute.dtype, compute.dtype_reason) == (getattr(torch, name), "NANOCHAT_DTYPE")
    assert compute.scaler == (name == "float16")
    monkeypatch.setenv("NANOCHAT_DTYPE", "fp8")
    with pytest.raises(UserError, match="one of float32, bfloat16, float16, got 'fp8'") as refused:
        compute_init("cpu")
    assert refused.value.exit_code == 2


def test_a_flag_overrides_the_format_and_a_slower_one_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset({"avx2"}))
    compute = compute_init("cpu")
    assert compute.in_format("auto") is compute
    assert "float32 computes faster than bfloat16 here" not in capsys.readouterr().err
    asked = compute.in_format("bfloat16")
    assert (asked.dtype, asked.dtype_reason) == (torch.bfloat16, "--dtype")
    assert "float32 computes faster than bfloat16 here" in capsys.readouterr().err


# --- one process ---------------------------------------------------------------------------------


def test_one_process_needs_no_process_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    compute = compute_init("cpu")
    assert compute == Compute(torch.device("cpu"), "cpu", "gloo", 0, 0, 1, torch.float32, "NANOCHAT_DTYPE")
    assert compute.main
    assert not torch.distributed.is_initialized()
    said = capsys.readouterr().out
    assert said.startswith("device: ") and said.count("\n") == 1
    assert "(asked for) | float32 (NANOCHAT_DTYPE)" in said
    device.barrier(compute)
    device.compute_cleanup()
    x = torch.arange(3)
    assert device.to_device(x, compute) is device.pin(x, compute) is x


def test_the_kernels_of_the_flags_reach_the_operations() -> None:
    seen: list[bool] = []

    def work(cfg: Any, compute: Compute) -> None:
        seen.append(compute.operations.muon.stacks)

    every: list[dict[str, str]] = [{}, {"kernels": "auto"}, {"kernels": "plain"}]
    for flags in every:
        device.with_compute(work)(SimpleNamespace(device_type="cpu", **flags))
    assert seen == [True, True, False]


def test_a_compute_belongs_to_one_platform() -> None:
    with pytest.raises(AssertionError):
        replace(CPU, device_type="cuda")


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, "cuda")
    monkeypatch.setattr(Nvidia, "module", SimpleNamespace(device_count=lambda: 2))
    place = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"shows 2 cuda device\(s\).*local rank 2; use --nproc_per_node=2"):
        compute_init("cuda")


def test_memory_of_the_host_is_in_bytes() -> None:
    assert 2**28 < device.memory_peak(CPU) < device.memory_total(CPU)
    assert device.memory_peak(CPU) >= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 2


def test_the_peak_is_measured_on_a_host_and_read_for_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flops, source = device.peak_flops(CPU)
    assert 1e8 < flops < 1e14
    assert "measured at start" in source
    gpu = pretend(Nvidia())
    for name, tflops in (("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank, name=name: name)
        assert device.peak_flops(gpu) == (tflops * 1e12, f"{name}, data sheet, bf16 dense")


def test_the_peak_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_PEAK_TFLOPS", "313")
    assert device.peak_flops(CPU) == (313e12, "NANOCHAT_PEAK_TFLOPS")
    for word in ("fast", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("NANOCHAT_PEAK_TFLOPS", word)
        with pytest.raises(UserError, match=f"NANOCHAT_PEAK_TFLOPS must be a number above 0, got '{word}'"):
            device.peak_flops(CPU)


# --- the compiler --------------------------------------------------------------------------------


def test_what_the_compiler_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler" in device.compiler_missing(CPU)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith("Python.h") and exists(path))
    assert "python3-dev" in device.compiler_missing(CPU)
    monkeypatch.setattr(os.path, "exists", lambda path: str(path).endswith("Python.h") or exists(path))
    assert device.compiler_missing(CPU) == ""
    assert device.compiler_missing(pretend(Ascend())) == "off on NPUs"
    assert device.compiler_missing(pretend(Nvidia())) == ""


# --- the edges ---------------------------------------------------------------------------------------


def asked_by_a_shell_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m nanochat.device` in this process."""
    monkeypatch.delitem(sys.modules, "nanochat.device")
    runpy.run_module("nanochat.device", run_name="__main__")


@pytest.mark.parametrize(("flags", "said"), [("avx2 avx512f", "fast"), ("avx2", "slow")])
def test_shell_scripts_learn_whether_a_cpu_is_slow(
    flags: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_DEVICE", "cpu")
    monkeypatch.setattr(host, "_cpuinfo", {"flags": flags}.get)
    asked_by_a_shell_script(monkeypatch)
    assert capsys.readouterr().out == f"cpu float32 1 {said} auto no\n"


def test_shell_scripts_do_not_read_that_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def preset_matmul(self: Cpu, dtype: torch.dtype) -> str:
        log("compiling C++ kernels")
        return "auto"

    monkeypatch.setenv("NANOCHAT_DEVICE", "cpu")
    monkeypatch.setattr(Cpu, "preset_matmul", preset_matmul)
    asked_by_a_shell_script(monkeypatch)
    said = capsys.readouterr()
    assert said.out.startswith("cpu ") and said.out.count("\n") == 1
    assert said.err == "compiling C++ kernels\n"


def test_shell_scripts_learn_that_cards_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci0").touch()
    monkeypatch.setenv("ASCEND_ROOT_PREFIX", str(tmp_path))
    available(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        asked_by_a_shell_script(monkeypatch)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (1, "") and "setup_ascend.sh" in said.err


@pytest.mark.slow
def test_compiled_kernels_are_kept_in_one_folder_for_all_base_folders(tmp_path: Path):
    """In a fresh process, with an optimizer, whose first import would settle on another folder."""
    script = (
        "import os, torch; from nanochat import device\n"
        "work = lambda cfg, compute: torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())\n"
        "device.with_compute(work)(type('Config', (), {'device_type': 'cpu'}))\n"
        "import torch._inductor.runtime.cache_dir_utils as cache; print('CACHE', cache.cache_dir())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment["HOME"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert f"CACHE {tmp_path / '.cache' / 'nanochat' / 'compile_cache'}" in done.stdout

"""NVIDIA GPUs: peaks by name, and messages for a GPU that another process holds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanochat import device
from nanochat.common import UserError
from nanochat.platforms.nvidia import platform as nvidia
from nanochat.platforms.nvidia.platform import Nvidia
from tests.support.tiny_model import on_cpu, pretend


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10", 125), ("NVIDIA A10G", 70), ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181), ("NVIDIA L4", 121), ("Some GPU", None),
        ("NVIDIA RTX A1000", None), ("NVIDIA T400 4GB", None),
    ],
)  # fmt: skip
def test_peaks_are_found_by_the_longest_name(name: str, peak: float | None) -> None:
    assert nvidia.peak_tflops(name) == peak


def card(monkeypatch: pytest.MonkeyPatch, opens: bool, free: int) -> None:
    """A pretended torch.cuda of eight GPUs."""

    def set_device(index: int) -> None:
        if not opens:
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ...")

    functions: dict[str, Any] = {"device_count": lambda: 8, "mem_get_info": lambda: (free, 80 * 2**30)}
    monkeypatch.setattr(Nvidia, "module", SimpleNamespace(set_device=set_device, **functions))
    # What open() sets for the whole process.
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)


def test_a_gpu_that_another_process_holds_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, False, 0)
    with pytest.raises(UserError, match=r"GPU 3 cannot be opened: .* busy or unavailable. Another process"):
        Nvidia(3).open()


@pytest.mark.parametrize(("free", "said"), [(20, "GPU 1 is in use: 20 of 80 GiB are free. `nvidia-smi`"), (79, "")])
def test_a_gpu_whose_memory_others_hold_is_told(
    free: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card(monkeypatch, True, free * 2**30)
    assert Nvidia(1).open() == torch.device("cuda", 1)
    words = "".join(capsys.readouterr())
    assert said in words and bool(said) == bool(words)


# --- copies and memory -----------------------------------------------------------------------------


class HostTensor:
    """A host tensor that records how it is copied."""

    def __init__(self, pinned: bool = False):
        self.pinned = pinned

    def pin_memory(self) -> "HostTensor":
        return HostTensor(pinned=True)

    def to(self, where: torch.device, non_blocking: bool) -> tuple[torch.device, bool, bool]:
        return where, self.pinned, non_blocking


def test_batches_are_pinned_and_sent_without_waiting() -> None:
    gpu = pretend(Nvidia(1), device=torch.device("cuda", 1))
    tensor: Any = HostTensor()
    assert device.to_device(device.pin(tensor, gpu), gpu) == (torch.device("cuda", 1), True, True)


def test_memory_that_runs_out_anywhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compute_init", lambda asked, kernels: on_cpu())

    def work(cfg: Any, compute: device.Compute) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    with pytest.raises(
        UserError, match=r"^out of memory. .* smaller model.* It said: CUDA out of memory. Tried .*GiB$"
    ):
        device.with_compute(work)(SimpleNamespace(device_type="cuda"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_planner_knows_a_gpu_by_its_name_and_takes_its_own_memory(
    name: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(Nvidia, "memory_total", lambda self: 39 * 2**30)
    chip = Nvidia().chip
    assert (chip and chip.name) == kind
    if chip:
        assert chip.memory_gib == 39 and chip.tflops in (312, 989) and chip.trains

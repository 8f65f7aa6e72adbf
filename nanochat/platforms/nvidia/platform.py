"""NVIDIA GPUs: their peaks and formats, their attention, and messages about unusable GPUs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanochat.common import log, tr
from nanochat.model import Model
from nanochat.platforms.base import Chip, Platform
from nanochat.platforms.nvidia import fp8
from nanochat.platforms.nvidia.attention import NvidiaOperations
from nanochat.platforms.operations import KernelChoice, Operations

# Dense tensor-core peaks for bf16/fp16 in TFLOP/s from data sheets, keyed by a part of the device's
# name.
PEAKS = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A6000": 155,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "V100": 125,
    "T4": 65,
    "4090": 165,
    "3090": 71,
    "B200": 2250,
    "5090": 210,
}

FP8_SINCE = (8, 9)  # the compute capability of the first GPUs that multiply in FP8


def peak_tflops(name: str) -> float | None:
    """Return the dense bf16/fp16 peak TFLOP/s of the GPU called `name`, or None if unknown."""
    for short_name, tflops in PEAKS.items():
        if re.search(rf"{short_name}(?!\d)", name):  # an RTX A1000 is no A100
            return tflops
    return None


@dataclass(frozen=True)
class NvidiaChip:
    """A kind of GPU that nanochat.planner can plan for."""

    name: str  # a part of the device's name
    memory_gib: float
    trains: bool = True

    @property
    def tflops(self) -> float:
        """The dense bf16 peak in TFLOP/s."""
        return PEAKS[self.name]


CHIPS = (NvidiaChip("A100", 80), NvidiaChip("H100", 80), NvidiaChip("H200", 141))


class Nvidia(Platform):
    """An NVIDIA GPU, driven through CUDA."""

    name = "cuda"
    backend = "nccl"
    replays_replies = True  # 7 times as fast for one reply, and 4 for 128 (dev/LOG.md)

    def unavailable(self) -> str:
        """Return why this process cannot use a GPU, or "" if it can."""
        return "" if torch.cuda.is_available() else tr("torch sees no CUDA device")

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """Return the number format that suits the GPU, and its compute capability as the reason."""
        major, minor = torch.cuda.get_device_capability()
        capability = tr("compute capability {major}.{minor}", major=major, minor=minor)
        if major >= 8:
            return torch.bfloat16, capability
        if major >= 7:
            why = tr("{capability} has no bf16; a gradient scaler is used", capability=capability)
            return torch.float16, why
        return torch.float32, capability

    def has_fp8(self) -> bool:
        """Implement Platform.has_fp8: GPUs of compute capability 8.9 or later do."""
        return torch.cuda.get_device_capability() >= FP8_SINCE

    def use_fp8(self, model: Model) -> None:
        """Implement Platform.use_fp8."""
        if not self.has_fp8():
            super().use_fp8(model)
        fp8.use(model)

    def cannot_open(self, failure: str) -> str:
        """Return a message that says why the GPU could not be opened, and what may help."""
        first = (failure.splitlines() or [tr("no reason given")])[0]
        return tr(
            "GPU {index} cannot be opened: {first}. Another process may hold it alone, or all of its "
            "memory: look at `nvidia-smi`, or choose another with CUDA_VISIBLE_DEVICES.",
            index=self.index,
            first=first,
        )

    def in_use(self, free: int, total: int) -> str:
        """Return a warning if less than 80 % of the GPU's memory is free, or "" otherwise."""
        if free >= 0.8 * total:
            return ""
        return tr(
            "GPU {index} is in use: {free:.0f} of {total:.0f} GiB are free. `nvidia-smi` shows by "
            "which process; CUDA_VISIBLE_DEVICES chooses another",
            index=self.index,
            free=free / 2**30,
            total=total / 2**30,
        )

    def operations(self, choice: KernelChoice) -> Operations:
        """Return operations with the attention that NvidiaOperations chooses, and log its name.

        If `choice` is plain, the attention is torch's own. Raises UserError if fused kernels were
        requested, or if the kernel that NANOCHAT_FLASH_KERNEL names cannot be loaded.
        """
        self.refuse_fused(choice)
        generation, _ = torch.cuda.get_device_capability()
        operations = NvidiaOperations(generation, plain=choice == "plain")
        log(tr("attention: {name}", name=operations.name))
        return operations

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """Return an empty CUDA graph."""
        return torch.cuda.CUDAGraph()

    def graphed(
        self,
        call: torch.nn.Module,
        samples: tuple[torch.Tensor, ...],
    ) -> Callable[..., Any]:
        """Implement Platform.graphed, and turn off a warning that does not apply to graphs."""
        # torch warns that it waits for the stream of the gradients computed before the capture,
        # which is expected here.
        name = "set_warn_on_accumulate_grad_stream_mismatch"
        set_warning = getattr(torch.autograd.graph, name, None)
        if set_warning is not None:
            set_warning(False)
        return super().graphed(call, samples)

    def peak_flops(self) -> tuple[float, str] | None:
        """Return the GPU's dense bf16 peak FLOP/s and its source, or None for an unknown GPU."""
        name = torch.cuda.get_device_name(self.index)
        tflops = peak_tflops(name)
        if tflops is None:
            return None
        return tflops * 1e12, tr("{chip}, data sheet, bf16 dense", chip=name)

    def chips(self) -> Sequence[Chip]:
        """Return the kinds of GPUs that nanochat.planner can plan for."""
        return CHIPS

    def chips_called(self, name: str) -> Sequence[Chip]:
        """Return the GPU of an SXM server that `name` means, with the memory that it names."""
        if re.search("pcie|nvl", name, re.IGNORECASE):  # their peak and links are others
            return []
        memory = re.search(r"(\d+) ?GB", name, re.IGNORECASE)
        return [
            NvidiaChip(chip.name, float(memory[1]) if memory else chip.memory_gib)
            for chip in CHIPS
            if re.search(rf"\b{chip.name}\b", name, re.IGNORECASE)
        ]

    @property
    def chip(self) -> Chip | None:
        """The kind of this GPU, with its actual memory, or None if the planner does not know it."""
        name = torch.cuda.get_device_name(self.index)
        tflops = peak_tflops(name)
        for chip in CHIPS:
            if chip.name in name and chip.tflops == tflops:
                memory_gib = self.memory_total() / 2**30
                return NvidiaChip(chip.name, memory_gib)
        return None

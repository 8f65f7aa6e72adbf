"""Huawei Ascend NPUs under torch_npu: which chip this is, how models compute on it, how its ranks meet."""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from nanochat.common import UserError, log
from nanochat.nn.operations import Asked, Operations
from nanochat.platforms import ascend_environment, ascend_errors, ascend_kernels
from nanochat.platforms.ascend_chips import CHIPS, AscendChip, chip_of
from nanochat.platforms.ascend_environment import PortBlocks
from nanochat.platforms.ascend_kernels import KINDS, NEEDS
from nanochat.platforms.ascend_profiler import AscendTracer
from nanochat.platforms.base import Platform, Tracer


class Ascend(Platform):
    """An NPU; torch_npu is imported when unavailable() first asks for it."""

    name = "npu"
    backend = "hccl"

    def __init__(self, index: int = 0):
        super().__init__(index)
        self.ports = PortBlocks()  # of this job's collectives, held while this object lives

    def unavailable(self) -> str:
        """Try to import torch_npu. Every failure (no CANN, a wrong version) is a reason, not an error."""
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        # torch and torch_npu share their first two numbers
        if why := ascend_environment.prepare_loading(torch.__version__):
            return f"torch_npu could not be loaded: {why}"
        try:
            usable = importlib.import_module("torch_npu").npu.is_available()
        except Exception as failure:  # the edge to a foreign library, which raises anything; the reason is shown
            return f"torch_npu could not be loaded: {ascend_errors.cannot_load(str(failure) or repr(failure))}"
        return "" if usable else "torch_npu loaded, but sees no NPU"

    @cached_property
    def chip(self) -> AscendChip | None:
        """The chip by its SoC version; None for a version that is not known."""
        return chip_of(self.module.get_soc_version())

    def chips(self) -> Sequence[AscendChip]:
        """Every chip that is known."""
        return CHIPS

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """bf16 where the chip has bf16, else fp16."""
        if self.module.is_bf16_supported():
            return torch.bfloat16, "the NPU has bf16"
        return torch.float16, "the NPU has no bf16; " + (
            "a gradient scaler is used" if self.chip is None or self.chip.trains else "for inference only"
        )

    def lacks_dtype(self, dtype: torch.dtype) -> str:
        """The refusal of bf16 on a chip without bf16."""
        if dtype != torch.bfloat16 or self.module.is_bf16_supported():
            return ""
        return "NANOCHAT_DTYPE=bfloat16 was asked for, but this NPU has no bf16; leave it out to use float16"

    def cannot_open(self, failure: str) -> str:
        """Why the card could not be opened, and what may help."""
        return ascend_errors.cannot_open(self.index, failure)

    def in_use(self, free: int, total: int) -> str:
        """A warning if less than 80 % of the card's memory is free."""
        return ascend_errors.in_use(self.index, free, total)

    # --- ranks -----------------------------------------------------------------------------------

    def prepare_collectives(self) -> int:
        """Set HCCL's time-outs where the user has not; returns the time-out of the process group in seconds."""
        return ascend_environment.prepare_collectives()

    def ranks_met(self, rank: int, local_rank: int, world_size: int) -> None:
        """Give this job's collectives a block of ports of their own, the same block for all ranks of a host."""
        if world_size == 1:
            return
        if given := os.environ.get("HCCL_IF_BASE_PORT"):
            if local_rank == 0 and given.isdigit() and (taken := self.ports.hold(int(given))):
                raise UserError(ascend_environment.block_words(int(given), taken))
            return
        blocks = torch.zeros(world_size, dtype=torch.int64)
        if local_rank == 0:
            blocks[rank] = self.ports.free(hold=True)
        dist.all_reduce(blocks)
        if base := int(blocks[rank - local_rank]):
            os.environ["HCCL_IF_BASE_PORT"] = str(base)

    # --- work ------------------------------------------------------------------------------------

    def operations(self, asked: Asked) -> Operations:
        """What the chip has, or torch's own operators where plain was asked for or the chip is not known."""
        chip = self.chip
        kind = "plain" if chip is None or asked == "plain" else chip.kernels
        if asked == "fused" and kind != "fused":
            what = "this chip, whose SoC version is not known," if chip is None else f"a {chip.name}"
            raise UserError(f"--kernels fused was asked for, but {what} has no fused attention for training; use auto")
        if chip is not None and kind != "plain" and (lacking := ascend_kernels.missing(kind)):
            raise UserError(
                f"torch_npu lacks {', '.join(lacking)}, which a {chip.name} computes with; "
                "install one that fits CANN (python check_npu.py), or give --kernels plain"
            )
        operators = ", ".join(NEEDS.get(kind, ()))
        log(f"kernels: {kind}" + (f" ({operators})" if operators else ""))
        return KINDS[kind](stacks_matrices=asked != "plain", saturates=chip is not None and chip.saturates)

    def cannot_train(self) -> str:
        """Why an inference card cannot train."""
        if self.chip is None or self.chip.trains:
            return ""
        return (
            f"a {self.chip.name} is for inference only, it cannot train: its operators have no backward pass. "
            "Train on another device (--device_type=cpu is one); chat_cli, chat_web and chat_eval work here."
        )

    def clear_overflow(self) -> None:
        """Forget earlier overflows, on a chip that saturates."""
        if self.chip is not None and self.chip.saturates:
            self.module.amp.GradScaler.clear_npu_overflow_flag()

    def overflows(self) -> list[torch.Tensor]:
        """The status flag of a chip that saturates, read as torch_npu's GradScaler reads it."""
        if self.chip is None or not self.chip.saturates:
            return []
        status = torch.zeros(8, dtype=torch.float32, device=torch.device(self.name, self.index))
        import torch_npu  # pyright: ignore[reportMissingImports]

        return [torch_npu.npu_get_float_status(status)[:1]]

    def explain(self, failure: RuntimeError) -> str:
        """What a known error of torch_npu, HCCL or the driver means."""
        return ascend_errors.explain(str(failure)) or super().explain(failure)

    def tracer(self, folder: Path, name: str, steps: int) -> Tracer:
        """torch_npu's profiler."""
        return AscendTracer(folder, name, steps)

    def peak_flops(self) -> tuple[float, str] | None:
        """The dense peak of a known chip."""
        return None if self.chip is None else (self.chip.tflops * 1e12, f"{self.chip.name}, {self.chip.source} dense")

    def compiler_missing(self) -> str:
        """Compilers for NPUs are not used."""
        return "off on NPUs"

"""CPUs: the host as a device, with kernels in C++."""

import torch

from nanochat.common import UserError
from nanochat.model import Model
from nanochat.platforms import host
from nanochat.platforms.base import dtype_name, requested_kernels
from nanochat.platforms.cpu import int8
from nanochat.platforms.cpu.gradients import Trained
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.operations import KernelChoice, Matmul, Operations
from nanochat.platforms.plain import Host


class Cpu(Host):
    """The host's processor, with kernels that a C++ compiler makes faster."""

    def operations(self, choice: KernelChoice) -> Operations:
        """Return C++ kernels, or plain torch; refuse fused kernels."""
        self.refuse_fused(choice)
        has_kernels = choice != "plain"
        return CpuOperations(has_kernels, has_kernels)

    def default_operations(self) -> Operations:
        """Return the operations of a Compute that no launcher made."""
        return CpuOperations()

    def use_int8(self, model: Model, operations: Operations) -> None:
        """See Platform.use_int8."""
        if model.dtype != torch.bfloat16:
            raise UserError(
                "--matmul int8 needs a model that computes in bfloat16, but this one computes in "
                f"{dtype_name(model.dtype)}: leave --matmul out, or set NANOCHAT_DTYPE=bfloat16",
                exit_code=2,
            )
        kernels = _int8_kernels(operations)
        if kernels is None:
            raise UserError(
                "--matmul int8 needs the C++ kernels, but they were switched off (--kernels plain, "
                "NANOCHAT_KERNELS) or could not be compiled: switch them on, install g++, or leave "
                "--matmul out",
                exit_code=2,
            )
        int8.use_int8(model, kernels)

    def preset_matmul(self, dtype: torch.dtype) -> Matmul:
        """See Platform.preset_matmul. The kernels are compiled here, unless they are there."""
        if dtype != torch.bfloat16 or not int8.is_faster() or host.compiler() is None:
            return "auto"
        operations = self.operations(requested_kernels("auto"))
        return "auto" if _int8_kernels(operations) is None else "int8"

    def usual_mfu(self) -> float:
        """Return what kernels in C++ reach in fp32, bf16 and int8: 0.55 to 0.75 (dev/LOG.md)."""
        has_kernels = host.compiler() is not None
        if has_kernels and "avx2" in host.cpu_flags():
            return 0.6
        return super().usual_mfu()


def _int8_kernels(operations: Operations) -> Trained | None:
    """Return the kernels that train in 8 bits; None if a model with these operations has none."""
    if not isinstance(operations, CpuOperations):
        return None
    return operations.in_int8()

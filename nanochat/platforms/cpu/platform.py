"""CPUs: the host as a device, with kernels in C++."""

import torch

from nanochat.model import Model
from nanochat.platforms import host
from nanochat.platforms.base import requested_kernels
from nanochat.platforms.cpu import int8
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
        int8.use_int8(model, operations)

    def preset_matmul(self, dtype: torch.dtype, operations: Operations | None = None) -> Matmul:
        """See Platform.preset_matmul. Without `operations`, the kernels may be compiled here."""
        if dtype != torch.bfloat16 or not int8.is_faster() or host.compiler() is None:
            return "auto"
        operations = operations or self.operations(requested_kernels("auto"))
        return "auto" if int8.kernels_of(operations) is None else "int8"

    def usual_mfu(self) -> float:
        """Return what kernels in C++ reach in fp32, bf16 and int8: 0.55 to 0.75 (dev/LOG.md)."""
        has_kernels = host.compiler() is not None
        if has_kernels and "avx2" in host.cpu_flags():
            return 0.6
        return super().usual_mfu()

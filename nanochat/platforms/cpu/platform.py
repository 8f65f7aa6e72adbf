"""The host as a device, with C++ kernels."""

import torch

from nanochat.model import Model
from nanochat.platforms import host
from nanochat.platforms.base import requested_kernels
from nanochat.platforms.cpu import int8
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.cpu.panels import serve_here
from nanochat.platforms.operations import KernelChoice, Matmul, Operations
from nanochat.platforms.plain import Host


class Cpu(Host):
    """The host's processor, with kernels that a C++ compiler builds."""

    compiles_layers = True

    def operations(self, choice: KernelChoice) -> Operations:
        """Return CpuOperations, without C++ kernels or stacked matrices if `choice` is plain.

        Raises UserError if fused kernels were requested.
        """
        self.refuse_fused(choice)
        has_kernels = choice != "plain"
        return CpuOperations(has_kernels, has_kernels)

    def default_operations(self) -> Operations:
        """Return CpuOperations for a Compute that is created without operations, as in tests."""
        return CpuOperations()

    def use_int8(self, model: Model, operations: Operations) -> None:
        """Implement Platform.use_int8 with the C++ kernels."""
        int8.use_int8(model, operations)

    def preset_matmul(self, dtype: torch.dtype, operations: Operations | None = None) -> Matmul:
        """Return int8 for a bf16 GPT if kernels for it exist and are faster here, or else auto.

        This may compile the kernels if they are missing.
        """
        if dtype != torch.bfloat16 or not int8.is_faster() or host.compiler() is None:
            return "auto"
        operations = operations or self.operations(requested_kernels("auto"))
        return "auto" if int8.kernels_of(operations) is None else "int8"

    def int8_missing(self, dtype: torch.dtype) -> str:
        """Return "" also if `dtype` is fp32 and C++ kernels multiply by 8-bit numbers here."""
        has_kernels = host.compiler() is not None and requested_kernels("auto") != "plain"
        if has_kernels and serve_here(dtype):
            return ""
        return super().int8_missing(dtype)

    def usual_mfu(self) -> float:
        """Return 0.6 if the host has a C++ compiler and AVX2, or else the default of 0.4.

        The C++ kernels reach 0.55 to 0.75 in fp32, bf16 and int8 (dev/LOG.md).
        """
        has_kernels = host.compiler() is not None
        if has_kernels and "avx2" in host.cpu_flags():
            return 0.6
        return super().usual_mfu()

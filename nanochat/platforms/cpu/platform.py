"""CPUs: the host as a device, with kernels in C++."""

from nanochat.platforms import host
from nanochat.platforms.cpu import int8
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.operations import KernelChoice, Operations
from nanochat.platforms.plain import Host


class Cpu(Host):
    """The host's processor, with kernels that a C++ compiler makes faster."""

    def operations(self, choice: KernelChoice) -> Operations:
        """Return C++ kernels, or plain torch; refuse fused kernels."""
        self.refuse_fused(choice)
        has_kernels = choice != "plain"
        return CpuOperations(has_kernels, has_kernels, int8.reason())

    def default_operations(self) -> Operations:
        """Return the operations of a Compute that no launcher made."""
        return CpuOperations()

    def usual_mfu(self) -> float:
        """Return what kernels in C++ reach in fp32, bf16 and int8: 0.55 to 0.75 (dev/LOG.md)."""
        has_kernels = host.compiler() is not None
        if has_kernels and "avx2" in host.cpu_flags():
            return 0.6
        return super().usual_mfu()

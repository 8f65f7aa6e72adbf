"""CPUs: the host as a device, with kernels in C++."""

from nanochat.platforms import host
from nanochat.platforms.cpu import int8
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.operations import KernelChoice, Operations
from nanochat.platforms.plain import Host


class Cpu(Host):
    """The host's processor, with kernels that a C++ compiler makes faster."""

    def operations(self, choice: KernelChoice) -> Operations:
        """C++ kernels, or plain torch; fused kernels are refused."""
        self.refuse_fused(choice)
        has_kernels = choice != "plain"
        return CpuOperations(has_kernels, has_kernels, int8.reason())

    def default_operations(self) -> Operations:
        """Return the operations of a Compute that no launcher made."""
        return CpuOperations()

    def usual_mfu(self) -> float:
        """Kernels in C++ reach 0.55 to 0.75 of a matmul's speed, in fp32, bf16 and int8 (dev/LOG.md)."""
        return (
            0.6
            if "avx2" in host.cpu_flags() and host.compiler() is not None
            else super().usual_mfu()
        )

"""Mixed precision."""

from torch_npu.npu.amp.grad_scaler import GradScaler as GradScaler

__all__ = ["GradScaler"]

"""Loss scaling that also sees overflow on a chip that saturates instead of giving inf."""

from typing import Any

import torch
import torch.distributed as dist


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for which overflow is also what the device's flag says, on any rank."""

    def __init__(
        self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000, enabled: bool = True, dynamic: bool = True,
    ):  # fmt: skip
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._dynamic = dynamic

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale; what overflowed before is forgotten."""
        from torch_npu.npu.utils import is_support_inf_nan

        if self._enabled and self._dynamic and not is_support_inf_nan():
            GradScaler.clear_npu_overflow_flag()
        return super().scale(outputs)

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        from torch_npu.npu.utils import is_support_inf_nan

        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not is_support_inf_nan():
            overflow = torch.full((), float(GradScaler.get_npu_overflow_flag()), device=found_inf.device)
            if dist.is_initialized():
                dist.all_reduce(overflow)
            for tensor in found.values():
                tensor += overflow.to(tensor.device)
        return found

    @staticmethod
    def get_npu_overflow_flag() -> bool:
        """Whether anything overflowed since the flag was cleared."""
        import torch_npu

        status = torch.zeros(8).pin_memory().to("npu", non_blocking=True)
        return bool(torch_npu.npu_get_float_status(status).cpu()[0] != 0)

    @staticmethod
    def clear_npu_overflow_flag() -> None:
        """Forget what overflowed."""
        import torch_npu

        torch_npu.npu_clear_float_status(torch.zeros(8).pin_memory().to("npu", non_blocking=True))

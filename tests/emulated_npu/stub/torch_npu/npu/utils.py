"""The current device and stream, synchronisation, what the chip supports, and versions."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from torch_npu import _load
from torch_npu.npu._backends import get_soc_version as get_soc_version
from torch_npu.npu.streams import Stream


def _get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type == "cpu" and allow_cpu:
            return -1
        if device.type != "npu":
            raise ValueError(f"Expected a npu device, but got: {device}")
        return current_device() if device.index is None else device.index
    if device is None and optional:
        return current_device()
    if hasattr(device, "idx"):
        return device.idx
    raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")


def current_device() -> int:
    """The index of the device that this thread uses."""
    return _load.device().current_device()


def set_device(device: Any) -> None:
    """Make this thread use a device. An index without a device is an error."""
    index = _get_device_index(device, optional=True)
    if index >= 0:
        _load.device().set_device(index)


def synchronize(device: Any = None) -> None:
    """Wait until the device has finished everything, including deferred copies."""
    _load.device().synchronize(_get_device_index(device, optional=True))


class device:
    """A context that uses another device; -1 or None changes nothing."""

    def __init__(self, device: Any):
        self.idx = -1 if device is None else _get_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            self.prev_idx = _load.device().exchange_device(self.idx)

    def __exit__(self, *args: Any) -> bool:
        if self.idx >= 0:
            _load.device().exchange_device(self.prev_idx)
        return False


class device_of(device):
    """A context that uses the device of a tensor."""

    def __init__(self, obj: Any):
        super().__init__(obj.get_device() if obj.is_npu else -1)


def current_stream(device: Any = None) -> Stream:
    """The stream that this thread sends its work to."""
    index = _get_device_index(device, optional=True)
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return Stream(stream_id=_load.device().current_stream_id(index), device_index=index, device_type=int(kind))


def default_stream(device: Any = None) -> Stream:
    """Stream 0 of a device."""
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return Stream(stream_id=0, device_index=_get_device_index(device, optional=True), device_type=int(kind))


def set_stream(stream: Stream | None) -> None:
    """Make this thread send its work to a stream."""
    if stream is not None:
        _load.device().set_stream(stream.stream_id, stream.device_index)


class StreamContext:
    """A context in which work goes to a stream; None changes nothing."""

    def __init__(self, stream_ctx: Stream | None):
        self.stream = stream_ctx
        self.before: Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = current_stream(self.stream.device)
            self.device = device(self.stream.device)
            self.device.__enter__()
            set_stream(self.stream)

    def __exit__(self, *args: Any) -> None:
        if self.stream is not None:
            set_stream(self.before)
            self.device.__exit__()


def stream(stream: Stream | None) -> StreamContext:
    """A context in which work goes to a stream."""
    return StreamContext(stream)


def is_bf16_supported() -> bool:
    """Whether the chip computes in bf16."""
    return bool(_load.emulated()["chip"]["bf16"])


def is_support_inf_nan() -> bool:
    """Whether an overflow gives inf, as IEEE says. On a 910A, it gives the largest number."""
    return not _load.emulated()["chip"]["saturates"]


def get_npu_overflow_flag() -> bool:
    """On a chip that saturates, whether anything has overflowed."""
    if is_support_inf_nan():
        raise RuntimeError("Unsupported api when soc_version >= Ascend910B1, please use npu_check_overflow")
    return _load.device().overflow_flag(False)


def clear_npu_overflow_flag() -> None:
    """On a chip that saturates, clear the overflow flag."""
    if is_support_inf_nan():
        warnings.warn(
            "When soc_version >= Ascend910B1, clear_npu_overflow_flag is useless. Please remove it.", stacklevel=2
        )
        return
    _load.device().overflow_flag(True)


def npu_check_overflow(grad: Any) -> bool:
    """Whether a gradient is not finite, or, on a chip that saturates, whether anything has overflowed."""
    if is_support_inf_nan():
        total = grad if isinstance(grad, float) else float(grad.float().sum())
        return total != total or total in (float("inf"), -float("inf"))
    return _load.device().overflow_flag(True)


def get_cann_version(module: str = "CANN") -> str:
    """The version of the installed CANN, or "" if there is none."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    for file in sorted(Path(home).rglob("ascend_*_install.info")) if home else []:
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("version="):
                return line.partition("=")[2]
    return ""

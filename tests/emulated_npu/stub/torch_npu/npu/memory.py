"""Device memory, counted to the byte. Nothing is cached, so reserved memory equals allocated memory."""

from typing import Any

from torch_npu import _load


def _usage(device: Any) -> dict[str, int]:
    from torch_npu.npu.utils import _get_device_index

    return _load.device().usage(_get_device_index(device, optional=True))


def memory_allocated(device: Any = None) -> int:
    """Bytes that are allocated now."""
    return _usage(device)["current"]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were allocated at once since reset_peak_memory_stats()."""
    return _usage(device)["peak"]


def memory_reserved(device: Any = None) -> int:
    """Bytes that are allocated or cached now."""
    return _usage(device)["current"]


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes that were allocated or cached at once."""
    return _usage(device)["peak"]


def memory_stats(device: Any = None) -> dict[str, Any]:
    """The counters of the real package, under its names."""
    usage = _usage(device)
    stats: dict[str, Any] = {}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        for name in ("current", "peak", "allocated", "freed"):
            stats[f"{kind}.all.{name}"] = usage[name]
    live = usage["allocations"] - usage["frees"]
    stats["allocation.all.current"], stats["allocation.all.allocated"] = live, usage["allocations"]
    stats["allocation.all.freed"], stats["num_ooms"] = usage["frees"], usage["out_of_memory"]
    stats["num_alloc_retries"] = 0
    return stats


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset the peak to what is allocated now."""
    from torch_npu.npu.utils import _get_device_index

    _load.device().reset_peak(_get_device_index(device, optional=True))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Accepted, without effect: the emulation's sums cover the life of the process."""


def empty_cache() -> None:
    """Accepted, without effect: nothing is cached."""


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limit this process to a part of a device's memory."""
    from torch_npu.npu.utils import _get_device_index

    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _load.device().set_fraction(_get_device_index(device, optional=True), float(fraction))

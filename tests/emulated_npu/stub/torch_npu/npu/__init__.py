"""torch.npu: devices, streams, memory, random numbers and number formats."""

from typing import Any

import torch

from torch_npu import _load
from torch_npu.npu import amp
from torch_npu.npu._backends import get_soc_version
from torch_npu.npu.graphs import (
    NPUGraph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
    make_graphed_callables,
)
from torch_npu.npu.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from torch_npu.npu.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_npu.npu.streams import Event, Stream
from torch_npu.npu.utils import (
    StreamContext,
    _get_device_index,
    clear_npu_overflow_flag,
    current_device,
    current_stream,
    default_stream,
    device,
    device_of,
    get_npu_overflow_flag,
    is_bf16_supported,
    set_device,
    set_stream,
    stream,
    synchronize,
)


def _device() -> Any:
    return _load.device()


def is_available() -> bool:
    """Whether the host has a device."""
    return device_count() > 0


def device_count() -> int:
    """The number of devices that this process sees."""
    return _device().device_count()


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def init() -> None:
    _lazy_init()


def _lazy_init() -> None:
    _device().refuse_after_fork()


def _lazy_call(callable: Any, **kwargs: Any) -> None:
    callable()


def _is_in_bad_fork() -> bool:
    return False


def get_device_name(device_name: Any = None) -> str:
    """The name of a device, for example Ascend910B3."""
    _checked(device_name)
    return _load.emulated()["chip"]["name"]


class _Properties:
    """The properties that the real package's object has."""

    def __init__(self, name: str, total_memory: int):
        self.name, self.total_memory = name, total_memory
        self.cube_core_num, self.vector_core_num = 20, 40

    def __repr__(self) -> str:
        return f"_NPUDeviceProperties(name='{self.name}', total_memory={self.total_memory >> 20}MB)"


def get_device_properties(device_name: Any = None) -> _Properties:
    """The name and the total memory of a device."""
    _checked(device_name)
    return _Properties(_load.emulated()["chip"]["name"], _device().memory())


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """The free and the total bytes of a device."""
    index = _checked(device)
    total = _device().memory()
    return total - _device().usage(index)["current"], total


def _checked(device: Any) -> int:
    index = _get_device_index(device, optional=True)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return index


def can_device_access_peer(device_id: int, peer_device_id: int) -> bool:
    return device_id != peer_device_id


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that torch.autocast("npu") may compute in."""
    return [torch.float16, torch.bfloat16] if is_bf16_supported() else [torch.float16]


_compile_mode: dict[str, bool] = {}  # what set_compile_mode() was last told, as "jit_compile"


def set_compile_mode(jit_compile: bool = False) -> None:
    """Remembered, without effect: the emulation compiles no kernels."""
    _compile_mode["jit_compile"] = jit_compile


def is_jit_compile_false() -> bool:
    """Whether kernels come ready from the ops package; by default, only from the 910B1 on."""
    return not _compile_mode.get("jit_compile", get_soc_version() < 220)


def set_option(option: dict[str, Any]) -> None:
    """Accepted, without effect."""


def utilization(device: Any = None) -> int:
    """How busy the device is, in percent. The emulated device is never busy when asked."""
    _checked(device)
    return 0


__all__ = [
    "Event", "NPUGraph", "Stream", "StreamContext", "amp", "can_device_access_peer", "clear_npu_overflow_flag",
    "current_device", "current_stream", "default_stream", "device", "device_count", "device_of", "empty_cache",
    "get_amp_supported_dtype", "get_device_name", "get_device_properties", "get_npu_overflow_flag", "get_rng_state",
    "get_rng_state_all", "get_soc_version", "graph", "graph_pool_handle", "init",
    "initial_seed", "is_available", "is_bf16_supported", "is_current_stream_capturing", "is_initialized",
    "is_jit_compile_false",
    "make_graphed_callables", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved",
    "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats", "reset_accumulated_memory_stats",
    "reset_peak_memory_stats", "seed", "seed_all", "set_compile_mode", "set_device", "set_option",
    "set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all", "set_stream", "stream", "synchronize",
    "utilization",
]  # fmt: skip

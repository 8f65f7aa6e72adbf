"""The variables that a job on NPUs wants, and those that harm it."""

from __future__ import annotations

import os
import re
import socket
from typing import Mapping, NamedTuple

from tools_npu.versions import release

FILES_WANTED = 4096


class Variable(NamedTuple):
    """A variable to export unless the user has set it."""

    name: str
    value: str


def allocator_variable(torch_npu: str) -> str:
    """The variable that this torch_npu reads: PYTORCH_ALLOC_CONF from 2.13 on."""
    return "PYTORCH_ALLOC_CONF" if release(torch_npu)[:2] >= (2, 13) else "PYTORCH_NPU_ALLOC_CONF"


def wanted(torch_npu: str) -> list[Variable]:
    """What setup_ascend.sh exports; every one gives way to what is set already, but HCCL_IF_BASE_PORT is not here:
    a job takes a free block when it starts.
    """
    return [
        Variable("TASK_QUEUE_ENABLE", "2"),  # launches are queued twice over: the host is the limit of small models
        Variable(allocator_variable(torch_npu), "expandable_segments:True"),
        Variable("CPU_AFFINITY_CONF", "2"),
        Variable("HCCL_CONNECT_TIMEOUT", "1200"),
        Variable("HCCL_EXEC_TIMEOUT", "1836"),
        Variable("HCCL_WHITELIST_DISABLE", "1"),
        Variable("ASCEND_GLOBAL_LOG_LEVEL", "3"),
    ]


class Finding(NamedTuple):
    """A variable that harms: WARN or FAIL, why in both languages, and what to type."""

    status: str
    name: str
    english: str
    chinese: str
    remedy: str


def _whole_number(value: str) -> int:
    return int(value) if value.strip().isdigit() else -1


def _allocator(environment: Mapping[str, str], torch_npu: str) -> list[Finding]:
    found = []
    both = [name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF") if environment.get(name)]
    if len(both) == 2:
        found.append(Finding("FAIL", both[1], f"{both[0]} and {both[1]} are both set: torch_npu aborts",
                             f"{both[0]} 与 {both[1]} 同时设置：torch_npu 会中止", f"unset {both[1]}"))  # fmt: skip
    for name in both:
        value = environment[name]
        if "expandable_segments:True" in value and re.search("max_split_size_mb|garbage_collection_threshold", value):
            found.append(
                Finding("FAIL", name, f"{name}: expandable_segments does not go with max_split_size_mb or "
                        "garbage_collection_threshold",
                        f"{name}：expandable_segments 不能与 max_split_size_mb 或 garbage_collection_threshold 同用",
                        f"export {name}=expandable_segments:True"))  # fmt: skip
    if torch_npu and len(both) == 1 and both[0] != allocator_variable(torch_npu):
        right = allocator_variable(torch_npu)
        found.append(Finding("WARN", both[0], f"{both[0]} is not what torch_npu {torch_npu} reads: {right} is",
                             f"torch_npu {torch_npu} 读取的是 {right}，而不是 {both[0]}",
                             f"export {right}=${both[0]}; unset {both[0]}"))  # fmt: skip
    return found


def lint(environment: Mapping[str, str], torch_npu: str = "") -> list[Finding]:
    """Every variable that conflicts, does nothing, or slows a run down."""
    found = _allocator(environment, torch_npu)

    def add(status: str, name: str, english: str, chinese: str, remedy: str) -> None:
        found.append(Finding(status, name, f"{name}={environment[name]}: {english}",
                             f"{name}={environment[name]}：{chinese}", remedy))  # fmt: skip

    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        add("WARN", "ASCEND_LAUNCH_BLOCKING", "a debugging aid that switches the task queue off; it saves no memory",
            "仅用于调试，会关闭任务队列；并不节省内存", "unset ASCEND_LAUNCH_BLOCKING")  # fmt: skip
    if environment.get("ASCEND_GLOBAL_LOG_LEVEL") in ("0", "1"):
        add("WARN", "ASCEND_GLOBAL_LOG_LEVEL", "0 is DEBUG, 1 is INFO, 3 is ERROR: such logs slow every launch",
            "0 为 DEBUG，1 为 INFO，3 为 ERROR：大量日志会拖慢运行", "export ASCEND_GLOBAL_LOG_LEVEL=3")  # fmt: skip
    if environment.get("ASCEND_SLOG_PRINT_TO_STDOUT") == "1":
        add("WARN", "ASCEND_SLOG_PRINT_TO_STDOUT", "for debugging: it slows a run and fills the screen",
            "仅用于调试：会拖慢运行并刷屏", "unset ASCEND_SLOG_PRINT_TO_STDOUT")  # fmt: skip
    if environment.get("TASK_QUEUE_ENABLE") == "0":
        add("WARN", "TASK_QUEUE_ENABLE", "launches are not queued: the card waits for the host",
            "未启用任务队列：NPU 会等待主机下发", "export TASK_QUEUE_ENABLE=2")  # fmt: skip
    for name, low, high in [("HCCL_CONNECT_TIMEOUT", 120, 7200), ("HCCL_EXEC_TIMEOUT", 0, 2147483647)]:
        if name in environment and not low <= _whole_number(environment[name]) <= high:
            add("FAIL", name, f"must be whole seconds from {low} to {high}", f"须为 {low} 到 {high} 之间的整数秒",
                f"export {name}={'1200' if low else '1836'}")  # fmt: skip
    if environment.get("CUDA_VISIBLE_DEVICES") and not environment.get("ASCEND_RT_VISIBLE_DEVICES"):
        add("WARN", "CUDA_VISIBLE_DEVICES", "is not read on NPUs; ASCEND_RT_VISIBLE_DEVICES is", "对 NPU 无效",
            "export ASCEND_RT_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES")  # fmt: skip
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
        if environment.get(name) and not os.path.isdir(environment[name]):
            add("FAIL", name, "no such folder", "目录不存在", "source setup_ascend.sh")
    if environment.get("ASCEND_HOME_PATH") and not environment.get("ASCEND_OPP_PATH"):
        add("WARN", "ASCEND_HOME_PATH", "but no ASCEND_OPP_PATH: CANN's set_env.sh was not sourced",
            "但没有 ASCEND_OPP_PATH：尚未执行 CANN 的 set_env.sh", "source setup_ascend.sh")  # fmt: skip
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "1":
        add("WARN", "TORCH_DEVICE_BACKEND_AUTOLOAD", "`import torch` fails wherever CANN is not set up",
            "在未配置 CANN 的环境中 import torch 会失败", "unset TORCH_DEVICE_BACKEND_AUTOLOAD")  # fmt: skip
    return found


def port_is_free(port: int) -> bool:
    """Whether a TCP port of this host can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

"""The environment variables that a job on NPUs needs, and those that harm it."""

from __future__ import annotations

import os
import re
import resource
import shlex
import socket
from typing import Mapping, NamedTuple

from tools_npu.versions import order

FILES_WANTED = 4096
NAME = re.compile(r"[A-Za-z_]\w*")
# The first patch of each minor of torch_npu that reads PYTORCH_ALLOC_CONF: TorchNPU 26.2 with torch 2.10 or later.
FIRST_WITH_TORCHS_NAME = {(2, 10): 7, (2, 11): 3, (2, 12): 3}
# Those that read TORCH_HCCL_ASYNC_ERROR_HANDLING, and warn of the older name.
FIRST_WITH_ASYNC_NAME = {(2, 7): 11, (2, 9): 9, (2, 10): 7, (2, 11): 3, (2, 12): 3}


class Variable(NamedTuple):
    """A variable that set-up exports unless the user has already set it."""

    name: str
    value: str


def allocator_variable(torch_npu: str) -> str:
    """The allocator variable of a torch_npu; nanochat/platforms/ascend_environment.py says the same to a job."""
    number, post = order(torch_npu)
    torchs = number[:2] >= (2, 13) or post >= FIRST_WITH_TORCHS_NAME.get(number[:2], post + 1)
    return "PYTORCH_ALLOC_CONF" if torchs else "PYTORCH_NPU_ALLOC_CONF"


def wanted(torch_npu: str) -> list[Variable]:
    """The variables that setup_ascend.sh exports; a value that the user has already set wins.

    HCCL_IF_BASE_PORT is not among them, because each job picks a free block of ports when it starts.
    """
    return [
        Variable(
            "TASK_QUEUE_ENABLE", "2"
        ),  # two queues of launches: small models are limited by the host
        Variable(allocator_variable(torch_npu), "expandable_segments:True"),
        Variable("CPU_AFFINITY_CONF", "2"),
        Variable("HCCL_CONNECT_TIMEOUT", "1200"),
        Variable("HCCL_EXEC_TIMEOUT", "1836"),
        Variable("HCCL_WHITELIST_DISABLE", "1"),
        Variable("ASCEND_GLOBAL_LOG_LEVEL", "3"),
    ]


class Finding(NamedTuple):
    """A harmful variable: WARN or FAIL, the reason in both languages, and the command that fixes it."""

    status: str
    name: str
    english: str
    chinese: str
    remedy: str


def _whole_number(value: str) -> int:
    return int(value) if value.strip().isdigit() else -1


def _allocator(environment: Mapping[str, str], torch_npu: str) -> list[Finding]:
    found = []
    both = [
        name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF") if environment.get(name)
    ]
    if len(both) == 2:
        found.append(
            Finding(
                "FAIL",
                both[1],
                f"{both[0]} and {both[1]} are both set, which makes torch_npu abort",
                f"{both[0]} 和 {both[1]} 不能同时设置，否则 torch_npu 会中止",
                f"unset {both[1]}",
            )
        )
    for name in both:
        value = environment[name]
        if "expandable_segments:True" in value and re.search(
            "max_split_size_mb|garbage_collection_threshold", value
        ):
            found.append(
                Finding(
                    "FAIL",
                    name,
                    f"{name}: expandable_segments cannot be combined with max_split_size_mb or "
                    "garbage_collection_threshold",
                    f"{name}：expandable_segments 不能与 max_split_size_mb 或 garbage_collection_threshold 一起用",
                    f"export {name}=expandable_segments:True",
                )
            )
    right = allocator_variable(torch_npu) if torch_npu else ""
    if (
        both == ["PYTORCH_ALLOC_CONF"] and right == "PYTORCH_NPU_ALLOC_CONF"
    ):  # the older name is read by every release
        found.append(
            Finding(
                "WARN",
                both[0],
                f"torch_npu {torch_npu} reads {right}, not {both[0]}",
                f"torch_npu {torch_npu} 读取的是 {right}，而不是 {both[0]}",
                f"export {right}=${both[0]}; unset {both[0]}",
            )
        )
    return found


def lint(environment: Mapping[str, str], torch_npu: str = "") -> list[Finding]:
    """Every variable that conflicts with another, has no effect, or slows a run down."""
    found = _allocator(environment, torch_npu)

    def add(status: str, name: str, english: str, chinese: str, remedy: str) -> None:
        found.append(
            Finding(
                status,
                name,
                f"{name}={environment[name]}: {english}",
                f"{name}={environment[name]}：{chinese}",
                remedy,
            )
        )

    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        add(
            "WARN",
            "ASCEND_LAUNCH_BLOCKING",
            "this debugging aid switches off the task queue; it saves no memory",
            "只用于调试，会关闭任务队列；并不省显存",
            "unset ASCEND_LAUNCH_BLOCKING",
        )
    if environment.get("ASCEND_GLOBAL_LOG_LEVEL") in ("0", "1"):
        add(
            "WARN",
            "ASCEND_GLOBAL_LOG_LEVEL",
            "level 0 (DEBUG) or 1 (INFO) slows every launch; 3 (ERROR) does not",
            "0（DEBUG）和 1（INFO）会写大量日志，拖慢每次下发；平时用 3（ERROR）",
            "export ASCEND_GLOBAL_LOG_LEVEL=3",
        )
    if environment.get("ASCEND_SLOG_PRINT_TO_STDOUT") == "1":
        add(
            "WARN",
            "ASCEND_SLOG_PRINT_TO_STDOUT",
            "this debugging aid slows a run down and floods the terminal",
            "只用于调试，会拖慢运行并刷屏",
            "unset ASCEND_SLOG_PRINT_TO_STDOUT",
        )
    if environment.get("TASK_QUEUE_ENABLE") == "0":
        add(
            "WARN",
            "TASK_QUEUE_ENABLE",
            "without the task queue the card waits for the host to launch operators",
            "没有启用任务队列，卡会空等主机下发算子",
            "export TASK_QUEUE_ENABLE=2",
        )
    for name, low, high in [
        ("HCCL_CONNECT_TIMEOUT", 120, 7200),
        ("HCCL_EXEC_TIMEOUT", 0, 2147483647),
    ]:
        if name in environment and not low <= _whole_number(environment[name]) <= high:
            add(
                "FAIL",
                name,
                f"must be a whole number of seconds from {low} to {high}",
                f"应为 {low} 到 {high} 之间的整数，单位秒",
                f"export {name}={'1200' if low else '1836'}",
            )
    if (
        "HCCL_ASYNC_ERROR_HANDLING" in environment
        and "TORCH_HCCL_ASYNC_ERROR_HANDLING" not in environment
    ):
        number, post = order(torch_npu)
        if number[:2] >= (2, 13) or post >= FIRST_WITH_ASYNC_NAME.get(number[:2], post + 1):
            value = environment["HCCL_ASYNC_ERROR_HANDLING"]
            add(
                "WARN",
                "HCCL_ASYNC_ERROR_HANDLING",
                f"torch_npu {torch_npu} calls it TORCH_HCCL_ASYNC_ERROR_HANDLING",
                f"torch_npu {torch_npu} 已改名为 TORCH_HCCL_ASYNC_ERROR_HANDLING",
                f"export TORCH_HCCL_ASYNC_ERROR_HANDLING={value}; unset HCCL_ASYNC_ERROR_HANDLING",
            )
    if environment.get("CUDA_VISIBLE_DEVICES") and not environment.get("ASCEND_RT_VISIBLE_DEVICES"):
        add(
            "WARN",
            "CUDA_VISIBLE_DEVICES",
            "NPUs ignore this variable; they read ASCEND_RT_VISIBLE_DEVICES",
            "对 NPU 不起作用；选卡要用 ASCEND_RT_VISIBLE_DEVICES",
            "export ASCEND_RT_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES",
        )
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
        if environment.get(name) and not os.path.isdir(environment[name]):
            add("FAIL", name, "this folder does not exist", "目录不存在", "source setup_ascend.sh")
    if environment.get("ASCEND_HOME_PATH") and not environment.get("ASCEND_OPP_PATH"):
        add(
            "WARN",
            "ASCEND_HOME_PATH",
            "ASCEND_OPP_PATH is not set, so CANN's set_env.sh was not sourced",
            "没有设置 ASCEND_OPP_PATH，说明还没有执行 CANN 的 set_env.sh",
            "source setup_ascend.sh",
        )
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "1":
        add(
            "WARN",
            "TORCH_DEVICE_BACKEND_AUTOLOAD",
            "`import torch` fails in every shell in which CANN is not set up",
            "在没有配置 CANN 的 shell 里，import torch 会失败",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )
    return found


def advice(one: Finding, fix: bool) -> tuple[str, str]:
    """What set-up says about a harmful variable; `fix`: after --fix of a script that was started, not sourced."""
    if not fix:
        return (
            f"{one.english}. Run: {one.remedy}; or source setup_ascend.sh --fix",
            f"{one.chinese}。请执行 {one.remedy}，或 source setup_ascend.sh --fix",
        )
    return (
        f"{one.english}. `bash setup_ascend.sh --fix` cannot change your shell; type source setup_ascend.sh --fix, "
        f"or {one.remedy}",
        f"{one.chinese}。bash setup_ascend.sh --fix 改不了当前 shell，请输入 source setup_ascend.sh --fix，或 "
        f"{one.remedy}",
    )


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The lines that turn one environment into the other in any shell."""
    own = {"_", "PWD", "OLDPWD", "SHLVL"}  # every shell sets these itself
    names = sorted(name for name in {*old, *new} - own if NAME.fullmatch(name))
    lines = [
        f"export {name}={shlex.quote(new[name])}"
        for name in names
        if name in new and old.get(name) != new[name]
    ]
    lines += [f"unset {name}" for name in names if name not in new]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_WANTED and (hard == resource.RLIM_INFINITY or hard > soft):
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        lines.append(f"ulimit -S -n {most}")
    return lines


def port_is_free(port: int) -> bool:
    """Whether this process can bind a TCP port of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

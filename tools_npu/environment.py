"""The environment variables that a job on NPUs needs, and those that harm it."""

from __future__ import annotations

import os
import re
import resource
import shlex
import socket
from typing import Mapping, NamedTuple

from tools_npu.versions import order

OPEN_FILES = 4096  # how many open files a job with many ranks needs
SHELL_VARIABLES = {"_", "PWD", "OLDPWD", "SHLVL"}  # every shell sets these by itself
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")  # for torch and torch_npu
# Each variable with the smallest and largest number of seconds, and the value that set-up exports.
TIME_OUTS = (
    ("HCCL_CONNECT_TIMEOUT", 120, 7200, "1200"),
    ("HCCL_EXEC_TIMEOUT", 0, 2147483647, "1836"),
)
NAME = re.compile(r"[A-Za-z_]\w*")
# The first patch of each minor of torch_npu that reads PYTORCH_ALLOC_CONF: TorchNPU 26.2 with torch
# 2.10 or later.
FIRST_WITH_TORCH_NAME = {(2, 10): 7, (2, 11): 3, (2, 12): 3}
# The first patch of each minor that reads TORCH_HCCL_ASYNC_ERROR_HANDLING and warns about the older
# name.
FIRST_WITH_ASYNC_NAME = {(2, 7): 11, (2, 9): 9, (2, 10): 7, (2, 11): 3, (2, 12): 3}


class Variable(NamedTuple):
    """An environment variable that the set-up exports unless the user has already set it."""

    name: str
    value: str


def allocator_variable(torch_npu: str) -> str:
    """Return the name of the allocator variable that a torch_npu reads.

    nanochat/platforms/ascend/environment.py sets the same variable for a job.
    """
    if is_since(torch_npu, FIRST_WITH_TORCH_NAME):
        return "PYTORCH_ALLOC_CONF"
    return "PYTORCH_NPU_ALLOC_CONF"


def is_since(torch_npu: str, first_patches: Mapping[tuple[int, ...], int]) -> bool:
    """Return whether a torch_npu is new enough to have a feature.

    It is new enough from 2.13 on, or from the patch that `first_patches` lists for its minor
    version.
    """
    release_numbers, patch = order(torch_npu)
    minor = release_numbers[:2]
    if minor >= (2, 13):
        return True
    return minor in first_patches and patch >= first_patches[minor]


def exported_variables(torch_npu: str) -> list[Variable]:
    """Return the variables that setup_ascend.sh exports unless the user has set them.

    HCCL_IF_BASE_PORT is not among them, because each job picks a free block of ports when it
    starts.
    """
    return [
        # Two queues of launches, because small models are limited by the host.
        Variable("TASK_QUEUE_ENABLE", "2"),
        Variable(allocator_variable(torch_npu), "expandable_segments:True"),
        Variable("CPU_AFFINITY_CONF", "2"),
        Variable("HCCL_CONNECT_TIMEOUT", "1200"),
        Variable("HCCL_EXEC_TIMEOUT", "1836"),
        Variable("HCCL_WHITELIST_DISABLE", "1"),
        Variable("ASCEND_GLOBAL_LOG_LEVEL", "3"),
    ]


class Finding(NamedTuple):
    """A harmful variable: WARN or FAIL, the reason in two languages, and the remedy."""

    status: str
    name: str
    english: str
    chinese: str
    remedy: str


def _whole_number(value: str) -> int:
    return int(value) if value.strip().isdigit() else -1


def _allocator(environment: Mapping[str, str], torch_npu: str) -> list[Finding]:
    findings = []
    names = [name for name in ALLOCATOR_VARIABLES if environment.get(name)]
    if len(names) == 2:
        first, second = names
        findings.append(
            Finding(
                "FAIL",
                second,
                f"{first} and {second} are both set, which makes torch_npu abort",
                f"{first} 和 {second} 不能同时设置，否则 torch_npu 会中止",
                f"unset {second}",
            )
        )
    for name in names:
        value = environment[name]
        conflicting = re.search("max_split_size_mb|garbage_collection_threshold", value)
        if "expandable_segments:True" in value and conflicting:
            findings.append(
                Finding(
                    "FAIL",
                    name,
                    f"{name}: expandable_segments cannot be combined with max_split_size_mb or "
                    "garbage_collection_threshold",
                    f"{name}：expandable_segments 不能与 max_split_size_mb 或 "
                    "garbage_collection_threshold 一起用",
                    f"export {name}=expandable_segments:True",
                )
            )
        elif conflicting:
            findings.append(
                Finding(
                    "WARN",
                    name,
                    f"{name}={value} takes the place of expandable_segments:True, which wastes less "
                    "memory",
                    f"{name}={value} 会取代更省显存的 expandable_segments:True",
                    f"export {name}=expandable_segments:True",
                )
            )
    # Every release reads the older name.
    torch_name, npu_name = ALLOCATOR_VARIABLES
    if names == [torch_name] and torch_npu and allocator_variable(torch_npu) == npu_name:
        findings.append(
            Finding(
                "WARN",
                torch_name,
                f"torch_npu {torch_npu} reads {npu_name}, not {torch_name}",
                f"torch_npu {torch_npu} 读取的是 {npu_name}，而不是 {torch_name}",
                f"export {npu_name}=${torch_name}; unset {torch_name}",
            )
        )
    return findings


def lint(environment: Mapping[str, str], torch_npu: str = "") -> list[Finding]:
    """Return a finding for each variable that conflicts, has no effect, or slows a run down."""
    findings = _allocator(environment, torch_npu)

    def add(
        status: str,
        name: str,
        english: str,
        chinese: str,
        remedy: str,
    ) -> None:
        setting = f"{name}={environment[name]}"
        findings.append(
            Finding(status, name, f"{setting}: {english}", f"{setting}：{chinese}", remedy)
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
    for name, low, high, default in TIME_OUTS:
        if name in environment and not low <= _whole_number(environment[name]) <= high:
            add(
                "FAIL",
                name,
                f"must be a whole number of seconds from {low} to {high}",
                f"应为 {low} 到 {high} 之间的整数，单位秒",
                f"export {name}={default}",
            )
    old_name = "HCCL_ASYNC_ERROR_HANDLING"
    new_name = "TORCH_HCCL_ASYNC_ERROR_HANDLING"
    only_old_name = old_name in environment and new_name not in environment
    if only_old_name and is_since(torch_npu, FIRST_WITH_ASYNC_NAME):
        add(
            "WARN",
            old_name,
            f"torch_npu {torch_npu} calls it {new_name}",
            f"torch_npu {torch_npu} 已改名为 {new_name}",
            f"export {new_name}={environment[old_name]}; unset {old_name}",
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
    return findings


def advice(finding: Finding, fix: bool) -> tuple[str, str]:
    """Return the warning of the set-up about a harmful variable, in English and Chinese.

    `fix` is set if --fix was given to a script that was run instead of sourced.
    """
    if not fix:
        return (
            f"{finding.english}. Run: {finding.remedy}; or source setup_ascend.sh --fix",
            f"{finding.chinese}。请执行 {finding.remedy}，或 source setup_ascend.sh --fix",
        )
    return (
        f"{finding.english}. `bash setup_ascend.sh --fix` cannot change your shell; type source "
        f"setup_ascend.sh --fix, or {finding.remedy}",
        f"{finding.chinese}。bash setup_ascend.sh --fix 改不了当前 shell，请输入 source setup_ascend.sh "
        f"--fix，或 {finding.remedy}",
    )


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the shell commands that change one environment into another.

    They also raise the limit of open files if it is too low.
    """
    names = sorted({*old, *new} - SHELL_VARIABLES)
    names = [name for name in names if NAME.fullmatch(name)]
    lines = []
    for name in names:
        if name in new and old.get(name) != new[name]:
            lines.append(f"export {name}={shlex.quote(new[name])}")
    lines += [f"unset {name}" for name in names if name not in new]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, 65536)
    if soft < OPEN_FILES and soft < hard:
        lines.append(f"ulimit -S -n {min(hard, 65536)}")
    return lines


def port_is_free(port: int) -> bool:
    """Return whether this process can bind a TCP port on this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

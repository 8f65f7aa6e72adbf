"""Ascend chips by SoC version, the environment they want, their ports, and what their errors mean; needs no torch.

Problems are returned as words, not raised: device.py decides what becomes of them. A chip is known by its SoC
version alone: names mislead (`Ascend910B` is of the first generation, `Ascend910B3` of the second).
"""

import os
import re
import socket
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

# Which operators a chip has: the fused ones of the second generation; none, so that attention is made of matmuls
# over blocks of queries; or those of an inference card.
Kernels = Literal["fused", "chunked", "inference"]

BLOCK = 16  # ports that a job's collectives take from HCCL_IF_BASE_PORT on
FIRST_BLOCK, LAST_BLOCK = 61008, 65504  # above what Linux hands out by itself (32768-60999)


@dataclass(frozen=True)
class Chip:
    """A family of chips: what it computes in, which operators it has, how fast it can be."""

    name: str
    socs: tuple[int, ...]  # torch.npu.get_soc_version()
    bf16: bool
    kernels: Kernels
    tflops: float  # dense fp16/bf16 peak of what one device number stands for
    source: str  # of the peak
    memory_gib: float

    @property
    def trains(self) -> bool:
        """Whether it can be trained on: inference cards lack every backward operator that matters."""
        return self.kernels != "inference"

    @property
    def saturates(self) -> bool:
        """Whether an overflow gives the largest number instead of inf, so that only a status flag tells of it."""
        return self.kernels == "chunked"


CHIPS = (
    Chip("910A", tuple(range(100, 105)), False, "chunked", 256, "data sheet, fp16", 32),
    Chip("310P", tuple(range(200, 206)), False, "inference", 70, "estimate, fp16", 24),
    Chip("910B1", (220,), True, "fused", 379, "estimate from cores and clock, bf16", 64),
    Chip("910B2", (221,), True, "fused", 376, "data sheet, bf16", 64),
    Chip("910B2C", (222,), True, "fused", 354, "estimate from cores and clock, bf16", 64),
    Chip("910B3", (223,), True, "fused", 313, "data sheet, bf16", 64),
    Chip("910B4", (224,), True, "fused", 280, "data sheet, bf16", 32),
    Chip("910B4-1", (225,), True, "fused", 270, "estimate from cores and clock, bf16", 64),
    Chip("910C", tuple(range(250, 257)), True, "fused", 376, "data sheet, bf16, one die", 64),
)


def chip_of(soc: int) -> Chip | None:
    """The chip of a SoC version, or None for one that is not in the table."""
    return next((chip for chip in CHIPS if soc in chip.socs), None)


# --- the environment -----------------------------------------------------------------------------

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")


def prepare_loading(version: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Set what torch_npu reads while it loads, where the user has not; "" or why loading would abort.

    The task queue lets Python run ahead of the device, the affinity keeps its threads on near cores, and segments
    that grow keep the memory from falling to pieces. From 2.13 on the allocator's variable has torch's own name;
    both at once abort the process.
    """
    if all(name in environ for name in ALLOCATORS):
        return f"{ALLOCATORS[0]} and {ALLOCATORS[1]} are both set, on which it aborts; unset {ALLOCATORS[1]}"
    environ.setdefault("TASK_QUEUE_ENABLE", "2")
    environ.setdefault("CPU_AFFINITY_CONF", "2")
    if not any(name in environ for name in ALLOCATORS):
        major, minor = (int(re.sub(r"\D.*", "", part) or 0) for part in (*version.split("."), "0")[:2])
        environ[ALLOCATORS[0 if (major, minor) >= (2, 13) else 1]] = "expandable_segments:True"
    return ""


def prepare_collectives(environ: MutableMapping[str, str] = os.environ) -> int:
    """Set the timeouts of collectives, where the user has not; returns the seconds the process group must wait.

    Ranks may load for minutes before they first meet; and each outer timeout must exceed the one inside it, or the
    innermost cause is never named.
    """
    environ.setdefault("HCCL_CONNECT_TIMEOUT", "1200")
    environ.setdefault("HCCL_WHITELIST_DISABLE", "1")
    given = environ.get("HCCL_EXEC_TIMEOUT", "")
    inner = int(given) if given.isdigit() else 1836  # its default
    if given.isdigit():
        environ.setdefault("HCCL_EVENT_TIMEOUT", str(inner + 120))
    return max(2400, inner + 300)


def port_taken(port: int) -> bool:
    """Whether another process listens on a port of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def port_words(port: str) -> str:
    """What to do where the port that the ranks meet at is taken."""
    return (
        f"MASTER_PORT={port} is taken by another process on this host; start again with a free one on every host, "
        f"such as MASTER_PORT={free_port()} (torchrun: --master_port), or with torchrun --standalone"
    )


# The blocks of this process's job, and what holds them until the process ends.
_held: dict[int, list[socket.socket]] = {}


def _claim(port: int) -> socket.socket | None:
    """Say that a port is this job's; None where another process has said so.

    Collectives bind their ports only when the ranks first meet: of jobs that start together each finds them free. So
    a job also takes a name for each, among the kernel's unix sockets, which belong to the same network as the ports
    do (containers with --network host included) and are gone with the process, however it ends.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":  # no other system has such names, or cards
            claim.bind(f"\0nanochat-hccl-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def hold_block(base: int) -> int:
    """Make a block of ports this process's until it ends; 0, or the first port that another process has."""
    if base in _held:
        return 0
    claims: list[socket.socket] = []
    for port in range(base, base + BLOCK):
        claim = _claim(port)
        if claim is not None:
            claims.append(claim)
        if claim is None or port_taken(port):
            for mine in claims:
                mine.close()
            return port
    _held[base] = claims
    return 0


def release_block(base: int) -> None:
    """Let others have a block that this process held."""
    for claim in _held.pop(base, []):
        claim.close()


def free_block(first: int = FIRST_BLOCK, hold: bool = False) -> int:
    """The first port of a free block for a job's collectives, held on request; 0 if there is none."""
    for base in range(first, LAST_BLOCK, BLOCK):
        if base not in _held and not hold_block(base):
            if not hold:
                release_block(base)
            return base
    return 0


def block_words(base: int, taken: int) -> str:
    """Why the block of ports that HCCL_IF_BASE_PORT asks for cannot be had, with a free one."""
    return (
        f"HCCL_IF_BASE_PORT={base} needs ports {base} to {base + BLOCK - 1} for this job's collectives, and port "
        f"{taken} is taken by another. Leave it out to have a block chosen, or use HCCL_IF_BASE_PORT={free_block()}"
    )


# --- errors --------------------------------------------------------------------------------------

Language = Literal["en", "zh"]

# What an error says, and what it means and what to do, in English and Chinese.
TROUBLES = (
    (r"out of memory|EL0004|\b207001\b|\b207018\b",
     "the NPU ran out of memory. Lower --device_batch_size (what a step learns stays the same), or look with "
     "`npu-smi info` whether another process holds memory of this card",
     "NPU 显存不足。请减小 --device_batch_size（每步学到的不变），或用 npu-smi info 查看是否有其他进程占用此卡"),
    (r"EJ0003|EI0019",
     "a port of this job's collectives is taken: another job on this host uses the same block. Start again with a "
     "free block: export HCCL_IF_BASE_PORT={block}",
     "通信端口被占用：本机另一个任务用了同一段端口。请换一段空闲端口后重试：export HCCL_IF_BASE_PORT={block}"),
    (r"EI0006",
     "the ranks could not connect in time. Look in every rank's output for the first error; where all are well, check "
     "the network between the hosts (HCCL_IF_IP, HCCL_SOCKET_IFNAME), then raise HCCL_CONNECT_TIMEOUT",
     "各进程未能及时建立连接。先在每个进程的输出中找最早的错误；若都正常，检查主机间网络（HCCL_IF_IP、"
     "HCCL_SOCKET_IFNAME），再调大 HCCL_CONNECT_TIMEOUT"),
    (r"EI0002",
     "a rank waited too long for another inside a collective. Look for the rank that stopped first; where one is "
     "only slow (data preparation, a save), raise HCCL_EXEC_TIMEOUT",
     "通信中等待其他进程过久。请找最先停下的进程；若只是较慢（准备数据、保存），调大 HCCL_EXEC_TIMEOUT"),
    (r"-8005|HwHiAiUser",
     "no permission for the device files. Add the user to group HwHiAiUser (sudo usermod -aG HwHiAiUser $USER), and "
     "log in again",
     "没有设备文件的权限。请把用户加入 HwHiAiUser 组（sudo usermod -aG HwHiAiUser $USER），然后重新登录"),
    (r"in forked subprocess",
     "a process that had used the NPU was forked. Start children with torch.multiprocessing.get_context(\"spawn\"), or "
     "before the NPU is first used",
     "使用过 NPU 的进程被 fork。请用 torch.multiprocessing.get_context(\"spawn\") 创建子进程，"
     "或在首次使用 NPU 之前创建"),
    (r"TORCH_NPU_FALLBACK_CPU_DISABLE|not currently implemented for the NPU|fall back to run on the CPU",
     "an operator does not exist on this NPU. Update CANN and torch_npu (python check_npu.py), or try --kernels plain",
     "此 NPU 上没有该算子。请升级 CANN 与 torch_npu（python check_npu.py），或尝试 --kernels plain"),
)  # fmt: skip

# What importing torch_npu says, what it means, and the command that mends it.
LOADING = (
    (r"libascend_hal|libdrvdsmi|libdcmi|libdrv",
     "a library of the driver is not found: no driver, or its lib64 folders are not on LD_LIBRARY_PATH",
     "找不到驱动的库：未安装驱动，或 LD_LIBRARY_PATH 中没有驱动的 lib64 目录", "source setup_ascend.sh"),
    (r"lib\w+\.so[\w.]*: cannot open",
     "a library of CANN is not found: its set_env.sh was not sourced", "找不到 CANN 的库：尚未执行 set_env.sh",
     "source setup_ascend.sh"),
    (r"undefined symbol|symbol lookup error|symbol not found|version `\S+' not found|"
     r"Failed to load the backend extension",
     "torch_npu was built for another torch or CANN", "torch_npu 与 torch 或 CANN 版本不匹配",
     "bash setup_ascend.sh --fix"),
    (r"Two accelerators|ERR00007",
     "torch sees another accelerator on this host, and must be one for CPUs",
     "torch 同时看到了其他加速卡，需要 CPU 版 torch",
     "bash setup_ascend.sh --fix"),
    (r"No module named 'torch_npu'", "torch_npu is not installed", "未安装 torch_npu", "bash setup_ascend.sh"),
)  # fmt: skip


def why_not_loaded(failure: str) -> tuple[str, str, str]:
    """Why importing torch_npu failed, in English and Chinese, and the command that mends it; empty if not known."""
    for pattern, english, chinese, remedy in LOADING:
        if re.search(pattern, failure):
            return english, chinese, remedy
    return "", "", ""


def cannot_load(failure: str) -> str:
    """The first line of what importing torch_npu raised, with a remedy where one is known."""
    why, _, remedy = why_not_loaded(failure)
    return failure.splitlines()[0] + (f" ({why}; {remedy})" if why else "")


def explain(failure: str, language: Language = "en") -> str:
    """What a known error of torch_npu, HCCL or the driver means and what to do; "" if it is not known."""
    for pattern, english, chinese in TROUBLES:
        if re.search(pattern, failure):
            words = chinese if language == "zh" else english
            return words.format(block=free_block()) if "{block}" in words else words
    return ""


def in_use(card: int, free: int, total: int, language: Language = "en") -> str:
    """What to say of a card of which another process holds memory; "" if it is as good as empty."""
    if free >= 0.8 * total:
        return ""
    left, whole = f"{free / 2**30:.0f}", f"{total / 2**30:.0f} GiB"
    if language == "zh":
        return f"NPU {card} 已被占用：{whole} 中剩余 {left}。npu-smi info 可查看占用的进程"
    return (
        f"NPU {card} is in use: {left} of {whole} are free. `npu-smi info` shows by which process; python "
        "check_npu.py --processes lists your own"
    )


def cannot_open(card: int, failure: str) -> str:
    """Why a card could not be taken, with what may help."""
    words = explain(failure)
    first = (failure.splitlines() or ["no reason given"])[0]
    return f"NPU {card} cannot be opened: {words or first}. " + (
        "" if words else "It may be held by another container or be unhealthy: look at `npu-smi info`, leave it out "
        "with ASCEND_RT_VISIBLE_DEVICES, or run python check_npu.py"
    )  # fmt: skip

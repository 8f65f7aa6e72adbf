"""What the errors of torch_npu, HCCL and the driver mean, in English and Chinese, and what to do; needs no torch.

Messages are returned as text: the caller decides whether to raise them.
"""

import re
from typing import Literal

from nanochat.platforms.ascend_environment import PortBlocks

Language = Literal["en", "zh"]

# A pattern of the error, and what the error means and what to do, in English and Chinese.
TROUBLES = (
    (r"out of memory|EL0004|\b207001\b|\b207018\b",
     "the NPU ran out of memory. Lower --device_batch_size (what a step learns stays the same), or see with "
     "`npu-smi info` whether another process holds memory of this card",
     "NPU 显存不足。请减小 --device_batch_size（每步学到的不变），或用 npu-smi info 查看是否有其他进程占用此卡"),
    (r"EJ0003|EI0019",
     "a port of this job's collectives is taken: another job on this host uses the same block. Start again with a "
     "free block: export HCCL_IF_BASE_PORT={block}",
     "通信端口被占用：本机另一个任务用了同一段端口。请换一段空闲端口后重试：export HCCL_IF_BASE_PORT={block}"),
    (r"EI0006",
     "the ranks could not connect in time. Look in every rank's output for the first error; if there is none, check "
     "the network between the hosts (HCCL_IF_IP, HCCL_SOCKET_IFNAME), then raise HCCL_CONNECT_TIMEOUT",
     "各进程未能及时建立连接。先在每个进程的输出中找最早的错误；若都正常，检查主机间网络（HCCL_IF_IP、"
     "HCCL_SOCKET_IFNAME），再调大 HCCL_CONNECT_TIMEOUT"),
    (r"EI0002",
     "a rank waited too long for another inside a collective. Look for the rank that stopped first; if a rank "
     "is only slow (data preparation, a save), raise HCCL_EXEC_TIMEOUT",
     "通信中等待其他进程过久。请找最先停下的进程；若只是较慢（准备数据、保存），调大 HCCL_EXEC_TIMEOUT"),
    (r"-8005|HwHiAiUser",
     "no permission for the device files. Add the user to group HwHiAiUser (sudo usermod -aG HwHiAiUser $USER), and "
     "log in again",
     "没有设备文件的权限。请把用户加入 HwHiAiUser 组（sudo usermod -aG HwHiAiUser $USER），然后重新登录"),
    (r"in forked subprocess",
     "a process that had used the NPU was forked. Start children with torch.multiprocessing.get_context(\"spawn\"), or "
     "start them before the NPU is first used",
     "使用过 NPU 的进程被 fork。请用 torch.multiprocessing.get_context(\"spawn\") 创建子进程，"
     "或在首次使用 NPU 之前创建"),
    (r"TORCH_NPU_FALLBACK_CPU_DISABLE|not currently implemented for the NPU|fall back to run on the CPU",
     "an operator does not exist on this NPU. Update CANN and torch_npu (python check_npu.py), or try --kernels plain",
     "此 NPU 上没有该算子。请升级 CANN 与 torch_npu（python check_npu.py），或尝试 --kernels plain"),
)  # fmt: skip

# A pattern of what importing torch_npu raises, what this means, and the command that fixes it.
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
     "torch sees another accelerator on this host; install the build of torch for CPUs",
     "torch 同时看到了其他加速卡，需要 CPU 版 torch",
     "bash setup_ascend.sh --fix"),
    (r"No module named 'torch_npu'", "torch_npu is not installed", "未安装 torch_npu", "bash setup_ascend.sh"),
)  # fmt: skip


def why_not_loaded(failure: str) -> tuple[str, str, str]:
    """Why importing torch_npu failed, in English and Chinese, and the command that fixes it; empty if unknown."""
    for pattern, english, chinese, remedy in LOADING:
        if re.search(pattern, failure):
            return english, chinese, remedy
    return "", "", ""


def cannot_load(failure: str) -> str:
    """The first line of the error that importing torch_npu raised, with a remedy if one is known."""
    why, _, remedy = why_not_loaded(failure)
    return failure.splitlines()[0] + (f" ({why}; {remedy})" if why else "")


def explain(failure: str, language: Language = "en") -> str:
    """What a known error of torch_npu, HCCL or the driver means and what to do; "" for an unknown error."""
    for pattern, english, chinese in TROUBLES:
        if re.search(pattern, failure):
            words = chinese if language == "zh" else english
            return words.format(block=PortBlocks().free()) if "{block}" in words else words
    return ""


def in_use(card: int, free: int, total: int, language: Language = "en") -> str:
    """A warning about a card whose memory another process holds; "" if at least 80 % of the memory is free."""
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
    """Why a card could not be opened, and what may help."""
    words = explain(failure)
    first = (failure.splitlines() or ["no reason given"])[0]
    return f"NPU {card} cannot be opened: {words or first}. " + (
        "" if words else "Another container may hold the card, or the card may be unhealthy: look at `npu-smi info`, "
        "leave the card out with ASCEND_RT_VISIBLE_DEVICES, or run python check_npu.py"
    )  # fmt: skip

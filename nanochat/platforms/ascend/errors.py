"""Explains errors of torch_npu, HCCL and the driver in English or Chinese, with advice.

The functions return messages as text, and the caller decides whether to raise them. This module
needs no torch.
"""

import os
import re
from typing import Literal

from nanochat.platforms.ascend.environment import PortBlocks

Language = Literal["en", "zh"]

OPERATOR_FAILED = r"\b507\d\d\d\b|aicore exception"
# A pattern that matches the error, and what it means and what to do, in English and Chinese.
TROUBLES = (
    (
        r"out of memory|EL0004|\b207001\b|\b207018\b",
        "the NPU ran out of memory. Lower --device_batch_size (what a step learns stays the same), or see with "
        "`npu-smi info` whether another process holds memory of this card. TASK_QUEUE_ENABLE=2, which is set unless you "
        "set it, can raise the peak: TASK_QUEUE_ENABLE=1 may save the last few per cent",
        "NPU 显存不足。请减小 --device_batch_size（不影响每步学到的内容），或用 npu-smi info 查看卡上有没有其他进程。"
        "默认的 TASK_QUEUE_ENABLE=2 可能抬高显存峰值，只差一点时可以改成 TASK_QUEUE_ENABLE=1",
    ),
    (
        r"libopapi\.so|\b561103\b|Parse dynamic kernel config fail|AclOpKernelInit failed",
        "CANN does not find the kernel of this operator: the ops (kernels) package is missing, or it is of another version "
        "or for another chip. Install the ops package of the toolkit's version for this chip; python check_npu.py shows "
        "both versions",
        "CANN 找不到这个算子的内核：没装算子包（ops/kernels），或算子包的版本、芯片型号不对。请安装与 toolkit 同版本、"
        "对应本机芯片的算子包；python check_npu.py 会列出两者的版本",
    ),
    (
        r"[Uu]nsupported soc version",
        "this torch_npu is older than the chip and does not know it. Install a newer one: bash setup_ascend.sh "
        "--torch-npu VERSION (for an Ascend 950 such as 2.10.0.post4 or later, with CANN 9.1)",
        "这个 torch_npu 比芯片旧，不认识它。请安装更新的版本：bash setup_ascend.sh --torch-npu 版本号"
        "（Ascend 950 可用 2.10.0.post4 或更高，配 CANN 9.1）",
    ),
    (
        r"SetPrecisionMode|\b500001\b",
        "CANN could not initialise its compiler. Before CANN 9.0 that is what numpy 2 does: bash setup_ascend.sh --fix "
        "installs the numpy that fits this CANN. If numpy is 1.26 already, a Python package or the operator package is "
        "missing: python check_npu.py",
        "CANN 的编译器初始化失败。CANN 9.0 之前的版本遇到 numpy 2 就会这样：bash setup_ascend.sh --fix 会装上配套的 numpy。"
        "如果 numpy 已经是 1.26，那就是缺少 Python 包或算子包：python check_npu.py",
    ),
    (
        r"EJ0003|EI0019",
        "a port of this job's collectives is taken: another job on this host uses the same block. Start again with a "
        "free block: export HCCL_IF_BASE_PORT={block}",
        "通信端口被占用：本机另一个任务用了同一段端口。请换一段空闲端口后重试：export HCCL_IF_BASE_PORT={block}",
    ),
    (
        r"EI0006",
        "the ranks could not connect in time. Look in every rank's output for the first error; if there is none, check "
        "the network between the hosts (HCCL_IF_IP, HCCL_SOCKET_IFNAME), then raise HCCL_CONNECT_TIMEOUT",
        "各进程没能按时建立连接。请先看每个进程最早的报错；如果都没有报错，请检查主机之间的网络（HCCL_IF_IP、"
        "HCCL_SOCKET_IFNAME），再调大 HCCL_CONNECT_TIMEOUT",
    ),
    (
        r"EI0002",
        "a rank waited too long for another inside a collective. Look for the rank that stopped first; if a rank "
        "is only slow (data preparation, a save), raise HCCL_EXEC_TIMEOUT",
        "通信时等其他进程超时。请找出最先停下的进程；如果只是慢（在准备数据或保存），请调大 HCCL_EXEC_TIMEOUT",
    ),
    (
        r"-8005|HwHiAiUser",
        "no permission for the device files. Add the user to group HwHiAiUser (sudo usermod -aG HwHiAiUser $USER), and "
        "log in again",
        "没有设备文件的权限。请把当前用户加入 HwHiAiUser 组（sudo usermod -aG HwHiAiUser $USER），然后重新登录",
    ),
    (
        r"in forked subprocess",
        'a process that had used the NPU was forked. Start children with torch.multiprocessing.get_context("spawn"), or '
        "start them before the NPU is first used",
        '用过 NPU 的进程不能再 fork。请用 torch.multiprocessing.get_context("spawn") 创建子进程，'
        "或者在第一次用 NPU 之前创建",
    ),
    (
        r"EI0004|EI0014",
        "the ranks do not agree on which cards and hosts take part: a rank table (RANK_TABLE_FILE) is wrong, or "
        "WORLD_SIZE and RANK of the hosts do not fit each other. unset RANK_TABLE_FILE, and start every host with the same "
        "number of hosts and ranks",
        "各进程对集群信息的认识不一致：rank table（RANK_TABLE_FILE）有误，或各主机的 WORLD_SIZE、RANK 对不上。请 "
        "unset RANK_TABLE_FILE，并让每台主机用同样的主机数和进程数启动",
    ),
    (
        r"EI0015",
        "some ranks did not report to rank 0 in time. Look in every rank's output for the first error; check that all hosts "
        "have started and reach the first one (HCCL_IF_IP, HCCL_SOCKET_IFNAME), then raise HCCL_CONNECT_TIMEOUT",
        "有进程没能按时向 0 号进程报到。请先看每个进程最早的报错；确认所有主机都已启动、都能连到第一台主机（HCCL_IF_IP、"
        "HCCL_SOCKET_IFNAME），再调大 HCCL_CONNECT_TIMEOUT",
    ),
    (
        r"TORCH_NPU_FALLBACK_CPU_DISABLE|not currently implemented for the NPU|fall back to run on the CPU",
        "an operator does not exist on this NPU. Update CANN and torch_npu (python check_npu.py), or try --kernels plain",
        "NPU 上没有这个算子。请升级 CANN 和 torch_npu（先用 python check_npu.py 检查），或改用 --kernels plain",
    ),
    # Families of codes, which say only in which part of CANN a call failed. They stand after the codes
    # that name a cause, because CANN prints several codes at once.
    (
        r"\b16100[12]\b|EZ1001",
        "an operator refuses its inputs: this chip or CANN does not know their number format or shape. Try --kernels plain; "
        "if it fails again, report the operator's name, which starts with aclnn, with python check_npu.py --json",
        "算子不接受输入：这种芯片或这个版本的 CANN 不支持该数据类型或形状。请试试 --kernels plain；仍然失败，就把报错里以 "
        "aclnn 开头的算子名连同 python check_npu.py --json 的输出报告给我们",
    ),
    (
        r"\b507[89]\d\d\b",
        "the driver failed: another container may hold this card, the card may have dropped out, or driver, firmware and "
        "CANN do not fit each other. Look at npu-smi info and `dmesg`, leave the card out with ASCEND_RT_VISIBLE_DEVICES, or "
        "run python check_npu.py",
        "驱动内部出错：这张卡可能被别的容器占用，可能掉卡，也可能是驱动、固件与 CANN 不配套。请查看 npu-smi info 和 dmesg，"
        "用 ASCEND_RT_VISIBLE_DEVICES 避开这张卡，或运行 python check_npu.py",
    ),
    (
        OPERATOR_FAILED,
        "an operator failed on the card. ASCEND_LAUNCH_BLOCKING=1 shows which one; if it is always the same, try --kernels "
        "plain and update CANN with its ops package; if it is always the same card, leave the card out with "
        "ASCEND_RT_VISIBLE_DEVICES",
        "算子在卡上执行失败。设 ASCEND_LAUNCH_BLOCKING=1 可以看出是哪个算子；如果总是同一个算子，请试试 --kernels plain，并"
        "升级 CANN 和算子包；如果总是同一张卡，请用 ASCEND_RT_VISIBLE_DEVICES 避开它",
    ),
    (
        r"\b107\d\d\d\b|EE1001",
        "CANN's runtime refuses a call: most often the number of the card does not exist. Compare "
        "ASCEND_RT_VISIBLE_DEVICES and NPROC_PER_NODE with `npu-smi info`; in code of your own, call "
        "torch.npu.set_device in every process and thread first",
        "CANN 运行时拒绝了一次调用：多半是卡号不存在。请对照 npu-smi info 检查 ASCEND_RT_VISIBLE_DEVICES 和 NPROC_PER_NODE；"
        "如果是自己的代码，每个进程和线程都要先调用 torch.npu.set_device",
    ),
    (
        r"E[EHZ]9999",
        "CANN failed inside, and this code does not say why. Look for another code in the lines around it and in "
        "~/ascend/log, then run python check_npu.py, which tries every operator of training",
        "CANN 内部出错，仅凭这个错误码看不出原因。请在它前后的输出和 ~/ascend/log 里找别的错误码，再运行 python check_npu.py，"
        "它会逐个试用训练要用的算子",
    ),
)

# A pattern that matches an error from importing torch_npu, what the error means in English and
# Chinese, and the command that fixes it.
LOADING = (
    (
        r"libascend_hal|libdrvdsmi|libdcmi|libdrv",
        "a library of the driver is not found: no driver, or its lib64 folders are not on LD_LIBRARY_PATH",
        "找不到驱动的库：没装驱动，或者 LD_LIBRARY_PATH 里没有驱动的 lib64 目录",
        "source setup_ascend.sh",
    ),
    (
        r"lib\w+\.so[\w.]*: cannot open",
        "a library of CANN is not found: its set_env.sh was not sourced",
        "找不到 CANN 的库：还没有执行它的 set_env.sh",
        "source setup_ascend.sh",
    ),
    (
        r"undefined symbol|symbol lookup error|symbol not found|version `\S+' not found|"
        r"Failed to load the backend extension",
        "torch_npu was built for another torch or CANN",
        "torch_npu 与 torch 或 CANN 版本不匹配",
        "bash setup_ascend.sh --fix",
    ),
    (
        r"Two accelerators|ERR00007",
        "torch sees another accelerator on this host; install the build of torch for CPUs",
        "torch 还看到了别的加速卡，需要换成 CPU 版 torch",
        "bash setup_ascend.sh --fix",
    ),
    (
        r"No module named 'torch_npu'",
        "torch_npu is not installed",
        "未安装 torch_npu",
        "bash setup_ascend.sh",
    ),
)


def why_not_loaded(failure: str) -> tuple[str, str, str]:
    """Return why torch_npu could not be imported, in English and Chinese, and a command that helps.

    All three strings are empty if the reason is unknown.
    """
    for pattern, english, chinese, remedy in LOADING:
        if re.search(pattern, failure):
            return english, chinese, remedy
    return "", "", ""


def cannot_load(failure: str) -> str:
    """Return the first line of an error from importing torch_npu, with a remedy if one is known."""
    first_line = failure.splitlines()[0]
    why, _, remedy = why_not_loaded(failure)
    if not why:
        return first_line
    return f"{first_line} ({why}; {remedy})"


def spoken() -> Language:
    """Return the language of messages, "en" or "zh", from NANOCHAT_LANG or the locale.

    nanochat.common, which has the same function, needs packages that may be missing here.
    """
    for name in ("NANOCHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        setting = os.environ.get(name)
        if setting:
            return "zh" if setting.lower().startswith("zh") else "en"
    return "en"


def explain(failure: str, language: Language | None = None) -> str:
    """Return what a known error of torch_npu, HCCL or the driver means, and what to do.

    Returns "" for an unknown error.
    """
    for pattern, english, chinese in TROUBLES:
        if not re.search(pattern, failure):
            continue
        words = chinese if (language or spoken()) == "zh" else english
        if "{block}" in words:  # finding a free block takes time
            return words.format(block=PortBlocks().free())
        return words
    return ""


def in_use(card: int, free: int, total: int, language: Language | None = None) -> str:
    """Return a warning if less than 80 % of a card's memory is free, or "" otherwise.

    `free` and `total` are in bytes.
    """
    if free >= 0.8 * total:
        return ""
    free_size = f"{free / 2**30:.0f}"
    total_size = f"{total / 2**30:.0f} GiB"
    if (language or spoken()) == "zh":
        return (
            f"NPU {card} 正被占用：显存共 {total_size}，剩余 {free_size}。用 npu-smi info 查看是哪个进程；"
            "python check_npu.py --processes 列出你自己的进程，并给出结束它们的命令"
        )
    return (
        f"NPU {card} is in use: {free_size} of {total_size} are free. `npu-smi info` shows by which process; python "
        "check_npu.py --processes lists your own"
    )


def cannot_open(card: int, failure: str) -> str:
    """Return a message that says why a card cannot be opened, and what may help."""
    # No operator runs while a card is opened.
    words = "" if re.search(OPERATOR_FAILED, failure) else explain(failure)
    lines = failure.splitlines() or ["no reason given"]
    if spoken() == "zh":
        if words:
            return f"NPU {card} 打不开（{lines[0]}）：{words}。"
        return (
            f"NPU {card} 打不开：{lines[0]}。可能被另一个容器占用，或者这张卡有故障："
            "查看 npu-smi info，用 ASCEND_RT_VISIBLE_DEVICES 避开它，或运行 python check_npu.py"
        )
    if words:
        return f"NPU {card} cannot be opened ({lines[0]}): {words}."
    return (
        f"NPU {card} cannot be opened: {lines[0]}. Another container may hold the card, or the card "
        "may be unhealthy: look at `npu-smi info`, leave the card out with "
        "ASCEND_RT_VISIBLE_DEVICES, or run python check_npu.py"
    )

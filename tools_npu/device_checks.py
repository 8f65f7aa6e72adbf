"""Runs the checks that need torch, in a process of their own.

python -m tools_npu.device_checks PIPE [--bench]

The process writes each result to the file descriptor PIPE as a line of JSON. Before each check it
writes a line that names the check. If the process crashes or hangs, check_npu.py therefore knows
which check was running.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from importlib import metadata
from typing import Any, NamedTuple

from tools_npu import bench as benchmark
from tools_npu import host, versions
from tools_npu.lines import FAIL, PASS, SKIP, WARN, Line

HCCL_SECONDS = 240
MATMUL_SECONDS = 1.0  # limit of one matmul of the speed test, because an emulated card is slow

UPDATE = (
    "update CANN and torch_npu; until then set NANOCHAT_KERNELS=plain",
    "升级 CANN 和 torch_npu；升级之前可以先设 NANOCHAT_KERNELS=plain",
)
PLAIN_KERNELS = (
    "bash setup_ascend.sh --fix; if it still fails, set NANOCHAT_KERNELS=plain for now",
    "bash setup_ascend.sh --fix；如果仍然失败，可以先设 NANOCHAT_KERNELS=plain",
)
SPARE = (
    "nothing: training on this chip does not use this number format",
    "不用处理：在这种芯片上训练用不到这种数据格式",
)
CHECK_PORTS = (
    "source setup_ascend.sh; then check the ports, HCCL_IF_IP and HCCL_SOCKET_IFNAME",
    "先 source setup_ascend.sh；再检查端口、HCCL_IF_IP 和 HCCL_SOCKET_IFNAME",
)
UPDATE_DRIVER = ("update the driver and CANN", "升级驱动和 CANN")
UNKNOWN = (
    "nothing if the lines below pass: training tries each fused operator of this chip first",
    "如果下面各项都通过，不用处理：训练会先逐个试用这种芯片的融合算子",
)
# Chinese for the words that say where the peak figures of the chips come from.
SOURCES_ZH = {
    "data sheet": "产品手册",
    "estimate": "估计值",
    "one die": "单个 die",
    ", ": "，",
}
COLLECTIVES = (
    "all_reduce",
    "all_reduce average",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
)


class Output:
    """The pipe on which results go to check_npu.py."""

    def __init__(self, pipe: int):
        self.file = os.fdopen(pipe, "w", encoding="utf-8")

    def write(self, message: dict[str, Any]) -> None:
        """Send one message as a line of JSON."""
        self.file.write(json.dumps(message, ensure_ascii=False) + "\n")
        self.file.flush()

    def line(self, line: Line) -> None:
        """Send the result of a check."""
        self.write({"line": list(line)})

    def begin(self, name: str) -> None:
        """Announce the check that runs next."""
        self.write({"begin": name})


def first_line(failure: BaseException) -> str:
    """Return the first line of an exception's message, cut to 300 characters."""
    message = str(failure).strip() or repr(failure)
    return message.splitlines()[0][:300]


def explanation(text: str) -> tuple[str, str]:
    """Return what an error of torch_npu, HCCL or the driver means, in English and Chinese."""
    from nanochat.platforms.ascend import errors as ascend_errors

    return ascend_errors.explain(text, "en"), ascend_errors.explain(text, "zh")


# --- loading -------------------------------------------------------------------------------------


def load(out: Output, cann: str) -> str:
    """Import torch and torch_npu, and check that they fit CANN.

    Returns the version of torch_npu, or "" if it is unusable.
    """
    # Without this, `import torch` itself fails if CANN is missing.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    torch = load_torch(out)
    if not torch:
        return ""
    torch_npu = load_torch_npu(out)
    if not torch_npu:
        return ""
    pair = versions.pair_fits(torch, torch_npu)
    out.line(
        Line(
            "torch_npu",
            pair.status,
            pair.english or torch_npu,
            pair.chinese or torch_npu,
            "bash setup_ascend.sh --fix",
            {"version": torch_npu, "torch": torch},
        )
    )
    fit = versions.cann_fits(torch_npu, cann)
    out.line(
        Line(
            "torch_npu and CANN",
            fit.status,
            fit.english or f"torch_npu {torch_npu} fits CANN {cann}",
            fit.chinese or f"torch_npu {torch_npu} 与 CANN {cann} 配套",
            versions.remedy(fit, cann),
        )
    )
    check_numpy(out, cann)
    return torch_npu if pair.status == PASS else ""


def load_torch(out: Output) -> str:
    """Import torch and return its version, or "" if the import fails."""
    out.begin("torch")
    try:
        import torch
    except Exception as failure:  # a library may raise anything, and its message is the finding
        message = first_line(failure)
        out.line(Line("torch", FAIL, message, message, "bash setup_ascend.sh --fix"))
        return ""
    version = str(torch.__version__)
    status = PASS if versions.release(version)[:2] >= versions.TORCH_FLOOR else FAIL
    out.line(Line("torch", status, version, version, "bash setup_ascend.sh --fix"))
    return version


def load_torch_npu(out: Output) -> str:
    """Import torch_npu and return its version, or "" if the import fails."""
    from nanochat.platforms.ascend import errors as ascend_errors

    out.begin("torch_npu")
    try:
        import torch_npu
    except Exception as failure:  # as in load_torch()
        traceback.print_exc()
        english, chinese, remedy = ascend_errors.why_not_loaded(str(failure))
        message = first_line(failure)
        out.line(
            Line(
                "torch_npu",
                FAIL,
                f"{english}: {message}" if english else message,
                f"{chinese}：{message}" if chinese else message,
                remedy or "bash setup_ascend.sh --fix",
            )
        )
        return ""
    return str(torch_npu.__version__)


def check_numpy(out: Output, cann: str) -> None:
    """Check that the compiler of CANN works with the installed numpy."""
    out.begin("numpy and CANN")
    numpy = ""
    try:
        numpy = metadata.version("numpy")
        fit = versions.numpy_fits(numpy, cann, sys.version_info[:2])
    except metadata.PackageNotFoundError:
        fit = versions.Fit(FAIL, "numpy is not installed", "未安装 numpy")
    out.line(
        Line(
            "numpy and CANN",
            fit.status,
            fit.english or f"numpy {numpy}, CANN {cann or '?'}",
            fit.chinese or f"numpy {numpy}，CANN {cann or '?'}",
            "bash setup_ascend.sh --fix",
        )
    )


def open_card(out: Output) -> int:
    """Compute on the first card, and return the number of visible cards, or 0 if none works."""
    import torch

    from nanochat.platforms.ascend import chips as ascend_chips
    from nanochat.platforms.ascend import environment as ascend_environment
    from nanochat.platforms.ascend import errors as ascend_errors

    out.begin("npu:0")
    try:
        count = torch.npu.device_count() if torch.npu.is_available() else 0
        if not count:
            out.line(
                Line(
                    "npu:0",
                    FAIL,
                    "torch_npu loads but sees no card",
                    "torch_npu 能加载，但看不到 NPU 卡",
                    "npu-smi info; unset ASCEND_RT_VISIBLE_DEVICES",
                )
            )
            return 0
        torch.npu.set_device(0)
        ascend_environment.use_ready_kernels(torch.npu)
        total = float(torch.arange(100, device="npu:0").sum().cpu())
        soc = int(torch.npu.get_soc_version())
        name = torch.npu.get_device_name(0)
        free, memory = torch.npu.mem_get_info(0)
    except Exception as failure:  # whatever the driver reports is the finding
        message = first_line(failure)
        meaning = explanation(str(failure))
        remedy = meaning if meaning[0] else "npu-smi info"
        out.line(Line("npu:0", FAIL, f"cannot be used: {message}", f"无法使用：{message}", remedy))
        return 0
    chip = ascend_chips.chip_of(soc)
    chip_name = chip.name if chip else "not in the table of chips"
    data = {
        "name": name,
        "soc": soc,
        "chip": chip_name,
        "count": count,
        "memory_gib": round(memory / 2**30, 1),
        "trains": chip is None or chip.trains,
    }
    status = PASS if chip else WARN
    remedy = "npu-smi info" if chip else UNKNOWN
    card = f"{name} (SoC {soc}, {chip_name}), {memory / 2**30:.0f} GiB"
    english = f"{card}, {free / 2**30:.0f} free"
    chinese = f"{card}，空闲 {free / 2**30:.0f} GiB"
    if total != 4950:
        status = FAIL
        remedy = "npu-smi info"
        english += f"; it computed 0 + ... + 99 = {total:g} instead of 4950"
        chinese += f"；在卡上算 0 + ... + 99 得到 {total:g}，应为 4950"
    out.line(Line("npu:0", status, english, chinese, remedy, data))
    in_use = ascend_errors.in_use(0, free, memory, "en")
    if in_use:
        in_use_zh = ascend_errors.in_use(0, free, memory, "zh")
        remedy = "python check_npu.py --processes"
        full = free < (1 - host.BUSY) * memory
        out.line(Line("npu:0 memory", FAIL if full else WARN, in_use, in_use_zh, remedy))
    return count


# --- numerics ------------------------------------------------------------------------------------


class Numeric(NamedTuple):
    """A check that measures the error of an operation that training needs."""

    name: str
    error: Callable[[], float]  # runs the operation, and returns its error
    dtype: Any  # the number format, whose tolerance limits the error
    skip: tuple[str, str] = ("", "")  # why this chip skips the check, in English and Chinese
    spare: bool = False  # training on this chip does not use the operation


def numerics(chip: Any, dtype: Any) -> list[Numeric]:
    """Return a check of every operation that training needs.

    `chip` is None if the chip is unknown. `dtype` is the number format of training.
    """
    import torch

    from tools_npu import numerics as check

    short = str(dtype).removeprefix("torch.")
    training = ("", "")  # why this chip skips operations that only training needs
    if chip is not None and not chip.trains:
        training = ("this inference card has no backward operators", "推理卡没有反向算子")
    bf16 = training
    if chip is not None and not chip.bf16:
        bf16 = (f"the {chip.name} has no bf16", f"{chip.name} 不支持 bf16")
    return [
        Numeric("pinned copy", check.there_and_back, torch.float32),
        Numeric(
            "matmul float16",
            lambda: check.matmul(torch.float16),
            torch.float16,
            training,
            spare=dtype != torch.float16,
        ),
        Numeric("matmul bfloat16", lambda: check.matmul(torch.bfloat16), torch.bfloat16, bf16),
        Numeric(f"stacked matmul {short}", lambda: check.stacked_matmul(dtype), dtype),
        Numeric(f"attention causal {short}", lambda: check.attend(dtype, 255), dtype, training),
        Numeric(f"attention band {short}", lambda: check.attend(dtype, 64), dtype, training),
        Numeric(
            f"attention grouped {short}",
            lambda: check.attend(dtype, 255, kv_heads=2),
            dtype,
            training,
        ),
        Numeric(f"attention decode {short}", lambda: check.decode(dtype), dtype),
        Numeric(f"rms norm {short}", lambda: check.norm(dtype), dtype, training),
        Numeric(f"rotary {short}", lambda: check.rotary(dtype), dtype, training),
        Numeric(f"chunked loss {short}", lambda: check.loss(dtype), dtype, training),
        Numeric("fused AdamW float32", check.adamw, torch.float32, training),
    ]


def check_numerics(out: Output, chip: Any, dtype: Any) -> None:
    """Report the error of each operation, compared with fp32 on the host."""
    from tools_npu.numerics import TOLERANCE

    for check in numerics(chip, dtype):
        out.begin(check.name)
        if check.skip[0]:
            out.line(Line(check.name, SKIP, *check.skip))
            continue
        try:
            error = check.error()
        except Exception as failure:  # one operation that fails must not hide the others
            traceback.print_exc()
            message = f"{type(failure).__name__}: {first_line(failure)}"
            if check.spare:
                out.line(Line(check.name, WARN, message, message, SPARE))
                continue
            meaning = explanation(str(failure))
            remedy = meaning if meaning[0] else PLAIN_KERNELS
            out.line(Line(check.name, FAIL, message, message, remedy))
            continue
        limit = TOLERANCE[check.dtype]
        out.line(
            Line(
                check.name,
                PASS if error <= limit else FAIL,
                f"error {error:.1e}, limit {limit:.0e}",
                f"误差 {error:.1e}，上限 {limit:.0e}",
                UPDATE,
                {"error": error, "allowed": limit},
            )
        )


# --- speed ---------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest of `repeats` runs, including the work on the device."""
    import torch

    best = float("inf")
    for _ in range(repeats):
        torch.npu.synchronize()
        start = time.perf_counter()
        work()
        torch.npu.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def check_speed(out: Output, chip: Any, dtype: Any) -> None:
    """Report TFLOP/s of the largest square matmul, up to 4,096, that takes less than a second."""
    import torch

    short = str(dtype).removeprefix("torch.")
    out.begin("matmul speed")
    size = 512
    while True:
        a = torch.ones(size, size, dtype=dtype, device="npu:0")
        b = a.clone()
        seconds = seconds_of(lambda a=a, b=b: torch.mm(a, b), 3)
        if size >= 4096 or 10 * seconds > MATMUL_SECONDS:
            break
        size *= 2
    seconds = min(seconds, seconds_of(lambda: torch.mm(a, b), 3))
    tflops = 2 * size**3 / seconds / 1e12
    peak = chip.tflops if chip is not None and chip.tflops > 0 else None
    english = ", peak unknown"
    chinese = "，峰值未知"
    if peak:
        percent = f"{100 * tflops / peak:.0f}"
        source_zh = chip.source
        for word, word_zh in SOURCES_ZH.items():
            source_zh = source_zh.replace(word, word_zh)
        english = f", {percent} % of {peak:g} ({chip.source})"
        chinese = f"，是峰值 {peak:g} 的 {percent}%（{source_zh}）"
    slow = peak is not None and tflops < 0.4 * peak
    out.line(
        Line(
            "matmul speed",
            WARN if slow else PASS,
            f"{tflops:.3g} TFLOP/s in {short}, {size}^3{english}",
            f"{short} {tflops:.3g} TFLOP/s，{size}^3{chinese}",
            (
                "check power, temperature and other processes with `npu-smi info`",
                "用 npu-smi info 查看功耗、温度，以及有没有其他进程",
            ),
            {"tflops": tflops, "size": size, "peak": peak},
        )
    )


# --- collectives ---------------------------------------------------------------------------------


def free_port() -> int:
    """Return a TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RankResult(NamedTuple):
    """The output and the exit code of one rank's process, and when it ended."""

    rank: int
    exit_code: int
    output: str
    errors: str
    ended: float = 0.0  # by time.monotonic()


def check_collectives(out: Output, ranks: int, megabytes: int, dtype: Any) -> float | None:
    """Check each HCCL collective over all visible cards, averages in the number format `dtype`.

    Returns the GB/s of all_reduce, or None if there is one card or a result is wrong.
    """
    from nanochat.platforms.ascend.environment import PortBlocks

    if ranks < 2:
        out.line(Line("hccl", SKIP, "only one card is visible", "只有一张可见的卡"))
        return None
    out.begin("hccl")
    ports = PortBlocks()  # reserved until the ranks have answered
    env = dict(os.environ)
    env["HCCL_IF_BASE_PORT"] = env.get("HCCL_IF_BASE_PORT") or str(ports.free(hold=True))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    command = [sys.executable, "-m", "tools_npu.collectives"]
    port = str(free_port())
    short = str(dtype).removeprefix("torch.")
    processes = []
    for rank in range(ranks):
        process = subprocess.Popen(
            [*command, str(rank), str(ranks), port, str(megabytes), short],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        processes.append(process)
    return report_collectives(out, wait_for_ranks(processes), ranks)


def wait_for_ranks(processes: Sequence[subprocess.Popen[str]]) -> list[RankResult]:
    """Return the results of all ranks.

    Kills the other ranks once one has failed, because they would wait for it, and all of them if
    one takes too long.
    """
    deadline = time.monotonic() + HCCL_SECONDS
    late = False
    with ThreadPoolExecutor(len(processes)) as readers:
        readings = [readers.submit(result_of, *ranked) for ranked in enumerate(processes)]
        running = set(readings)
        while running:
            remaining = max(deadline - time.monotonic(), 0)
            done, running = wait(running, remaining, return_when=FIRST_COMPLETED)
            failed = any(reading.result().exit_code for reading in done)
            late = late or not done
            if failed or late:
                for process in processes:
                    process.kill()
                wait(running)
                break
    results = [reading.result() for reading in readings]
    if not late:
        return results
    note = f"\nno answer within {HCCL_SECONDS} s"
    return [result._replace(errors=result.errors + note) for result in results]


def result_of(rank: int, process: subprocess.Popen[str]) -> RankResult:
    """Wait until a rank's process has ended, and return its result."""
    output, errors = process.communicate()
    return RankResult(rank, process.returncode, output, errors, time.monotonic())


def report_collectives(
    out: Output,
    results: Sequence[RankResult],
    ranks: int,
) -> float | None:
    """Report the results of all ranks.

    Returns the GB/s of all_reduce, or None if a rank failed or a result is wrong.
    """
    failed = [result for result in results if result.exit_code != 0]
    if failed:
        # The first to end names the cause: the others were waiting for it.
        report_failed_rank(out, min(failed, key=lambda result: result.ended))
        return None
    answers = [answer_of(result) for result in results]
    for name in COLLECTIVES:
        wrong = [str(rank) for rank, answer in enumerate(answers) if name in answer["wrong"]]
        english = f"wrong on rank {', '.join(wrong)}" if wrong else f"correct on {ranks} ranks"
        chinese = f"进程 {'、'.join(wrong)} 结果错误" if wrong else f"{ranks} 个进程结果正确"
        status = FAIL if wrong else PASS
        out.line(Line(f"hccl {name}", status, english, chinese, UPDATE_DRIVER))
    speed = min(answer["gb_per_s"] for answer in answers)
    out.line(
        Line(
            "hccl bandwidth",
            PASS,
            f"all_reduce moves {speed:.2f} GB/s over each link",
            f"all_reduce 每条链路 {speed:.2f} GB/s",
            data={"gb_per_s": speed, "ranks": ranks},
        )
    )
    return None if any(answer["wrong"] for answer in answers) else speed


def answer_of(result: RankResult) -> dict[str, Any]:
    """Return what a rank has printed as JSON, around which CANN may have printed its log."""
    json_lines = [line for line in result.output.splitlines() if line.startswith('{"wrong"')]
    answer: dict[str, Any] = json.loads(json_lines[-1])
    return answer


def report_failed_rank(out: Output, result: RankResult) -> None:
    """Report the last line of a rank's errors, and its meaning if that is known."""
    sys.stderr.write(result.errors)
    error_lines = result.errors.strip().splitlines() or [f"exit code {result.exit_code}"]
    last_line = error_lines[-1][:300]
    meaning = explanation(result.errors)
    remedy = meaning if meaning[0] else CHECK_PORTS
    rank = result.rank
    out.line(Line("hccl", FAIL, f"rank {rank}: {last_line}", f"进程 {rank}：{last_line}", remedy))


# --- all checks ----------------------------------------------------------------------------------


def check_card(out: Output, count: int, cann: str, bench: bool) -> None:
    """Run the checks that need a usable card.

    `count` is the number of visible cards, and `cann` the version of CANN. If `bench` is set, also
    measure how fast the cards are.
    """
    import torch

    from nanochat.platforms.ascend import chips as ascend_chips

    soc = int(torch.npu.get_soc_version())
    chip = ascend_chips.chip_of(soc)
    bf16 = chip.bf16 if chip else torch.npu.is_bf16_supported()
    dtype = torch.bfloat16 if bf16 else torch.float16
    check_numerics(out, chip, dtype)
    check_speed(out, chip, dtype)
    figures = None
    if bench and (chip is None or chip.trains):
        figures = benchmark.measure(out.begin, out.line, dtype)
    elif bench:
        out.line(
            Line(
                "bench",
                SKIP,
                "the planner plans training, and this card is for inference",
                "规划器只规划训练，而这是推理卡",
            )
        )
    if chip is not None and not chip.trains:  # a 310P has neither broadcast nor sums of int64
        out.line(
            Line(
                "hccl",
                SKIP,
                "only training needs collectives, and this card is for inference",
                "只有训练才需要集合通信，而这是推理卡",
            )
        )
        return
    ranks = count
    if chip is not None and chip.group:
        ranks = max(joined for joined in (1, 2, 4, 8) if joined <= count)
    link = check_collectives(out, ranks, 256 if bench else 16, dtype)
    if figures:
        name = chip.name if chip else f"SoC {soc}"
        out.begin("bench file")
        out.line(benchmark.save(figures, link, count, name, dtype, cann))


def main() -> None:
    """Run all checks, but stop early if one fails that the others need."""
    out = Output(int(sys.argv[1]))
    cann = os.environ.get("NANOCHAT_CHECK_CANN", "")
    if load(out, cann):
        count = open_card(out)
        if count:
            check_card(out, count, cann, bench="--bench" in sys.argv)
    out.write({"end": True})


if __name__ == "__main__":
    main()

"""The checks that need torch, in a separate process: python -m tools_npu.device_checks PIPE [--bench].

The process writes each result to the file descriptor PIPE as a line of JSON. Before each check it writes a line that
names the check, so check_npu.py knows which check was running if this process crashes or hangs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from tools_npu import bench as benchmark
from tools_npu import versions
from tools_npu.lines import FAIL, PASS, SKIP, WARN, Line

HCCL_SECONDS = 240
MATMUL_SECONDS = (
    1.0  # the most that one matmul of the speed test may take, because an emulated card is slow
)

UPDATE = (
    "update CANN and torch_npu; until then set NANOCHAT_KERNELS=plain",
    "升级 CANN 和 torch_npu；升级之前可以先设 NANOCHAT_KERNELS=plain",
)
UNKNOWN = (
    "nothing if the lines below pass: training tries each fused operator of this chip first",
    "如果下面各项都通过，不用处理：训练会先逐个试用这种芯片的融合算子",
)
IN_CHINESE = {
    "data sheet": "产品手册",
    "estimate": "估计值",
    "one die": "单个 die",
    ", ": "，",
}  # parts of chips' sources


class Output:
    """The pipe to check_npu.py."""

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
    """The first line of an exception's message, at most 300 characters."""
    return (str(failure).strip().splitlines() or [repr(failure)])[0][:300]


# --- loading ---------------------------------------------------------------------------------------


def load(out: Output, cann: str) -> str:
    """Import torch and torch_npu and check that they fit; returns the version of torch_npu, "" if it is unusable."""
    from nanochat.platforms import ascend_errors

    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
        "0"  # otherwise `import torch` itself fails if CANN is missing
    )
    out.begin("torch")
    try:
        import torch
    except (
        Exception
    ) as failure:  # a foreign library may raise anything, and its message is the finding
        out.line(
            Line(
                "torch",
                FAIL,
                first_line(failure),
                first_line(failure),
                "bash setup_ascend.sh --fix",
            )
        )
        return ""
    status = PASS if versions.release(torch.__version__)[:2] >= versions.TORCH_FLOOR else FAIL
    out.line(Line("torch", status, torch.__version__, torch.__version__, "bash setup_ascend.sh"))
    out.begin("torch_npu")
    try:
        import torch_npu
    except Exception as failure:  # see above
        traceback.print_exc()
        english, chinese, remedy = ascend_errors.why_not_loaded(str(failure))
        told = first_line(failure)
        out.line(
            Line(
                "torch_npu",
                FAIL,
                f"{english}: {told}" if english else told,
                f"{chinese}：{told}" if chinese else told,
                remedy or "bash setup_ascend.sh --fix",
            )
        )
        return ""
    version = str(torch_npu.__version__)
    pair = versions.pair_fits(torch.__version__, version)
    out.line(
        Line(
            "torch_npu",
            pair.status,
            pair.english or version,
            pair.chinese or version,
            "bash setup_ascend.sh --fix",
            {"version": version, "torch": torch.__version__},
        )
    )
    fit = versions.cann_fits(version, cann)
    out.line(
        Line(
            "torch_npu and CANN",
            fit.status,
            fit.english or f"torch_npu {version} fits CANN {cann}",
            fit.chinese or f"torch_npu {version} 与 CANN {cann} 配套",
            versions.remedy(fit, cann),
        )
    )
    out.begin("numpy and CANN")
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
            "bash setup_ascend.sh",
        )
    )
    return version if pair.status == PASS else ""


def open_card(out: Output) -> int:
    """Compute on the first card; returns how many cards are visible, 0 if none can be used."""
    import torch

    from nanochat.platforms import ascend_chips, ascend_errors

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
        total = float(torch.arange(100, device="npu:0").sum().cpu())
        soc, name = int(torch.npu.get_soc_version()), torch.npu.get_device_name(0)
        free, memory = torch.npu.mem_get_info(0)
    except Exception as failure:  # whatever the driver reports is the finding
        told = first_line(failure)
        words = (
            ascend_errors.explain(str(failure), "en"),
            ascend_errors.explain(str(failure), "zh"),
        )
        remedy = words if words[0] else "npu-smi info"
        out.line(Line("npu:0", FAIL, f"cannot be used: {told}", f"无法使用：{told}", remedy))
        return 0
    chip = ascend_chips.chip_of(soc)
    known = chip.name if chip else "not in the table of chips"
    status = FAIL if total != 4950 else PASS if chip else WARN
    data = {
        "name": name,
        "soc": soc,
        "chip": known,
        "count": count,
        "memory_gib": round(memory / 2**30, 1),
        "trains": chip is None or chip.trains,
    }
    what = f"{name} (SoC {soc}, {known}), {memory / 2**30:.0f} GiB, {free / 2**30:.0f} free"
    english = what + (
        "" if total == 4950 else f"; it computed 0 + ... + 99 = {total:g} instead of 4950"
    )
    chinese = what + ("" if total == 4950 else f"；在卡上算 0 + ... + 99 得到 {total:g}，应为 4950")
    out.line(
        Line("npu:0", status, english, chinese, UNKNOWN if status == WARN else "npu-smi info", data)
    )
    if words := ascend_errors.in_use(0, free, memory, "en"):
        chinese = ascend_errors.in_use(0, free, memory, "zh")
        out.line(Line("npu:0 memory", WARN, words, chinese, "python check_npu.py --processes"))
    return count


# --- numerics --------------------------------------------------------------------------------------


def numerics(
    chip: Any, dtype: Any
) -> Iterator[tuple[str, Callable[[], float], Any, tuple[str, str]]]:
    """(name, check, number format, why it is skipped in both languages) for every operation that training needs."""
    import torch

    from tools_npu import numerics as check

    short = str(dtype).removeprefix("torch.")
    trains = chip is None or chip.trains
    no = ("", "")
    only_inference = (
        no if trains else ("this inference card has no backward operators", "推理卡没有反向算子")
    )
    bf16 = (
        no
        if chip is None or chip.bf16
        else (f"the {chip.name} has no bf16", f"{chip.name} 不支持 bf16")
    )
    yield "pinned copy", check.there_and_back, torch.float32, no
    yield "matmul float16", lambda: check.matmul(torch.float16), torch.float16, only_inference
    yield (
        "matmul bfloat16",
        lambda: check.matmul(torch.bfloat16),
        torch.bfloat16,
        bf16 if bf16[0] else only_inference,
    )
    yield f"stacked matmul {short}", lambda: check.stacked_matmul(dtype), dtype, no
    yield f"attention causal {short}", lambda: check.attend(dtype, 255), dtype, only_inference
    yield f"attention band {short}", lambda: check.attend(dtype, 64), dtype, only_inference
    yield (
        f"attention grouped {short}",
        lambda: check.attend(dtype, 255, kv_heads=2),
        dtype,
        only_inference,
    )
    yield f"attention decode {short}", lambda: check.decode(dtype), dtype, no
    yield f"rms norm {short}", lambda: check.norm(dtype), dtype, only_inference
    yield f"rotary {short}", lambda: check.rotary(dtype), dtype, only_inference
    yield f"chunked loss {short}", lambda: check.loss(dtype), dtype, only_inference
    yield "fused AdamW float32", check.adamw, torch.float32, only_inference


def check_numerics(out: Output, chip: Any, dtype: Any) -> None:
    """Report the error of each operation compared with fp32 on the host."""
    from tools_npu.numerics import TOLERANCE

    for name, check, kind, left_out in numerics(chip, dtype):
        out.begin(name)
        if left_out[0]:
            out.line(Line(name, SKIP, *left_out))
            continue
        try:
            wrong = check()
        except Exception as failure:  # one operation that fails must not hide the others
            traceback.print_exc()
            told = f"{type(failure).__name__}: {first_line(failure)}"
            out.line(
                Line(
                    name,
                    FAIL,
                    told,
                    told,
                    (
                        "bash setup_ascend.sh --fix; if it still fails, set NANOCHAT_KERNELS=plain for now",
                        "bash setup_ascend.sh --fix；如果仍然失败，可以先设 NANOCHAT_KERNELS=plain",
                    ),
                )
            )
            continue
        allowed = TOLERANCE[kind]
        text = f"error {wrong:.1e}, limit {allowed:.0e}"
        out.line(
            Line(
                name,
                PASS if wrong <= allowed else FAIL,
                text,
                f"误差 {wrong:.1e}，上限 {allowed:.0e}",
                UPDATE,
                {"error": wrong, "allowed": allowed},
            )
        )


# --- speed -----------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """The time of the fastest of `repeats` runs, including the work on the device."""
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
    size, seconds = 512, 0.0
    while True:
        a = torch.ones(size, size, dtype=dtype, device="npu:0")
        b = a.clone()
        seconds = seconds_of(lambda a=a, b=b: torch.mm(a, b), 3)
        if size >= 4096 or 10 * seconds > MATMUL_SECONDS:
            break
        size *= 2
    seconds = min(seconds, seconds_of(lambda: torch.mm(a, b), 3))
    tflops = 2 * size**3 / seconds / 1e12
    known = chip is not None and chip.tflops > 0
    english, chinese = ", peak unknown", "，峰值未知"
    if known:
        share, source = 100 * tflops / chip.tflops, chip.source
        for word, other in IN_CHINESE.items():
            source = source.replace(word, other)
        english = f", {share:.0f} % of {chip.tflops:g} ({chip.source})"
        chinese = f"，是峰值 {chip.tflops:g} 的 {share:.0f}%（{source}）"
    slow = known and tflops < 0.4 * chip.tflops
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
            {"tflops": tflops, "size": size, "peak": chip.tflops if known else None},
        )
    )


# --- collectives -------------------------------------------------------------------------------------


def free_port() -> int:
    """A TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_collectives(out: Output, ranks: int, megabytes: int) -> float | None:
    """Check each HCCL collective over all visible cards for its known answer; returns GB/s of all_reduce, if any."""
    from nanochat.platforms.ascend_environment import PortBlocks

    if ranks < 2:
        out.line(Line("hccl", SKIP, "only one card is visible", "只有一张可见的卡"))
        return None
    out.begin("hccl")
    ports = PortBlocks()  # held until the ranks have answered
    env = {
        **os.environ,
        "HCCL_IF_BASE_PORT": os.environ.get("HCCL_IF_BASE_PORT") or str(ports.free(hold=True)),
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    port = str(free_port())
    command = [sys.executable, "-m", "tools_npu.collectives"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), port, str(megabytes)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + HCCL_SECONDS
    answers = []
    for rank, process in enumerate(started):
        try:
            said, failed = process.communicate(timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            said, failed = process.communicate()
            failed += f"\nrank {rank} did not answer within {HCCL_SECONDS} s"
        answers.append((rank, process.returncode, said, failed))
    return report_collectives(out, answers, ranks)


def report_collectives(
    out: Output, answers: list[tuple[int, int, str, str]], ranks: int
) -> float | None:
    """Report the results of all ranks, or the first rank that failed; returns GB/s of all_reduce if all are correct."""
    from nanochat.platforms import ascend_errors

    broken = [answer for answer in answers if answer[1] != 0]
    if broken:
        rank, code, _, failed = broken[0]
        sys.stderr.write(failed)
        last = (failed.strip().splitlines() or [f"exit code {code}"])[-1][:300]
        words = (ascend_errors.explain(failed, "en"), ascend_errors.explain(failed, "zh"))
        general = (
            "source setup_ascend.sh; then check the ports, HCCL_IF_IP and HCCL_SOCKET_IFNAME",
            "先 source setup_ascend.sh；再检查端口、HCCL_IF_IP 和 HCCL_SOCKET_IFNAME",
        )
        out.line(
            Line(
                "hccl",
                FAIL,
                f"rank {rank}: {last}",
                f"进程 {rank}：{last}",
                words if words[0] else general,
            )
        )
        return None
    results = [json.loads(said.strip().splitlines()[-1]) for _, _, said, _ in answers]
    for name in (
        "all_reduce",
        "all_reduce average",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "broadcast",
    ):
        wrong = [str(rank) for rank, result in enumerate(results) if name in result["wrong"]]
        text = f"wrong on rank {', '.join(wrong)}" if wrong else f"correct on {ranks} ranks"
        chinese = f"进程 {'、'.join(wrong)} 结果错误" if wrong else f"{ranks} 个进程结果正确"
        out.line(
            Line(
                f"hccl {name}",
                FAIL if wrong else PASS,
                text,
                chinese,
                ("update the driver and CANN", "升级驱动和 CANN"),
            )
        )
    speed = min(result["gb_per_s"] for result in results)
    out.line(
        Line(
            "hccl bandwidth",
            PASS,
            f"all_reduce moves {speed:.2f} GB/s over each link",
            f"all_reduce 每条链路 {speed:.2f} GB/s",
            data={"gb_per_s": speed, "ranks": ranks},
        )
    )
    return None if any(result["wrong"] for result in results) else speed


# --- all checks ------------------------------------------------------------------------------------


def main() -> None:
    """Run all checks; stop early if a check fails that the later ones need."""
    out = Output(int(sys.argv[1]))
    bench = "--bench" in sys.argv
    if not load(out, os.environ.get("NANOCHAT_CHECK_CANN", "")):
        out.write({"end": True})
        return
    count = open_card(out)
    if count:
        import torch

        from nanochat.platforms import ascend_chips

        chip = ascend_chips.chip_of(int(torch.npu.get_soc_version()))
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
        link = check_collectives(out, count, 256 if bench else 16)
        if figures:
            name = chip.name if chip else f"SoC {int(torch.npu.get_soc_version())}"
            out.begin("bench file")
            out.line(
                benchmark.save(
                    figures, link, count, name, dtype, os.environ.get("NANOCHAT_CHECK_CANN", "")
                )
            )
    out.write({"end": True})


if __name__ == "__main__":
    main()

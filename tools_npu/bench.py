"""Measures how fast the cards of this host are, for the planner: check_npu.py --bench.

python -m tools_npu.bench      # print the measurements as Markdown: check_npu.py --share

Every figure is an average over several seconds, in which work is queued without a pause. Waiting
for every single operation would measure its launch, on a card that stays cool. The result is
card_bench.json in the base folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tools_npu.lines import PASS, Line, language_of

if TYPE_CHECKING:
    from nanochat.planner.calibration import Bench

SECONDS = 3.0  # how long each measurement takes
SLOW_SECONDS = 0.2  # the same on an emulated card, where a 2048^3 matmul takes longer than SLOW
SLOW = 6e-3  # at 2.9 TFLOP/s: more than a core emulates, much less than a chip that trains has
# The sizes of matmuls: rows, inner, columns.
SHAPES = ((8192, 8192, 8192), (16384, 1536, 6144), (4096, 4096, 4096))
SLOW_SHAPES = ((256, 256, 256), (512, 128, 512))

NOTHING = (
    "error: nothing has been measured on this host yet; on cards that can train, run python "
    "check_npu.py --bench",
    "错误：这台主机还没有测量过；在能训练的卡上运行 python check_npu.py --bench",
)


def average(
    work: Callable[[], Any],
    seconds: float,
    wait: Callable[[], None],
) -> float:
    """Return the seconds per call of `work`, averaged over calls that are queued at once.

    The calls take at least `seconds` in total.
    """
    work()  # the first call compiles or loads the operator
    wait()
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            work()
        wait()
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / count
        needed = int(1.1 * count * seconds / max(elapsed, 1e-6))
        count = max(2 * count, min(needed, 100 * count))


class Card:
    """Measures how fast the first card is."""

    def __init__(self, dtype: Any, seconds: float | None = None):
        import torch

        self.torch = torch
        self.dtype = dtype
        self.wait = torch.npu.synchronize
        matmul = average(self._multiply(2048, 2048, 2048, dtype), 0.0, self.wait)
        self.slow = matmul > SLOW
        self.seconds = seconds or (SLOW_SECONDS if self.slow else SECONDS)

    def _average(self, work: Callable[[], Any]) -> float:
        return average(work, self.seconds, self.wait)

    def _random(self, *shape: int, dtype: Any) -> Any:
        return self.torch.randn(shape, device="npu:0").to(dtype)

    def _multiply(
        self,
        rows: int,
        inner: int,
        columns: int,
        dtype: Any,
    ) -> Callable[[], Any]:
        a = self._random(rows, inner, dtype=dtype)
        b = self._random(inner, columns, dtype=dtype)
        return lambda: self.torch.mm(a, b)

    def matmul(self, dtype: Any) -> float:
        """Return the TFLOP/s of matmuls, for the best of several shapes."""
        best = 0.0
        for rows, inner, columns in SLOW_SHAPES if self.slow else SHAPES:
            seconds = self._average(self._multiply(rows, inner, columns, dtype))
            best = max(best, 2 * rows * inner * columns / seconds / 1e12)
        return best

    def attention(self) -> float:
        """Return the TFLOP/s of causal attention in training, forward and backward."""
        from tools_npu import numerics

        operations = numerics.operations()
        B, T, H, D = (1, 256, 2, 64) if self.slow else (8, 2048, 8, 128)
        q, k, v = (self._random(B, T, H, D, dtype=self.dtype).requires_grad_() for _ in range(3))

        def forward_and_backward() -> None:
            operations.attend(q, k, v, T).sum().backward()

        flops = 14 * B * H * D * T**2 / 2
        return flops / self._average(forward_and_backward) / 1e12

    def vector(self) -> float:
        """Return the GB/s that an element-wise operator reads and writes."""
        size = (1 << 20) if self.slow else (128 << 20)
        a = self._random(size, dtype=self.dtype)
        b = self.torch.empty_like(a)
        seconds = self._average(lambda: self.torch.mul(a, 1.5, out=b))
        return 2 * a.numel() * a.element_size() / seconds / 1e9

    def launch(self) -> float:
        """Return the microseconds that the host takes to launch one small operator."""
        x = self._random(64, dtype=self.torch.float32)

        def launch_hundred() -> None:
            y = x
            for _ in range(100):
                y = y + 1

        return 1e6 * self._average(launch_hundred) / 100

    def copies(self) -> tuple[float, float]:
        """Return the GB/s of copies from pinned host memory to the card, and of copies back."""
        size = (1 << 18) if self.slow else (64 << 20)
        host = self.torch.ones(size).pin_memory()
        card = host.to("npu:0")
        gigabytes = host.numel() * 4 / 1e9
        up = self._average(lambda: card.copy_(host, non_blocking=True))
        down = self._average(lambda: host.copy_(card, non_blocking=True))
        return gigabytes / up, gigabytes / down


def measure(
    begin: Callable[[str], None],
    line: Callable[[Line], None],
    dtype: Any,
) -> dict[str, float]:
    """Measure the first card, report each figure as a line, and return all figures by name."""
    import torch

    card = Card(dtype)
    short = str(dtype).removeprefix("torch.")
    begin("launch")
    launch = card.launch()
    line(
        Line(
            "launch",
            PASS,
            f"{launch:.1f} us per operator",
            f"下发一个算子 {launch:.1f} 微秒",
            data={"us": launch},
        )
    )
    begin("copies")
    up, down = card.copies()
    vector = card.vector()
    line(
        Line(
            "copies",
            PASS,
            f"{up:.1f} GB/s to the card, {down:.1f} GB/s back, {vector:.0f} GB/s on the card",
            f"主机到卡 {up:.1f} GB/s，卡到主机 {down:.1f} GB/s，卡内 {vector:.0f} GB/s",
            data={"up_gb_per_s": up, "down_gb_per_s": down, "memory_gb_per_s": vector},
        )
    )
    begin("attention speed")
    attention = card.attention()
    line(
        Line(
            "attention speed",
            PASS,
            f"{attention:.3g} TFLOP/s, causal, forward and backward",
            f"{attention:.3g} TFLOP/s，因果，前向加反向",
            data={"tflops": attention},
        )
    )
    begin("long matmul speed")
    matmul = card.matmul(dtype)
    full = card.matmul(torch.float32)
    line(
        Line(
            "long matmul speed",
            PASS,
            f"{matmul:.3g} TFLOP/s in {short}, {full:.3g} in float32",
            f"{short} {matmul:.3g} TFLOP/s，float32 {full:.3g} TFLOP/s",
            data={"tflops": matmul, "full_tflops": full},
        )
    )
    return {
        "launch_us": launch,
        "vector_gb_per_s": vector,
        "attention_tflops": attention,
        "matmul_tflops": matmul,
        "full_tflops": full,
        "seconds": card.seconds,
    }


def save(
    figures: dict[str, float],
    link: float | None,
    cards: int,
    chip: str,
    dtype: Any,
    toolkit: str,
) -> Line:
    """Write the file that the planner reads, and return a line that says so."""
    import torch
    import torch_npu

    from nanochat.planner import calibration

    bench = calibration.Bench(
        chip=chip,
        cards=cards,
        number_format=str(dtype).removeprefix("torch."),
        link_gb_per_s=link,
        torch=torch.__version__,
        driver_package=str(torch_npu.__version__),
        toolkit=toolkit or "unknown",
        **figures,
    )
    calibration.save(bench, calibration.path_of())
    name = calibration.NAME
    english = (
        f"{name} in the base folder; nanochat.planner uses it. To share it: python check_npu.py "
        "--share"
    )
    chinese = (
        f"已写入数据目录下的 {name}，nanochat.planner 会使用。要分享：python check_npu.py --share"
    )
    return Line("bench file", PASS, english, chinese)


def digits(figure: float) -> str:
    """Return a figure with three significant digits, such as 0.0547, 12.3 or 1,230."""
    rounded = float(f"{figure:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:#.3g}"


def shared(bench: Bench) -> str:
    """Return the measurements, and what the planner predicts from them, as Markdown.

    The text has no names of hosts, users or folders.
    """
    from nanochat import device
    from nanochat.planner import calibration, tables

    link = "one card" if bench.link_gb_per_s is None else f"{digits(bench.link_gb_per_s)} GB/s"
    rows = [
        (f"matmul in {bench.number_format}, best shape", f"{digits(bench.matmul_tflops)} TFLOP/s"),
        ("matmul in float32, best shape", f"{digits(bench.full_tflops)} TFLOP/s"),
        ("attention, causal, forward and backward", f"{digits(bench.attention_tflops)} TFLOP/s"),
        ("element-wise operators", f"{digits(bench.vector_gb_per_s)} GB/s"),
        ("launch of an operator", f"{digits(bench.launch_us)} us"),
        ("all_reduce, a card", link),
    ]
    text = [
        f"### {bench.cards} x {bench.chip}",
        f"torch {bench.torch}, torch_npu {bench.driver_package}, CANN {bench.toolkit}; every "
        f"figure over at least {bench.seconds:g} s",
        tables.markdown(("measured", bench.chip), rows),
    ]
    chips = [chip for chip in device.planned() if chip.name == bench.chip and chip.trains]
    if chips:
        measured = {bench.chip: calibration.rates_from(bench)}
        text.append(tables.of_plans(chips[:1], [bench.cards], (12, 20, 24), 32_768, measured))
        text.append("Please add what base_train printed: depth, cards, tok/sec and mfu.")
    return "\n\n".join(text)


def main() -> int:
    """Print the measurements of this host, and return the exit code: 1 if there are none."""
    from nanochat.common import UserError
    from nanochat.planner import calibration

    try:
        bench = calibration.read(calibration.path_of())
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 1
    if bench is None:
        print(NOTHING[language_of(os.environ) == "zh"], file=sys.stderr)
        return 1
    print(shared(bench))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""torch_npu.profiler, with the names that the project uses. It writes the files and columns that the project reads.

A kernel of the emulated device is an operator that calls no other operator, and its time is the host's.
"""

import csv
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

STEP = "ProfilerStep#"  # with a number: a step in the trace
INNER = "aten::resolve_conj"  # matrix products call this, and it is no kernel

__all__ = [
    "AiCMetrics", "ProfilerActivity", "ProfilerLevel", "_ExperimentalConfig", "profile", "schedule",
    "tensorboard_trace_handler",
]  # fmt: skip


class ProfilerActivity(Enum):
    """What is recorded."""

    CPU = 0
    NPU = 1


class ProfilerLevel:
    """How much CANN reports."""

    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"


class AiCMetrics:
    """Which counters of the cores are read."""

    AiCoreNone = "ACL_AICORE_NONE"
    PipeUtilization = "ACL_AICORE_PIPE_UTILIZATION"


class _ExperimentalConfig:
    """Settings, which are checked but have no effect."""

    def __init__(self, profiler_level: str = ProfilerLevel.Level0, aic_metrics: str = AiCMetrics.PipeUtilization):
        if not profiler_level.startswith("Level") or not aic_metrics.startswith("ACL_"):
            raise ValueError(f"unknown profiler level or metrics: {profiler_level}, {aic_metrics}")


class schedule:
    """Which steps are recorded, by torch's own schedule."""

    def __init__(self, wait: int, active: int, warmup: int = 0, repeat: int = 0, skip_first: int = 0):
        self.of_torch = torch.profiler.schedule(
            wait=wait, active=active, warmup=warmup, repeat=repeat, skip_first=skip_first
        )

    def __call__(self, step: int) -> Any:
        return self.of_torch(step)


def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True
) -> Callable[["profile"], None]:
    """A handler that writes the folder at the end."""

    def write(profiler: "profile") -> None:
        if analyse_flag:
            span = f"{worker_name or 'host'}_{os.getpid()}_{time.strftime('%Y%m%d%H%M%S')}000_ascend_pt"
            _leave(profiler._inner, Path(dir_name or ".") / span / "ASCEND_PROFILER_OUTPUT")

    return write


class profile:
    """Records steps with torch's profiler for the host, because the emulated device works there, too."""

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        schedule: Callable[[int], Any] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        experimental_config: _ExperimentalConfig | None = None,
    ):
        self._ready = on_trace_ready
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would warn that there is no other device
        self._inner = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule, on_trace_ready=self._trace_ready
        )

    def _trace_ready(self, _: Any) -> None:
        if self._ready is not None:
            self._ready(self)

    def start(self) -> None:
        """Start recording with the first step."""
        self._inner.start()

    def step(self) -> None:
        """Start the next step."""
        self._inner.step()

    def stop(self) -> None:
        """Stop recording, and write the folder."""
        self._inner.stop()


def _times(start: float, end: float, events: Sequence[Any]) -> list[float]:
    """Microseconds of computing, of communication (twice, since all of it is exposed), and of neither."""
    computing = communication = 0.0
    ended = start
    for event in sorted(events, key=lambda event: event.start_ns()):  # of nested events, only the outermost counts
        begin, took = event.start_ns() / 1000, event.duration_ns() / 1000
        if event.is_user_annotation() or event.is_async() or not ended <= begin < end:
            continue
        ended = begin + took
        if event.name().startswith("c10d::"):
            communication += took
        else:
            computing += took
    return [computing, communication, communication, max(end - start - computing - communication, 0.0)]


def _leave(inner: Any, folder: Path) -> None:
    """Write the files of the real profiler that the project reads, with the columns that it reads."""
    folder.mkdir(parents=True)
    inner.export_chrome_trace(str(folder / "trace_view.json"))
    assert json.loads((folder / "trace_view.json").read_text(encoding="utf-8"))["traceEvents"]
    events = inner.events()
    calls = [e for e in events if e.name.startswith(("aten::", "npu::", "c10d::")) and e.name != INNER]
    kernels = [e for e in calls if all(child.name == INNER for child in e.cpu_children)]
    rows = [[e.name, e.name.split("::")[1], e.time_range.start, e.time_range.elapsed_us()] for e in kernels]
    _write(folder / "kernel_details.csv", ["Name", "Type", "Start Time(us)", "Duration(us)"], rows)
    results = inner.profiler.kineto_results.events()
    steps = {e.name(): (e.start_ns() / 1000, e.end_ns() / 1000) for e in results if e.name().startswith(STEP)}
    _write(
        folder / "step_trace_time.csv",
        ["Step", "Computing", "Communication(Not Overlapped)", "Communication", "Free"],
        [[name.removeprefix(STEP), *_times(*steps[name], results)] for name in sorted(steps)],
    )


def _write(path: Path, head: list[str], rows: list[list[Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)

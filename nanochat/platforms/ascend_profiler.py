"""Traces of an Ascend NPU, by torch_npu's profiler: it leaves a folder of tables and a Chrome trace; profiling.py asks.

torch_npu is imported where it is used. Its profiler reports what fails on the screen and goes on: so what it should
have left is looked for.
"""

import csv
from pathlib import Path
from typing import Any

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.runtime.timeline import Span, Traced, top, total_times

# Files of the folder that the profiler's analysis leaves, and their columns that are read, all in microseconds.
OUTPUT = "ASCEND_PROFILER_OUTPUT"
TRACE, STEPS, KERNELS = "trace_view.json", "step_trace_time.csv", "kernel_details.csv"
STEP_COLUMNS = ("Computing", "Communication(Not Overlapped)", "Communication", "Free")
KERNEL_COLUMNS = ("Name", "Type", "Duration(us)")


def traces(compute: Compute) -> bool:
    """Whether this device is traced by torch_npu's profiler and not by torch's."""
    return compute.device_type == "npu"


class Tracer:
    """Traces `steps` steps after one to settle, of one rank."""

    def __init__(self, folder: Path, compute: Compute, steps: int):
        from torch_npu import profiler  # pyright: ignore[reportMissingImports]

        self.folder, self.name, self.steps = folder, f"rank{compute.rank}", steps
        self._profiler: Any = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
            schedule=profiler.schedule(wait=0, active=steps, warmup=1, repeat=1),
            on_trace_ready=profiler.tensorboard_trace_handler(str(folder), worker_name=self.name),
            experimental_config=profiler._ExperimentalConfig(
                profiler_level=profiler.ProfilerLevel.Level1, aic_metrics=profiler.AiCMetrics.AiCoreNone
            ),
        )

    def start(self) -> None:
        """The step to settle begins."""
        self._profiler.start()

    def step(self) -> None:
        """A step has ended; after the last one the profiler writes its files."""
        self._profiler.step()

    def finish(self) -> tuple[Traced, Path]:
        """What was traced, and the folder of the files; UserError where the profiler has not left them."""
        self._profiler.stop()
        folders = sorted(self.folder.glob(f"{self.name}_*_ascend_pt/{OUTPUT}"))
        if not folders:
            raise UserError(f"torch_npu's profiler left no folder {OUTPUT} in {self.folder}; what it printed says why")
        steps = _read(folders[-1] / STEPS, STEP_COLUMNS)
        computing, exposed, communication, free = (
            sum(float(row[column]) for row in steps) / len(steps) / 1000 for column in STEP_COLUMNS
        )
        kernels = [
            Span(_kernel_name(row), 0.0, float(row["Duration(us)"]))
            for row in _read(folders[-1] / KERNELS, KERNEL_COLUMNS)
        ]
        operators = top(total_times(kernels), self.steps)
        whole = computing + exposed + free
        return Traced(whole, computing, communication, exposed, free, operators), folders[-1] / TRACE


def _kernel_name(row: dict[str, str]) -> str:
    """The kind of kernel, such as MatMulV2; where the profiler knows none, the kernel's own name."""
    return row["Name"] if row["Type"] in ("", "N/A") else row["Type"]


def _read(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of one of the profiler's tables; UserError where it is not what it should be."""
    rows: list[dict[str, str]] = []
    if path.exists():
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    if not rows or any(column not in rows[0] for column in columns):
        raise UserError(
            f"torch_npu's profiler left no {path.name} with the columns {', '.join(columns)} in {path.parent}; "
            "what it printed says why"
        )
    return rows

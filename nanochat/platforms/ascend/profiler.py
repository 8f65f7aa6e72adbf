"""Traces steps on an Ascend NPU with torch_npu's profiler.

The profiler writes a folder of tables and a Chrome trace. It only prints its failures, so this
module checks that the tables exist. torch_npu is imported where it is used.
"""

import csv
from pathlib import Path
from typing import Any

from nanochat.common import UserError, tr
from nanochat.platforms.base import Trace

# The files that the profiler's analysis writes, and the columns that are read. All times are in
# microseconds.
OUTPUT = "ASCEND_PROFILER_OUTPUT"
TRACE = "trace_view.json"
STEPS = "step_trace_time.csv"
KERNELS = "kernel_details.csv"
STEP_COLUMNS = ("Computing", "Communication(Not Overlapped)", "Communication", "Free")
KERNEL_COLUMNS = ("Name", "Type", "Duration(us)")


class AscendTracer:
    """Traces `steps` steps of one rank, after one warm-up step."""

    def __init__(self, folder: Path, name: str, steps: int):
        from torch_npu import profiler  # pyright: ignore[reportMissingImports]

        self.folder = folder
        self.name = name
        self._profiler: Any = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
            schedule=profiler.schedule(wait=0, active=steps, warmup=1, repeat=1),
            on_trace_ready=profiler.tensorboard_trace_handler(str(folder), worker_name=self.name),
            experimental_config=profiler._ExperimentalConfig(
                profiler_level=profiler.ProfilerLevel.Level1,
                aic_metrics=profiler.AiCMetrics.AiCoreNone,
            ),
        )

    def start(self) -> None:
        """Begin the warm-up step."""
        self._profiler.start()

    def step(self) -> None:
        """End a step. After the last one, the profiler writes its files."""
        self._profiler.step()

    def finish(self) -> Trace:
        """Stop the profiler, and return its measurements.

        Raises UserError if a file or a column that the profiler should have written is missing.
        """
        self._profiler.stop()
        folders = sorted(self.folder.glob(f"{self.name}_*_ascend_pt/{OUTPUT}"))
        if not folders:
            raise UserError(
                tr(
                    "torch_npu's profiler left no folder {output} in {folder}; what it printed "
                    "says why",
                    output=OUTPUT,
                    folder=self.folder,
                )
            )
        newest = folders[-1]
        steps = _read(newest / STEPS, STEP_COLUMNS)
        computing, exposed, communication, idle = (
            _mean_milliseconds(steps, column) for column in STEP_COLUMNS
        )
        operators = []
        for row in _read(newest / KERNELS, KERNEL_COLUMNS):
            microseconds = float(row["Duration(us)"])
            operators.append((_kernel_name(row), microseconds))
        return Trace(
            computing_ms=computing,
            communication_ms=communication,
            exposed_ms=exposed,
            idle_ms=idle,
            operators=operators,
            path=newest / TRACE,
        )


def _mean_milliseconds(rows: list[dict[str, str]], column: str) -> float:
    """Return the mean, in milliseconds, of a column that holds microseconds."""
    total = sum(float(row[column]) for row in rows)
    return total / len(rows) / 1000


def _kernel_name(row: dict[str, str]) -> str:
    """Return the type of a kernel, such as MatMulV2, or its own name if the type is unknown."""
    kind = row["Type"]
    if kind in ("", "N/A"):
        return row["Name"]
    return kind


def _read(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of one of the profiler's CSV tables as dicts.

    Raises UserError if the table is missing or empty, or lacks a column.
    """
    rows: list[dict[str, str]] = []
    if path.exists():
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    if not rows or any(column not in rows[0] for column in columns):
        raise UserError(
            tr(
                "torch_npu's profiler left no {name} with the columns {columns} in {parent}; "
                "what it printed says why",
                name=path.name,
                columns=", ".join(columns),
                parent=path.parent,
            )
        )
    return rows

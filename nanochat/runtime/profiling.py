"""Implements --profile: measures where the time of a training step goes, on any kind of device.

Four early steps are timed part by part, and three more are traced. Timing costs almost nothing, so
its table describes the run as it is. Tracing slows a step down, but shows the time of each
operator. The training stage calls mark() at the beginning of each part of a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nanochat import device
from nanochat.common import UserError, log, tr, warn, write_atomic, write_json
from nanochat.device import Compute
from nanochat.platforms import base
from nanochat.runtime import timeline
from nanochat.runtime.timeline import FILE, FOLDER, Interval, Kind, Span, StepPart, Times, Traced

# A profile takes two steps to warm up, four timed, one for the profiler to warm up, three traced.
SETTLING = 2
TIMED = 4
TRACED = 3
NEEDED = SETTLING + TIMED + 1 + TRACED
TRACING_RANKS = 8  # further ranks are only timed: the trace of a rank takes about ten megabytes
FUSED = "kernels fused by torch.compile"  # on a CPU, where such kernels have no names of their own
STEP = "nanochat step"  # the name of a step in the trace


# --- tracers -------------------------------------------------------------------------------------


class Tracer(Protocol):
    """Traces steps: start() precedes the warm-up step, step() ends each, finish() comes last."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def finish(self) -> tuple[Traced, Path]: ...


class TorchTracer:
    """Traces steps with torch's own profiler, on the host and on devices that torch supports."""

    def __init__(self, folder: Path, compute: Compute, steps: int):
        self.compute = compute
        self.steps = steps
        self.path = folder / f"trace-rank-{compute.rank}.json.gz"
        # otherwise the profiler warns that there is no accelerator
        if not compute.platform.runs_beside_host:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
        self._profiler = torch.profiler.profile(schedule=schedule)

    def start(self) -> None:
        """Begin the step in which torch's profiler warms up."""
        self._profiler.start()

    def step(self) -> None:
        """Tell the profiler that a step has ended."""
        self._profiler.step()

    def finish(self) -> tuple[Traced, Path]:
        """Write the trace to a file, and return the device's times in it and the file's path.

        The file can be opened in chrome://tracing and ui.perfetto.dev.
        """
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.path))
        steps = []
        spans = []
        for event in self._profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == STEP and _on_host(event):
                steps.append(_microseconds(event))
            span = self._span(event)
            if span is not None:
                spans.append(span)
        traced = timeline.device_time(spans, steps)
        operators = timeline.top(self._times(spans), self.steps)
        return replace(traced, operators=operators), self.path

    def _span(self, event: Any) -> Span | None:
        """Return the time span of an event on the device, or None for any other event.

        On an accelerator, neither host events nor annotations count. On a CPU, an asynchronous
        event counts only if it is communication, and any other event unless it is an annotation.
        """
        platform = self.compute.platform
        if _on_host(event) == platform.runs_beside_host:
            return None
        name = event.name()
        start, end = _microseconds(event)
        kind: Kind = "communication" if platform.communicates(name) else "computing"
        if not platform.runs_beside_host:
            # A CPU communicates in the background, so work in the foreground counts as computing.
            if event.is_async():
                return Span(name, start, end, kind) if kind == "communication" else None
            kind = "computing"
        return None if event.is_user_annotation() else Span(name, start, end, kind)

    def _times(self, spans: Sequence[Span]) -> Times:
        """Return a dict from each operator's name to its number of calls and total microseconds.

        On a CPU, an operator's time excludes the operators that it calls.
        """
        times = timeline.total_times(spans)
        platform = self.compute.platform
        if platform.runs_beside_host:
            return times
        times = {name: value for name, value in times.items() if platform.communicates(name)}
        for average in self._profiler.key_averages():
            if average.is_user_annotation:
                continue
            is_fused = average.key.startswith("## Call CompiledFxGraph")
            name = FUSED if is_fused else average.key
            calls, microseconds = times.get(name, (0, 0.0))
            times[name] = (calls + average.count, microseconds + average.self_cpu_time_total)
        return times


class PlatformTracer:
    """Traces steps with the profiler of a device's vendor."""

    def __init__(self, tracer: base.Tracer, steps: int):
        self._tracer = tracer
        self.steps = steps

    def start(self) -> None:
        """Begin the step in which the profiler warms up."""
        self._tracer.start()

    def step(self) -> None:
        """End a step; after the last step, the profiler writes its files."""
        self._tracer.step()

    def finish(self) -> tuple[Traced, Path]:
        """Return the device's times in the trace, and the path of the trace.

        Raises UserError if the profiler has not written its files.
        """
        trace = self._tracer.finish()
        spans = [Span(name, 0.0, microseconds) for name, microseconds in trace.operators]
        traced = Traced(
            step_ms=trace.computing_ms + trace.exposed_ms + trace.idle_ms,
            computing_ms=trace.computing_ms,
            communication_ms=trace.communication_ms,
            exposed_ms=trace.exposed_ms,
            idle_ms=trace.idle_ms,
            operators=timeline.top(timeline.total_times(spans), self.steps),
        )
        return traced, trace.path


def tracer_of(folder: Path, compute: Compute, steps: int) -> Tracer:
    """Return the vendor's tracer for this rank, or torch's if the vendor has none."""
    vendor_tracer = compute.platform.tracer(folder, f"rank{compute.rank}", steps)
    if vendor_tracer is None:
        return TorchTracer(folder, compute, steps)
    return PlatformTracer(vendor_tracer, steps)


def _on_host(event: Any) -> bool:
    return event.device_type().name == "CPU"


def _microseconds(event: Any) -> Interval:
    """Return the start and the end of an event in microseconds."""
    return event.start_ns() / 1000, event.end_ns() / 1000


# --- the profile of a run ------------------------------------------------------------------------


@dataclass
class _Step:
    """The marks of a timed step: the names of the parts they begin, host times, device events."""

    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)  # empty on a CPU


class Profile:
    """Times and traces early steps of a run, then prints and saves tables of where time went."""

    def __init__(self, stage: str, folder: Path, steps_left: int, compute: Compute):
        """Prepare a profile that will be written to the folder `profile` inside `folder`.

        Raises UserError (exit code 2) if `steps_left` is less than a profile needs.
        """
        check(steps_left)
        self.stage = stage
        self.folder = folder / FOLDER
        self.compute = compute
        self.module = compute.platform.module
        self.number = 0  # steps since the start
        self.timed: list[_Step] = []
        self.tracer: Tracer | None = None
        self._spans: list[Any] = []  # open in the trace: the step, and a part of it

    def begin_step(self) -> None:
        """Begin a step and its first part, "data"; after the last profiled step, do nothing."""
        if self.number >= NEEDED:
            return
        warms_up = self.number == NEEDED - TRACED - 1
        if warms_up and self.compute.rank < TRACING_RANKS:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.tracer = tracer_of(self.folder, self.compute, TRACED)
            self.tracer.start()
        if self._is_timed():
            self.timed.append(_Step())
        if self.tracer is not None:
            self._open(STEP)
        self.mark("data")

    def _is_timed(self) -> bool:
        return SETTLING <= self.number < SETTLING + TIMED

    def _open(self, name: str) -> None:
        """Open a span in the trace."""
        span = torch.profiler.record_function(name)
        span.__enter__()
        self._spans.append(span)

    def _close(self, keep: int) -> None:
        """Close all open spans in the trace except the `keep` outermost ones."""
        while len(self._spans) > keep:
            self._spans.pop().__exit__(None, None, None)

    def mark(self, name: str) -> None:
        """End the current part of the step, and begin the part called `name`.

        In steps that are neither timed nor traced, do nothing.
        """
        if self._is_timed() and self.timed:
            step = self.timed[-1]
            step.names.append(name)
            step.seconds.append(time.perf_counter())
            if self.module is not None:
                event = self.module.Event(enable_timing=True)
                event.record()
                step.events.append(event)
        elif self._spans:
            self._close(keep=1)
            self._open(name)

    def end_step(self) -> None:
        """End a step and, if it is the last profiled one, print and save the tables.

        After that step, do nothing.
        """
        if self.number >= NEEDED:
            return
        self.mark("")
        if self.tracer is not None:
            device.synchronize(self.compute)  # so that the traced step contains all of its work
            self._close(keep=0)
            self.tracer.step()
        self.number += 1
        if self.number == NEEDED:
            self._report()

    def _step_parts(self) -> list[StepPart]:
        """Return a list of the parts of a step, with their mean times over the timed steps.

        Every rank must call this, because each part also has its time on the slowest rank.
        """
        device.synchronize(self.compute)
        host_ms: dict[str, float] = {}
        device_ms: dict[str, float] = {}
        for step in self.timed:
            for i, name in enumerate(step.names[:-1]):
                ms_on_host = 1000 * (step.seconds[i + 1] - step.seconds[i])
                ms_on_device = ms_on_host
                if step.events:
                    ms_on_device = step.events[i].elapsed_time(step.events[i + 1])
                host_ms[name] = host_ms.get(name, 0.0) + ms_on_host / TIMED
                device_ms[name] = device_ms.get(name, 0.0) + ms_on_device / TIMED
        ranks = [device_ms]
        if self.compute.world_size > 1:
            ranks = [{} for _ in range(self.compute.world_size)]
            dist.all_gather_object(ranks, device_ms)
        step_parts = []
        for name, ms in device_ms.items():
            slowest_ms = max(rank.get(name, 0.0) for rank in ranks)
            step_parts.append(StepPart(name, ms, host_ms[name], slowest_ms))
        return step_parts

    def _trace(self) -> tuple[Traced | None, list[str]]:
        """Return the device's times in this rank's trace, and a list with the path of the trace.

        Returns (None, []) if this rank is not traced, or if its tracer raises UserError. The error
        becomes a warning.
        """
        if self.tracer is None:
            return None, []
        try:
            traced, path = self.tracer.finish()
        except UserError as failure:
            warn(tr("no trace of rank {rank}: {failure}", rank=self.compute.rank, failure=failure))
            return None, []
        return traced, [str(path)]

    def _report(self) -> None:
        """Print and save the tables on rank 0; every rank must call this."""
        step_parts = self._step_parts()
        traced, files = self._trace()
        if not self.compute.main:
            return
        on_host = self.module is None
        ranks = self.compute.world_size
        device_name = device.describe(self.compute)
        text = (
            f"{self.stage} on {device_name}: the mean of {TIMED} steps, each timed part by part\n"
        )
        text += timeline.parts_table(step_parts, ranks, on_host)
        if traced is not None:
            text += f"\n\nthe mean of {TRACED} traced steps, which tracing makes slower\n"
            text += timeline.traced_table(traced, on_host)
        content = {
            "stage": self.stage,
            "device": device_name,
            "ranks": ranks,
            "files": files,
            **timeline.as_json(step_parts, traced),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        table_file = self.folder / "profile.txt"
        write_json(self.folder / FILE, content)
        write_atomic(table_file, text + "\n")
        log(tr("profile: {text}", text=text))
        traces = "".join(tr("; trace: {file}", file=file) for file in files)
        log(
            tr(
                "profile: {table_file}{traces}; the run continues",
                table_file=table_file,
                traces=traces,
            )
        )


def check(steps_left: int) -> None:
    """Raise UserError (exit code 2) if the run has fewer steps left than a profile needs."""
    if steps_left < NEEDED:
        raise UserError(
            tr(
                "--profile needs {needed} steps ({settling} to warm up, {timed} timed, 1 for "
                "the profiler to warm up, {traced} traced), and this run has {steps_left} "
                "left. Leave --profile out, or give it more steps.",
                needed=NEEDED,
                settling=SETTLING,
                timed=TIMED,
                traced=TRACED,
                steps_left=steps_left,
            ),
            exit_code=2,
        )

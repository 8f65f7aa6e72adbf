"""`--profile`: where the time of a step goes, on every device. Four early steps are timed part by part, three traced.

Timing costs nothing, so its table is true to the run. Tracing slows a step down, and names the operators. The stage
marks where each part of a step begins; without --profile, mark() does nothing.
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
from nanochat.common import UserError, log, warn, write_atomic, write_json
from nanochat.device import Compute
from nanochat.platforms import base
from nanochat.runtime import timeline
from nanochat.runtime.timeline import FILE, FOLDER, Span, StepPart, Traced

# Steps after the first: two to warm up, four timed, one for the profiler to warm up, three traced.
SETTLING, TIMED, TRACED = 2, 4, 3
NEEDED = SETTLING + TIMED + 1 + TRACED
TRACING_RANKS = 8  # further ranks are only timed: the trace of one rank takes about ten megabytes
FUSED = "kernels fused by torch.compile"  # on a CPU, where such kernels have no names of their own
STEP = "nanochat step"  # the name of a step in the trace


class Tracer(Protocol):
    """Traces steps: start() before the step that warms up, step() after each step."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def finish(self) -> tuple[Traced, Path]: ...


class TorchTracer:
    """torch's profiler, which traces the host and the devices that torch was built for."""

    def __init__(self, folder: Path, compute: Compute, steps: int):
        self.compute, self.steps = compute, steps
        self.path = folder / f"trace-rank-{compute.rank}.json.gz"
        if compute.platform.is_host:  # otherwise it complains that there is no other device
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
        self._profiler = torch.profiler.profile(schedule=schedule)

    def start(self) -> None:
        """The step that warms up begins."""
        self._profiler.start()

    def step(self) -> None:
        """A step has ended."""
        self._profiler.step()

    def finish(self) -> tuple[Traced, Path]:
        """The figures of the trace, and its file, for chrome://tracing or ui.perfetto.dev."""
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.path))
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        windows = [
            (e.start_ns() / 1000, e.end_ns() / 1000)
            for e in events
            if e.name() == STEP and _on_host(e)
        ]
        spans = [span for event in events if (span := self._span(event)) is not None]
        traced = timeline.device_time(spans, windows)
        return replace(traced, operators=timeline.top(self._times(spans), self.steps)), self.path

    def _span(self, event: Any) -> Span | None:
        """The device time of an event; None for an event of the host beside the device, or a mark."""
        here = (event.start_ns() / 1000, event.end_ns() / 1000)
        name = event.name()
        moves = self.compute.platform.communicates(name)
        if _on_host(event) != self.compute.platform.is_host:
            return None
        if not _on_host(event):
            return (
                None
                if event.is_user_annotation()
                else Span(name, *here, "communication" if moves else "computing")
            )
        if event.is_async():
            return Span(name, *here, "communication") if moves else None
        return None if event.is_user_annotation() else Span(name, *here)

    def _times(self, spans: Sequence[Span]) -> dict[str, tuple[int, float]]:
        """Calls and microseconds of operators; on a CPU, without the time of the operators that they call."""
        if not self.compute.platform.is_host:
            return timeline.total_times(spans)
        moves = self.compute.platform.communicates
        times = {name: took for name, took in timeline.total_times(spans).items() if moves(name)}
        for average in self._profiler.key_averages():
            if not average.is_user_annotation:
                name = FUSED if average.key.startswith("## Call CompiledFxGraph") else average.key
                calls, took = times.get(name, (0, 0.0))
                times[name] = (calls + average.count, took + average.self_cpu_time_total)
        return times


class PlatformTracer:
    """A vendor's own profiler."""

    def __init__(self, tracer: base.Tracer, steps: int):
        self._tracer, self.steps = tracer, steps

    def start(self) -> None:
        """The step in which the profiler settles begins."""
        self._tracer.start()

    def step(self) -> None:
        """A step has ended; after the last step the profiler writes its files."""
        self._tracer.step()

    def finish(self) -> tuple[Traced, Path]:
        """What was traced, and the file of the trace; UserError where the profiler has not left its files."""
        trace = self._tracer.finish()
        spans = [Span(name, 0.0, microseconds) for name, microseconds in trace.operators]
        operators = timeline.top(timeline.total_times(spans), self.steps)
        whole = trace.computing_ms + trace.exposed_ms + trace.idle_ms
        traced = Traced(
            whole,
            trace.computing_ms,
            trace.communication_ms,
            trace.exposed_ms,
            trace.idle_ms,
            operators,
        )
        return traced, trace.path


def tracer_of(folder: Path, compute: Compute, steps: int) -> Tracer:
    """The profiler that traces this rank: the vendor's own where there is one, else torch's."""
    own = compute.platform.tracer(folder, f"rank{compute.rank}", steps)
    return TorchTracer(folder, compute, steps) if own is None else PlatformTracer(own, steps)


def _on_host(event: Any) -> bool:
    return event.device_type().name == "CPU"


@dataclass
class _Step:
    """The marks of a timed step: for the beginning of each part its name, the host's clock and a device event."""

    parts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)  # empty on a host


class Profile:
    """Follows the first steps of a run, and after the last of them prints where their time went."""

    def __init__(self, stage: str, folder: Path, steps_left: int, compute: Compute):
        """Write to `folder`; UserError if the run has fewer steps left than a profile takes."""
        check(True, steps_left)
        self.stage, self.folder, self.compute = stage, folder, compute
        self.module = compute.platform.module
        self.number = 0  # steps since the start
        self.timed: list[_Step] = []
        self.traced_seconds: list[float] = []
        self.tracer: Tracer | None = None
        self._spans: list[Any] = []  # open in the trace: the step, and a part of it
        self._start = 0.0

    def begin_step(self) -> None:
        """A step begins, and with it the part that fetches its data."""
        if self.number >= NEEDED:
            return
        if self.number == NEEDED - TRACED - 1 and self.compute.rank < TRACING_RANKS:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.tracer = tracer_of(self.folder, self.compute, TRACED)
            self.tracer.start()
        self._start = time.perf_counter()
        if self._is_timed():
            self.timed.append(_Step())
        if self.tracer is not None:
            self._open(STEP)
        self.mark("data")

    def _is_timed(self) -> bool:
        return SETTLING <= self.number < SETTLING + TIMED

    def _open(self, name: str) -> None:
        self._spans.append(torch.profiler.record_function(name))
        self._spans[-1].__enter__()

    def _close(self, keep: int) -> None:
        while len(self._spans) > keep:
            self._spans.pop().__exit__(None, None, None)

    def mark(self, part: str) -> None:
        """A part of a step begins, and the part before it ends."""
        if self._is_timed() and self.timed:
            step = self.timed[-1]
            step.parts.append(part)
            step.seconds.append(time.perf_counter())
            if self.module is not None:
                step.events.append(self.module.Event(enable_timing=True))
                step.events[-1].record()
        elif self._spans:
            self._close(keep=1)
            self._open(part)

    def end_step(self) -> None:
        """A step has ended; after the last profiled step the tables are printed and written."""
        if self.number >= NEEDED:
            return
        self.mark("")
        if self.tracer is not None:
            device.synchronize(self.compute)  # so that a traced step holds all of its work
            self._close(keep=0)
            self.tracer.step()
        self.traced_seconds.append(time.perf_counter() - self._start)
        self.number += 1
        if self.number == NEEDED:
            self._tell()

    def _parts(self) -> list[StepPart]:
        """The mean time of each part over the timed steps, with the time of the slowest rank."""
        device.synchronize(self.compute)
        host: dict[str, float] = {}
        own: dict[str, float] = {}
        for step in self.timed:
            for i, part in enumerate(step.parts[:-1]):
                took = 1000 * (step.seconds[i + 1] - step.seconds[i])
                host[part] = host.get(part, 0.0) + took / TIMED
                if step.events:
                    took = step.events[i].elapsed_time(step.events[i + 1])
                own[part] = own.get(part, 0.0) + took / TIMED
        ranks = [own]
        if self.compute.world_size > 1:
            ranks = [{} for _ in range(self.compute.world_size)]
            dist.all_gather_object(ranks, own)
        return [
            StepPart(part, ms, host[part], max(rank.get(part, 0.0) for rank in ranks))
            for part, ms in own.items()
        ]

    def _trace(self) -> tuple[Traced | None, list[str]]:
        """The figures of this rank's trace, and its file. If the profiler fails, the run only warns and continues."""
        if self.tracer is None:
            return None, []
        try:
            traced, path = self.tracer.finish()
        except UserError as failure:
            warn(f"no trace of rank {self.compute.rank}: {failure}")
            return None, []
        return traced, [str(path)]

    def _tell(self) -> None:
        parts = self._parts()
        traced, files = self._trace()
        if not self.compute.main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        on_host, ranks = self.module is None, self.compute.world_size
        text = f"{self.stage} on {device.describe(self.compute)}: the mean of {TIMED} steps, each timed part by part\n"
        text += timeline.parts_table(parts, ranks, on_host)
        if traced is not None:
            text += f"\n\nthe mean of {TRACED} traced steps, which tracing makes slower\n"
            text += timeline.traced_table(traced, on_host)
        about = {
            "stage": self.stage,
            "device": device.describe(self.compute),
            "ranks": ranks,
            "files": files,
        }
        write_json(self.folder / FILE, {**about, **timeline.as_json(parts, traced)})
        write_atomic(self.folder / "profile.txt", text + "\n")
        log("profile: " + text)
        log(
            f"profile: {self.folder / 'profile.txt'}"
            + "".join(f"; trace: {file}" for file in files)
            + "; the run continues"
        )


class Idle:
    """Stands in for a Profile where nothing is profiled: its methods do nothing."""

    def begin_step(self) -> None:
        """Do nothing."""

    def mark(self, part: str) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""


def check(wanted: bool, steps_left: int) -> None:
    """UserError (code 2) if a profile is wanted and the run has fewer steps left than a profile takes."""
    if wanted and steps_left < NEEDED:
        raise UserError(
            f"--profile needs {NEEDED} steps ({SETTLING} to warm up, {TIMED} timed, 1 for the profiler to warm up, "
            f"{TRACED} traced), and this run has {steps_left} left. Leave --profile out, or give it more steps.",
            exit_code=2,
        )


def begin(
    wanted: bool, stage: str, folder: Path, steps_left: int, compute: Compute
) -> Profile | Idle:
    """Profile the next steps, if that is wanted, into the folder `profile` beside a stage's checkpoints."""
    return Profile(stage, folder / FOLDER, steps_left, compute) if wanted else Idle()

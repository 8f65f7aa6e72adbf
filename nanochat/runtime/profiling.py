"""`--profile`: where a step's time goes, on every device. Some early steps are timed part by part, then some traced.

Timing costs nothing, so its table is true to the run; tracing slows a step down, and names the operators. The loop
marks where a part of a step begins; marks are nothing where nothing is profiled.
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
from nanochat.common import UserError, log, read_json, warn, write_atomic, write_json
from nanochat.device import Compute
from nanochat.platforms import base
from nanochat.runtime import timeline
from nanochat.runtime.timeline import Part, Span, Traced

# Steps after the first: some to settle, some timed, one for the profiler to settle, some traced.
SETTLING, TIMED, TRACED = 2, 4, 3
NEEDED = SETTLING + TIMED + 1 + TRACED
TRACING_RANKS = 8  # the others are timed only: a trace of one rank has some ten megabytes
FOLDER, FILE = "profile", "profile.json"
FUSED = "kernels fused by torch.compile"  # on a host, where they have no names of their own
STEP = "nanochat step"  # the name of a step in the trace


class Tracer(Protocol):
    """Traces steps: start() before the one to settle, step() after each."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def finish(self) -> tuple[Traced, Path]: ...


class TorchTracer:
    """torch's profiler, which follows the host and the devices that torch was built for."""

    def __init__(self, folder: Path, compute: Compute, steps: int):
        self.compute, self.steps = compute, steps
        self.path = folder / f"trace-rank-{compute.rank}.json.gz"
        if compute.platform.is_host:  # it would complain that there is no other device
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
        self._profiler = torch.profiler.profile(schedule=schedule)

    def start(self) -> None:
        """The step to settle begins."""
        self._profiler.start()

    def step(self) -> None:
        """A step has ended."""
        self._profiler.step()

    def finish(self) -> tuple[Traced, Path]:
        """What was traced, and the file of the trace, for chrome://tracing or ui.perfetto.dev."""
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.path))
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        windows = [(e.start_ns() / 1000, e.end_ns() / 1000) for e in events if e.name() == STEP and _on_host(e)]
        spans = [span for event in events if (span := self._span(event)) is not None]
        traced = timeline.device_time(spans, windows)
        return replace(traced, operators=timeline.top(self._times(spans), self.steps)), self.path

    def _span(self, event: Any) -> Span | None:
        """What the device did in an event; None where the event is of the host beside it, or a mark around others."""
        here = (event.start_ns() / 1000, event.end_ns() / 1000)
        name = event.name()
        moves = self.compute.platform.communicates(name)
        if _on_host(event) != self.compute.platform.is_host:
            return None
        if not _on_host(event):
            return None if event.is_user_annotation() else Span(name, *here, "communication" if moves else "computing")
        if event.is_async():
            return Span(name, *here, "communication") if moves else None
        return None if event.is_user_annotation() else Span(name, *here)

    def _times(self, spans: Sequence[Span]) -> dict[str, tuple[int, float]]:
        """Calls and microseconds of operators; on a host without those of the operators that they call."""
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
        traced = Traced(whole, trace.computing_ms, trace.communication_ms, trace.exposed_ms, trace.idle_ms, operators)
        return traced, trace.path


def tracer_of(folder: Path, compute: Compute, steps: int) -> Tracer:
    """The profiler that traces this rank: the vendor's own where there is one, else torch's."""
    own = compute.platform.tracer(folder, f"rank{compute.rank}", steps)
    return TorchTracer(folder, compute, steps) if own is None else PlatformTracer(own, steps)


def _on_host(event: Any) -> bool:
    return event.device_type().name == "CPU"


@dataclass
class _Step:
    """The marks of a timed step: each part's name, the host's clock and the device's event when it begins."""

    parts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)  # empty on a host


class Profile:
    """Follows a stage's steps from its start, and says at the end of the last one what they took."""

    def __init__(self, stage: str, folder: Path, steps_left: int, compute: Compute):
        """Into `folder`; UserError where fewer steps are left than it takes."""
        if steps_left < NEEDED:
            raise UserError(
                f"--profile needs {NEEDED} steps ({SETTLING} to settle, {TIMED} timed, 1 for the profiler to settle, "
                f"{TRACED} traced), and this run has {steps_left} left. Leave --profile out, or give it more steps.",
                exit_code=2,
            )
        self.stage, self.folder, self.compute = stage, folder, compute
        self.module = compute.platform.module
        self.number = 0  # steps since the start
        self.timed: list[_Step] = []
        self.traced_seconds: list[float] = []
        self.tracer: Tracer | None = None
        self._spans: list[Any] = []  # open in the trace: the step, and a part of it
        self._start = 0.0

    def begin_step(self) -> None:
        """A step begins, with the part in which its data comes."""
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
        """A part of a step begins, and ends the one before."""
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

    def end_step(self) -> bool:
        """A step has ended; True after the last one, which is told then."""
        self.mark("")
        if self.tracer is not None:
            device.synchronize(self.compute)  # so that a traced step holds all of its work
            self._close(keep=0)
            self.tracer.step()
        self.traced_seconds.append(time.perf_counter() - self._start)
        self.number += 1
        if self.number < NEEDED:
            return False
        self._tell()
        return True

    def _parts(self) -> list[Part]:
        """The mean of each part over the timed steps, with the slowest of all ranks."""
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
        return [Part(part, ms, host[part], max(rank.get(part, 0.0) for rank in ranks)) for part, ms in own.items()]

    def _trace(self) -> tuple[Traced | None, list[str]]:
        """What this rank's trace says, and its file; a profiler that fails costs a warning, not the run."""
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
        about = {"stage": self.stage, "device": device.describe(self.compute), "ranks": ranks, "files": files}
        write_json(self.folder / FILE, {**about, **timeline.as_json(parts, traced)})
        write_atomic(self.folder / "profile.txt", text + "\n")
        log("profile: " + text)
        log(f"profile: {self.folder / 'profile.txt'}" + "".join(f"; trace: {file}" for file in files)
            + "; the run goes on")  # fmt: skip


@dataclass
class _Active:
    """The profile that marks go to."""

    profile: Profile | None = None


_active = _Active()


def begin(wanted: bool, stage: str, folder: Path, steps_left: int, compute: Compute) -> None:
    """Profile the steps to come if that is wanted, into the folder `profile` beside a stage's checkpoints."""
    _active.profile = Profile(stage, folder / FOLDER, steps_left, compute) if wanted else None


def begin_step() -> None:
    """A step begins."""
    if _active.profile is not None:
        _active.profile.begin_step()


def mark(part: str) -> None:
    """From here on a step's time belongs to this part."""
    if _active.profile is not None:
        _active.profile.mark(part)


def end_step() -> None:
    """A step has ended."""
    if _active.profile is not None and _active.profile.end_step():
        _active.profile = None


def report_rows(folder: Path) -> list[dict[str, Any]]:
    """What a stage's profile says of the parts of a step, for its section of the report; none where there is none."""
    path = folder / FOLDER / FILE
    return timeline.as_rows([Part(**part) for part in read_json(path)["parts"]]) if path.exists() else []

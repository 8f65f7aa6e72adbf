"""Shows where time goes, from marks and spans: the parts of a step, the device's work, and the slowest operators."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nanochat.common import read_json

FOLDER, FILE = (
    "profile",
    "profile.json",
)  # of a stage that ran with --profile, beside its checkpoints
Kind = Literal["computing", "communication"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Something that lasted from `start` to `end`, in microseconds of one clock."""

    name: str
    start: float
    end: float
    kind: Kind = "computing"


@dataclass(frozen=True)
class Operator:
    """The calls and the time of an operator in an average step."""

    name: str
    calls: float
    ms: float


@dataclass(frozen=True)
class Traced:
    """An average traced step, in ms. `exposed_ms` is communication that does not overlap with computing."""

    step_ms: float
    computing_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float  # neither computing nor communication
    operators: list[Operator] = field(default_factory=list)  # the slowest first


@dataclass(frozen=True)
class StepPart:
    """The time of one part of an average step, in ms: on the device, and on the host that launches its work."""

    name: str
    ms: float
    host_ms: float
    slowest_ms: float  # of all ranks


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, as sorted intervals that do not touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """The length of the union of the intervals."""
    return sum(end - start for start, end in merged(intervals))


def within(span: Interval, windows: Sequence[Interval]) -> list[Interval]:
    """The pieces of an interval that lie in the windows."""
    pieces = ((max(span[0], start), min(span[1], end)) for start, end in windows)
    return [(start, end) for start, end in pieces if start < end]


def device_time(spans: Sequence[Span], steps: Sequence[Interval]) -> Traced:
    """What a device did in an average of the steps, from the spans of its operators; `operators` stays empty."""
    busy: dict[Kind, list[Interval]] = {"computing": [], "communication": []}
    for span in spans:
        busy[span.kind] += within((span.start, span.end), steps)
    each = 1000 * len(steps)  # turns microseconds of all steps into ms per step
    computing, communication = length(busy["computing"]), length(busy["communication"])
    both = length(busy["computing"] + busy["communication"])
    wall = length(steps)
    return Traced(
        wall / each,
        computing / each,
        communication / each,
        (both - computing) / each,
        (wall - both) / each,
    )


def top(times: Mapping[str, tuple[int, float]], steps: int, count: int = 15) -> list[Operator]:
    """The `count` slowest operators; `times` maps a name to (calls, microseconds) over all steps."""
    longest = sorted(times.items(), key=lambda item: -item[1][1])[:count]
    return [
        Operator(name, calls / steps, took / steps / 1000)
        for name, (calls, took) in longest
        if took > 0
    ]


def total_times(spans: Iterable[Span]) -> dict[str, tuple[int, float]]:
    """The calls and the microseconds of each name."""
    times: dict[str, tuple[int, float]] = {}
    for span in spans:
        calls, took = times.get(span.name, (0, 0.0))
        times[span.name] = (calls + 1, took + span.end - span.start)
    return times


def _percent(ms: float, whole: float) -> str:
    return f"{100 * ms / whole:.1f} %" if whole else "-"


def parts_table(parts: Sequence[StepPart], ranks: int, on_host: bool) -> str:
    """A table with a line for each part of a step. On a CPU it has no column for the host, and with one rank no column
    for the slowest rank."""
    whole = sum(part.ms for part in parts)
    total = StepPart(
        "step", whole, sum(part.host_ms for part in parts), sum(part.slowest_ms for part in parts)
    )
    lines = [
        f"{'part of a step':<18}{'ms':>10}{'share':>9}"
        + ("" if on_host else f"{'host ms':>10}")
        + (f"{'slowest rank':>14}" if ranks > 1 else "")
    ]
    for part in (*parts, total):
        line = f"{part.name:<18}{part.ms:>10.2f}{_percent(part.ms, whole):>9}"
        line += "" if on_host else f"{part.host_ms:>10.2f}"
        lines.append(
            line + (f"{part.slowest_ms:>14.2f}" if ranks > 1 and part is not total else "")
        )
    return "\n".join(lines)


def traced_table(traced: Traced, on_host: bool) -> str:
    """A table of the device's work and the slowest operators."""
    whole = traced.step_ms
    idle = "outside operators" if on_host else "idle"
    lines = [f"{'traced step':<18}{whole:>10.2f}"]
    for name, ms in (
        ("operators", traced.computing_ms),
        ("communication", traced.communication_ms),
        ("  not hidden", traced.exposed_ms),
        (idle, traced.idle_ms),
    ):
        if ms or traced.communication_ms:
            lines.append(f"{name:<18}{ms:>10.2f}{_percent(ms, whole):>9}")
    lines += ["", f"{'calls':>9}{'ms a step':>11}{'share':>9}  operator"]
    for operator in traced.operators:
        share = _percent(operator.ms, whole)
        lines.append(f"{operator.calls:>9,.1f}{operator.ms:>11.2f}{share:>9}  {operator.name[:70]}")
    return "\n".join(lines)


def as_rows(parts: Sequence[StepPart]) -> list[dict[str, Any]]:
    """The parts as rows of a table in the report."""
    whole = sum(part.ms for part in parts)
    return [
        {"part of a step": part.name, "ms": part.ms, "share": _percent(part.ms, whole)}
        for part in parts
    ]


def as_json(parts: Sequence[StepPart], traced: Traced | None) -> dict[str, Any]:
    """The parts and the trace as JSON."""
    return {
        "parts": [asdict(part) for part in parts],
        "traced": None if traced is None else asdict(traced),
    }


def report_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a stage's profile for its section of the report; none if the stage was not profiled."""
    path = folder / FOLDER / FILE
    return as_rows([StepPart(**part) for part in read_json(path)["parts"]]) if path.exists() else []

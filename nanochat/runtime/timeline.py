"""Where time goes, from marks and spans: parts of a step, what a device did, the operators that took longest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["computing", "communication"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in microseconds of one clock."""

    name: str
    start: float
    end: float
    kind: Kind = "computing"


@dataclass(frozen=True)
class Operator:
    """What an operator took in a step, on average."""

    name: str
    calls: float
    ms: float


@dataclass(frozen=True)
class Traced:
    """What a trace says of a step, on average, in ms. Communication may run beside computing; `exposed` does not."""

    step_ms: float
    computing_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float  # neither
    operators: list[Operator] = field(default_factory=list)  # by time, the longest first


@dataclass(frozen=True)
class StepPart:
    """What a part of a step took, on average, in ms: on the device, and on the host that gives it its work."""

    name: str
    ms: float
    host_ms: float
    slowest_ms: float  # of all ranks


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not touch, in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasts."""
    return sum(end - start for start, end in merged(intervals))


def within(span: Interval, windows: Sequence[Interval]) -> list[Interval]:
    """The parts of an interval that lie in the windows."""
    pieces = ((max(span[0], start), min(span[1], end)) for start, end in windows)
    return [(start, end) for start, end in pieces if start < end]


def device_time(spans: Sequence[Span], steps: Sequence[Interval]) -> Traced:
    """What a device did in some steps, by the spans of its operators; without their names."""
    busy: dict[Kind, list[Interval]] = {"computing": [], "communication": []}
    for span in spans:
        busy[span.kind] += within((span.start, span.end), steps)
    each = 1000 * len(steps)  # microseconds over all steps to ms of one
    computing, communication = length(busy["computing"]), length(busy["communication"])
    both = length(busy["computing"] + busy["communication"])
    wall = length(steps)
    return Traced(wall / each, computing / each, communication / each, (both - computing) / each, (wall - both) / each)


def top(times: Mapping[str, tuple[int, float]], steps: int, count: int = 15) -> list[Operator]:
    """The operators that took longest, of name -> (calls, microseconds) in some steps."""
    longest = sorted(times.items(), key=lambda item: -item[1][1])[:count]
    return [Operator(name, calls / steps, took / steps / 1000) for name, (calls, took) in longest if took > 0]


def total_times(spans: Iterable[Span]) -> dict[str, tuple[int, float]]:
    """Calls and microseconds by name."""
    times: dict[str, tuple[int, float]] = {}
    for span in spans:
        calls, took = times.get(span.name, (0, 0.0))
        times[span.name] = (calls + 1, took + span.end - span.start)
    return times


def _percent(ms: float, whole: float) -> str:
    return f"{100 * ms / whole:.1f} %" if whole else "-"


def parts_table(parts: Sequence[StepPart], ranks: int, on_host: bool) -> str:
    """A line for each part of a step; the host has no device beside it, one rank no slowest."""
    whole = sum(part.ms for part in parts)
    total = StepPart("step", whole, sum(part.host_ms for part in parts), sum(part.slowest_ms for part in parts))
    lines = [f"{'part of a step':<18}{'ms':>10}{'share':>9}" + ("" if on_host else f"{'host ms':>10}")
             + (f"{'slowest rank':>14}" if ranks > 1 else "")]  # fmt: skip
    for part in (*parts, total):
        line = f"{part.name:<18}{part.ms:>10.2f}{_percent(part.ms, whole):>9}"
        line += "" if on_host else f"{part.host_ms:>10.2f}"
        lines.append(line + (f"{part.slowest_ms:>14.2f}" if ranks > 1 and part is not total else ""))
    return "\n".join(lines)


def traced_table(traced: Traced, on_host: bool) -> str:
    """What the device did, and the operators that took longest."""
    whole = traced.step_ms
    idle = "outside operators" if on_host else "idle"
    lines = [f"{'traced step':<18}{whole:>10.2f}"]
    for name, ms in (("operators", traced.computing_ms), ("communication", traced.communication_ms),
                     ("  not hidden", traced.exposed_ms), (idle, traced.idle_ms)):  # fmt: skip
        if ms or traced.communication_ms:
            lines.append(f"{name:<18}{ms:>10.2f}{_percent(ms, whole):>9}")
    lines += ["", f"{'calls':>9}{'ms a step':>11}{'share':>9}  operator"]
    for operator in traced.operators:
        share = _percent(operator.ms, whole)
        lines.append(f"{operator.calls:>9,.1f}{operator.ms:>11.2f}{share:>9}  {operator.name[:70]}")
    return "\n".join(lines)


def as_rows(parts: Sequence[StepPart]) -> list[dict[str, Any]]:
    """The parts for the report."""
    whole = sum(part.ms for part in parts)
    return [{"part of a step": part.name, "ms": part.ms, "share": _percent(part.ms, whole)} for part in parts]


def as_json(parts: Sequence[StepPart], traced: Traced | None) -> dict[str, Any]:
    """Both, for a file."""
    return {"parts": [asdict(part) for part in parts], "traced": None if traced is None else asdict(traced)}

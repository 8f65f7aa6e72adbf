"""Makes the tables of a profile: the parts of a step, the device's work, the slowest operators.

The tables are computed from the times of a step's parts, and from the spans of operators.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nanochat.common import read_json

# The folder next to a stage's checkpoints that holds its profile, and the JSON file in it.
FOLDER = "profile"
FILE = "profile.json"
Kind = Literal["computing", "communication"]
Times = dict[str, tuple[int, float]]  # operator -> (calls, microseconds)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """One run of an operator, from `start` to `end` in microseconds of a common clock."""

    name: str
    start: float
    end: float
    kind: Kind = "computing"


@dataclass(frozen=True)
class Operator:
    """An operator's number of calls and time in an average step."""

    name: str
    calls: float
    ms: float


@dataclass(frozen=True)
class Traced:
    """The device's time in an average traced step, in ms.

    `exposed_ms` is the time of communication that does not overlap with computing.
    """

    step_ms: float
    computing_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float  # neither computing nor communication
    operators: list[Operator] = field(default_factory=list)  # the slowest first


@dataclass(frozen=True)
class StepPart:
    """The time that one part of an average step takes, on the device and on the host, in ms."""

    name: str
    ms: float
    host_ms: float
    slowest_ms: float  # on the slowest rank


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals as sorted, disjoint intervals."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        touches = bool(union) and start <= union[-1][1]
        if touches:
            last_start, last_end = union[-1]
            union[-1] = (last_start, max(end, last_end))
        else:
            union.append((start, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the union of the intervals."""
    return sum(end - start for start, end in merged(intervals))


def within(span: Interval, windows: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the interval `span` that lie inside `windows`."""
    span_start, span_end = span
    pieces = []
    for window_start, window_end in windows:
        start = max(span_start, window_start)
        end = min(span_end, window_end)
        if start < end:
            pieces.append((start, end))
    return pieces


def device_time(spans: Sequence[Span], steps: Sequence[Interval]) -> Traced:
    """Return a device's times in an average step, as a Traced without operators.

    `spans` are those of the device's operators. `steps`, the intervals of the traced steps, must
    not be empty.
    """
    intervals: dict[Kind, list[Interval]] = {"computing": [], "communication": []}
    for span in spans:
        intervals[span.kind] += within((span.start, span.end), steps)
    microseconds_to_ms = 1000 * len(steps)  # also divides the sum over all steps by their number
    computing = length(intervals["computing"])
    communication = length(intervals["communication"])
    busy = length(intervals["computing"] + intervals["communication"])
    total = length(steps)
    return Traced(
        step_ms=total / microseconds_to_ms,
        computing_ms=computing / microseconds_to_ms,
        communication_ms=communication / microseconds_to_ms,
        exposed_ms=(busy - computing) / microseconds_to_ms,
        idle_ms=(total - busy) / microseconds_to_ms,
    )


def top(times: Times, steps: int, count: int = 15) -> list[Operator]:
    """Return the `count` slowest operators of an average step, slowest first.

    `times` are totals over `steps` steps. Operators that took no time are left out.
    """
    operators = []
    for name, (calls, microseconds) in times.items():
        if microseconds > 0:
            ms = microseconds / 1000
            operators.append(Operator(name, calls / steps, ms / steps))
    operators.sort(key=lambda operator: -operator.ms)
    return operators[:count]


def total_times(spans: Iterable[Span]) -> Times:
    """Return a dict from each operator's name to its number of calls and total microseconds."""
    times: Times = {}
    for span in spans:
        calls, microseconds = times.get(span.name, (0, 0.0))
        times[span.name] = (calls + 1, microseconds + span.end - span.start)
    return times


# --- tables --------------------------------------------------------------------------------------


def _percent(ms: float, total_ms: float) -> str:
    return f"{100 * ms / total_ms:.1f} %" if total_ms else "-"


def parts_table(step_parts: Sequence[StepPart], ranks: int, on_host: bool) -> str:
    """Return a text table with a line for each part of a step and one for the whole step.

    The host column is omitted if `on_host` is true (the device is a CPU), and the slowest-rank
    column if there is only one rank.
    """
    step = StepPart(
        "step",
        sum(step_part.ms for step_part in step_parts),
        sum(step_part.host_ms for step_part in step_parts),
        sum(step_part.slowest_ms for step_part in step_parts),
    )
    header = f"{'part of a step':<18}{'ms':>10}{'share':>9}"
    if not on_host:
        header += f"{'host ms':>10}"
    if ranks > 1:
        header += f"{'slowest rank':>14}"
    lines = [header]
    for row in (*step_parts, step):
        line = f"{row.name:<18}{row.ms:>10.2f}{_percent(row.ms, step.ms):>9}"
        if not on_host:
            line += f"{row.host_ms:>10.2f}"
        if ranks > 1 and row is not step:
            line += f"{row.slowest_ms:>14.2f}"
        lines.append(line)
    return "\n".join(lines)


def traced_table(traced: Traced, on_host: bool) -> str:
    """Return a text table of the device's work in a traced step and of the slowest operators."""
    step_ms = traced.step_ms
    rows = (
        ("operators", traced.computing_ms),
        ("communication", traced.communication_ms),
        ("  not hidden", traced.exposed_ms),
        ("outside operators" if on_host else "idle", traced.idle_ms),
    )
    lines = [f"{'traced step':<18}{step_ms:>10.2f}"]
    for name, ms in rows:
        if ms or traced.communication_ms:
            lines.append(f"{name:<18}{ms:>10.2f}{_percent(ms, step_ms):>9}")
    lines += ["", f"{'calls':>9}{'ms a step':>11}{'share':>9}  operator"]
    for operator in traced.operators:
        share = _percent(operator.ms, step_ms)
        lines.append(f"{operator.calls:>9,.1f}{operator.ms:>11.2f}{share:>9}  {operator.name[:70]}")
    return "\n".join(lines)


def as_rows(step_parts: Sequence[StepPart]) -> list[dict[str, Any]]:
    """Return a list of table rows for the report, with a dict for each part of a step."""
    step_ms = sum(step_part.ms for step_part in step_parts)
    rows = []
    for step_part in step_parts:
        share = _percent(step_part.ms, step_ms)
        rows.append({"part of a step": step_part.name, "ms": step_part.ms, "share": share})
    return rows


def as_json(step_parts: Sequence[StepPart], traced: Traced | None) -> dict[str, Any]:
    """Return a step's parts and the trace as a dict that can be written as JSON."""
    return {
        "parts": [asdict(step_part) for step_part in step_parts],
        "traced": None if traced is None else asdict(traced),
    }


def report_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the profile of the stage in `folder` as table rows, or [] if there is no profile."""
    path = folder / FOLDER / FILE
    if not path.exists():
        return []
    content = read_json(path)
    return as_rows([StepPart(**fields) for fields in content["parts"]])

"""Tables of where time goes, compared with tables made by hand."""

import pytest

from nanochat.runtime import timeline
from nanochat.runtime.timeline import Operator, Span, StepPart, Traced


def test_time_is_counted_once_however_many_intervals_hold_it() -> None:
    intervals = [(4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (4.5, 5.0), (6.0, 7.0)]
    assert timeline.merged(intervals) == [(0.0, 3.0), (4.0, 7.0)]
    assert timeline.length(intervals) == 6.0
    assert timeline.length([]) == 0.0


def test_only_what_lies_in_the_steps_counts() -> None:
    assert timeline.within((1.0, 10.0), [(0.0, 2.0), (4.0, 6.0), (9.0, 20.0), (30.0, 40.0)]) == [
        (1.0, 2.0), (4.0, 6.0), (9.0, 10.0),
    ]  # fmt: skip


def test_communication_beside_computing_is_hidden_and_the_rest_is_idle() -> None:
    spans = [
        Span("mm", 1000, 4000),
        Span("all_gather", 3000, 5000, "communication"),  # half of it hidden
        Span("mm", 11_000, 12_000),
        Span("validation", 20_000, 30_000),  # after the steps
    ]
    traced = timeline.device_time(spans, [(0, 10_000), (10_000, 16_000)])
    assert (traced.step_ms, traced.computing_ms, traced.communication_ms) == (8.0, 2.0, 1.0)
    assert (traced.exposed_ms, traced.idle_ms) == (0.5, 5.5)


def test_operators_are_ranked_by_their_time_in_a_step() -> None:
    times = timeline.total_times([Span("mm", 0, 3000), Span("add", 0, 500), Span("mm", 5000, 6000), Span("view", 1, 1)])
    assert timeline.top(times, steps=2) == [Operator("mm", 1.0, 2.0), Operator("add", 0.5, 0.25)]
    assert timeline.top(times, steps=2, count=1) == [Operator("mm", 1.0, 2.0)]


PARTS = [StepPart("forward", 30.0, 20.0, 31.0), StepPart("backward", 70.0, 60.0, 90.0)]


@pytest.mark.parametrize(
    ("ranks", "on_host", "line", "total"),
    [
        (1, True, "backward               70.00   70.0 %", "step                  100.00  100.0 %"),
        (
            1,
            False,
            "backward               70.00   70.0 %     60.00",
            "step                  100.00  100.0 %     80.00",
        ),
        (2, True, "backward               70.00   70.0 %         90.00", "step                  100.00  100.0 %"),
    ],
)
def test_parts_are_shown_with_what_there_is_to_compare(ranks: int, on_host: bool, line: str, total: str) -> None:
    lines = timeline.parts_table(PARTS, ranks, on_host).splitlines()
    assert lines[2:] == [line, total]
    assert ("host ms" in lines[0], "slowest rank" in lines[0]) == (not on_host, ranks > 1)


def test_a_trace_is_shown_with_its_operators() -> None:
    traced = Traced(10.0, 6.0, 3.0, 1.0, 3.0, [Operator("x" * 100, 12.0, 5.0)])
    text = timeline.traced_table(traced, on_host=False)
    assert [line.split()[-2] for line in text.splitlines()[1:5]] == ["60.0", "30.0", "10.0", "30.0"]
    assert "idle" in text and "outside operators" in timeline.traced_table(traced, on_host=True)
    assert "communication" not in timeline.traced_table(Traced(10.0, 6.0, 0.0, 0.0, 4.0), on_host=True)
    assert text.splitlines()[-1] == "     12.0       5.00   50.0 %  " + "x" * 70

"""The roofline against the runs that others have published."""

import pytest

from nanochat.planner.published import RUNS, Run


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.who}-d{run.depth}-{run.source.split()[-1]}")
def test_the_published_runs_are_met_within_15_percent(run: Run) -> None:
    assert abs(run.off) < 0.15, f"{run.predicted():,.0f} tokens/s, published {run.tokens_per_second:,.0f}"


@pytest.mark.parametrize(
    ("number", "mfu"), [(0, 0.267), (1, 0.158), (2, 0.189), (3, 0.500)]
)  # as their authors or the guides give them
def test_the_published_utilisation_follows_from_the_published_time(number: int, mfu: float) -> None:
    assert RUNS[number].mfu(RUNS[number].tokens_per_second) == pytest.approx(mfu, abs=0.002)

"""The roofline against the runs that others have published."""

import pytest

from nanochat.planner.plan import OF_COUNTED, OF_PUBLISHED
from nanochat.planner.published import FITTED, RUNS, Run, spread


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.who}-d{run.depth}-{run.source.split()[-1]}")
def test_the_published_runs_are_met_within_15_percent(run: Run) -> None:
    assert abs(run.off) < 0.15, f"{run.predicted():,.0f} tokens/s, published {run.tokens_per_second:,.0f}"


@pytest.mark.parametrize(
    ("number", "mfu"), [(0, 0.267), (1, 0.158), (2, 0.189), (3, 0.500)]
)  # as their authors or the guides give them
def test_the_published_utilisation_follows_from_the_published_time(number: int, mfu: float) -> None:
    assert RUNS[number].mfu(RUNS[number].tokens_per_second) == pytest.approx(mfu, abs=0.002)


def test_few_constants_were_fitted_to_the_runs_and_the_errors_lie_on_both_sides() -> None:
    assert len(FITTED) <= len(RUNS) // 2
    assert min(run.off for run in RUNS) < 0 < max(run.off for run in RUNS)
    assert spread() < OF_PUBLISHED / 100 < OF_COUNTED / 100

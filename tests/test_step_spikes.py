"""The limit on sudden gradients: what it lets through, what it stops, and that it always gives way."""

import json
import random

import pytest

from nanochat.step import SIGMAS, WINDOW, Spikes


def filled(seed: int = 0) -> Spikes:
    """128 norms around 1 with a standard deviation of 0.1."""
    draw = random.Random(seed)
    return Spikes([draw.gauss(1, 0.1) for _ in range(WINDOW)])


def test_six_sigma_is_the_limit() -> None:
    mean = sum(filled().norms) / WINDOW
    sigma = (sum((norm - mean) ** 2 for norm in filled().norms) / WINDOW) ** 0.5
    assert not filled().is_spike(mean + 0.999 * SIGMAS * sigma)
    assert filled().is_spike(mean + 1.001 * SIGMAS * sigma)
    assert not filled().is_spike(0.0)  # small ones harm nobody


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    spikes = Spikes(filled().norms[:-1])
    assert not spikes.is_spike(1e9)
    assert len(spikes.norms) == WINDOW


@pytest.mark.parametrize("level", [2.0, 10.0, 1e6])
def test_gradients_that_stay_larger_are_let_through_soon(level: float) -> None:
    """Ten skipped steps in a row would stop the run."""
    spikes = filled()
    skipped = [spikes.is_spike(level * (1 + 0.01 * i)) for i in range(20)]
    assert skipped[0] and sum(skipped) <= 5 and not any(skipped[5:])


def test_the_window_moves() -> None:
    spikes = filled()
    spikes.is_spike(1000.0)
    assert not spikes.is_spike(2.0)  # after a spike the limit is wide
    for norm in filled(1).norms:
        spikes.is_spike(norm)
    assert len(spikes.norms) == WINDOW and spikes.is_spike(2.0)


def test_the_window_survives_a_stop_exactly() -> None:
    spikes = filled()
    kept = json.loads(json.dumps({"norms": spikes.norms}))
    assert Spikes.start(kept) == spikes
    assert Spikes.start({}) == Spikes([])

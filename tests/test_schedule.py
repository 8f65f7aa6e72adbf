"""Schedules against tables computed by hand; the rules for batch, rate, decay and the split of a step."""

import math

import pytest

from nanochat import schedule
from nanochat.common import UserError

MILLION = 10**6


# --- how long ------------------------------------------------------------------------------------


def test_the_horizon_of_a_flop_budget() -> None:
    """3e12 FLOPs at 1e6 a token are 3e6 tokens: 300 steps of 10,000."""
    assert schedule.steps_for_flops(3e12, MILLION, 10_000) == 300
    assert schedule.steps_for_flops(1.0, MILLION, 10_000) == 1


def test_the_horizon_of_tokens_per_parameter() -> None:
    """12 tokens for each of 1e6 parameters: 1,200 steps of 10,000, 1,171 whole ones of 10,240."""
    assert schedule.steps_for_ratio(12, MILLION, 10_000) == 1200
    assert schedule.steps_for_ratio(12, MILLION, 10_240) == 1171
    assert schedule.steps_for_ratio(0.001, MILLION, 10_240) == 1


# --- how large -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "expected"),
    # 2^19 x ratio^0.383, to a power of two: 4^.383 = 2^0.77, 2^.383 = 2^0.38, 64^.383 = 2^2.3, 1000^-.383 = 2^-3.8
    [(1, 2**19), (4, 2**20), (2, 2**19), (64, 2**21), (1 / 4, 2**18), (1 / 1000, 2**15)],
)
def test_the_batch_grows_as_a_power_of_the_horizon(ratio: float, expected: int) -> None:
    assert schedule.batch_tokens(ratio * 1.3e9, 1.3e9) == expected


@pytest.mark.parametrize(
    ("ranks", "rows"),  # 256 rows a step: 36.6, 42.7, 51.2, 85.3, 32, 16 and 15.1 of a rank
    [(7, 40), (6, 40), (5, 48), (3, 88), (8, 32), (16, 16), (17, 15), (1000, 1)],
)
def test_a_ranks_rows_divide_into_passes_of_several(ranks: int, rows: int) -> None:
    assert schedule.shared_tokens(2**19, 2048 * ranks) == rows * 2048 * ranks


def test_a_horizon_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="target_param_data_ratio must be above 0"):
        schedule.batch_tokens(0.0, 1e9)


@pytest.mark.parametrize(("tokens", "factor"), [(4096, 1.0), (2**19, 1.0), (2**21, 2.0), (2**20, math.sqrt(2))])
def test_learning_rates_grow_with_large_batches_and_stay_for_small_ones(tokens: int, factor: float) -> None:
    assert schedule.rate_scale(tokens) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("tokens_per_step", "horizon", "expected"),
    [
        (2**19, 1e9, 0.28),  # the reference itself
        (2**19, 4e9, 0.07),  # four times the run, a quarter of the decay
        (2**21, 1e9, 0.56),  # from the reference up: the square root, as published
        (2**17, 1e9, 0.07),  # below it the rate stays and the decay falls with the batch: B / (rate decay D) constant
        (2**19, 1e8, 0.56),  # never above twice the base
    ],
)
def test_decay_keeps_its_share_of_the_run(tokens_per_step: int, horizon: float, expected: float) -> None:
    decay = schedule.weight_decay(0.28, tokens_per_step, horizon, 1e9)
    assert decay == pytest.approx(expected)
    if decay < 0.56:
        constant = tokens_per_step / (schedule.rate_scale(tokens_per_step) * decay * horizon)
        assert constant == pytest.approx(2**19 / (0.28 * 1e9))


def test_a_short_run_decays_less() -> None:
    assert schedule.is_short(1.9e6, 10**6) and not schedule.is_short(2e6, 10**6)
    assert schedule.weight_decay(0.3, 2**19, 1e8, 1e9, short=True) == pytest.approx(0.2)
    assert schedule.weight_decay(0.3, 2**19, 4e9, 1e9, short=True) == pytest.approx(0.075)


# --- step by step --------------------------------------------------------------------------------


def test_the_trapezoid_by_hand() -> None:
    """20 steps: 4 up, then flat, the last 10 down to 0.1: at step 10 all ten are left, at step 19 one."""
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1, 1.0, 0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.37, 0.28, 0.19]
    assert [schedule.trapezoid(i, 20, 4, 0.5, 0.1) for i in range(20)] == pytest.approx(expected)


def test_a_trapezoid_without_ends_is_flat() -> None:
    assert {schedule.trapezoid(i, 5, 0, 0.0, 0.0) for i in range(5)} == {1.0}


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_short_runs_never_have_a_rate_outside_0_and_1(steps: int) -> None:
    warmup = schedule.warmup_steps(None, steps)
    assert all(0 < schedule.trapezoid(i, steps, warmup, 0.65, 0.05) <= 1 for i in range(steps))


@pytest.mark.parametrize(
    ("asked", "steps", "expected"),
    [(None, 10_000, 40), (None, 800, 40), (None, 200, 10), (None, 3, 1), (7, 100, 7), (0, 9, 0)],
)
def test_warmup_is_as_asked_else_at_most_a_twentieth(asked: int | None, steps: int, expected: int) -> None:
    assert schedule.warmup_steps(asked, steps) == expected


def test_momentum_by_hand() -> None:
    """10,000 steps: .85 to .97 over 400, flat to 3,500, then to .90 at the end."""
    table = {0: 0.85, 100: 0.88, 200: 0.91, 400: 0.97, 3000: 0.97, 3500: 0.97, 6750: 0.935, 9999: 0.90 + 0.07 / 6500}
    assert {i: schedule.momentum(i, 10_000, 0.65) for i in table} == pytest.approx(table)


def test_momentum_of_a_short_run_rises_over_a_quarter_and_spans_a_twentieth() -> None:
    """200 steps: 1 - 20 / 200 at most, 0.05 less at the end; 400: 0.95, then 0.90; 80 steps: 0.85 throughout."""
    table = {0: 0.85, 25: 0.875, 50: 0.90, 100: 0.90, 150: 0.875, 200: 0.85}
    assert {i: schedule.momentum(i, 200, 0.5) for i in table} == pytest.approx(table)
    table = {0: 0.85, 50: 0.90, 100: 0.95, 200: 0.95, 300: 0.925, 400: 0.90}
    assert {i: schedule.momentum(i, 400, 0.5) for i in table} == pytest.approx(table)
    assert {schedule.momentum(i, 80, 0.5) for i in range(80)} == {0.85}
    assert schedule.momentum(0, 1, 0.65) == pytest.approx(0.85)


def test_the_decay_factor_is_a_half_cosine() -> None:
    assert [schedule.decay_factor(i, 8) for i in (0, 2, 4, 6, 8)] == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]
    )


# --- the split of a step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "device_batch_size", "world_size", "expected"),
    [
        (32, 8, 8, (4, 1)),  # 8 ranks x 8 rows would exceed the step: lowered to 4
        (32, 8, 1, (8, 4)),
        (32, 8, 2, (8, 2)),
        (12, 8, 1, (6, 2)),  # 8 does not divide 12
        (7, 4, 1, (1, 7)),  # a prime share
        (1, 1, 1, (1, 1)),
    ],
)
def test_a_step_is_split_evenly(rows: int, device_batch_size: int, world_size: int, expected: tuple[int, int]) -> None:
    per_pass, passes = schedule.micro_batches(rows * 256, 256, device_batch_size, world_size)
    assert (per_pass, passes) == expected
    assert per_pass * passes * world_size == rows


@pytest.mark.parametrize(("tokens", "world_size"), [(4096 + 1, 1), (3 * 256, 2), (100, 1), (0, 1), (-256, 1)])
def test_a_step_that_leaves_a_remainder_is_refused(tokens: int, world_size: int) -> None:
    with pytest.raises(UserError, match=f"multiple of {256 * world_size:,} .* got {tokens:,}") as refused:
        schedule.micro_batches(tokens, 256, 8, world_size)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("size", [0, -4])
def test_a_pass_of_no_rows_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"device_batch_size must be at least 1, got {size}"):
        schedule.micro_batches(4096, 256, size, 1)


def test_scalars_keep_the_square_root_below_the_reference_batch() -> None:
    assert schedule.scalar_scale(2**19) == schedule.scalar_scale(2**21) == 1.0
    assert schedule.scalar_scale(2**17) == pytest.approx(0.5)
    assert schedule.scalar_scale(4096) * schedule.rate_scale(4096) == pytest.approx((4096 / 2**19) ** 0.5)


@pytest.mark.parametrize(("steps", "factor"), [(1, 2.0), (200, 2.0), (300, 4 / 3), (400, 1.0), (100_000, 1.0)])
def test_matrices_go_further_in_a_step_of_a_short_run(steps: int, factor: float) -> None:
    assert schedule.matrix_scale(steps) == pytest.approx(factor)


@pytest.mark.parametrize(("steps", "beta"), [(1, 0.0), (200, 0.0), (400, 0.5), (1000, 0.8), (100_000, 0.8)])
def test_tables_average_over_a_small_part_of_a_short_run(steps: int, beta: float) -> None:
    assert schedule.table_momentum(steps) == pytest.approx(beta)

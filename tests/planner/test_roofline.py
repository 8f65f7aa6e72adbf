"""The roofline: work counted by hand, at round rates."""

from dataclasses import replace

import pytest

from nanochat import device
from nanochat.planner.cards import RATINGS, SHAPES, rates_of
from nanochat.planner.programs import COMPILED, FUSED, PROGRAMS, program_of
from nanochat.planner.roofline import exchange, least_rows, pass_of, step_of
from nanochat.planner.work import attention_flops, keys, matmul_flops, muon_flops, size_of
from tests.planner.support import SLOW, Kind

D12 = size_of(12, 32768)

# From the reports of the published runs: leideng's of d20 and d32 with full windows, upstream's of d24 with today's.
PUBLISHED_SIZES = [
    (20, "L", 896_535_720, 3.240119e9),
    (32, "L", 2_818_580_544, 1.167699e10),
    (24, "SSSL", 1_384_124_976, 4.775e9),
]


@pytest.mark.parametrize(("depth", "pattern", "parameters", "flops"), PUBLISHED_SIZES)
def test_parameters_and_flops_equal_the_published_ones(depth: int, pattern: str, parameters: int, flops: float) -> None:
    size = size_of(depth, 32768, pattern, upstream=True)
    assert size.parameters == pytest.approx(parameters, rel=1e-5)
    assert size.flops_per_token == pytest.approx(flops, rel=5e-4)


def test_a_causal_window_shows_its_keys_but_for_the_start_of_a_row() -> None:
    size = size_of(4, 32768)  # windows 512, 512, 512 and 2048 of 2048
    by_hand = sum(min(place, window) for window in (512, 512, 512, 2048) for place in range(2048)) / 2048
    assert keys(size) == pytest.approx(by_hand, rel=1e-3)
    assert keys(size, shortest=2048) == 4 * 1024
    assert attention_flops(size) == 14 * 256 * keys(size)


def test_the_flops_of_muon_are_those_of_its_matmuls() -> None:
    dim = D12.shape.n_embd
    wide = 2 * dim * dim * 4 * dim  # (C, 4C) times its transpose
    square = 2 * dim**3
    assert muon_flops(D12) == 12 * 5 * (4 * 3 * square + 2 * (2 * wide + square))


def test_a_pass_adds_matmuls_attention_and_bytes_beside_launches() -> None:
    took = pass_of(D12, 2, SLOW, FUSED)
    tokens = 2 * 2048
    assert took.matmul == pytest.approx(tokens * 6 * D12.scaling / 1e12)
    assert took.attention == pytest.approx(tokens * attention_flops(D12) / 0.5e12)
    traffic = FUSED.traffic
    by_hand = tokens * ((247 + 54) * 12 * 768 + 149 * 768 + 55 * 32768 + 0.012 * 32768 * 768) + 11 * D12.scaling
    assert took.vector == pytest.approx((by_hand + 16 * D12.tables) / 1e9) and traffic.table == 16
    assert took.host == pytest.approx((12 * (47.5 + 11) + 101) * 1e-3)
    assert took.card == took.matmul + took.attention + took.vector and took.seconds == max(took.card, took.host)


def test_matmuls_in_fp32_take_the_rate_of_fp32() -> None:
    half = pass_of(D12, 1, SLOW, replace(FUSED, full=0.5))
    assert half.matmul == pytest.approx(2048 * matmul_flops(D12) * (0.5 / 1e12 + 0.5 / 0.25e12))


def test_the_cards_of_a_server_share_a_copy_and_servers_sum_gradients() -> None:
    assert exchange(D12, 1, SLOW, FUSED) == 0
    within = 7 / 8 * (6 * D12.parameters + 4 * D12.matrices / 8) / 1e9
    assert exchange(D12, 8, SLOW, FUSED) == pytest.approx(within)
    between = 1 / 2 * (8 * D12.parameters + 2 * D12.matrices) / 8 / 0.1e9
    assert exchange(D12, 16, SLOW, FUSED) == pytest.approx(within + between)


def test_a_step_is_its_passes_and_then_the_optimizer_and_the_exchange() -> None:
    step = step_of(D12, 2, 3, 8, SLOW, FUSED)
    one = pass_of(D12, 2, SLOW, FUSED)
    assert step.seconds == pytest.approx(3 * one.seconds + step.optimizer + step.exchange)
    assert step.tokens == 3 * 2 * 8 * 2048 and step.tokens_per_second == pytest.approx(step.tokens / step.seconds)
    assert step.optimizer == pytest.approx(
        muon_flops(D12) / 8 / 1e12 + (106 * D12.matrices + 32 * (D12.tables + D12.head)) / 8 / 1e9
    )


@pytest.mark.parametrize("launch", [1e-6, 1e-3, 0.5])
def test_the_least_rows_are_the_first_that_keep_the_card_busy(launch: float) -> None:
    rates = replace(SLOW, launch=launch, vector=1e12, matmul=1e14, attention=1e14)
    rows = least_rows(D12, rates, FUSED)
    assert pass_of(D12, rows, rates, FUSED).compute_bound
    assert rows == 1 or not pass_of(D12, rows // 2, rates, FUSED).compute_bound


def test_every_chip_with_a_peak_has_a_rating_and_no_program_is_named_in_vain() -> None:
    assert {chip.name for chip in device.planned() if chip.trains} == set(RATINGS)
    assert set(PROGRAMS) <= set(RATINGS)
    assert program_of("910B3") is FUSED and program_of("H100") is COMPILED


def test_rates_come_from_the_peak_and_the_data_sheet_and_unknown_cards_have_none() -> None:
    rates = rates_of(Kind("910B3", 313, 64))
    assert rates is not None and rates.matmul == pytest.approx(SHAPES * 0.87 * 313e12)
    assert rates.vector == pytest.approx(0.8 * 1.6e12) and rates.server == 8
    assert rates_of(Kind("910B3", 0, 64)) is None and rates_of(Kind("SoC 999", 300, 64)) is None

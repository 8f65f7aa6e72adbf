"""The benchmark of training: upstream's rules and figures by hand, and both sides at tiny sizes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.processes import Steps
from bench.train import __main__ as train
from bench.train import ranks
from bench.train.__main__ import Config
from bench.train.side import Side, bits_per_byte, upstream_factors
from bench.train.variants import Plan, Variant, flops_per_token
from bench.training import D4, Trainer
from nanochat.step import Spikes
from tests.bench.fakes import TINY, fake_upstream, tiny_plan
from tests.support.tiny_model import on_cpu, tiny_gpt

EAGER = Variant("ours", "float32")
UPSTREAM = Variant("upstream", "float32")


def test_bits_per_byte_counts_text_and_no_special_token() -> None:
    """Tokens 0, 1 and 2 have 0, 1 and 3 bytes; a target costs one bit more than its id."""
    side = Side(
        lambda passes: 0.0,
        lambda number, steps: None,
        lambda inputs, targets: (targets + 1.0) * math.log(2),
        0,
    )
    rows = np.array([[1, 2, 0, 1], [0, 0, 2, 2], [2, 1, 1, 1]], np.uint16)
    bits = (3 + 2) + (3 + 3) + (2 + 2 + 2)
    text_bytes = (3 + 1) + (3 + 3) + 3
    for size in (1, 2, 3):
        counted = bits_per_byte(side, rows, np.array([0, 1, 3]), size)
        assert counted == pytest.approx(bits / text_bytes)


def test_upstreams_schedules_by_hand() -> None:
    """Rates rise for 40 steps and fall to 0.05; momentum rises to 0.97 and falls to 0.90."""
    assert upstream_factors(0, 200) == (1 / 40, 0.85, 1.0)
    assert upstream_factors(39, 200)[0] == 1.0 == upstream_factors(70, 200)[0]
    decay = 0.5 * (1 + math.cos(math.pi * 0.675))
    assert upstream_factors(135, 200) == pytest.approx((0.525, 0.8905, decay))
    assert upstream_factors(1000, 4000)[:2] == pytest.approx((1.0, 0.97))
    assert upstream_factors(2700, 4000)[:2] == pytest.approx((0.525, 0.935))


def test_flops_count_the_keys_that_windows_let_a_query_see() -> None:
    assert flops_per_token(D4) == 31_457_280
    windowed = replace(D4, window_pattern="SSSL")  # 128 keys in three layers
    assert flops_per_token(D4) - flops_per_token(windowed) == 12 * 256 * 3 * (512 - 128)


def test_a_spike_is_skipped_as_in_training_and_what_is_not_finite_measures_nothing() -> None:
    trainer = Trainer(tiny_gpt(64), on_cpu())
    passes = [(torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64))]
    first = trainer.step(passes)
    trainer.safeguards.spikes = Spikes([1e-9] * 128)
    skipped = trainer.step(passes)
    assert first > skipped == trainer.step(passes)  # the spike changed nothing
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(RuntimeError, match="not finite"):
        trainer.step(passes)


def test_figures_follow_from_medians_of_the_fastest_variants(tmp_path: Path) -> None:
    results = {
        EAGER: Steps(seconds=[8.0]),
        Variant("ours", "bfloat16", True): Steps(seconds=[5.0, 4.0, 1.0]),
        UPSTREAM: Steps(seconds=[10.0]),
        Variant("upstream", "bfloat16", True): Steps(seconds=[6.0]),
    }
    figures = train.figures(results, Plan(TINY, tmp_path, rows_per_step=4))
    assert figures == {
        "variant": "ours compiled bfloat16",
        "tokens_per_cpu_second": 64 / 4.0,
        "eager_tokens_per_cpu_second": 64 / 8.0,
        "vs_upstream_default": 2.5,
        "vs_upstream_best": 1.5,
    }


@pytest.mark.slow
def test_both_sides_train_in_turns_on_the_same_rows(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path / "rows", warmup=1)
    results = train.measure([EAGER, UPSTREAM], plan, 2, fake_upstream(tmp_path / "upstream"))
    for result in results.values():
        assert len(result.seconds) == 4
        assert len(result.losses) == 5
        assert result.losses[0] == pytest.approx(np.log(300), abs=0.02)
        assert result.losses[-1] < result.losses[0]
        assert result.peak_bytes > 10e6


def test_without_a_compiler_nothing_is_compiled() -> None:
    cfg = Config(upstream=Path("x"))
    for missing in ("", "no g++"):
        variants = train.variants(cfg, missing, "bfloat16")
        assert any(variant.compiled for variant in variants) == (not missing)
        assert UPSTREAM in variants


def test_wall_time_is_the_slowest_ranks_and_cpu_time_is_summed() -> None:
    slow = {"wall_seconds": 2.5, "cpu_seconds": 1.5}
    fast = {"wall_seconds": 2.0, "cpu_seconds": 2.5}
    assert ranks.median_step([[slow, fast]]) == ranks.Seconds(2.5, 4.0)


@pytest.mark.ranks
def test_two_ranks_are_measured_beside_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ranks, "D4", TINY)
    monkeypatch.setattr(ranks, "BIGRAM_ROWS", 0)
    ranks.main(ranks.Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["two_ranks_of_ideal"]) == {"apart", "grad"}
    assert min(result["two_ranks_of_ideal_cpu"].values()) > 0

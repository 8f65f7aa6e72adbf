"""What runs learn in bench.train: curves and upstream's schedules by hand, and real processes at tiny sizes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.train import quality
from bench.train.quality import Learned
from bench.train.side import Side, bits_per_byte, upstream_decay, upstream_factors
from bench.train.worker import Variant, measure
from tests.bench.train.test_train import fake_upstream, tiny_plan

OURS, THEIRS = Variant("ours", "bfloat16", True), Variant("upstream", "bfloat16", True)


def test_bits_per_byte_counts_text_and_no_special_token() -> None:
    """Tokens 1 and 2 have 1 and 3 bytes, token 0 has none; each target costs one bit more than its id."""
    side = Side(lambda number, batch: 0.0, lambda batch: (batch[1] + 1.0).flatten() * math.log(2), 0, dict, print)
    rows = np.array([[1, 2, 0, 1], [0, 0, 2, 2], [2, 1, 1, 1]], np.uint16)
    nats, size = [3 + 2, 3 + 3, 2 + 2 + 2], [3 + 1, 3 + 3, 3]
    for rows_per_pass in (1, 2, 3):
        got = bits_per_byte(side, rows, np.array([0, 1, 3]), rows_per_pass)
        assert got == pytest.approx(sum(nats) / sum(size))


def test_the_time_to_a_goal_lies_between_two_measurements() -> None:
    run = Learned([(10.0, 2.0), (20.0, 1.6), (30.0, 1.5)])
    assert quality.seconds_to(run, 2.5) == 10.0
    assert quality.seconds_to(run, 1.9) == pytest.approx(12.5)
    assert quality.seconds_to(run, 1.5) == 30.0
    assert quality.seconds_to(run, 1.49) is None


def test_figures_are_against_the_best_of_upstreams_runs() -> None:
    half = Variant("upstream", "bfloat16", True, 0.5)
    learned = {
        OURS: Learned([(10.0, 2.0), (20.0, 1.5)]),
        half: Learned([(39.0, 1.9)]),
        THEIRS: Learned([(40.0, 1.6)]),
    }
    assert quality.figures(learned) == {
        "bpb": 1.5, "bpb_minus_upstream_best": -0.1, "time_to_bpb_vs_upstream_best": 0.45,
    }  # fmt: skip
    learned[OURS] = Learned([(10.0, 2.0), (20.0, 1.7)])
    assert quality.figures(learned)["time_to_bpb_vs_upstream_best"] is None
    assert "x0.5" in quality.table(learned).splitlines()[2]


def test_upstream_runs_once_at_each_scale() -> None:
    assert quality.runs(OURS, THEIRS, (0.35, 1.0)) == [OURS, Variant("upstream", "bfloat16", True, 0.35), THEIRS]
    assert quality.runs(OURS, None, (0.35, 1.0)) == [OURS]


def test_upstreams_schedules_by_hand() -> None:
    """Rates rise for 40 steps and fall to 0.05 over the last 65 %; momentum rises to 0.97 and falls to 0.90."""
    assert upstream_factors(0, 200) == (1 / 40, 0.85, 1.0)
    assert upstream_factors(39, 200)[0] == 1.0 == upstream_factors(70, 200)[0]
    assert upstream_factors(135, 200) == pytest.approx((0.525, 0.8905, 0.5 * (1 + math.cos(math.pi * 0.675))))
    assert upstream_factors(1000, 4000)[:2] == (1.0, 0.97)
    assert upstream_factors(2700, 4000)[:2] == pytest.approx((0.525, 0.935))


def test_upstreams_decay_by_hand() -> None:
    """At the reference shape the horizons are equal, and a batch of 2^17 halves the decay."""
    shape = {"n_layer": 12, "n_embd": 768, "vocab_size": 4096}
    assert upstream_decay(shape, 2**19) == pytest.approx(0.28)
    assert upstream_decay(shape, 2**17) == pytest.approx(0.14)
    assert upstream_decay({**shape, "n_layer": 4, "n_embd": 256}, 2**19) == pytest.approx(0.28 * 88_080_384 / 4_194_304)


@pytest.mark.slow
def test_runs_learn_in_turns_by_their_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(quality, "TURNS", 3)
    plan = replace(tiny_plan(tmp_path / "rows"), horizon=6, warmup=0)
    variants = quality.runs(Variant("ours", "float32"), Variant("upstream", "float32"), (1.0, 40.0))
    learned = quality.learn(variants, plan, fake_upstream(tmp_path / "upstream"))
    own, slow, fast = learned.values()
    assert len(own.curve) == 2 and len(slow.curve) == len(fast.curve) == 1
    rows = np.load(tmp_path / "rows" / "rows.npy")[-4:, 1:].astype(np.int64)
    lengths = torch.from_numpy(np.load(tmp_path / "rows" / "token_bytes.npy").astype(np.int64))[torch.from_numpy(rows)]
    untrained = math.log2(300) * int((lengths > 0).sum()) / int(lengths.sum())
    assert fast.bits_per_byte < slow.bits_per_byte < untrained  # the rates of `fast` were scaled
    assert own.bits_per_byte < untrained
    assert own.curve[0][0] < own.curve[1][0] == own.seconds
    assert {"bpb", "bpb_minus_upstream_best", "time_to_bpb_vs_upstream_best"} == quality.figures(learned).keys()


@pytest.mark.slow
def test_memory_is_compared_on_the_rows_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    plan = tiny_plan(tmp_path / "rows")
    peer = fake_upstream(tmp_path / "upstream")
    result = quality.memory(Variant("ours", "float32"), Variant("upstream", "float32"), plan, peer)
    assert result["memory_rows"] == "4 rows of 16 tokens" and 0.2 < result["memory_vs_upstream"] < 5
    assert 0.2 < result["memory_by_default_vs_upstream"] < 5


def test_a_step_of_ours_may_take_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    variant, plan = Variant("ours", "float32"), tiny_plan(tmp_path / "rows")
    whole, split = (measure([variant], replace(plan, pass_rows=rows))[variant].losses for rows in (None, 1))
    assert split == pytest.approx(whole, abs=1e-4) and len(set(whole)) == len(whole)

"""The figures of a stage, their state over stops, and the clock of saves."""

import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.meter import Meter, SaveClock, step_line, step_note
from nanochat.step import Outcome
from tests.support.tiny_model import on_cpu

CPU = on_cpu()


# --- when to save --------------------------------------------------------------------------------


class Clock:
    """A clock that stands still unless moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(("cost", "seconds"), [(0.5, 60), (10.0, 300)])
def test_saves_are_a_minute_apart_and_costly_ones_further(
    cost: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    saves, switched_off = SaveClock(60.0), SaveClock(0.0)
    for passed, expected in ((0, False), (59.9, False), (60, True), (300, True)):
        clock.now = 1000 + passed
        assert saves.due(CPU) is expected
    saves.saved(cost)
    clock.now += seconds - 1
    assert not saves.due(CPU)
    clock.now += 1
    assert saves.due(CPU) and not switched_off.due(CPU)


def test_a_save_waits_for_the_last_one_and_reports_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    saves = SaveClock(60.0)
    clock.now += 1e3
    assert saves.due(CPU) and not saves.due(CPU, busy=True)
    saves.saved(cost=0.5)
    assert not saves.due(CPU) and saves.due(CPU, failed=True)


def meter(**changes: Any) -> Meter:
    return Meter(
        **{"steps": 100, "tokens_per_step": 1000, "flops_per_token": 10**6, "peak": 1e9, "usual_mfu": 0.4, **changes}
    )


# --- the meter -----------------------------------------------------------------------------------


def test_the_smooth_loss_is_a_debiased_average() -> None:
    m, losses = meter(), [4.0, 3.0, 2.0, 5.0]
    for step, loss in enumerate(losses, 1):
        line = m.tick(step, Outcome(loss, 1.0, False), 0.5, 0.4, 1.0)
        weights = [0.1 * 0.9 ** (step - 1 - i) for i in range(step)]
        expected = sum(w * x for w, x in zip(weights, losses, strict=False)) / sum(weights)
        assert line["smooth_loss"] == pytest.approx(expected)
    assert line["loss"] == 5.0


def test_speed_utilisation_and_time_left() -> None:
    m = meter()
    line = m.tick(1, Outcome(2.0, 1.0, False), 0.5, 0.3, 1.0)
    assert line["tokens_per_second"] == 2000
    assert line["mfu"] == pytest.approx(100 * 2000 * 1e6 / 1e9)
    assert (line["total_seconds"], line["seconds"], line["cpu_seconds"]) == (0.5, 0.5, 0.3)
    assert m.eta(1) == pytest.approx(99 * 0.5)
    for step in range(2, 23):
        m.tick(step, Outcome(2.0, 1.0, False), 2.0, 1.0, 1.0)
    assert m.eta(22) == pytest.approx(78 * 2.0)  # the first, quick step is older than the last twenty
    assert m.seconds == pytest.approx(42.5)


def test_a_meter_goes_on_where_it_was(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_PEAK_TFLOPS", "0.5")
    begun = Meter.start(100, 1000, 10**6, replace(CPU, world_size=2), {})
    assert begun.peak == 1e12  # of both ranks
    assert begun.usual_mfu == CPU.platform.usual_mfu()
    assert "0.5 TFLOP/s a rank (NANOCHAT_PEAK_TFLOPS)" in capsys.readouterr().out
    for step, loss in ((1, 4.0), (2, float("nan")), (3, 3.0)):
        begun.tick(step, Outcome(loss, 1.0, math.isnan(loss)), 0.5, 0.4, 1.0)
    kept = json.loads(json.dumps({"meter": begun.state()}))
    resumed = Meter.start(100, 1000, 10**6, replace(CPU, world_size=2), kept)
    assert (resumed.smooth, resumed.seconds, resumed.skipped) == (begun.smooth, begun.seconds, 1)
    lines = [m.tick(4, Outcome(2.0, 1.0, False), 0.5, 0.4, 1.0) for m in (begun, resumed)]
    assert lines[0] == lines[1]


def test_skipped_steps_do_not_enter_the_average(capsys: pytest.CaptureFixture[str]) -> None:
    m = meter()
    m.tick(1, Outcome(2.0, 1.0, False), 1, 1, 1.0)
    line = m.tick(2, Outcome(float("nan"), float("inf"), True), 1, 1, 1.0)
    assert line["smooth_loss"] == pytest.approx(2.0)
    assert line["skipped"] and m.skipped == 1
    assert "step 2: loss nan, gradient norm inf: not finite, update skipped" in capsys.readouterr().err


def test_ten_bad_steps_in_a_row_stop_the_run() -> None:
    m, bad = meter(), Outcome(float("nan"), 1.0, True)
    for step in range(1, 10):
        m.tick(step, bad, 1, 1, 1.0)
    m.tick(10, Outcome(2.0, 1.0, False), 1, 1, 1.0)  # a good one begins the count again
    for step in range(11, 20):
        m.tick(step, bad, 1, 1, 1.0)
    with pytest.raises(UserError, match=r"10 updates in a row were skipped, the last at step 20 .*--resume=none"):
        m.tick(20, bad, 1, 1, 1.0)


def test_the_time_of_a_run_is_expected_from_the_peak_and_on_resuming_from_its_pace() -> None:
    # 1,000 tokens of 1 MFLOP at 40 % of 1 GFLOP/s take 2.5 s
    assert meter().expected(0) == pytest.approx(250)
    assert meter(seconds=40.0).expected(20) == pytest.approx(160)


LINE = {
    "step": 1000, "loss": 2.9876, "smooth_loss": 3.4561, "lrm": 1.0, "seconds": 0.1805,
    "tokens_per_second": 90847.2, "mfu": 1.352, "total_seconds": 192.0,
}  # fmt: skip


def test_a_step_is_printed_in_the_published_format() -> None:
    assert step_line(LINE, 5000, 600) == (
        "step 01000/05000 (20.00%) | loss: 3.456 (this step: 2.988) | lrm: 1.00 | dt: 180.5ms | tok/sec: 90,847 | "
        "mfu: 1.35 | total time: 3 min 12 s | eta: 10 min"
    )


def test_the_note_beside_the_bar_says_step_loss_pace_and_time_left() -> None:
    assert step_note(LINE, 5000, 600) == "1000/5000 loss 3.456 (this step 2.988) 90,847 tok/s, 10 min left"

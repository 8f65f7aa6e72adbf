"""What a stage carries from step to step: figures, lines, bars, the clock of saves, and their state over stops."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.runtime.tracking import read_metrics
from nanochat.train import loop
from nanochat.train.loop import LossScale, Meter, Outcome, SaveClock, Stage, StageFlags, step_line, step_note

CPU = Compute(torch.device("cpu"), "cpu", "gloo", 0, 0, 1, torch.float32, "test")
FP16 = replace(CPU, dtype=torch.float16)


# --- when to save --------------------------------------------------------------------------------


class Clock:
    """A clock that stands still unless moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(loop.time, "monotonic", lambda: self.now)


def test_saves_are_a_minute_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    saves = SaveClock(60.0)
    for passed, expected in ((0, False), (59.9, False), (60, True), (300, True)):
        clock.now = 1000 + passed
        assert saves.due(CPU) is expected
    saves.saved(cost=0.5)
    clock.now += 59
    assert not saves.due(CPU)
    clock.now += 1
    assert saves.due(CPU)


def test_costly_saves_are_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    saves = SaveClock(60.0)
    saves.saved(cost=10.0)
    clock.now += 299
    assert not saves.due(CPU)
    clock.now += 1
    assert saves.due(CPU)


def test_no_saves_by_time_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    saves = SaveClock(0.0)
    clock.now += 1e9
    assert not saves.due(CPU)


def meter(**changes: Any) -> Meter:
    return Meter(**{"steps": 100, "tokens_per_step": 1000, "flops_per_token": 10**6, "peak": 1e9, **changes})


def test_a_stage_saves_at_its_end_by_step_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stage = Stage("base", tmp_path, StageFlags(save_every=20), meter(), 0, CPU)
    assert [step for step in range(1, 101) if stage.save_due(step)] == [20, 40, 60, 80, 100]
    clock.now += 61
    assert stage.save_due(7)
    stage.close()
    stage = Stage("base", tmp_path, StageFlags(stop_at=30), meter(), 0, CPU)
    assert stage.stop == 30
    assert [step for step in range(1, 31) if stage.save_due(step)] == [30]
    stage.close()
    assert Stage("base", tmp_path, StageFlags(stop_at=500), meter(), 0, CPU).stop == 100


# --- the meter -----------------------------------------------------------------------------------


def test_the_smooth_loss_is_a_debiased_average() -> None:
    m, losses = meter(), [4.0, 3.0, 2.0, 5.0]
    for step, loss in enumerate(losses, 1):
        line = m.tick(step, Outcome(loss, 1.0, False), 0.5, 0.4, 1.0)
        weights = [0.1 * 0.9 ** (step - 1 - i) for i in range(step)]
        expected = sum(w * x for w, x in zip(weights, losses, strict=False)) / sum(weights)
        assert line["smooth_loss"] == pytest.approx(expected)
    assert line["loss"] == 5.0


def test_a_constant_loss_is_smooth_from_the_first_step() -> None:
    m = meter()
    assert [m.tick(i, Outcome(2.5, 1.0, False), 1, 1, 1.0)["smooth_loss"] for i in (1, 2, 3)] == pytest.approx(
        [2.5] * 3
    )


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
    assert "0.5 TFLOP/s a rank (NANOCHAT_PEAK_TFLOPS)" in capsys.readouterr().out
    for step, loss in ((1, 4.0), (2, float("nan")), (3, 3.0)):
        begun.tick(step, Outcome(loss, 1.0, math.isnan(loss)), 0.5, 0.4, 1.0)
    kept = json.loads(json.dumps(loop.state(begun, LossScale(), {"step": 3})))
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
    m.tick(10, Outcome(2.0, 1.0, False), 1, 1, 1.0)  # a good one begins the count anew
    for step in range(11, 20):
        m.tick(step, bad, 1, 1, 1.0)
    with pytest.raises(UserError, match="10 updates in a row were skipped, the last at step 20"):
        m.tick(20, bad, 1, 1, 1.0)


LINE = {
    "step": 1000, "smooth_loss": 3.4561, "lrm": 1.0, "seconds": 0.1805, "tokens_per_second": 90847.2, "mfu": 1.352,
    "total_seconds": 192.0,
}  # fmt: skip


def test_a_step_is_printed_in_the_published_format() -> None:
    assert step_line(LINE, 5000, 600) == (
        "step 01000/05000 (20.00%) | loss: 3.456 | lrm: 1.00 | dt: 180.5ms | tok/sec: 90,847 | mfu: 1.35 | "
        "total time: 3.2m | eta: 10.0m"
    )


def test_the_note_beside_the_bar_says_step_loss_pace_and_time_left() -> None:
    assert step_note(LINE, 5000, 600) == "1000/5000 loss 3.456 90,847 tok/s, 10.0 min left"


def test_a_stage_prints_one_line_a_step_on_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, lines in ((0, 3), (1, 0)):
        stage = Stage("base", tmp_path, StageFlags(), meter(), 0, replace(CPU, rank=rank))
        for step in (1, 2, 3):
            stage.start()
            stage.tick(step, Outcome(2.0, 1.0, False), 1.0)
        stage.close()
        assert capsys.readouterr().out.count(" | loss: 2.000 | ") == lines


def test_every_step_is_in_a_log_file_while_errors_go_to_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m scripts.base_train > log`, typed on a terminal, once gave an empty log."""
    keyboard, terminal = os.openpty()
    log = tmp_path / "log"
    with open(terminal, "w") as stderr, open(log, "w") as stdout, monkeypatch.context() as streams:
        streams.setattr(sys, "stderr", stderr)
        streams.setattr(sys, "stdout", stdout)
        stage = Stage("base", tmp_path, StageFlags(), meter(), 0, CPU)
        for step in range(1, 21):
            stage.start()
            stage.tick(step, Outcome(2.0, 1.0, False), 1.0)
        stage.close()
    os.close(keyboard)
    lines = log.read_text().splitlines()
    assert [line.partition("/")[0] for line in lines] == [f"step {step:05d}" for step in range(1, 21)]


def test_a_stage_measures_its_steps_and_keeps_their_figures(tmp_path: Path) -> None:
    stage = Stage("base", tmp_path, StageFlags(), meter(), 0, CPU)
    stage.start()
    line = stage.tick(1, Outcome(2.0, 1.0, False), 0.5)
    stage.tracker.log(**line, val_bpb=1.5)
    stage.close()
    (kept,) = read_metrics(tmp_path)
    assert kept == {**line, "val_bpb": 1.5}
    assert 0 < kept["seconds"] < 60 and kept["lrm"] == 0.5


def test_the_scale_goes_on_where_it_was() -> None:
    kept = loop.state(meter(), LossScale(1024.0, 17, True), {})
    assert LossScale.start(FP16, json.loads(json.dumps(kept))) == LossScale(1024.0, 17, True)


def test_a_line_that_was_saved_but_not_logged_is_owed(tmp_path: Path) -> None:
    """A kill in the measurement after a save must not leave a hole in metrics.jsonl."""
    kept = loop.state(meter(), LossScale(), {"step": 20, "loss": 1.0})
    stage = Stage("base", tmp_path, StageFlags(), meter(), 20, CPU, kept)
    assert stage.owed == {"step": 20, "loss": 1.0}
    stage.tracker.log(**stage.owed)
    stage.close()
    again = Stage("base", tmp_path, StageFlags(), meter(), 20, CPU, kept)
    assert again.owed is None
    again.close()
    beginning = Stage("base", tmp_path, StageFlags(), meter(), 0, CPU, {})
    assert beginning.owed is None
    beginning.close()


def test_the_end_says_where_the_checkpoints_are_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.log_end(tmp_path, 9, 9)
    assert capsys.readouterr().out == f"checkpoints: {tmp_path}\n"
    loop.log_end(tmp_path, 4, 9)
    assert "stopped at step 4; leave --stop_at out" in capsys.readouterr().out

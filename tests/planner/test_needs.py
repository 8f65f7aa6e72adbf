"""What a run of fine-tuning needs: its disk space, which is refused where it is lacking, and its time."""

import shutil
from dataclasses import replace
from typing import Any

import pytest

from nanochat import device
from nanochat.common import UserError
from nanochat.planner.cards import rates_of
from nanochat.planner.forecast import Tuning
from nanochat.planner.needs import log_needs, seconds_of
from nanochat.planner.tuning_speed import program_for, step_of
from nanochat.train.sizes import Batch
from tests.support.qwens import tiny_qwen
from tests.support.tiny_model import on_cpu, pretend

MODEL = tiny_qwen("qwen3")
TUNING = Tuning(MODEL.config, None)
BATCH = Batch(tokens_per_step=4096, rows_per_step=16, device_batch_size=8, passes=2)  # of one row in TUNING


def free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(size)))


@pytest.mark.parametrize("keep", [3, 1, 0])
def test_a_disk_must_hold_two_checkpoints_as_when_the_run_starts(base_folder, monkeypatch, capsys, keep):
    size = 1.01 * 3 * sum(weight.nbytes for weight in MODEL.parameters())  # with two moments, and some 1 % beside
    folder = base_folder / "tuned_checkpoints/x"
    free(monkeypatch, 2.001 * size)
    log_needs(TUNING, MODEL, BATCH, 10, folder, keep, "auto", on_cpu())
    assert "disk: " in capsys.readouterr().out
    free(monkeypatch, 1.999 * size)
    with pytest.raises(UserError, match="NANOCHAT_BASE_DIR"):
        log_needs(TUNING, MODEL, BATCH, 10, folder, keep, "auto", on_cpu())


def test_a_known_card_takes_the_time_that_the_planner_predicts(base_folder, monkeypatch):
    chip = next(chip for chip in device.planned() if chip.name == "910B3")
    rates = rates_of(chip)
    assert rates is not None
    platform: Any = device.PLATFORMS["npu"]()
    monkeypatch.setattr(type(platform), "chip", chip)
    split = replace(TUNING, rows=BATCH.device_batch_size)
    step = step_of(split, BATCH.rows_per_step, rates, program_for(split, "910B3"))
    assert seconds_of(TUNING, MODEL, BATCH, 10, pretend(platform)) == pytest.approx(10 * step.seconds)

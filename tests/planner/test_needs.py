"""What a run of fine-tuning needs: its disk space, which is refused where it is lacking, and its time."""

import shutil
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
BATCH = Batch(tokens_per_step=4096, rows_per_step=2, device_batch_size=1, passes=2)


def free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(size)))


@pytest.mark.parametrize(("keep", "checkpoints"), [(3, 4), (1, 2), (0, 2)])
def test_a_disk_must_hold_the_checkpoints_and_one_more(base_folder, monkeypatch, capsys, keep, checkpoints):
    size = 1.01 * 3 * sum(weight.nbytes for weight in MODEL.parameters())  # with two moments, and some 1 % beside
    free(monkeypatch, 1.001 * checkpoints * size)
    log_needs(TUNING, MODEL, BATCH, 10, keep, on_cpu())
    assert "disk: " in capsys.readouterr().out
    free(monkeypatch, 0.999 * checkpoints * size)
    with pytest.raises(UserError, match="--keep") as caught:
        log_needs(TUNING, MODEL, BATCH, 10, keep, on_cpu())
    assert caught.value.exit_code == 2


def test_a_known_card_takes_the_time_that_the_planner_predicts(base_folder, monkeypatch):
    chip = next(chip for chip in device.planned() if chip.name == "910B3")
    rates = rates_of(chip)
    assert rates is not None
    platform: Any = device.PLATFORMS["npu"]()
    monkeypatch.setattr(type(platform), "chip", chip)
    step = step_of(TUNING, BATCH.passes * TUNING.rows, rates, program_for(TUNING, "910B3"))
    assert seconds_of(TUNING, MODEL, BATCH, 10, pretend(platform)) == pytest.approx(10 * step.seconds)

"""The benchmark of what fine-tuning teaches: a run that was stopped is not measured."""

import sys
from pathlib import Path

import pytest

from bench.finetune import learned
from nanochat.checkpoint_manager.locate import Trained
from nanochat.common import UserError, read_json


def test_a_stopped_run_is_not_measured_and_its_seconds_count_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")  # stands for scripts.finetune, which also ends with 0
    steps = iter((100, 360))
    monkeypatch.setattr(learned, "trained", lambda stage, tag: [Trained(stage, tag, next(steps), 0.0, 360)])
    cfg = learned.Config(model=tmp_path)
    usage = tmp_path / "villages-answers.usage.json"
    with pytest.raises(UserError, match="stopped at step 100 of 360"):
        learned.train(cfg, "villages", 1, tmp_path)
    first = read_json(usage)["cpu_seconds"]
    seconds, peak_gb = learned.train(cfg, "villages", 1, tmp_path)
    assert seconds == read_json(usage)["cpu_seconds"] > first > 0
    assert peak_gb > 0

"""The benchmarks of RL: the verdict of the control by hand, and quick runs."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.processes import ROOT
from bench.rl import __main__ as rl
from bench.rl import control as rl_control
from bench.rl.control import gain_of, judge
from bench.rl.side import SUMS
from nanochat.common import UserError
from tests.support.small_world import files
from tests.support.tiny_model import tiny_checkpoint

FEW = replace(SUMS, problems=2, samples=8, sharpness=1.0)


@pytest.mark.slow
def test_the_figures_are_one_json_object(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rl, "SUMS", FEW)
    rl.main(rl.Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {"benchmark", "trees", "rows"}
    assert min(result["trees"], result["rows"]) > 0


def test_the_verdict_by_hand() -> None:
    verdict = judge([10.0, 12.0, 14.0], [1.0, -1.0, 0.6])
    assert (verdict.gain, verdict.control) == pytest.approx((12.0, 0.2))
    assert verdict.error == pytest.approx(2 / math.sqrt(3))
    assert verdict.passed
    assert not judge([4.0, 5.0, 4.0], [0.0, 0.0, 0.0]).passed  # too little
    assert not judge([1.0, 12.0, 20.0], [0.0, 0.0, 0.0]).passed  # too uncertain
    assert not judge([12.0], [0.0]).passed
    assert not judge([10.0, 12.0, 14.0], [3.0, 2.0, 2.0]).passed  # the controls learn
    assert not judge([10.0, 12.0, 14.0], [-3.0, -2.0, -2.0]).passed


def test_a_gain_is_the_last_accuracy_less_the_one_before_the_first_step(tmp_path: Path) -> None:
    lines = [{"step": 0, "accuracy": 0.4}, {"step": 1}, {"step": 2, "accuracy": 0.55}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert gain_of(tmp_path) == pytest.approx(15.0)


def control(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.rl.control", *flags]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)


@pytest.mark.smoke
def test_a_quick_control_changes_none_of_the_user_s_checkpoints(base_folder: Path) -> None:
    tiny_checkpoint("sft")
    before = files(base_folder)
    variant = "--variant=--loss=cispo --advantage=normalized"
    finished = control("--quick", "--eval_examples=8", variant)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert (len(result["gains"]), len(result["controls"]), result["passed"]) == (1, 1, False)
    after = files(base_folder)
    own = {name: value for name, value in after.items() if not name.startswith("rl_control/")}
    assert own == before
    for name in ("seed-1", "shuffled-1"):
        folder = f"rl_control/quick-loss=cispo-advantage=normalized/{name}"
        assert f"{folder}/chatrl_checkpoints/d2/metrics.jsonl" in after


def test_without_an_sft_checkpoint_its_command_is_named() -> None:
    with pytest.raises(UserError, match=r"python -m scripts\.chat_sft") as refused:
        rl_control.main(rl_control.Config())
    assert refused.value.exit_code == 2

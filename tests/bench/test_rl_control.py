"""The control of RL: its verdict by hand, and a quick run that leaves the user's files alone."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.rl_control import gain, judge
from tests.support.small_world import files
from tests.support.tiny_model import tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_verdict_by_hand() -> None:
    verdict = judge([10.0, 12.0, 14.0], [1.0, -1.0, 0.6])
    assert (verdict.gain, verdict.control) == pytest.approx((12.0, 0.2))
    assert verdict.error == pytest.approx(2 / math.sqrt(3)) and verdict.passed
    assert not judge([4.0, 5.0, 4.0], [0.0, 0.0, 0.0]).passed  # too little
    assert not judge([1.0, 12.0, 20.0], [0.0, 0.0, 0.0]).passed  # too uncertain
    assert not judge([10.0, 12.0, 14.0], [3.0, 2.0, 2.0]).passed  # the controls learn
    assert not judge([10.0, 12.0, 14.0], [-3.0, -2.0, -2.0]).passed
    assert not judge([50.0], [0.0]).passed  # one run says nothing


def test_a_gain_is_the_last_accuracy_less_the_one_before_the_first_step(tmp_path: Path) -> None:
    lines = [{"step": 0, "accuracy": 0.4}, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0, "accuracy": 0.55}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gain(tmp_path) == pytest.approx(15.0)


@pytest.mark.smoke
def test_a_quick_control_changes_none_of_the_user_s_checkpoints(base_folder: Path) -> None:
    tiny_checkpoint("sft")
    before = files(base_folder)
    command = [
        sys.executable,
        "-m",
        "bench.rl_control",
        "--quick",
        "--eval_examples=8",
        "--variant=--loss=cispo --advantage=normalized",
    ]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (len(found["gains"]), len(found["controls"]), found["passed"]) == (1, 1, False)
    after = files(base_folder)
    assert {name: value for name, value in after.items() if not name.startswith("rl_control/")} == before
    for name in ("seed-1", "shuffled-1"):
        assert f"rl_control/quick-loss=cispo-advantage=normalized/{name}/chatrl_checkpoints/d2/metrics.jsonl" in after


def test_without_an_sft_checkpoint_its_command_is_named() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.rl_control"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "python -m scripts.chat_sft" in done.stderr

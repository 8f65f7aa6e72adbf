"""The benchmark of RL: both ways learn the same, parts add up, and a checkout that fails is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.rl import __main__ as rl
from bench.rl.__main__ import Config, Peer, measure
from bench.rl.ours import Ours
from bench.rl.work import GSM8K, SUMS, prompts, right
from nanochat.common import UserError

FEW = replace(SUMS, problems=2, samples=8, sharpness=1.0)


def test_the_median_of_each_part_counts_after_a_step_that_warms_up() -> None:
    given = iter([{"forward": 99.0}, {"sampling": 1.0, "forward": 2.0, "backward": 3.0, "optimizer": 4.0, "copy": 0.5},
                  {"sampling": 2.0, "training": 7.0, "optimizer": 0.5}, {"sampling": 9.0, "forward": 6.0}])  # fmt: skip
    assert measure({"x": lambda number: next(given)}, 3) == {"x": {"sampling": 2.0, "training": 6.0, "rest": 0.5}}


def test_prompts_and_rewards_depend_on_their_numbers_alone() -> None:
    assert prompts(GSM8K, 3) == prompts(GSM8K, 3) != prompts(GSM8K, 4)
    assert {len(prompt) for prompt in prompts(GSM8K, 3)} == {GSM8K.prompt}
    rewards = [right([token, 1, 2, 3, token], GSM8K) for token in range(64)]
    assert 16 < sum(rewards) < 48 and right([5, 1, 2, 3, 9], GSM8K) == rewards[5]


def test_trees_and_rows_take_the_same_step() -> None:
    for trees in (True, False):
        parts = Ours(FEW, trees).step(0)
        assert set(parts) == {"sampling", "gap", "forward", "backward", "gradient norm", "optimizer", "copy"}
        assert min(parts.values()) >= 0


def test_the_figures_are_one_json_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl, "SUMS", FEW)
    monkeypatch.setattr(rl, "GSM8K", replace(GSM8K, problems=1, samples=4, prompt=8, reply=4))
    rl.main(Config(quick=True))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"bench", "sums trees", "sums rows", "gsm8k trees", "gsm8k rows"}


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--upstream must name a checkout"):
        rl.main(Config(upstream=tmp_path))
    with pytest.raises(UserError, match="ended with code"):
        Peer(tmp_path, GSM8K, "float32")

"""The benchmark of evaluations: its questions, its figures, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.eval import __main__ as evaluation
from bench.eval.__main__ import Config, Measured, figures
from bench.eval.questions import choices, core_bundle
from nanochat.common import UserError
from nanochat.evals.core import read_problems


def test_the_questions_are_those_that_evaluations_read(tmp_path: Path) -> None:
    tasks = core_bundle(tmp_path, 12)
    assert [task.shots for task in tasks] == [10, 0, 0, 10]
    assert all(len(read_problems(task)) == 12 for task in tasks)
    assert core_bundle(tmp_path / "again", 12)[0].path.read_text() == tasks[0].path.read_text()
    asked = choices(3)
    assert len(asked) == 3 and len(asked.cloze(0).choices) == 4 and len(asked.cloze(0).examples) == 5
    assert {one.answer for one in choices(50).asked} == {0, 1, 2, 3}


def measured(seconds: list[float], **scores: float) -> Measured:
    found = Measured()
    for one in seconds:
        found.add({"seconds": one, "scores": scores})
    return found


def test_the_median_round_and_equal_scores_are_reported() -> None:
    found = {"core": {"ours": measured([1, 9, 2]), "upstream": measured([8, 10, 9])},
             "choices": {"ours": measured([3]), "lm-eval": measured([6])}}  # fmt: skip
    same = {"core": {"ours": measured([1], a=1 / 12), "upstream": measured([1], a=float(torch.tensor(1 / 12)))},
            "choices": {"ours": measured([1], acc=0.5), "lm-eval": measured([1], acc=0.25)}}  # fmt: skip
    result = figures(found, same)
    assert result["core"] == {"cpu_seconds": {"ours": 2, "upstream": 9}, "times_as_fast": 4.5, "equal_scores": True}
    assert result["choices"]["times_as_fast"] == 2 and not result["choices"]["equal_scores"]
    alone = {name: {"ours": sides["ours"]} for name, sides in found.items()}
    assert figures(alone, {}) == {"core": {"cpu_seconds": {"ours": 2}}, "choices": {"cpu_seconds": {"ours": 3}}}


@pytest.mark.parametrize(("given", "why"), [
    ({"rounds": 0}, "--rounds must be at least 1"), ({"problems": 1}, "--problems must be from 2"),
    ({"quick": True, "against": ("lm-eval",)}, "leave out"), ({"against": ("upstream",)}, "belong together"),
    ({"against": ("upstream",), "upstream": Path("no such folder")}, "must name a folder"),
])  # fmt: skip
def test_flags_that_cannot_be_measured_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as failure:
        evaluation.main(Config(**given))
    assert failure.value.exit_code == 2


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="lm-eval needs lm_eval: run") as failure:
        evaluation.check(Config(against=("lm-eval",)))
    assert failure.value.exit_code == 2


class FakeSide:
    """Answers at once; ours takes a second, every other a multiple of it."""

    def __init__(self, task: dict[str, Any], errors: Any):
        self.name, self.process = task["side"], self
        self.evaluations = {"ours": ["core", "choices"], "upstream": ["core"], "lm-eval": ["choices"]}[self.name]

    def evaluate(self, name: str) -> dict[str, Any]:
        return {"seconds": {"ours": 1.0, "upstream": 5.0, "lm-eval": 7.0}[self.name], "scores": {"x": 0.5}}

    def kill(self) -> None: ...

    def communicate(self) -> None: ...


def test_each_side_does_the_evaluations_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "Side", FakeSide)
    found = evaluation.measure(["ours", "lm-eval", "upstream"], {}, 2)
    assert {name: sorted(sides) for name, sides in found.items()} == {
        "core": ["ours", "upstream"], "choices": ["lm-eval", "ours"]
    }  # fmt: skip
    assert figures(found, found)["choices"]["times_as_fast"] == 7


def test_a_process_that_fails_is_named(tmp_path: Path) -> None:
    task = {"model": str(tmp_path / "none"), "bundle": str(tmp_path), "problems": 2, "dtype": "float32"}
    with (
        pytest.raises(UserError, match=r"ours ended with code \d+; its last lines:\n"),
        evaluation.started(["ours"], task),
    ):
        pass


def test_a_quick_run_ends_with_one_line_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "Side", FakeSide)
    shape = evaluation.model.make
    small = evaluation.model.SHAPE.__class__(sequence_len=64, vocab_size=600, n_layer=1, n_head=1, n_kv_head=1,
                                             n_embd=32, n_hidden=32, head_dim=32, tied=1)  # fmt: skip
    monkeypatch.setattr(evaluation.model, "make", lambda folder: shape(folder, small, text=50_000))
    evaluation.main(Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["core"] == {"cpu_seconds": {"ours": 1.0}} and result["problems"] == 6

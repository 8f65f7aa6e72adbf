"""Tasks while training: the same figure as an evaluation afterwards, on the same problems, through a stop, on all ranks."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch.nn as nn

from nanochat.common import UserError
from nanochat.data.conversation import Part
from nanochat.device import Compute, is_sharded
from nanochat.evals.chat import grade_reply
from nanochat.evals.likelihood import PromptRow, score_rows
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.runtime.parallel import Sharding
from nanochat.runtime.tracking import read_metrics
from nanochat.train import task_scores
from nanochat.train.flags import CoreFlags
from nanochat.train.task_scores import MOST_TIMES, TaskSample, TaskScores, affordable_every
from scripts import base_eval
from tasks.tinyworld import measures
from tests.evals.test_core import BUNDLE
from tests.support.rank_training import CPU as ALONE
from tests.support.rank_training import make
from tests.support.ranks import run_ranks
from tests.support.small_world import make_corpus, run_stage, shrink, stage_folder, up_to
from tests.support.tiny_model import on_cpu, tiny_gpt, tiny_tokenizer

EXAMPLES = 4  # of each task, above the three that a prompt shows
FLAGS: dict[str, Any] = {"num_iterations": 4, "eval_every": 0, "core_every": 2, "core_examples": EXAMPLES}


class Two:
    """A curriculum with two of TinyWorld's tasks: one of words, and one that grades calls of the calculator."""

    @staticmethod
    def measures(_: bool) -> Any:
        return {name: measures()[name] for name in ("unknown_en", "calculator")}


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        for script in ("mid_train", "chat_sft"):
            patch.setattr(f"scripts.{script}.curriculum", lambda _: Two)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base folder with a bundle, in which three stages have measured their tasks."""
    base = tmp_path_factory.mktemp("measured")
    shutil.copytree(BUNDLE, base / "eval_bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        make_corpus(base)
        for stage in ("base", "mid", "sft"):
            run_stage(stage, **FLAGS)
        yield base


def curve(base: Path, stage: str, figure: str) -> dict[int, float]:
    return {line["step"]: line[figure] for line in read_metrics(stage_folder(base, stage)) if figure in line}


# --- figures -------------------------------------------------------------------------------------


def test_core_while_training_is_what_base_eval_finds_afterwards(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(measured))
    core = curve(measured, "base", "core")
    assert list(core) == [2, 4]
    cfg = base_eval.Config(max_per_task=EXAMPLES, split_tokens=1024)
    assert base_eval.evaluate(cfg, on_cpu())["core"]["core"] == core[4]


@pytest.mark.parametrize("stage", ["mid", "sft"])
def test_a_chat_stage_has_a_curve_of_its_tasks(stage: str, measured: Path) -> None:
    assert list(curve(measured, stage, "chat_core")) == [2, 4]


def test_a_resumed_run_repeats_the_curve_and_measuring_changes_no_loss(measured: Path, tmp_path: Path) -> None:
    up_to("base", measured, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
        run_stage("base", **FLAGS | {"core_every": 0, "stop_at": 1})
        run_stage("base", **FLAGS | {"stop_at": 2})
        run_stage("base", **FLAGS)
    for figure in ("core", "loss"):
        assert curve(tmp_path, "base", figure) == curve(measured, "base", figure)


def core_of(compute: Compute, mode: Sharding) -> dict[str, float]:
    """CORE's mean loss over a few rows, as every rank finds it."""
    model, _ = make(compute, mode)

    def evaluate(whole: Model) -> float:
        assert not any(map(is_sharded, cast(nn.Module, whole).parameters()))
        rows = [PromptRow(i, [1 + i, 2, 3 + i, 4], 2) for i in range(compute.rank, 7, compute.world_size)]
        losses = [score.mean_loss for score in score_rows(whole, rows, 0, rows_per_batch=1)]
        return parallel.total([sum(losses)], compute)[0]

    scores = TaskScores(1, "figure", evaluate, model, compute)
    assert scores.measure(1) == scores.measure(2)
    return scores.measure(3)


@pytest.mark.parametrize("mode", ["grad", "full"])
def test_ranks_with_a_sharded_model_measure_what_one_measures(mode: Sharding) -> None:
    """The ranks have unequal numbers of rows, so a sharded model would wait for ever."""
    alone = core_of(ALONE, "none")
    for together in run_ranks(2, core_of, mode):
        assert together == pytest.approx(alone, rel=1e-6)


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "tokens", "steps", "every"),
    [
        (3_000, 1_000_000, 100, 10),  # a measurement costs 1,000 of 1,000,000 tokens: ten are 1 %
        (3_000, 990_000, 100, 12),  # nine measurements
        (30_000, 1_000_000, 100, 100),
        (30_001, 1_000_000, 100, 0),
        (1, 1_000_000, 100, 100 // MOST_TIMES),
        (1, 1_000_000, 3, 1),
    ],
)
def test_measurements_take_one_percent_of_a_run(cost: int, tokens: int, steps: int, every: int) -> None:
    assert affordable_every(cost, tokens, steps) == every


def without_bundle(**flags: Any) -> TaskScores:
    training = task_scores.TrainingRun("web", 10, 10**9)
    model = tiny_gpt(tiny_tokenizer().vocab_size)
    return task_scores.of_base_model(CoreFlags(**flags), training, model, tiny_tokenizer(), on_cpu())


def test_without_a_bundle_core_is_refused_if_asked_for_and_else_left_out_in_one_line(
    base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="base_eval --download_only"):
        without_bundle(core_every=5)
    assert without_bundle(core_every=0).every == 0
    assert not capsys.readouterr().out
    assert without_bundle().every == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_with_a_bundle_core_is_measured_by_default_as_often_as_it_is_cheap(base_folder: Path) -> None:
    shutil.copytree(BUNDLE, base_folder / "eval_bundle")
    scores = without_bundle(core_examples=EXAMPLES)
    assert scores.every == 1
    with pytest.raises(UserError, match=r"--core_examples must be above 3.* got 3"):
        without_bundle(core_every=1, core_examples=3)
    for file in (base_folder / "eval_bundle").rglob("*.jsonl"):
        file.write_text("")
    assert scores.measure(1) == scores.measure(2) != {}  # the problems were read once, before the first step


# --- the problems of chat tasks ------------------------------------------------------------------


def test_the_chosen_problems_are_the_same_every_time_and_not_the_first_ones() -> None:
    task = measures()["tinyworld_en"]()
    first, again = (TaskSample(task, 12, tiny_tokenizer(), grade_reply) for _ in range(2))
    questions = [first[i] for i in range(len(first))]
    assert questions == [again[i] for i in range(len(again))]
    assert len(questions) == 12 and questions != [task[i] for i in range(12)]
    assert all(first.grade(i, questions[i].messages[-1].text) == 1 for i in range(12))


def test_calls_of_the_calculator_are_graded_by_their_parts() -> None:
    chosen = TaskSample(measures()["calculator"](), 3, tiny_tokenizer(), grade_reply)
    reference = list(chosen[0].messages[-1].parts)
    assert chosen.grade_parts(0, reference) == 1
    assert chosen.grade_parts(0, [Part("text", "a number")]) == 0

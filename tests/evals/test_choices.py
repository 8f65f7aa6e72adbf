"""Multiple choice as texts: tokens as lm-evaluation-harness splits them, four counts, records, and broken tasks."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.common import UserError
from nanochat.data.conversation import Cloze
from nanochat.evals import records as records_module
from nanochat.evals.choices import Picks, evaluate_choices, pick, rows_of
from nanochat.evals.likelihood import Likelihood, PromptRow, score_rows
from nanochat.evals.records import Records, fingerprint, read_records
from nanochat.platforms.nvidia.platform import Nvidia
from tests.support.tiny_model import on_cpu, pretend, tiny_gpt, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MODEL = tiny_gpt(TOKENIZER.vocab_size)
CHOICES = (("cat", "the cat sat", "猫坐在垫子上"), ("A", "B", "C", "D"), ("12", "34 56"))


class Texts:
    name = "texts"

    def __init__(self, size: int = 11, examples: int = 2):
        self.size, self.examples = size, examples

    def __len__(self) -> int:
        return self.size

    def cloze(self, i: int) -> Cloze:
        shown = tuple(f"the mat {n}? cat\n\n" for n in range(self.examples))
        return Cloze("about cats\n\n", shown, f"the {'cat ' * (i % 5)}sat {i}:", CHOICES[i % 3], i % 2)


@torch.no_grad()
def one_by_one(task: Texts, i: int) -> list[float]:
    """The reference: one choice at a time, from a softmax in float64 over every position."""
    asked = task.cloze(i)
    context = asked.intro + "".join(asked.examples) + asked.question
    found = []
    for choice in asked.choices:
        start = 1 + len(TOKENIZER.encode(context))
        tokens = [TOKENIZER.bos, *TOKENIZER.encode(f"{context} {choice}")]
        logprobs = MODEL(torch.tensor([tokens]))[0].double().log_softmax(-1)
        found.append(sum(float(logprobs[t - 1, tokens[t]]) for t in range(start, len(tokens))))
    return found


@pytest.mark.parametrize("tokens_per_batch", [1, 200, 100_000])
def test_batches_find_what_one_choice_at_a_time_finds(tokens_per_batch: int) -> None:
    task = Texts()
    records = Records(on_folder(), "texts", {}, on_cpu())
    score = evaluate_choices(task, MODEL, TOKENIZER, on_cpu(), tokens_per_batch, records=records)
    _, lines = read_records(records.path)
    right = 0
    for i, line in enumerate(lines):
        expected = one_by_one(task, i)
        assert [value for _, value, _ in line["logprobs"]] == pytest.approx(expected, abs=1e-4)
        right += expected.index(max(expected)) == task.cloze(i).answer
        assert line["id"] == str(i) and line["expected"] == task.cloze(i).choices[i % 2]
    assert (len(lines), score.total, score.acc) == (11, 11, pytest.approx(right / 11))
    assert score.baseline == pytest.approx(sum(1 / len(task.cloze(i).choices) for i in range(11)) / 11)


def on_folder() -> Any:
    from nanochat.common import base_dir

    return base_dir() / "answers"


def test_the_four_counts_by_hand() -> None:
    scores = [Likelihood(-4.0, 1), Likelihood(-6.0, 2), Likelihood(-9.0, 9), Likelihood(-4.5, 1)]
    choices = ("a", "abcdefgh", "a", "猫猫猫猫")
    # -4 in total; -0.75 for each character; -0.375 for each byte; -1 for each token
    assert pick(scores, choices) == Picks(0, 1, 3, 2)
    assert pick([Likelihood(-1.0, 1)] * 2, ("a", "b")) == Picks(0, 0, 0, 0)


def test_a_space_at_the_end_of_a_context_counts_to_the_choice() -> None:
    rows = rows_of(3, "the cat ", ("sat", ""), TOKENIZER)
    start = 1 + len(TOKENIZER.encode("the cat"))
    assert [row.start for row in rows] == [start, start] and rows[0].question == 3
    assert rows[0].tokens == [TOKENIZER.bos, *TOKENIZER.encode("the cat  sat")]


def test_rows_that_differ_in_their_last_token_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    real = MODEL.hidden
    monkeypatch.setattr(MODEL, "hidden", lambda idx: seen.append(tuple(idx.shape)) or real(idx))
    rows = [PromptRow(0, [1, 2, 3, letter], 3) for letter in (5, 6, 7)] + [PromptRow(1, [1, 2], 1)]
    together = score_rows(MODEL, rows, TOKENIZER.bos)
    assert seen == [(2, 3)]
    alone = [score_rows(MODEL, [row], TOKENIZER.bos)[0].logprob for row in rows]
    assert [one.logprob for one in together] == pytest.approx(alone, abs=1e-5)


def test_examples_that_do_not_fit_are_left_out_and_counted() -> None:
    score = evaluate_choices(Texts(4, examples=40), MODEL, TOKENIZER, on_cpu(), 10_000)
    assert (score.fewer_examples, score.too_long) == (4, 0)

    class Long(Texts):
        def cloze(self, i: int) -> Cloze:
            return Cloze("", (), "猫" * 300, ("A", "B"), 0)

    score = evaluate_choices(Long(3), MODEL, TOKENIZER, on_cpu(), 10_000)
    assert (score.too_long, score.acc) == (3, 0.0) and "3 too long" in str(score)


def test_a_broken_question_is_an_error_and_leaves_no_file() -> None:
    class Broken(Texts):
        def cloze(self, i: int) -> Cloze:
            raise UserError("row 3 is broken")

    records = Records(on_folder(), "texts", {}, on_cpu())
    with pytest.raises(UserError, match="row 3 is broken"):
        evaluate_choices(Broken(), MODEL, TOKENIZER, on_cpu(), 100, records=records)
    assert not records.path.exists()
    with pytest.raises(UserError, match="no question"):
        evaluate_choices(Texts(0), MODEL, TOKENIZER, on_cpu(), 100)


def test_records_are_of_one_model_and_settings() -> None:
    records = Records(on_folder(), "a task/1", {"model": "x", "shots": 5}, on_cpu())
    assert records.saved_score() is None
    records.add(2, {"id": "b"})
    records.add(1, {"id": "a"})
    records.finish({"acc": 0.5})
    assert records.saved_score() == {"acc": 0.5}
    assert [line["id"] for line in read_records(records.path)[1]] == ["a", "b"]
    for about in ({"model": "y", "shots": 5}, {"model": "x", "shots": 0}, {"model": "x"}):
        other = Records(on_folder(), "a task/1", about, on_cpu())
        assert other.saved_score() is None
        other.finish({"acc": 0.25})
    plain = replace(on_cpu(), operations=on_cpu().platform.operations("plain"))
    for compute in (plain, pretend(Nvidia())):
        assert Records(on_folder(), "a task/1", {"model": "x", "shots": 5}, compute).saved_score() is None
    assert records.saved_score() == {"acc": 0.5}  # the others erased nothing
    records.path.write_text("{cut")
    assert records.saved_score() is None


def test_answers_of_graders_that_have_changed_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(any(records_module.PACKAGE.glob(pattern)) for pattern in records_module.GRADERS)
    shared, grader = tmp_path / "shared.py", tmp_path / "evals" / "chat.py"
    grader.parent.mkdir()
    monkeypatch.setattr(records_module, "PACKAGE", tmp_path)
    monkeypatch.setattr(inspect, "getfile", lambda kind: str(tmp_path / "texts.py"))

    def saved() -> Records:
        return Records(on_folder(), "texts", {"data": fingerprint(Texts(5))}, on_cpu())

    for module in (shared, grader):
        saved().finish({"acc": 0.5})
        assert saved().saved_score() == {"acc": 0.5}
        module.write_text("# another grader")
        assert saved().saved_score() is None
    saved().finish({"acc": 0.5})
    monkeypatch.setattr(records_module, "RENDERING", -1)
    assert saved().saved_score() is None


def test_a_fingerprint_follows_the_questions() -> None:
    assert fingerprint(Texts(5)) == fingerprint(Texts(5)) != fingerprint(Texts(6))
    assert fingerprint(Texts(6), 5) == fingerprint(Texts(5)) != fingerprint(Texts(5, examples=1))

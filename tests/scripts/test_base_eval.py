"""base_loss and base_eval with a tiny checkpoint: they evaluate what is there, and name what is missing."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError, base_dir
from nanochat.data.corpora import Corpus, shards
from nanochat.data.mixing import Data
from nanochat.data.shards import texts, write_shards
from nanochat.dataloader import split_rows
from nanochat.evals import core as core_eval
from nanochat.evals import loss as loss_eval
from nanochat.evals.records import read_records
from nanochat.runtime.samples import read_samples
from scripts import base_eval, base_loss
from tests.support import published
from tests.support.tiny_model import on_cpu, tiny_checkpoint, tiny_gpt, tiny_tokenizer

BUNDLE = Path(__file__).parent.parent / "support" / "files" / "eval_bundle"
CPU = on_cpu()
TOKENIZER = tiny_tokenizer()
DOCUMENTS = [f"the cat number {i} sat on the mat. 第{i}只猫坐在垫子上。 " * (1 + i % 7) for i in range(300)]


def make_checkpoint() -> None:
    tiny_checkpoint("base", corpus="cats", tag="d4")


def make_corpus() -> Data:
    folder = base_dir() / "base_data" / "cats"
    write_shards(folder, DOCUMENTS, rows_per_shard=200)
    return Data((Corpus("cats", folder),))


def section(name: str) -> dict[str, Any]:
    return json.loads((base_dir() / "report" / "sections" / f"{name}.json").read_text(encoding="utf-8"))


def test_base_loss_measures_both_splits_and_samples() -> None:
    make_checkpoint()
    corpus = make_corpus()
    result = base_loss.evaluate(base_loss.Config(split_tokens=1000, sample_tokens=5), CPU)
    assert section("base_loss") == result
    assert (result["tag"], result["step"], result["corpus"]) == ("d4", 3, "cats")
    model = load_model("base", None, None, CPU).model
    for split in base_loss.SPLITS:
        loss = loss_eval.evaluate_split(model, TOKENIZER, corpus, split, 1000, 3, CPU)
        assert result[split]["bits_per_byte"] == pytest.approx(loss.bits_per_byte, rel=1e-6)
        assert 800 < result[split]["tokens"] <= 1000
    assert list(result["samples"]) == list(base_loss.PROMPTS)
    samples = read_samples(checkpoint_dir("base", "d4"))
    assert [(one.step, one.asked, one.said) for one in samples] == [(3, *both) for both in result["samples"].items()]


def test_domains_are_read_in_passes_as_large_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took 32 rows on a GPU whatever --device_batch_size was, and ran out of memory after both splits."""
    make_checkpoint()
    make_corpus()
    passes: list[int] = []
    monkeypatch.setattr(base_loss, "evaluate_domains", lambda *given: passes.append(given[4]) or {})
    for rows in ("auto", 2):
        quick = base_loss.Config(split_tokens=500, sample_tokens=0, device_batch_size=rows)
        base_loss.evaluate(quick, CPU)
    context = load_model("base", None, None, CPU).model.config.sequence_len
    assert passes == [CPU.platform.pass_tokens, 2 * context]


def test_a_split_is_measured_whole_and_once_when_more_is_asked_for() -> None:
    corpus = make_corpus()
    model = tiny_gpt(TOKENIZER.vocab_size)
    loss = loss_eval.evaluate_split(model, TOKENIZER, corpus, "val", 10**9, 2, CPU)
    rows = split_rows(corpus, TOKENIZER, "val", model.config.sequence_len)
    assert loss.tokens + rows.count >= rows.targets_in(0, rows.count) >= loss.tokens
    assert loss.tokens == len(
        [token for text in texts(shards(corpus.corpora[0], "val")) for token in TOKENIZER.encode(text)]
    )
    by_one = loss_eval.evaluate_split(model, TOKENIZER, corpus, "val", 10**9, 1, CPU)
    assert loss.bits_per_byte == pytest.approx(by_one.bits_per_byte, rel=1e-6)


@pytest.mark.parametrize("tokens", [1, 800])
def test_ranks_together_measure_what_one_measures(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    corpus, model = make_corpus(), tiny_gpt(TOKENIZER.vocab_size)
    alone = loss_eval.evaluate_split(model, TOKENIZER, corpus, "val", tokens, 2, CPU)
    shares: list[list[float]] = []
    monkeypatch.setattr(loss_eval.parallel, "total", lambda values, compute: shares.append(values) or [1.0, 1.0, 1.0])
    for rank in range(3):
        loss_eval.evaluate_split(model, TOKENIZER, corpus, "val", tokens, 2, on_cpu(rank, 3))
    nats, together, size = (sum(values) for values in zip(*shares, strict=True))
    assert (together, size) == (alone.tokens, alone.bytes)
    assert nats / together == pytest.approx(alone.nats_per_token, rel=1e-6)


def test_base_loss_names_what_is_missing() -> None:
    make_checkpoint()
    with pytest.raises(UserError, match="no corpus or folder 'cats'"):
        base_loss.evaluate(base_loss.Config(), CPU)
    make_corpus()
    with pytest.raises(UserError, match="must be at least 1, got 0"):
        base_loss.evaluate(base_loss.Config(split_tokens=0), CPU)


@pytest.mark.parametrize("size", ["split_tokens", "max_per_task"])
def test_base_eval_refuses_a_size_before_it_loads_the_model(size: str) -> None:
    with pytest.raises(UserError, match=r"must be at least 1.* got 0"):  # no model is here
        base_eval.evaluate(replace(base_eval.Config(), **{size: 0}), CPU)


@pytest.mark.parametrize("wrong", [{"data": "dogs"}, {"eval_bundle": "nowhere"}])
def test_base_eval_refuses_what_is_not_here_before_it_measures(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    make_checkpoint()
    monkeypatch.setattr(base_eval, "evaluate_tasks", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match=r"dogs|nowhere"):
        base_eval.evaluate(base_eval.Config(**{"eval_bundle": str(BUNDLE), **wrong}), CPU)


def test_base_eval_without_a_bundle_measures_bits() -> None:
    make_checkpoint()
    make_corpus()
    result = base_eval.evaluate(base_eval.Config(split_tokens=2000), CPU)
    assert result["core"] is None
    assert math.isfinite(result["val"]["bits_per_byte"])
    assert section("base_eval") == result


def test_base_eval_writes_core_as_the_published_table() -> None:
    make_checkpoint()
    result = base_eval.evaluate(base_eval.Config(eval_bundle=str(BUNDLE)), CPU)
    assert result["val"] is None  # this machine does not have the corpus
    model = load_model("base", None, None, CPU).model
    core = core_eval.evaluate_core(model, TOKENIZER, BUNDLE, CPU)
    assert result["core"]["core"] == core.core
    with open(base_dir() / "base_eval" / "d4_000003.csv", newline="") as f:
        written = [[cell.strip() for cell in row] for row in csv.reader(f)]
    assert written[0] == ["Task", "Accuracy", "Centered"]
    assert [row[0] for row in written[1:]] == ["pick_one", "pick_two", "who", "finish", "CORE"]
    assert [float(row[2]) for row in written[1:-1]] == pytest.approx([one.centered for one in core.tasks], abs=1e-6)
    assert float(written[-1][2]) == pytest.approx(core.core, abs=1e-6)


def test_base_eval_with_nothing_to_evaluate_is_refused() -> None:
    make_checkpoint()
    with pytest.raises(UserError, match="neither an eval bundle nor the corpus") as refused:
        base_eval.evaluate(base_eval.Config(), CPU)
    assert refused.value.exit_code == 2
    assert not (base_dir() / "report").exists()


def test_base_eval_measures_multiple_choice_and_skips_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint()
    monkeypatch.setenv("NANOCHAT_TASK_DIR", "nowhere")  # restored after the test
    published.write_mmlu_pro(tmp_path / "MMLU-Pro")
    cfg = base_eval.Config(tasks="MMLU-Pro", task_data=str(tmp_path), shots=1)
    score = base_eval.evaluate(cfg, CPU)["choices"]["MMLU-Pro"]
    assert score["total"] == 10 and 0 < score["baseline"] < 0.5
    (path,) = (base_dir() / "records" / "base-d4-000003").glob("MMLU-Pro-*.jsonl")
    head, lines = read_records(path)
    assert score["too_long"] == 5  # ten choices do not fit into this context
    assert head["score"] == score and len(lines) == 5 and lines[0]["logprobs"][0][0] == "A"
    assert base_eval.evaluate(cfg, CPU)["choices"]["MMLU-Pro"] == score
    assert "MMLU-Pro: done before" in capsys.readouterr().out
    with pytest.raises(UserError, match="--tasks takes ARC-Easy"):
        base_eval.evaluate(base_eval.Config(tasks="Arc"), CPU)


def test_a_broken_task_of_core_is_named_and_the_others_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint()
    bundle = tmp_path / "bundle"
    shutil.copytree(BUNDLE, bundle)
    broken = core_eval.read_bundle(bundle)[1].path
    content = broken.read_bytes()
    broken.write_text('{"query": "?"}\n')
    with pytest.raises(UserError, match="1 of the tasks could not be evaluated: pick_"):
        base_eval.evaluate(base_eval.Config(eval_bundle=str(bundle)), CPU)
    assert "line 1: choices, gold missing" in capsys.readouterr().err
    kept = sorted(path.name for path in (base_dir() / "records" / "base-d4-000003").iterdir())
    assert len(kept) == 3 and not (base_dir() / "base_eval").exists()
    broken.write_bytes(content)
    whole = base_eval.evaluate(base_eval.Config(eval_bundle=str(bundle)), CPU)["core"]
    fresh = base_eval.evaluate(base_eval.Config(eval_bundle=str(bundle), again=True), CPU)["core"]
    assert whole["core"] == fresh["core"] and len(whole["tasks"]) == 4


@pytest.mark.parametrize(
    ("file", "old", "new"), [("core.yaml", "Answer: ", "So: "), ("eval_meta_data.csv", "33.3333", "25")]
)
def test_a_task_of_core_is_measured_again_after_its_delimiter_or_baseline_has_changed(
    tmp_path: Path, file: str, old: str, new: str
) -> None:
    make_checkpoint()
    bundle = tmp_path / "bundle"
    shutil.copytree(BUNDLE, bundle)
    cfg = base_eval.Config(eval_bundle=str(bundle))
    before = base_eval.evaluate(cfg, CPU)["core"]["tasks"]
    changed = bundle / file
    changed.write_text(changed.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    after = base_eval.evaluate(cfg, CPU)["core"]["tasks"]
    assert after[0]["seconds"] != before[0]["seconds"] and after[1:] == before[1:]


def test_once_measures_again_what_was_measured_on_fewer_tokens() -> None:
    make_checkpoint()
    make_corpus()
    quick = base_loss.Config(split_tokens=500, domain_tokens=0, sample_tokens=0, once=True)
    few = base_loss.evaluate(quick, CPU)
    assert base_loss.evaluate(quick, CPU) == few
    more = base_loss.evaluate(replace(quick, split_tokens=2000), CPU)
    assert more["val"]["tokens"] > few["val"]["tokens"]

"""A mixture of corpora through the stages: trained by its weights, exact over a stop, seen in help and report."""

from pathlib import Path

import pytest

from nanochat.common import UserError, base_dir, parse, read_json
from nanochat.data.corpora import resolve, shards
from nanochat.data.shards import texts, write_shards
from nanochat.prepare.__main__ import Config
from nanochat.report import __main__ as report
from nanochat.report.sections import report_dir
from nanochat.runtime.tracking import read_metrics
from scripts import base_eval, base_loss, base_train, tok_eval, tok_train
from tests.support.small_world import files, make_corpus, run_stage, stage_folder, tensors
from tests.support.tiny_model import on_cpu

MIXED = "tinyworld:0.75,more:0.25"


@pytest.fixture
def mixed(base_folder: Path) -> None:
    make_corpus(base_folder)
    write_shards(base_dir() / "base_data" / "more", [f"{i} plus {i} is {2 * i}. 这是第{i}句。" * 3 for i in range(400)])
    tok_train.train(tok_train.Config(data=MIXED, vocab_size=320))


def test_a_mixture_trains_goes_on_exactly_and_is_reported(mixed, base_folder, capsys):
    run_stage("base", data=MIXED)
    said = capsys.readouterr().out
    assert "data: tinyworld:3,more:1, " in said
    assert "  tinyworld: 75 % of the rows, 120, " in said and "  more: 25 % of the rows, 40, " in said
    whole = tensors(base_folder, "base")
    section = read_json(report_dir() / "sections" / "base_train.json")
    assert section["settings"]["corpus"] == "tinyworld:3,more:1"
    assert [(row["corpus"], row["rows read"]) for row in section["rows"]] == [("tinyworld", 120), ("more", 40)]

    losses = [line["loss"] for line in read_metrics(stage_folder(base_folder, "base"))]
    stage_folder(base_folder, "base").rename(base_folder / "aside")
    run_stage("base", data=MIXED, stop_at=7)
    run_stage("base", data=MIXED, device_batch_size=2)
    assert [line["loss"] for line in read_metrics(stage_folder(base_folder, "base"))] == pytest.approx(losses, abs=1e-5)
    assert tensors(base_folder, "base").keys() == whole.keys()

    with pytest.raises(
        UserError, match=r"other settings \(corpus: tinyworld:3,more:1 before, tinyworld:1,more:1 now\)"
    ):
        run_stage("base", data="tinyworld:0.5,more:0.5")
    base_loss.evaluate(base_loss.Config(split_tokens=2048, sample_tokens=0), on_cpu())
    base_eval.evaluate(base_eval.Config(split_tokens=2048), on_cpu())
    tok_eval.train(tok_eval.Config(data=MIXED))
    before = files(base_folder / "tokenizer")
    report.main(report.Config("generate"))
    text = (report_dir() / "report.md").read_text(encoding="utf-8")
    assert "| tinyworld | 75 % |" in text and "| more | 25 % |" in text and "tinyworld:3,more:1" in text
    assert "## Tokenizer\n" in text and "## Base: bits per byte and samples" in text
    assert files(base_folder / "tokenizer") == before


def test_a_mixture_stopped_and_gone_on_with_gives_the_same_bits(mixed, base_folder):
    run_stage("base", data=MIXED)
    whole = tensors(base_folder, "base")
    stage_folder(base_folder, "base").rename(base_folder / "aside")
    run_stage("base", data=MIXED, stop_at=9)
    run_stage("base", data=MIXED)
    assert tensors(base_folder, "base") == whole


def test_mid_and_sft_blend_a_mixture_s_documents_by_its_weights(mixed, base_folder, monkeypatch, capsys):
    chats = base_folder / "chats.jsonl"
    line = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "%d."}]}'
    chats.write_text("\n".join(line % (i, i) for i in range(300)), encoding="utf-8")
    run_stage("base", data=MIXED)
    run_stage("mid", conversations=str(chats), documents_every=2)
    assert "and one row in 2 of tinyworld:3,more:1" in capsys.readouterr().out
    run_stage("sft", source="base", conversations=str(chats), num_iterations=2)
    assert "and one row in" not in capsys.readouterr().out  # by default your own conversations stand alone
    run_stage("sft", source="base", conversations=str(chats), documents_every=3, num_iterations=2, out_tag="beside")
    assert "and one row in 3 of tinyworld:3,more:1" in capsys.readouterr().out
    own = {"conversations": str(chats), "documents": "more", "documents_every": 2}
    run_stage("sft", source="base", num_iterations=2, out_tag="other", **own)
    assert "and one row in 2 of more" in capsys.readouterr().out


def test_a_mixture_without_its_tokenizer_names_the_command_that_trains_it(base_folder):
    make_corpus(base_folder)
    write_shards(base_dir() / "base_data" / "more", list(texts(shards(resolve("tinyworld"), "val")))[:9])
    with pytest.raises(UserError, match=r"no tokenizer at .*python -m scripts\.tok_train --data tinyworld,more"):
        run_stage("base", data=MIXED)


@pytest.mark.parametrize("config", [base_train.Config, base_loss.Config, base_eval.Config, tok_train.Config, Config])
def test_the_help_says_how_to_write_a_mixture(config, capsys):
    with pytest.raises(SystemExit) as end:
        parse(config, ["--help"])
    assert end.value.code == 0 and "web:0.7,books:0.3" in capsys.readouterr().out

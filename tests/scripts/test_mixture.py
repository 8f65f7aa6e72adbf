"""A mixture of corpora through the stages: trained by its weights, resumed, and seen in the report."""

from pathlib import Path

import pytest

from nanochat.common import UserError, base_dir, read_json
from nanochat.data.shards import write_shards
from nanochat.report import __main__ as report
from nanochat.report.sections import report_dir
from nanochat.runtime.tracking import read_metrics
from scripts import base_eval, base_loss, tok_eval, tok_train
from tests.support.small_world import make_corpus, run_stage, stage_folder
from tests.support.tiny_model import on_cpu

pytestmark = pytest.mark.slow  # whole stages

MIXED = "tinyworld:0.75,more:0.25"


@pytest.fixture
def mixed(base_folder: Path) -> None:
    make_corpus(base_folder)
    write_shards(base_dir() / "base_data" / "more", [f"{i} plus {i} is {2 * i}. 这是第{i}句。" * 3 for i in range(400)])
    tok_train.train(tok_train.Config(data=MIXED, vocab_size=320))


def test_a_mixture_trains_resumes_and_is_reported(mixed, base_folder):
    run_stage("base", data=MIXED)
    section = read_json(report_dir() / "sections" / "base_train.json")
    assert section["settings"]["corpus"] == "tinyworld:3,more:1"
    assert [(row["corpus"], row["rows read"]) for row in section["rows"]] == [("tinyworld", 120), ("more", 40)]
    losses = [line["loss"] for line in read_metrics(stage_folder(base_folder, "base"))]
    stage_folder(base_folder, "base").rename(base_folder / "aside")
    run_stage("base", data=MIXED, stop_at=7)
    run_stage("base", data=MIXED, device_batch_size=2)
    assert [line["loss"] for line in read_metrics(stage_folder(base_folder, "base"))] == pytest.approx(losses, abs=1e-5)
    with pytest.raises(UserError, match="corpus: tinyworld:3,more:1 before, tinyworld:1,more:1 now"):
        run_stage("base", data="tinyworld:0.5,more:0.5")
    base_loss.evaluate(base_loss.Config(split_tokens=2048, sample_tokens=0), on_cpu())
    base_eval.evaluate(base_eval.Config(split_tokens=2048), on_cpu())
    tok_eval.evaluate(tok_eval.Config(data=MIXED))
    report.main(report.Config("generate"))
    text = (report_dir() / "report.md").read_text(encoding="utf-8")
    assert "| tinyworld | 75 % |" in text and "| more | 25 % |" in text and "tinyworld:3,more:1" in text
    assert "## Tokenizer\n" in text and "## Base: bits per byte and samples" in text


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

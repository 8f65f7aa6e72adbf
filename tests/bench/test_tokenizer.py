"""The benchmark of the tokenizer: documents read in blocks, ratios by hand, and a run of ours alone."""

import json
from pathlib import Path

import pytest

from bench import corpus
from bench.tokenizer import __main__ as tokenizer
from bench.tokenizer import side
from nanochat.common import UserError


def test_documents_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "BLOCK", 5)
    (tmp_path / "a.txt").write_text("one\0two 汉字\0\0three", encoding="utf-8")
    (tmp_path / "b.txt").write_text("")
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert list(side.documents(paths)) == ["one", "two 汉字", "", "three"]
    task = {"files": paths, "most_bytes": (tmp_path / "a.txt").stat().st_size // 2}
    assert side.sample(task) == ["one", ""]


def test_ratios_are_the_peers_figure_divided_by_ours() -> None:
    found = {"ours": {"cold": {"cpu": 2.0}}, "tiktoken": {"cold": {"cpu": 15.0}}}
    assert tokenizer.ratio(found, "tiktoken", "cold", "cpu") == 7.5
    assert tokenizer.ratio(found, "gigatoken", "cold", "cpu") is None


def test_it_measures_ours_and_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    corpus.standard_library(tmp_path, 0.3)
    (tmp_path / "chinese.txt").write_text("今天天气很好，我们去公园散步。" * 200, encoding="utf-8")
    tokenizer.main(tokenizer.Config(corpus=tmp_path, vocab_size=1024))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("train", "encode"))] == [
        ["train", "mixed"], ["encode", "mixed"], ["train", "Chinese"], ["encode", "Chinese"]
    ]  # fmt: skip
    result = json.loads(lines[-1])
    assert result["benchmark"] == "tokenizer" and result["identical"] is True and result["han_run_vs_text"] > 0
    assert not [name for name in result if name.startswith("train_vs")], "no peer was asked for"


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no corpus in .*python -m bench\.corpus"):
        tokenizer.main(tokenizer.Config(corpus=tmp_path))
    with pytest.raises(UserError, match="--threads must be at least 1"):
        tokenizer.main(tokenizer.Config(threads=0))

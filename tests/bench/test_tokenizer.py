"""The benchmark of the tokenizer: documents in blocks, passes that end in time, ratios, a run."""

import json
from pathlib import Path

import pytest

from bench import child
from bench.tokenizer import __main__ as tokenizer
from bench.tokenizer import side


def test_documents_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "BLOCK", 5)
    monkeypatch.setattr(side, "DOCUMENT", 4)
    (tmp_path / "a.txt").write_text("one\0two 汉字\0\0three", encoding="utf-8")
    (tmp_path / "b.txt").write_text("")
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert list(side.documents(paths)) == ["one", "two 汉字", "", "three"]
    half = (tmp_path / "a.txt").stat().st_size // 2
    assert side.sample(paths, half) == ["one"]
    assert sorted(side.sample(paths, 1000)) == ["e", "one", "thre", "two ", "汉字"]


class Slow:
    """A clock in place of CPU seconds: each encoded letter takes one, and construction ten."""

    def __init__(self) -> None:
        self.now = 0.0

    def process_time(self) -> float:
        return self.now

    def encoder(self) -> side.Encode:
        self.now += 10

        def encode(texts: list[str]) -> list[list[int]]:
            self.now += sum(map(len, texts))
            return [[ord(letter) for letter in text] for text in texts]

        return encode


def test_a_pass_ends_with_its_time_and_cold_includes_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Slow()
    monkeypatch.setattr(child, "time", clock)
    groups = [["abc", "d"], ["ef"], ["ghi"]]
    answer = side.encode_once(clock.encoder, groups, 5)
    assert (answer["groups"], answer["bytes"], answer["tokens"]) == (2, 6, 6)
    assert (answer["cold"], answer["warm"]) == (16, 6)
    assert side.encode_once(clock.encoder, groups[:2])["digest"] == answer["digest"]


def test_ratios_are_medians_of_the_peer_divided_by_ours() -> None:
    shared = {"bytes": 8, "tokens": 2}
    ours = [{**shared, "cold": cold, "warm": 1.0} for cold in (1.0, 2.0, 90.0)]
    theirs = [{**shared, "cold": cold, "warm": 3.0} for cold in (1.0, 15.0, 16.0)]
    figures = tokenizer.figures({"ours": ours, "tiktoken": theirs}, "tiktoken")
    assert figures == {"bytes": 8, "bytes_per_token": 4, "cold": 7.5, "warm": 3}


def test_it_measures_ours_and_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenizer, "QUICK_CODE", 300_000)
    monkeypatch.setattr(tokenizer, "REPEATS", 1)
    monkeypatch.setattr(tokenizer, "QUICK_VOCABULARY", 1024)
    chinese = "今天天气很好，我们去公园散步。" * 200
    for kind, text in (("english", ""), ("chinese", chinese), ("russian", "")):
        (tmp_path / f"{kind}.txt").write_text(text, encoding="utf-8")
    tokenizer.main(tokenizer.Config(quick=True, corpus=tmp_path))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["texts"]["ours"]) == {"mixed", "chinese", "code", "adversarial"}
    assert result["identical"] is True
    assert not [name for name in result if "_vs_" in name]

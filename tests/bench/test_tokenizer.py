"""The benchmark of the tokenizer: documents in blocks, passes that end in time, ratios by hand, a run of ours alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import corpus
from bench.tokenizer import __main__ as tokenizer
from bench.tokenizer import measure, side, texts
from nanochat.common import UserError


def test_documents_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "BLOCK", 5)
    monkeypatch.setattr(side, "DOCUMENT", 4)
    (tmp_path / "a.txt").write_text("one\0two 汉字\0\0three", encoding="utf-8")
    (tmp_path / "b.txt").write_text("")
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert list(side.documents(paths)) == ["one", "two 汉字", "", "three"]
    task = {"files": paths, "most_bytes": (tmp_path / "a.txt").stat().st_size // 2}
    assert side.spread(task) == ["one"]
    assert sorted(side.spread({**task, "most_bytes": 1000})) == ["e", "one", "thre", "two ", "汉字"]


class Slow:
    """A clock in place of CPU seconds: each encoded letter takes one, and construction ten."""

    def __init__(self) -> None:
        self.now = 0.0

    def process_time(self) -> float:
        return self.now

    perf_counter = process_time

    def encoder(self) -> side.Encode:
        self.now += 10

        def encode(texts: list[str]) -> list[list[int]]:
            self.now += sum(map(len, texts))
            return [[ord(letter) for letter in text] for text in texts]

        return encode


def test_a_pass_ends_with_its_time_and_cold_includes_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Slow()
    monkeypatch.setattr(side, "time", clock)
    found = side.once(clock.encoder, [["abc", "d"], ["ef"], ["ghi"]], seconds=5, warm=False)
    assert (found["groups"], found["bytes"], found["tokens"]) == (2, 6, 6), "the pass ends after the fifth second"
    assert (found["construction"], found["encode"], found["cold"]) == (10, 6, 16)
    again = side.once(clock.encoder, [["abc", "d"], ["ef"]], seconds=None)
    assert (again["cold"], again["warm"], again["digest"]) == (16, 6, found["digest"])


def answer(**figures: float) -> dict[str, Any]:
    return {"bytes": 8, "tokens": 2, "construction": 1.0, "digest": "d", **figures}


def test_ratios_are_medians_of_the_peer_divided_by_ours() -> None:
    ours = [answer(cold=cold, warm=1.0) for cold in (1.0, 2.0, 90.0)]
    theirs = [answer(cold=cold, warm=3.0) for cold in (1.0, 15.0, 16.0)]
    beside = measure.Beside("tiktoken", {}, {"ours": ours, "tiktoken": theirs})
    assert beside.ratio("cold") == 7.5 and beside.identical
    figures = measure.figures(beside)
    assert (figures["bytes_per_token"], figures["cold"], figures["warm"]) == (4, 7.5, 3)
    assert measure.spread(ours, lambda answer: answer["cold"]).split() == ["2.0", "(1.0..90.0)"]
    assert not measure.Beside("x", {}, {"ours": ours, "x": [answer(cold=1) | {"digest": "e"}]}).identical


def test_generated_texts_repeat_and_have_their_size(tmp_path: Path) -> None:
    paths = texts.write(tmp_path, 0.02)
    assert tuple(paths) == texts.KINDS
    before = {kind: path.read_bytes() for kind, path in paths.items()}
    assert all(20_000 <= len(content) < 100_000 for content in before.values())
    assert {kind: path.read_bytes() for kind, path in texts.write(tmp_path, 0.02).items()} == before


def test_it_measures_ours_and_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    corpus.standard_library(tmp_path, 0.3)
    (tmp_path / "chinese.txt").write_text("今天天气很好，我们去公园散步。" * 200, encoding="utf-8")
    tokenizer.main(tokenizer.Config(corpus=tmp_path, vocab_size=1024, quick=True, seconds=0.001, repeats=1))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("encode")] == [
        name for name in ("mixed", "chinese", "code", "formulaic", "adversarial") for _ in ("lists", "numpy")
    ]
    result = json.loads(lines[-1])
    assert result["benchmark"] == "tokenizer" and result["identical"] is True and result["han_run_vs_text"] > 0
    assert result["texts"]["none"]["mixed"]["construction"]["ours"] > 0
    assert not [name for name in result if "_vs_" in name and name != "han_run_vs_text"], "no peer was asked for"


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no corpus in .*python -m bench\.corpus"):
        tokenizer.main(tokenizer.Config(corpus=tmp_path))
    with pytest.raises(UserError, match="--threads and --repeats must be at least 1"):
        tokenizer.main(tokenizer.Config(threads=0))

"""scripts.tok_eval counts correctly, compares with published vocabularies, and downloads nothing."""

import hashlib
import re

import pytest
import tiktoken

from nanochat.common import base_dir, read_json
from nanochat.data import bpe
from nanochat.data.shards import write_shards
from nanochat.tokenizer import ROLES, Tokenizer, tokenizer_dir
from scripts import tok_eval
from scripts.tok_eval import PUBLISHED, SAMPLES, Config, evaluate


@pytest.fixture(autouse=True)
def tokenizer(tmp_path, monkeypatch) -> Tokenizer:
    """A tokenizer of a small corpus; no published vocabulary is cached."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "no-cache"))
    write_shards(base_dir() / "base_data" / "c", [f"document {i} 文档" for i in range(100)])
    tokenizer = Tokenizer.train([*SAMPLES.values()], 400)
    tokenizer.save(tokenizer_dir("c"))
    return tokenizer


def test_bytes_per_token_are_counted_for_each_kind_of_text(tokenizer):
    rows = evaluate(Config())
    assert [row["text"] for row in rows] == [*SAMPLES, "c train", "c val"]
    tokens = len(tokenizer.encode(SAMPLES["English"]))
    assert rows[0]["tokens"] == tokens and rows[0]["bytes_per_token"] == len(SAMPLES["English"].encode()) / tokens
    section = read_json(base_dir() / "report" / "sections" / "tok_eval.json")
    assert section["rows"] == rows and section["tokenizer"] == tokenizer.hash


def test_the_kinds_of_text_are_named_in_the_users_language(monkeypatch, capsys):
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    evaluate(Config())
    lines = capsys.readouterr().out.splitlines()
    kinds = ("英文", "中文", "代码", "数字", "c 训练", "c 验证")
    assert all(any(f"│ {kind} " in line for line in lines) for kind in kinds), lines


def test_published_vocabularies_stand_beside_ours_without_their_files(monkeypatch, capsys):
    monkeypatch.setattr(tok_eval.tiktoken, "get_encoding", lambda name: pytest.fail(f"{name} is fetched"))
    rows = evaluate(Config())
    for row in rows[: len(SAMPLES)]:
        assert {name: row["bytes"] / row[name] for name in PUBLISHED} == pytest.approx(
            {name: known.samples[row["text"]] for name, known in PUBLISHED.items()}
        )
    assert all({*row}.isdisjoint(PUBLISHED) for row in rows[len(SAMPLES) :])
    chinese = next(line for line in capsys.readouterr().out.splitlines() if "Chinese" in line)
    assert re.findall(r"\d\.\d\d", chinese)[-4:] == ["1.39", "2.25", "3.55", "4.73"]


def test_the_figures_of_published_vocabularies_are_of_these_samples():
    """Without the files the counts cannot be checked, so a hash shows when a sample has changed."""
    assert hashlib.sha256("".join(SAMPLES.values()).encode()).hexdigest()[:16] == "5c3d6926ab18d581", (
        "count PUBLISHED again"
    )
    assert all([*known.samples] == [*SAMPLES] for known in PUBLISHED.values())


def test_published_vocabularies_are_measured_where_they_are_cached(tokenizer, monkeypatch):
    monkeypatch.setattr(tok_eval, "is_cached", lambda name: name == "gpt2")
    ranks = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size - len(ROLES))]
    known = tiktoken.Encoding("known", **bpe.tiktoken_arguments(ranks, tokenizer.regex, {}))
    monkeypatch.setattr(tok_eval.tiktoken, "get_encoding", lambda name: known)
    assert all(row["gpt2"] == row["bytes_per_token"] for row in evaluate(Config()))


def test_the_cache_is_known_by_all_its_files(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    # The name that tiktoken 0.14 gives to .../encodings/cl100k_base.tiktoken.
    (folder / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4").write_text("")
    assert [name for name in PUBLISHED if tok_eval.is_cached(name)] == ["cl100k_base"]

"""scripts.tok_eval: the table counts what it says, and nothing is fetched."""

import pytest
import tiktoken

from nanochat import bpe
from nanochat.common import UserError, base_dir, read_json
from nanochat.shards import write_shards
from nanochat.tokenizer import ROLES, Tokenizer, tokenizer_dir
from scripts import tok_eval
from scripts.tok_eval import SAMPLES, Config, train


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "no-cache"))
    write_shards(base_dir() / "base_data" / "c", [f"document {i} 文档" for i in range(100)])


def test_bytes_per_token_are_counted_for_each_kind_of_text(capsys):
    tokenizer = Tokenizer.train([*SAMPLES.values()], 400)
    tokenizer.save(tokenizer_dir("c"))
    rows = train(Config())
    assert [row["text"] for row in rows] == [*SAMPLES, "c train", "c val"]
    english = rows[0]
    tokens = len(tokenizer.encode(SAMPLES["English"]))
    assert english["tokens"] == tokens and english["bytes_per_token"] == len(SAMPLES["English"].encode()) / tokens
    section = read_json(base_dir() / "report" / "sections" / "tok_eval.json")
    assert section["rows"] == rows and section["tokenizer"] == tokenizer.hash
    said = capsys.readouterr().out
    assert "bytes per token" in said and "left out, since tiktoken has them not cached here: gpt2, cl100k_base" in said


def test_published_vocabularies_are_compared_where_they_are_cached(monkeypatch, capsys):
    tokenizer = Tokenizer.train([*SAMPLES.values()], 400)
    tokenizer.save(tokenizer_dir("c"))
    monkeypatch.setattr(tok_eval, "is_cached", lambda name: name == "gpt2")
    ranks = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size - len(ROLES))]
    known = tiktoken.Encoding("known", **bpe.for_tiktoken(ranks, tokenizer.regex, {}))
    monkeypatch.setattr(tok_eval.tiktoken, "get_encoding", lambda name: known)
    assert all(row["gpt2"] == row["bytes_per_token"] for row in train(Config()))
    assert "left out, since tiktoken has them not cached here: cl100k_base" in capsys.readouterr().out


def test_the_cache_is_known_by_all_its_files(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    # The name that tiktoken 0.14 gives to .../encodings/cl100k_base.tiktoken.
    (folder / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4").write_text("")
    assert tok_eval.is_cached("cl100k_base") and not tok_eval.is_cached("gpt2")


def test_a_missing_tokenizer_names_the_command(tmp_path):
    with pytest.raises(UserError, match=r"python -m scripts\.tok_train --data c") as raised:
        train(Config())
    assert raised.value.exit_code == 2

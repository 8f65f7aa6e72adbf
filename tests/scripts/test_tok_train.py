"""scripts.tok_train trains once, trains again if something has changed, and writes its section of the report."""

import random
from pathlib import Path

import pytest

from nanochat.common import UserError, base_dir, read_json
from nanochat.data.corpora import resolve, shards
from nanochat.data.shards import shard_paths, texts, write_shards
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from scripts import tok_train
from scripts.tok_train import Config, Used, train

RANDOM = random.Random(0)
WORDS = ["".join(RANDOM.choices("abcdefghij", k=5)) for _ in range(900)] + ["中文词语", "世界"]
DOCUMENTS = [" ".join(RANDOM.choices(WORDS, k=30)) for _ in range(700)]


@pytest.fixture
def folder() -> Path:
    write_shards(base_dir() / "base_data" / "c", DOCUMENTS, rows_per_shard=200)
    return base_dir() / "base_data" / "c"


def no_training(*_: object) -> None:
    raise AssertionError("this was done before")


def test_a_tokenizer_is_trained_saved_and_reported(folder, capsys):
    tokenizer = train(Config(vocab_size=600))
    assert Tokenizer.load(tokenizer_dir("c")).hash == tokenizer.hash and tokenizer.vocab_size == 600
    section = read_json(base_dir() / "report" / "sections" / "tok_train.json")
    assert section["documents"] == len(DOCUMENTS) - 14 and section["settings"]["data"] == "c"
    assert section["bytes_per_token"]["val"] > 1.5 and section["token_bytes"]["min"] == 1
    assert "trained 600 tokens" in capsys.readouterr().out


def test_a_second_call_finds_it_done_and_other_settings_train_again(folder, monkeypatch, capsys):
    first = train(Config(vocab_size=600))
    files = {path: path.stat().st_mtime_ns for path in base_dir().rglob("*")}
    monkeypatch.setattr(tok_train.Tokenizer, "train", no_training)
    assert train(Config(vocab_size=600, data="c")).hash == first.hash
    assert "is already there: 600 tokens" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in base_dir().rglob("*")} == files
    monkeypatch.undo()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder.parent.parent))
    assert train(Config(vocab_size=500)).vocab_size == 500


def test_a_changed_corpus_is_trained_on_again_but_added_shards_change_nothing(folder, monkeypatch):
    first = train(Config(vocab_size=400, max_chars=30_000))  # all of it in the first shard
    last = shard_paths(folder)[-1]
    last.rename(folder / "shard_00099.parquet")
    last.write_bytes((folder / "shard_00001.parquet").read_bytes())
    (folder / "corpus.json").unlink()
    # Without corpus.json the SHA-256s are unknown, so this counts as a change once.
    again = train(Config(vocab_size=400, max_chars=30_000))
    assert again.hash == first.hash
    (folder / "shard_00098.parquet").write_bytes(last.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(tok_train.Tokenizer, "train", no_training)
        assert train(Config(vocab_size=400, max_chars=30_000)).hash == first.hash
    write_shards(folder, DOCUMENTS[::-1], rows_per_shard=200)
    assert train(Config(vocab_size=400, max_chars=30_000)).hash != first.hash


def test_a_lost_or_damaged_tokenizer_is_noticed(folder):
    path = tokenizer_dir("c") / "tokenizer.json"
    first = train(Config(vocab_size=400))
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match="is damaged"):
        train(Config(vocab_size=400))
    path.unlink()
    assert train(Config(vocab_size=400)).hash == first.hash


def test_documents_and_the_whole_are_cut_at_their_limits(folder):
    used = Used([0])
    cut = list(tok_train.sample([shard_paths(folder)], (1,), Config(doc_cap=10, max_chars=95), used))
    assert [len(text) for text in cut] == [10] * 10
    assert used == Used([1], 10, 100)


def test_auto_takes_a_small_vocabulary_for_a_small_corpus(capsys):
    assert tok_train.choose_vocab_size("auto", 2_000_000) == 4_096
    assert tok_train.choose_vocab_size("auto", 10**9) == tok_train.choose_vocab_size("auto", None) == 32_768
    assert tok_train.choose_vocab_size(777, 5) == 777
    assert "vocab_size: 4,096 (the corpus has 2,000,000 characters)" in capsys.readouterr().out


def test_mistakes_are_refused_before_anything_is_read(folder):
    for cfg, message in (
        (Config(max_chars=0), "--max_chars must be positive"),
        (Config(doc_cap=-1), "--doc_cap must be positive"),
        (Config(pattern="gpt9"), "--pattern must be one of nanochat"),
        (Config(vocab_size=100), "at least 265 tokens"),
        (Config(vocab_size=3_000_000_000), "--vocab_size must be at most 2,147,483,647"),
        (Config(vocab_size=60_000), "the text is too small for a vocabulary of 60,000"),
    ):
        with pytest.raises(UserError, match=message):
            train(cfg)
    assert not tokenizer_dir("c").exists()


def test_the_vocabulary_is_exported_after_training_and_when_it_is_there(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(UserError, match=r"--export must name a folder, got .*file"):
            train(Config(vocab_size=400, export=tmp_path / name))
        assert not tokenizer_dir("c").exists()
    for export in (tmp_path / "first", Path("~/new/second")):
        train(Config(vocab_size=400, export=export))
        monkeypatch.setattr(tok_train.Tokenizer, "train", no_training)  # exporting is no other setting
    train(Config(export=tmp_path / "third"))  # nor does --export alone replace a tokenizer of another size
    for name in ("first", "new/second", "third"):
        assert (tmp_path / name / "vocabulary.tiktoken").exists()
        assert (tmp_path / name / "huggingface" / "tokenizer.json").exists()


def test_a_mixture_is_read_by_its_weights_until_all_corpora_have_ended(folder, monkeypatch):
    documents = ["zz yy xx " * 10 for _ in range(3)] + DOCUMENTS[:300]
    write_shards(base_dir() / "base_data" / "d", documents, rows_per_shard=90)
    first = train(Config(data="c:0.75,d:0.25", vocab_size=500))
    assert Tokenizer.load(tokenizer_dir("c,d")).hash == first.hash
    section = read_json(base_dir() / "report" / "sections" / "tok_train.json")
    assert section["settings"]["data"] == "c:3,d:1" and section["shards"] == 4 + 4
    monkeypatch.setattr(tok_train.Tokenizer, "train", no_training)
    assert train(Config(data="c:3,d:1", vocab_size=500)).hash == first.hash
    with pytest.raises(AssertionError, match="done before"):
        train(Config(data="c:0.5,d:0.5", vocab_size=500))


def test_each_corpus_of_a_mixture_gives_its_share_of_the_characters(folder):
    write_shards(base_dir() / "base_data" / "d", [f"{i} " + "only in d " * 9 for i in range(300)], rows_per_shard=90)
    corpora = [shards(resolve(name), "train") for name in "cd"]
    for shares in ((3, 1), (1, 1), (1, 9)):
        used = Used([0, 0])
        some = list(tok_train.sample(corpora, shares, Config(max_chars=20_000), used))
        of_d = sum(len(text) for text in some if "only in d" in text)
        assert abs(of_d - used.characters * shares[1] / sum(shares)) < 300
        assert used.documents == len(some) and used.characters == sum(map(len, some)) < 20_300


@pytest.mark.parametrize("few", [2, 5])
def test_a_small_corpus_of_a_mixture_is_read_again_until_the_large_one_has_been_read(folder, monkeypatch, few):
    monkeypatch.setattr(tok_train, "FEW_DOCUMENTS", few)
    own = [f"{i} " + "only in d " * 9 for i in range(4)]
    write_shards(base_dir() / "base_data" / "d", own)
    corpora = [shards(resolve(name), "train") for name in "cd"]
    used = Used([0, 0])
    some = list(tok_train.sample(corpora, (1, 1), Config(doc_cap=80), used))
    of_d = [text for text in some if "only in d" in text]
    assert set(of_d) <= {text[:80] for text in own} and len(set(of_d)) == 3
    assert {text[:80] for text in texts(corpora[0])} <= set(some)
    assert abs(len(of_d) * 80 / used.characters - 0.5) < 0.01 and used.shards == [4, 1]
    assert abs(tok_train.characters_to_read([55_000, 240], (1, 1), 10**9) / used.characters - 1) < 0.1

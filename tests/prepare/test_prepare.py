"""Preparation keeps every document, repeats no work, loses at most one shard when stopped, and reports damage."""

import multiprocessing
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nanochat.common import UserError, base_dir
from nanochat.data.conversation import Conversation, assistant, chat, user
from nanochat.data.corpora import Corpus, shards
from nanochat.data.shards import shard_paths, texts, write_shards
from nanochat.prepare import conversations as conversations_module
from nanochat.prepare import documents
from nanochat.prepare.__main__ import Config, main
from nanochat.prepare.conversations import conversation_folder, prepare_conversations
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.plan import plan
from nanochat.prepare.token_files import TokenSet, open_tokens
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from nanochat.train.chat_rows import chat_rows, conversation_rows
from tasks.mixtures import Mix

DOCUMENTS = [f"Document {i}: the number {i} has {len(str(i))} digits. 第{i}号文档。" for i in range(600)]
TOKENIZER = Tokenizer.train(DOCUMENTS, 360)


def make_corpus(documents: list[str] = DOCUMENTS, name: str = "c") -> Corpus:
    folder = base_dir() / "base_data" / name
    write_shards(folder, documents, rows_per_shard=250)
    return Corpus(name, folder)


def decoded(tokens: TokenSet) -> list[str]:
    return [
        TOKENIZER.decode(part.tokens[a:b].tolist())
        for part in tokens.parts
        for a, b in zip(part.offsets[:-1], part.offsets[1:], strict=True)
    ]


def no_tokenising(*_: object) -> None:
    raise AssertionError("this should have been kept")


def test_every_document_comes_back_in_order():
    corpus = make_corpus()
    train, val = (prepare_documents(corpus, TOKENIZER, split) for split in ("train", "val"))
    assert decoded(train) == list(texts(shards(corpus, "train")))
    assert Counter(decoded(train) + decoded(val)) == Counter(DOCUMENTS)
    assert len(train.parts) == 3 and train.parts[0].tokens.dtype == np.uint16
    assert train.bytes == sum(len(text.encode()) for text in texts(shards(corpus, "train")))
    assert train.meta["tokenizer"] == TOKENIZER.hash
    assert TOKENIZER.bos not in set(train.parts[0].tokens.tolist())
    assert prepare_documents(corpus, Tokenizer.train(DOCUMENTS, 350), "val").folder != val.folder


def test_a_second_call_changes_no_file_and_reads_no_shard(monkeypatch):
    corpus = make_corpus()
    first = prepare_documents(corpus, TOKENIZER, "train")
    before = {path: path.stat().st_mtime_ns for path in corpus.folder.rglob("*")}
    monkeypatch.setattr(documents, "_tokenise_shards", no_tokenising)
    assert prepare_documents(corpus, TOKENIZER, "train").key == first.key
    assert {path: path.stat().st_mtime_ns for path in corpus.folder.rglob("*")} == before


def test_a_stop_keeps_the_shards_that_are_done(monkeypatch):
    corpus = make_corpus()
    make, done = documents.tokenise_shard, []

    def stop_at_the_third(path: Path, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(path.name)
        return make(path, *rest)

    monkeypatch.setattr(documents, "tokenise_shard", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepare_documents(corpus, TOKENIZER, "train")
    assert done == ["shard_00000.parquet", "shard_00001.parquet"]
    monkeypatch.setattr(documents, "tokenise_shard", lambda path, *rest: done.append("x") or make(path, *rest))
    tokens = prepare_documents(corpus, TOKENIZER, "train")
    assert len(done) == 3
    assert decoded(tokens) == list(texts(shards(corpus, "train")))


def test_processes_make_the_same_files_as_one(capsys):
    corpus = make_corpus()
    alone = prepare_documents(corpus, TOKENIZER, "train")
    shutil.rmtree(alone.folder)
    shared = prepare_documents(corpus, TOKENIZER, "train", processes=2)
    assert shared.key == alone.key and shared.meta == alone.meta
    said = capsys.readouterr().out
    assert "2 processes for 3 shards" in said and said.count("(100%)") == 2 and "tokens/s" in said
    assert decoded(shared) == list(texts(shards(corpus, "train")))


def test_more_shards_are_added_and_a_changed_one_is_made_again(monkeypatch):
    corpus = make_corpus()
    first = prepare_documents(corpus, TOKENIZER, "train")
    last = shard_paths(corpus.folder)[-1]
    last.rename(corpus.folder / "shard_00099.parquet")
    (corpus.folder / "corpus.json").unlink()
    make_corpus([f"Other {text}" for text in DOCUMENTS], "other")
    other = shard_paths(base_dir() / "base_data" / "other")
    other[0].rename(corpus.folder / "shard_00050.parquet")
    other[1].rename(corpus.folder / "shard_00000.parquet")
    seen, make = [], documents.tokenise_shard
    monkeypatch.setattr(documents, "tokenise_shard", lambda path, *rest: seen.append(path.stem) or make(path, *rest))
    tokens = prepare_documents(corpus, TOKENIZER, "train")
    # Without corpus.json only its size identifies a shard.
    assert "shard_00000" in seen and "shard_00050" in seen and tokens.key != first.key
    assert decoded(tokens) == list(texts(shards(corpus, "train")))


def prepare_and_report(queue) -> None:
    corpus = Corpus("c", base_dir() / "base_data" / "c")
    tokens = prepare_documents(corpus, TOKENIZER, "train")
    queue.put((tokens.key, plan(tokens, 65, cut=True).key))


def test_ranks_that_prepare_at_once_agree():
    make_corpus()
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    processes = [fork.Process(target=prepare_and_report, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    keys = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(keys) == 1


def prepare_with_two() -> None:
    prepare_documents(Corpus("c", base_dir() / "base_data" / "c"), TOKENIZER, "train", processes=2)


def test_a_killed_preparation_resumes_after_the_shards_that_are_done(monkeypatch):
    corpus = make_corpus(DOCUMENTS * 12)  # 29 shards
    folder = corpus.folder / f"tokens-{TOKENIZER.hash[:8]}" / "train"
    killed = multiprocessing.get_context("fork").Process(target=prepare_with_two)
    killed.start()
    while not list(folder.glob("shard_*.json")):
        assert killed.is_alive()
    killed.kill()
    killed.join()
    done = {path: path.stat().st_mtime_ns for path in folder.glob("shard_*.json")}
    assert done
    tokens = prepare_documents(corpus, TOKENIZER, "train", processes=2)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in done.items())
    assert decoded(tokens) == list(texts(shards(corpus, "train"))) and not list(folder.glob(".tmp*"))


def test_the_plan_is_kept_and_made_again_when_the_tokens_change(monkeypatch):
    tokens = prepare_documents(make_corpus(), TOKENIZER, "train")
    first = plan(tokens, 65, cut=True)
    stamp = (tokens.folder / "plan-65-cut" / "first.npy").stat().st_mtime_ns
    assert plan(tokens, 65, cut=True).key == first.key
    assert (tokens.folder / "plan-65-cut" / "first.npy").stat().st_mtime_ns == stamp
    assert plan(tokens, 33, cut=True).rows > first.rows
    assert first.packing.lengths.sum() == tokens.tokens and first.used[:-1].tolist() == [65] * (first.rows - 1)
    tokens.meta["parts"][0]["sha256"]["tokens"] = "changed"
    assert plan(open_tokens(tokens.folder), 65, cut=True).key == first.key
    changed = TokenSet(tokens.folder, tokens.meta, tokens.parts)
    assert plan(changed, 65, cut=True).key != first.key


# --- conversations -------------------------------------------------------------------------------

CHATS = [chat(f"What is {i}?", f"It is {i}.") for i in range(100)]


def test_conversations_are_kept_with_their_masks_and_without_the_begin_mark(tmp_path):
    tokens = prepare_conversations(tmp_path / "t", CHATS, TOKENIZER, "k")
    part = tokens.parts[0]
    assert part.mask is not None and tokens.documents == 100
    for i, conversation in enumerate(CHATS):
        rendered = TOKENIZER.render(conversation)
        here = slice(part.offsets[i], part.offsets[i + 1])
        assert part.tokens[here].tolist() == rendered.ids[1:] and part.mask[here].tolist() == rendered.mask[1:]


def test_an_equal_key_is_not_rendered_again(tmp_path):
    first = prepare_conversations(tmp_path / "t", CHATS, TOKENIZER, "k")
    assert prepare_conversations(tmp_path / "t", iter(()), TOKENIZER, "k").key == first.key
    assert prepare_conversations(tmp_path / "t", CHATS[:50], TOKENIZER, "other").documents == 50
    assert prepare_conversations(tmp_path / "t", CHATS[:40], Tokenizer.train(DOCUMENTS, 350), "other").documents == 40
    with pytest.raises(UserError, match="no conversations"):
        prepare_conversations(tmp_path / "none", [], TOKENIZER, "k")


def test_other_conversations_and_tokenizers_of_a_stage_get_other_folders(monkeypatch):
    """Another run's tokens may appear between the making of the tokens and their first use."""

    def rows(word, tokenizer=TOKENIZER):
        made = conversation_rows(
            "sft", lambda: [chat(f"q {i}", f"{word} {i}") for i in range(20)], word, tokenizer, 64, 0, True
        )
        return "".join(tokenizer.decode([t for t in made.row(i)[0].tolist() if t != tokenizer.bos]) for i in range(3))

    opened = conversations_module.open_tokens

    def slowly(folder):
        monkeypatch.setattr(conversations_module, "open_tokens", opened)
        assert "omega" in rows("omega")
        return opened(folder)

    monkeypatch.setattr(conversations_module, "open_tokens", slowly)
    text = rows("alpha")
    assert "alpha" in text and "omega" not in text
    other = Tokenizer.train(DOCUMENTS, 350)
    assert conversation_folder("sft", other, "k") != conversation_folder("sft", TOKENIZER, "k")
    before = conversation_folder("sft", TOKENIZER, "k")
    monkeypatch.setattr(conversations_module, "RENDERING", 0)  # of a version that made other tokens of them
    assert conversation_folder("sft", TOKENIZER, "k") != before


def test_old_folders_of_a_stage_do_not_pile_up(monkeypatch):
    def make(number, name="mid"):
        return prepare_conversations(
            conversation_folder(name, TOKENIZER, str(number)), CHATS[:2], TOKENIZER, str(number)
        ).folder

    folders = [make(number) for number in range(9)]
    beside = make(0, "mid-val")
    for age, folder in enumerate([*folders[::-1], beside]):
        then = time.time() - (age + 13.5) * 86_400
        os.utime(folder / "meta.json", (then, then))
    newest = make(9)
    assert [folder.exists() for folder in [newest, *folders[::-1], beside]] == [True] * 8 + [False] * 2 + [True]


def test_whole_conversations_are_packed_and_none_is_left_out(tmp_path, capsys):
    tokens = prepare_conversations(tmp_path / "t", CHATS, TOKENIZER, "k")
    made = plan(tokens, 101, cut=False)
    assert sorted(made.packing.starts.tolist()) == tokens.parts[0].offsets[:-1].tolist()
    assert made.trained.sum() == np.count_nonzero(tokens.parts[0].mask)
    assert (made.cut_conversations, made.dropped_tokens) == (0, 0) and "cut" not in capsys.readouterr().out


def test_long_conversations_are_cut_before_user_turns_counted_and_said(tmp_path, capsys):
    turns = [user("a" * 20), assistant("b" * 20)] * 5
    endless = chat("c", "d" * 500)
    silent = chat("e" * 500, "f")  # its first row would train nothing
    tokenizer = Tokenizer.train(["x"], 265)
    tokens = prepare_conversations(
        tmp_path / "t", [Conversation(tuple(turns)), endless, silent, chat("q", "a")], tokenizer, "k"
    )
    made = plan(tokens, 101, cut=False)
    text = tokens.parts[0].tokens
    pieces = {
        text[s : s + n].tobytes()
        for s, n in zip(made.packing.starts.tolist(), made.packing.lengths.tolist(), strict=True)
    }
    exchange = tokenizer.render(Conversation(tuple(turns[:2]))).ids[1:]
    as_bytes = [
        np.array(ids, np.uint16).tobytes()
        for ids in (
            exchange * 2,
            exchange,
            tokenizer.render(endless).ids[1:101],
            tokenizer.render(chat("q", "a")).ids[1:],
        )
    ]
    assert pieces == set(as_bytes)
    dropped = len(tokenizer.render(endless).ids) - 101 + len(tokenizer.render(silent).ids) - 1
    assert (made.cut_conversations, made.dropped_tokens) == (3, dropped)
    said = capsys.readouterr().out
    assert f"3 of 4 conversations were longer than a row of 100 tokens and were cut; {dropped} of" in said


def test_nothing_to_train_in_rows_that_short_is_refused(tmp_path):
    tokens = prepare_conversations(tmp_path / "t", [chat("q" * 50, "a")], TOKENIZER, "k")
    with pytest.raises(UserError, match="nothing to train on fits into rows of 4 tokens"):
        plan(tokens, 5, cut=False)


@pytest.mark.parametrize(("too_long", "reason"), [("cut", "lies beyond the end of a row"), ("drop", "are dropped")])
def test_held_out_conversations_that_are_all_too_long_are_named_by_their_file(too_long, reason):
    held_out, *trained = [chat("q" * (100 if i == 0 else 1), f"a {i}") for i in range(6)]
    mixture = Mix("mine.jsonl", "k", lambda: [held_out, *trained])
    with pytest.raises(UserError, match=rf"rows of 20 tokens in the held-out conversations of mine\.jsonl.* {reason}"):
        chat_rows("tune", mixture, TOKENIZER, 20, 1, True, too_long)


# --- command line --------------------------------------------------------------------------------


def test_the_command_prepares_both_splits_and_verifies_them(capsys):
    corpus = make_corpus()
    with pytest.raises(UserError, match=r"python -m scripts\.tok_train --data c"):
        main(Config())
    TOKENIZER.save(tokenizer_dir("c"))
    main(Config())
    main(Config(verify=True))
    said = capsys.readouterr().out
    assert "c train: " in said and "tokens, all intact" in said
    path = next(corpus.folder.glob("tokens-*/train/shard_00000.bin"))
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="its SHA-256 is not"):
        main(Config(verify=True))


def test_a_conversation_that_cannot_be_rendered_is_named_with_its_line(tmp_path):
    calls = Conversation((user("hi"), assistant("ok")), options={"tools": []}, origin="chats.jsonl, line 7")
    with pytest.raises(UserError, match=r"chats.jsonl, line 7: .*calculator"):
        prepare_conversations(tmp_path / "t", [*CHATS, calls], TOKENIZER, "k")

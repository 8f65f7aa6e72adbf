"""Faults of data: the order of rows over stops and ranks, missing shards, damaged files.

Each docstring says what a test injects and what must follow.
"""

import dataclasses
import random
import re
import shutil
import subprocess
from itertools import islice

import pytest
import torch

from nanochat.common import UserError, base_dir, read_json, write_json
from nanochat.data.conversation import chat
from nanochat.data.corpora import Corpus, shards
from nanochat.data.mixing import resolve_data
from nanochat.data.shards import batches, write_shards
from nanochat.dataloader import Rows, Source, split_rows, steps
from nanochat.device import Compute
from nanochat.prepare import documents, token_files
from nanochat.prepare.conversations import prepare_conversations
from nanochat.prepare.documents import prepare_documents, work
from nanochat.prepare.interleave import blend
from nanochat.prepare.plan import plan
from nanochat.tokenizer import Tokenizer

DOCUMENTS = {
    "web": [f"Page {i} says {'ha ' * (i * 7 % 40)}and 第{i}号。" for i in range(400)],
    "books": [f"Chapter {i}. {'It rained. ' * (i % 17)}" for i in range(150)],
}
TOKENIZER = Tokenizer.train([text for some in DOCUMENTS.values() for text in some], 360)
CPU = Compute(torch.device("cpu"), "cpu", "gloo", 0, 0, 1, torch.float32, "test")


@pytest.fixture(autouse=True)
def corpora() -> None:
    for name, texts in DOCUMENTS.items():
        about = {"make": f"python -m nanochat.dataset --data {name}"}
        write_shards(base_dir() / "base_data" / name, texts, rows_per_shard=130, about=about)


def web() -> Corpus:
    return resolve_data("web").corpora[0]


def prepare_web(processes: int | None = None):
    return prepare_documents(web(), TOKENIZER, "train", processes)


# --- T4: order -----------------------------------------------------------------------------------


def make_rows(kind: str) -> Source:
    """The rows of a stage, from the files on disk."""
    if kind in ("web", "web:7,books:3", "books:1,web:1"):
        return split_rows(resolve_data(kind), TOKENIZER, "train", 64, 7)
    chats = [chat(f"What is {i}?", f"It is {'so ' * (i % 9)}{i}.") for i in range(80)]
    tokens = prepare_conversations(base_dir() / "chats", chats, TOKENIZER, "k")
    rows = Rows(tokens, plan(tokens, 65, cut=False), TOKENIZER.bos, 7, kind == "sft")
    return blend(rows, make_rows("web:7,books:3"), 4) if kind == "mid" else rows


def seen(kind: str, world_size: int, first_step: int, count: int, device_batch_size: int) -> list[list[bytes]]:
    """The rows of each of `count` steps of eight, of all ranks together, by their contents."""
    rows, out = make_rows(kind), [[] for _ in range(count)]
    for rank in range(world_size):
        compute = dataclasses.replace(CPU, rank=rank, world_size=world_size)
        for number, step in enumerate(islice(steps(rows, 8 * first_step, 8, device_batch_size, compute), count)):
            cells = [row for batch in step.micro_batches for row in torch.cat(batch, dim=1)]
            out[number].append([row.numpy().tobytes() for row in cells])
    return [[row for group in zip(*step, strict=True) for row in group] for step in out]


@pytest.mark.parametrize("kind", ["web", "web:7,books:3", "books:1,web:1", "mid", "sft"])
def test_rows_come_in_one_order_on_any_number_of_ranks_and_after_any_resume(kind):
    """T4. Injects: runs of 1, 2 and 4 ranks stop after 3, 7 and 12 steps, and resume on another number of ranks with
    another device_batch_size, over documents, mixtures of corpora, the mixture of mid_train, and SFT. Must follow:
    every step holds the same rows in the same order as an uninterrupted run on one rank.

    注入：1、2、4 个进程的训练在 3、7、12 步之后停止，换一个进程数和 device_batch_size 继续，涵盖文档、混合语料、
    mid 的掺混和 SFT。必须：每一步的数据行及其顺序，都与单个进程从不中断的训练相同。
    """
    whole = seen(kind, 1, 0, 20, 8)
    assert seen(kind, 2, 0, 20, 4) == seen(kind, 4, 0, 20, 1) == whole
    for stop, before, after in ((3, 1, 4), (7, 4, 2), (12, 2, 1)):
        parts = seen(kind, before, 0, stop, 2), seen(kind, after, stop, 20 - stop, 3)
        assert [*parts[0], *parts[1]] == whole


# --- T8: a shard is missing ----------------------------------------------------------------------


def test_a_missing_shard_is_named_before_anything_is_trained():
    """T8. Injects: a shard that corpus.json names is deleted, before and after its tokens were made. Must follow: the
    start is refused with exit code 2, and the message names the shard and the command that restores it; with the shard
    restored, the tokens are the same.

    注入：在生成词元之前和之后，删除 corpus.json 列出的一个分片。必须：以退出码 2 拒绝，指出是哪个分片以及取回它的命
    令；取回之后，词元与原来相同。
    """
    path = shards(web(), "train")[1]
    aside = path.rename(path.with_name("aside"))
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"1 of 5 shards of web are missing, the first is shard_00001\.parquet\. Get them with:"
        ) as refused:
            prepare_web()
        assert refused.value.exit_code == 2
        aside.rename(path)
        key = prepare_web().key
        path.rename(aside)
    aside.rename(path)
    assert prepare_web().key == key


@pytest.mark.parametrize("processes", [1, 2])
def test_a_shard_that_vanishes_during_preparation_is_named(monkeypatch, processes):
    """T8. Injects: a shard is deleted after preparation has begun, in one process and in two. Must follow: the
    preparation is refused, and the message names the shard and the command that restores it; the shards that were
    already prepared are kept.

    注入：预处理开始之后删除一个分片，单进程和双进程各一次。必须：拒绝并指出是哪个分片和相应的命令；已完成的分片保留。
    """
    path = shards(web(), "train")[2]
    good, corpus = path.read_bytes(), web()

    def delete_late(*given, work=work, **more):
        path.unlink()
        yield from work(*given, **more)

    def delete_third(shard, *rest, make=documents.tokenise_shard):
        if shard == path:
            path.unlink()
        return make(shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(documents, "work", delete_late)
        patch.setattr(documents, "tokenise_shard", delete_third)
        with pytest.raises(
            UserError, match=rf"the shard {re.escape(str(path))} is damaged: it is missing. Fix it with:"
        ):
            prepare_documents(corpus, TOKENIZER, "train", processes)
    path.write_bytes(good)
    kept = {note.stem for note in corpus.folder.glob("tokens-*/train/shard_*.json")}
    assert processes == 2 or kept == {"shard_00000", "shard_00001"}
    assert_whole()


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_token_file_is_made_anew_and_no_other(monkeypatch, suffix):
    """T8. Injects: a token file is deleted after it was made. Must follow: the next start makes this file again from
    its shard and leaves the other files alone; the rows are the same.

    注入：删除一个已生成的词元文件。必须：下次启动由它的分片重新生成这一个，其余不动；数据行相同。
    """
    before = prepare_web()
    (before.folder / f"shard_00001{suffix}").unlink()
    made, make = [], documents.tokenise_shard
    monkeypatch.setattr(documents, "tokenise_shard", lambda path, *rest: made.append(path.stem) or make(path, *rest))
    assert prepare_web().key == before.key and made == ["shard_00001"]


# --- T17: damaged files --------------------------------------------------------------------------


def assert_whole() -> None:
    """The tokens are those of the documents, in order."""
    tokens = prepare_web()
    texts = [text for path in shards(web(), "train") for some in batches(path) for text in some]
    expected = [token for ids in TOKENIZER.encode_batch(texts) for token in ids]
    assert [token for part in tokens.parts for token in part.tokens.tolist()] == expected


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("processes", "fault"), [(1, "one bit"), (1, "cut short"), (1, "another file"), (2, "one bit")]
)
def test_a_corrupt_shard_is_refused_and_mended(processes, fault):
    """T17. Injects: a parquet shard with one bit flipped, its end cut off, or other bytes of the same length, prepared
    by one process or two. Must follow: the preparation is refused, the message names the shard and the command that
    repairs it, and no token of the shard is kept; with the shard restored, the same command resumes, and the tokens are
    correct.

    注入：一个 parquet 分片翻转一个比特、截去末尾，或换成等长的其他字节，由一个或两个进程预处理。必须：拒绝并指出是
    哪个分片以及修复的命令，不留下它的任何词元；放回分片后，同一条命令继续，词元正确。
    """
    path = shards(web(), "train")[1]
    good = path.read_bytes()
    bad = {"one bit": flipped(good, len(good) // 2), "cut short": good[:-100], "another file": bytes(len(good))}[fault]
    path.write_bytes(bad)
    with pytest.raises(UserError, match=rf"the shard {re.escape(str(path))} is damaged: .*Fix it with: rm -r"):
        prepare_web(processes)
    assert not list(web().folder.glob("tokens-*/train/shard_00001*"))
    path.write_bytes(good)
    assert_whole()
    assert not list(web().folder.glob("tokens-*/train/.tmp*"))


def test_no_flipped_bit_of_a_shard_changes_what_is_read():
    """T17. Injects: 400 single flipped bits, one at a time, half of them in the last 1,500 bytes, in a parquet shard
    whose SHA-256 is not recorded. Must follow: each flipped bit is refused with the name of the shard, or changes no
    document.

    注入：在一个没有记录 SHA-256 的 parquet 分片中逐一翻转 400 个比特，其中一半在最后 1,500 个字节。必须：每一次要么
    拒绝并指出分片的名字，要么不改变任何文档。
    """
    path = shards(web(), "train")[0]
    (path.parent / "corpus.json").unlink()
    good, draw = path.read_bytes(), random.Random(0)
    right, refused = [text for some in batches(path) for text in some], 0
    for number in range(400):
        end = min(1_500, len(good)) if number % 2 else len(good)
        path.write_bytes(flipped(good, len(good) - 1 - draw.randrange(end)))
        try:
            assert [text for some in batches(path) for text in some] == right
        except UserError as refusal:
            assert f"the shard {path} is damaged" in str(refusal)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("suffix", "fault"),
    [(".bin", "one bit"), (".bin", "cut short"), (".idx", "one bit"), (".idx", "too long"), (".idx", "empty")],
)
def test_a_corrupt_token_file_is_refused_and_the_command_it_names_mends_it(suffix, fault):
    """T17. Injects: a token file (.bin) or its offsets (.idx) with one bit flipped, cut short, too long or empty. Must
    follow: the next start is refused before its first step, and the message names the file; the command in the message,
    and then the command of the run again, rebuild the file, and the rows are the same.

    注入：词元文件（.bin）或其偏移（.idx）翻转一个比特、变短、变长或变空。必须：下次启动在第一步之前拒绝，并指出是哪
    个文件；照消息中的命令做，再输入同一条命令，就会重新生成这一部分，数据行相同。
    """
    before = prepare_web()
    path = before.folder / f"shard_00001{suffix}"
    good = path.read_bytes()
    path.write_bytes(
        {"one bit": flipped(good, 9), "cut short": good[:-2], "too long": good + b"xy", "empty": b""}[fault]
    )
    with pytest.raises(UserError, match=rf"{re.escape(str(path))} is damaged: (it has|its SHA-256)") as refused:
        split_rows(resolve_data("web"), TOKENIZER, "train", 64)
    mend = str(refused.value).partition("Fix it with: ")[2].splitlines()[0]
    assert mend == f"rm -f {path}"
    subprocess.run(mend.split(), check=True)
    assert prepare_web().key == before.key
    assert_whole()


def test_a_corrupt_mask_is_refused():
    """T17. Injects: one flipped byte in the mask of conversations. Must follow: the next start is refused, and the
    message names the file.

    注入：对话的掩码中改变一个字节。必须：拒绝并指出是哪个文件。
    """
    make_rows("sft")
    path = base_dir() / "chats" / "conversations.mask"
    path.write_bytes(flipped(path.read_bytes(), 20))
    with pytest.raises(UserError, match=rf"{re.escape(str(path))} is damaged: its SHA-256 is not .*rm -f"):
        make_rows("sft")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("starts.npy", "one bit"),
        ("first.npy", "cut short"),
        ("used.npy", "garbage"),
        ("used.npy", "missing"),
        ("meta.json", "garbage"),
    ],
)
def test_a_corrupt_plan_is_rebuilt(name, fault, capsys):
    """T17. Injects: a file of the packing plan with one bit flipped, cut short, overwritten or deleted. Must follow:
    the plan is rebuilt from the tokens with a warning; the rows are the same.

    注入：打包方案的一个文件翻转一个比特、变短、被覆盖或被删除。必须：由词元重新生成方案并给出警告；数据行相同。
    """
    whole = seen("web", 1, 0, 4, 8)
    path = prepare_web().folder / "plan-65-cut" / name
    good = path.read_bytes()
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes({"one bit": flipped(good, len(good) - 9), "cut short": good[:-3], "garbage": b"x" * 50}[fault])
    assert seen("web", 1, 0, 4, 8) == whole and "is made again" in capsys.readouterr().err
    assert seen("web", 1, 0, 4, 8) == whole and "is made again" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["meta.json", "shard_00001.json", "checked.json"])
def test_a_corrupt_note_costs_at_most_its_part(name):
    """T17. Injects: garbage in one of the JSON files that describe the token files. Must follow: the description of a
    shard is rebuilt with its shard, and the record of past checks is ignored; for the description of the whole set, the
    message names the file to remove. The tokens stay correct.

    注入：词元文件旁的说明被写成乱码。必须：单个分片的说明随分片重新生成；只记录检查结果的说明被忽略；整个集合的说明
    损坏时，报错指出要删除的文件；词元始终正确。
    """
    key = prepare_web().key
    path = prepare_web().folder / name
    path.write_text("{", encoding="utf-8")
    if name == "meta.json":
        with pytest.raises(
            UserError, match=rf"{re.escape(str(path))} is damaged: it is not JSON .*rm -f {re.escape(str(path))}"
        ):
            prepare_web()
        path.unlink()
    if name == "shard_00001.json":
        (path.parent / "meta.json").unlink()
    assert prepare_web().key == key
    assert_whole()


def test_files_are_hashed_again_only_when_they_have_changed(monkeypatch):
    """T17. Injects: the corpus is copied to another folder, as it would be to another host. Must follow: every token
    file is hashed once in its new place, and not again at the next start.

    注入：把语料复制到另一个目录，如同换到另一台主机。必须：每个词元文件在那里只算一次哈希，下次启动不再计算。
    """
    key, hashed, sha256_of = prepare_web().key, [], token_files.sha256_of
    monkeypatch.setattr(token_files, "sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    assert prepare_web().key == key and not hashed
    moved = base_dir() / "base_data" / "moved"
    shutil.copytree(web().folder, moved, copy_function=shutil.copyfile)
    for expected in (8, 0):
        hashed.clear()
        assert prepare_documents(Corpus("moved", moved), TOKENIZER, "train").key == key
        assert len(hashed) == expected


def test_token_files_of_earlier_versions_are_still_read():
    """T17. Injects: token files and a plan of an early version, without the notes and hashes that later versions write.
    Must follow: they are read as they are, and give the same rows under the same key, so that checkpoints resume.

    注入：词元文件和打包方案没有后来版本留下的说明和哈希。必须：照原样读取，数据行和标识不变，因此检查点可以继续。
    """
    rows = make_rows("web")
    folder = prepare_web().folder
    (folder / "checked.json").unlink()
    (folder / "plan-65-cut" / "checked.json").unlink()
    about = read_json(folder / "plan-65-cut" / "meta.json")
    write_json(folder / "plan-65-cut" / "meta.json", {name: about[name] for name in about if name != "sha256"})
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix in (".bin", ".idx", ".npy")}
    again = make_rows("web")
    assert again.key == rows.key and again.plan_rows(0, 99).tolist() == rows.plan_rows(0, 99).tolist()
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())

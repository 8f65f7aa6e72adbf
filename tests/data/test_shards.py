"""Shards: documents are read back as written, the held-out split is separate and stable, and damage is reported."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import UserError
from nanochat.data import shards
from nanochat.data.shards import (
    batches,
    check_sha256,
    read_about,
    shard_paths,
    texts,
    write_shards,
)

MANY = [f"document {i} 文档" for i in range(3_000)]


def listing(folder: Path) -> list[str]:
    """The entries of a test's folder, without the base folder that every test has."""
    return sorted(path.name for path in folder.iterdir() if path.name != "base")


def test_every_document_comes_back_once(tmp_path):
    about = write_shards(tmp_path / "c", MANY, rows_per_shard=1_200, about={"kind": "test"})
    paths = shard_paths(tmp_path / "c")
    assert [path.name for path in paths] == [f"shard_{i:05d}.parquet" for i in range(4)]
    assert Counter(texts(paths)) == Counter(MANY)
    assert [pq.ParquetFile(path).metadata.num_rows for path in paths[:2]] == [1_200, 1_200]
    assert pq.ParquetFile(paths[0]).num_row_groups == 2
    assert about["documents"]["train"] + about["documents"]["val"] == 3_000
    assert read_about(tmp_path / "c") == about and about["kind"] == "test"
    assert listing(tmp_path) == ["c"]


def held_bytes(path: Path) -> int:
    """The most memory that texts take inside pyarrow while all of a shard is read."""
    before = pa.total_allocated_bytes()
    return max(pa.total_allocated_bytes() - before for _ in batches(path))


def test_reading_holds_a_few_texts_and_not_all_of_a_shard(tmp_path):
    """Pyarrow refuses more than 2 GiB of texts in one array; a long text may be stored once and repeated in each row."""
    words = "".join(map(str, range(3_000)))
    documents = {"distinct": [f"{i} {words}" for i in range(2_000)], "repeated": [100 * words] * 2_000}
    for name, most in [("distinct", 15_000_000), ("repeated", 300_000_000)]:
        path = tmp_path / f"{name}.parquet"
        table = pa.table({"text": documents[name]})
        pq.write_table(table, path, row_group_size=100, use_dictionary=name == "repeated")
        assert held_bytes(path) < most < sum(map(len, documents[name])), name


def test_long_documents_make_small_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 100)
    write_shards(tmp_path / "c", MANY[:200])
    first = pq.ParquetFile(shard_paths(tmp_path / "c")[0]).metadata
    assert [first.row_group(i).num_rows for i in range(3)] == [8, 8, 8]
    assert Counter(texts(shard_paths(tmp_path / "c"))) == Counter(MANY[:200])


def held_out(folder: Path) -> set[str]:
    return set(texts(shard_paths(folder)[-1:]))


def test_the_held_out_part_follows_from_the_text_alone(tmp_path):
    write_shards(tmp_path / "a", MANY)
    write_shards(tmp_path / "b", MANY[::-1] + ["more"] * 100)
    assert 30 <= len(held_out(tmp_path / "a")) <= 90  # 2 % of 3,000
    assert held_out(tmp_path / "a") == held_out(tmp_path / "b") - {"more"}


def test_equal_documents_never_stand_on_both_sides(tmp_path):
    for number, documents in enumerate([["a", "b", "c"] * 50, [str(i % 40) for i in range(2_000)]]):
        folder = tmp_path / str(number)
        write_shards(folder, documents)
        assert not held_out(folder) & set(texts(shard_paths(folder)[:-1]))


def test_validation_does_not_grow_without_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "VALIDATION_CHARACTERS", 100)
    about = write_shards(tmp_path / "c", MANY)
    assert 100 <= about["characters"]["val"] <= 130
    assert Counter(texts(shard_paths(tmp_path / "c"))) == Counter(MANY)


@pytest.mark.parametrize("documents", [[], ["a"], ["a", "a", "a"], ["a"] * 2_000])
def test_a_corpus_needs_two_different_documents(tmp_path, documents):
    with pytest.raises(UserError, match="at least two different documents"):
        write_shards(tmp_path / "c", documents)
    assert listing(tmp_path) == []


def test_many_copies_of_few_texts_are_refused_with_the_reason(tmp_path):
    """Whether one of few texts is held out is chance, as it follows from a hash of the text."""
    write_shards(tmp_path / "once", [f"text {i}" for i in range(10)])
    with pytest.raises(UserError, match="these 1,500 repeat so few texts that none was chosen"):
        write_shards(tmp_path / "often", [f"text {i % 10}" for i in range(1_500)])


def test_a_failure_leaves_the_old_corpus_and_nothing_half_written(tmp_path):
    write_shards(tmp_path / "c", ["old 1", "old 2"])

    def failing():
        yield from MANY
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "c", failing())
    assert listing(tmp_path) == ["c"]
    assert set(texts(shard_paths(tmp_path / "c"))) == {"old 1", "old 2"}
    write_shards(tmp_path / "c", ["new 1", "new 2"])
    assert set(texts(shard_paths(tmp_path / "c"))) == {"new 1", "new 2"}


def test_what_a_killed_process_left_is_removed_and_that_of_a_running_one_is_not(tmp_path):
    """A number of our own is left too: in a container, the only process always has the number 1."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid in (ended.pid, os.getpid(), f"old-{os.getpid()}", os.getppid()):
        (tmp_path / f".c.tmp-{pid}").mkdir()
    write_shards(tmp_path / "c", MANY)
    assert listing(tmp_path) == [f".c.tmp-{os.getppid()}", "c"]


def test_half_a_surrogate_pair_is_refused_with_its_document(tmp_path):
    with pytest.raises(UserError, match=r"document 1 .*U\+DC00\) at character 1"):
        write_shards(tmp_path / "c", ["good", "x\udc00", "good too"])


def make(tmp_path: Path) -> Path:
    write_shards(tmp_path / "c", MANY, about={"kind": "import", "make": "MAKE IT"})
    return shard_paths(tmp_path / "c")[0]


def flip_some(content: bytes) -> bytes:
    return bytes(byte ^ 255 if 1000 <= i < 1004 else byte for i, byte in enumerate(content))


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b"", flip_some])
def test_a_damaged_shard_is_named_with_the_command_that_fixes_it(tmp_path, damage):
    path = make(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    mend = re.escape(f"Fix it with: rm -r {path.parent} && MAKE IT")
    with pytest.raises(UserError, match=rf"(?s)shard {re.escape(str(path))} is damaged: .*{mend}"):
        list(texts([path]))
    with pytest.raises(UserError, match="is damaged"):
        check_sha256(path)


def test_a_shard_without_the_column_or_without_a_note_of_its_own(tmp_path):
    path = tmp_path / "shard_00000.parquet"
    pq.write_table(pa.table({"body": ["x"]}), path)
    with pytest.raises(UserError, match="no column 'text' but body"):
        list(batches(path))
    pq.write_table(pa.table({"text": ["x", None, "", "y"]}), path)
    assert list(batches(path)) == [["x", "y"]]
    check_sha256(path)
    path.unlink()
    with pytest.raises(UserError, match=r"is damaged: it is missing\. Copy it again from its source\.$"):
        list(batches(path))

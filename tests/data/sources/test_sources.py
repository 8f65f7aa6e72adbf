"""Published corpora: their addresses, and downloads of files in their schemas from a server that misbehaves."""

import hashlib
import io
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import UserError
from nanochat.data.corpora import Corpus, resolve, shards
from nanochat.data.shards import read_about, texts
from nanochat.data.sources.download import Patience
from nanochat.data.sources.fetch import download
from nanochat.data.sources.folder import check_name, quiet
from nanochat.data.sources.hub import Host
from nanochat.data.sources.published import SOURCES, Source
from nanochat.dataset import Config, main
from tests.support.file_server import Server, status

QUICK = Patience(attempts=3, stall_seconds=0.3, first_wait_seconds=0.01, longest_wait_seconds=0.05)
TYPES = {"text": pa.string(), "score": pa.float64(), "source": pa.string()}
ALL = list(SOURCES.values())
Usage = namedtuple("Usage", "total used free")


def published(source: Source, number: int, documents: int = 20) -> bytes:
    """A small file in the schema that a source publishes."""
    values = {
        "text": [f"{source.name} file {number} document {i} 教育" for i in range(documents)],
        "score": [0.8] * documents,
        "source": ["CCI3"] * documents,
    }
    table = pa.table({name: pa.array(values[name], TYPES[name]) for name in source.columns})
    body = io.BytesIO()
    pq.write_table(table, body)
    return body.getvalue()


def path_of(server: Server, source: Source, number: int, host: Host = "hub") -> str:
    return source.url(number, host).removeprefix(server.url)


def serve(server: Server, source: Source, count: int, host: Host = "hub") -> None:
    for number in source.numbers(count):
        server.files[path_of(server, source, number, host)] = published(source, number)


def fetch(source: Source, count: int, host: Host = "hub") -> Corpus:
    return download(source, count, quiet, host, parallel=1, patience=QUICK)


@pytest.mark.parametrize("source", ALL, ids=list(SOURCES))
def test_a_source_becomes_a_corpus_with_its_held_out_file_last(server: Server, source: Source) -> None:
    serve(server, source, 2)
    corpus = fetch(source, 2)
    assert resolve(source.name) == corpus
    train, val = (list(texts(shards(corpus, split))) for split in ("train", "val"))
    first, second, held_out = source.numbers(2)
    assert [train[0], train[20], val[0]] == [
        f"{source.name} file {number} document 0 教育" for number in (first, second, held_out)
    ]
    about = read_about(corpus.folder)
    for number in source.numbers(2):
        body = server.files[path_of(server, source, number)]
        known = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}  # although the server promised nothing
        assert about["shards"][source.shard(number)] == known
    assert about["make"] == source.make(2)
    main(Config(data=source.name, verify=True))


def test_shards_that_were_copied_in_are_checked_and_recorded(server: Server, base_folder: Path) -> None:
    source = SOURCES["fineweb"]
    serve(server, source, 2)
    folder = base_folder / "base_data" / "fineweb"
    folder.mkdir(parents=True)
    first, second, _ = (folder / source.shard(number) for number in source.numbers(2))
    body = published(source, 0)
    first.write_bytes(body[: len(body) // 2])
    with pytest.raises(UserError, match=r"shard_00000.parquet: the file is not parquet: .* Delete the file and type"):
        fetch(source, 2)
    first.write_bytes(body)
    assert read_about(fetch(source, 2).folder)["shards"][first.name] == {
        "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()
    }  # fmt: skip
    (folder / "corpus.json").unlink()  # a corpus that was copied in whole
    main(Config(data="fineweb", verify=True))
    second.write_bytes(second.read_bytes()[:-5] + b"wrong")
    with pytest.raises(UserError, match=r"shard_00001.parquet is damaged"):
        main(Config(data="fineweb", verify=True))


def test_the_addresses_are_those_that_the_hosts_use() -> None:
    assert SOURCES["climbmix"].url(0) == (
        "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main/shard_00000.parquet"
    )
    assert SOURCES["fineweb-zh-v2.1"].url(45, "modelscope") == (
        "https://modelscope.cn/datasets/opencsg/Fineweb-Edu-Chinese-V2.1/resolve/master/4_5/000045.parquet"
    )
    assert [SOURCES[name].validation for name in ("fineweb", "climbmix", "fineweb-zh")] == [1822, 6542, 0]
    assert len(SOURCES["climbmix"].numbers(-1)) == 6543


def test_modelscope_serves_the_sets_that_are_there(server: Server) -> None:
    source = SOURCES["fineweb-zh-v2.2"]
    serve(server, source, 1, "modelscope")
    corpus = fetch(source, 1, "modelscope")
    assert {path.partition("/resolve/")[0] for path, _ in server.requests} == {
        "/ms/datasets/opencsg/Fineweb-Edu-Chinese-V2.2"
    }
    assert read_about(corpus.folder)["make"].endswith("--data fineweb-zh-v2.2 -n 1 --from modelscope")
    with pytest.raises(UserError, match="no copy of ClimbMix on ModelScope is known") as raised:
        main(Config(data="climbmix", num_files=1, host="modelscope"))
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("count", [0, -1])
def test_all_files_of_a_set_that_nobody_counted_are_refused(count: int) -> None:
    with pytest.raises(UserError, match="nobody has counted its files; got"):
        SOURCES["fineweb-zh"].numbers(count)


def test_a_shard_that_is_fetched_again_must_be_the_one_of_the_manifest(server: Server) -> None:
    source = SOURCES["climbmix"]
    serve(server, source, 1)
    corpus = fetch(source, 1)
    (corpus.folder / source.shard(0)).unlink()
    right = server.files[path_of(server, source, 0)]
    server.files[path_of(server, source, 0)] = published(source, 0, 21)
    with pytest.raises(UserError, match=f"promised SHA-256 {hashlib.sha256(right).hexdigest()}"):
        fetch(source, 1)
    server.files[path_of(server, source, 0)] = right
    assert (fetch(source, 1).folder / source.shard(0)).read_bytes() == right


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"text": ["x"]}, "text (string)"),
        ({"text": [b"x"], "score": [1.0], "source": ["a"]}, "text (binary)"),
    ],
)
def test_a_changed_schema_is_refused_without_retries(server: Server, columns: dict[str, Any], found: str) -> None:
    source = SOURCES["fineweb-zh-v2.1"]
    body = io.BytesIO()
    pq.write_table(pa.table(columns), body)
    server.files = {path_of(server, source, number): body.getvalue() for number in source.numbers(1)}
    with pytest.raises(UserError) as raised:
        fetch(source, 1)
    assert f"has the columns {found}" in str(raised.value) and "must have text, score, source" in str(raised.value)
    assert len(server.requests) == 2  # the size, and one file once


@pytest.mark.parametrize("code", [401, 403])
def test_a_gated_set_names_its_terms_and_the_token(server: Server, code: int) -> None:
    server.faults = [status(code)] * 2
    with pytest.raises(UserError) as raised:
        fetch(SOURCES["fineweb-zh-v2.2"], 1)
    page = "https://huggingface.co/datasets/opencsg/Fineweb-Edu-Chinese-V2.2"
    assert f"accept its terms on {page}, and set HF_TOKEN" in str(raised.value)
    with pytest.raises(UserError, match="needs an account of ModelScope: accept its terms on http://127"):
        fetch(SOURCES["fineweb-zh-v2.2"], 1, "modelscope")


def test_the_disk_is_checked_for_all_files_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES["fineweb"]
    serve(server, source, 3)
    one = len(published(source, 0))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2 * one))  # enough for each file alone
    with pytest.raises(UserError, match="the download needs about"):
        fetch(source, 3)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/x", "a,b", "a:b", ".a", "a\nb", "a\tb", "a\u202eb", "a\u2028b", "x" * 300]
)
def test_a_name_that_no_corpus_can_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="name of a corpus") as refused:
        check_name(name)
    assert refused.value.exit_code == 2

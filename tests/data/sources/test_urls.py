"""Lists of addresses: fetched, checked, imported, and refused line by line."""

import hashlib
import json
from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.data.corpora import Corpus, shards
from nanochat.data.shards import read_about, texts
from nanochat.data.sources.download import Patience
from nanochat.data.sources.folder import quiet
from nanochat.data.sources.urls import download_urls, read_list
from nanochat.dataset import Config, main
from tests.support.file_server import Server, status

QUICK = Patience(attempts=3, stall_seconds=0.3, first_wait_seconds=0.01, longest_wait_seconds=0.05)


def lines(*documents: str) -> bytes:
    return "".join(json.dumps({"body": text}) + "\n" for text in documents).encode()


def everything(corpus: Corpus) -> set[str]:
    return set(texts(shards(corpus, "train"))) | set(texts(shards(corpus, "val")))


@pytest.fixture
def listed(server: Server, tmp_path: Path) -> Path:
    """A list of two addresses with one file name, the second with its SHA-256."""
    server.files = {"/a/x.jsonl": lines("one", "two", "three"), "/b/x.jsonl?v=2": lines("four", "five")}
    digest = hashlib.sha256(server.files["/b/x.jsonl?v=2"]).hexdigest()
    path = tmp_path / "pages.txt"
    path.write_text(f"# from a friend\n{server.url}/a/x.jsonl\n\n{server.url}/b/x.jsonl?v=2 {digest}\n")
    return path


def fetch(path: Path) -> Corpus:
    return download_urls(path, None, "body", quiet, patience=QUICK)


def test_every_file_of_a_list_is_in_the_corpus_and_fetched_once(server: Server, listed: Path) -> None:
    corpus = fetch(listed)
    assert corpus.name == "pages" and everything(corpus) == {"one", "two", "three", "four", "five"}
    asked = len(server.requests)
    fetch(listed)
    assert len(server.requests) == asked
    server.files["/c.jsonl"] = lines("six")
    listed.write_text(listed.read_text() + f"{server.url}/c.jsonl\n")
    assert "six" in everything(fetch(listed))
    assert {path for path, _ in server.requests[asked:]} == {"/c.jsonl"}
    assert f"--urls {listed}" in read_about(corpus.folder)["make"]


def test_a_changed_address_or_hash_never_finds_the_old_file(server: Server, listed: Path) -> None:
    fetch(listed)
    server.files["/v2/x.jsonl"] = lines("new", "newer")
    listed.write_text(f"{server.url}/v2/x.jsonl\n")
    assert everything(fetch(listed)) == {"new", "newer"}
    listed.write_text(f"{server.url}/v2/x.jsonl {'0' * 64}\n")
    with pytest.raises(UserError, match="does not have the promised SHA-256"):
        fetch(listed)
    server.faults = [status(404)]
    with pytest.raises(UserError, match="the server answered 404"):
        fetch(listed)


def test_a_hash_is_compared_with_the_file_that_is_there(server: Server, listed: Path, base_folder: Path) -> None:
    fetch(listed)
    for path in (base_folder / "downloads").rglob("*.jsonl"):
        path.write_bytes(lines("damaged", path.name))
    fetched = everything(fetch(listed))
    assert {"four", "five"} < fetched and "damaged" in fetched, "the first address has no hash"


def test_a_file_is_renamed_if_its_hash_is_given_later(server: Server, listed: Path) -> None:
    listed.write_text(f"{server.url}/a/x.jsonl\n")
    fetch(listed)
    asked = len(server.requests)
    listed.write_text(f"{server.url}/a/x.jsonl {hashlib.sha256(server.files['/a/x.jsonl']).hexdigest()}\n")
    assert everything(fetch(listed)) == {"one", "two", "three"} and len(server.requests) == asked


def test_files_with_the_names_of_an_earlier_version_are_fetched_again_with_a_word(
    server: Server, listed: Path, base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(listed)
    for path in (base_folder / "downloads").rglob("*.jsonl"):
        path.rename(path.with_name("x.jsonl" if "three" in path.read_text() else "00004-x.jsonl"))
    asked = len(server.requests)
    assert everything(fetch(listed)) == {"one", "two", "three", "four", "five"}
    assert "1 file(s) of an earlier version" in capsys.readouterr().out
    assert {path for path, _ in server.requests[asked:]} == {"/a/x.jsonl"}, "the other file has the hash of the list"


def test_bad_lines_of_a_fetched_file_are_left_out_if_asked(server: Server, listed: Path, base_folder: Path) -> None:
    server.files["/a/x.jsonl"] += b"not JSON\n"
    main(Config(urls=str(listed), text_column="body", skip_bad_lines=True))
    corpus = Corpus("pages", base_folder / "base_data" / "pages")
    assert everything(corpus) == {"one", "two", "three", "four", "five"}
    assert read_about(corpus.folder)["make"].endswith("--skip_bad_lines")


def test_a_line_that_is_there_twice_is_fetched_once(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("http://a/x.txt\nhttp://a/x.txt\nhttp://b/x.txt\nhttp://b/00003-x.txt\n")
    assert len({remote.path for remote in read_list(path, tmp_path)}) == len(read_list(path, tmp_path)) == 3


@pytest.mark.parametrize(
    "line",
    [
        "ftp://a/x.parquet",
        "x.parquet",
        "http://a/x.zip",
        "http://a/x.txt short",
        "http://a/.txt",
        "http://[::1/x.txt",
        "http://a/%00x.txt",
    ],
)
def test_a_line_that_is_no_address_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "list"
    path.write_text(f"http://a/good.txt\n{line}\n")
    with pytest.raises(UserError, match=r"list line 2 must be the address") as raised:
        read_list(path, tmp_path)
    assert raised.value.exit_code == 2


def test_an_empty_or_missing_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name, why in (("empty", "names no address"), ("nowhere", "cannot be read")):
        with pytest.raises(UserError, match=why):
            main(Config(urls=str(tmp_path / name)))
    with pytest.raises(UserError, match="goes without --data and -n"):
        main(Config(urls="x", num_files=3))

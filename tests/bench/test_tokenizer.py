"""The benchmark of the tokenizer and its corpus: documents out of packages, figures by hand, and that it runs."""

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import corpus, tokenizer, tokenizer_side
from nanochat.common import UserError, read_json


def test_documents_lose_their_markup_and_nothing_else() -> None:
    page = "<html><script>if (a < b) {}</script><p>One &amp; two</p>\n\n\n<b>three</b></html>" + "x" * 200
    assert corpus.document("a.html", page.encode()) == "One & two\n\nthree" + "x" * 200 + "\n"
    assert corpus.document("a.txt", ("<b>" + "x" * 300 + "\0").encode()) == "<b>" + "x" * 300
    assert corpus.document("a.txt", b"\xff" * 300) is None
    assert corpus.document("a.txt", b"short") is None


def test_a_document_is_of_the_kind_that_its_name_or_letters_say() -> None:
    assert corpus.kind_of("a/b.hpp", "中文" * 100) == "code"
    assert corpus.kind_of("a.txt", "中" * 2 + "x" * 10) == "chinese"
    assert corpus.kind_of("a.txt", "中" + "x" * 10) == "english"


def package(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """A Debian package with these files."""
    root = folder / "root"
    (root / "DEBIAN").mkdir(parents=True)
    control = (
        f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: A <a@b>\nDescription: x\nInstalled-Size: 900\n"
    )
    (root / "DEBIAN" / "control").write_text(control)
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    built = ["dpkg-deb", "--build", str(root), str(folder / f"{name}_1_all.deb")]
    subprocess.run(built, check=True, capture_output=True)
    shutil.rmtree(root)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb makes the packages")
def test_packages_become_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chinese, english = "中文文档。" * 100, "English text. " * 100
    files = {
        "usr/share/doc/a.html": f"<p>{chinese}</p>".encode(),
        "usr/share/doc/b.txt.gz": gzip.compress(english.encode()),
        "usr/share/doc/again.txt": english.encode(),
        "usr/include/c.h": b"int x;\n" * 100,
        "usr/share/doc/picture.png": b"x" * 1000,
    }
    (tmp_path / "packages").mkdir()
    package(tmp_path / "packages", "docs", files)
    monkeypatch.setattr(corpus, "PACKAGES", {"chinese": ("docs", "gone"), "english": ("docs",), "code": ("docs",)})
    monkeypatch.setattr(corpus.shutil, "which", lambda name: name)
    config = corpus.Config(tmp_path, english=1, chinese=1, code=1)
    corpus.main(config)
    assert corpus.read(tmp_path / "chinese.txt") == [chinese + "\n"]
    assert corpus.read(tmp_path / "english.txt") == [english]
    assert corpus.read(tmp_path / "code.txt") == ["int x;\n" * 100]
    about = read_json(tmp_path / "about.json")["kinds"]
    assert about["english"] == {"bytes": len(english), "documents": 1, "packages": ["docs_1_all"]}
    (tmp_path / "code.txt").write_text("kept")
    corpus.main(config)
    assert (tmp_path / "code.txt").read_text() == "kept", "a corpus of this size is not made again"
    with pytest.raises(UserError, match="--code must not be negative"):
        corpus.main(corpus.Config(tmp_path, code=-1))


def test_documents_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_side, "BLOCK", 5)
    (tmp_path / "a.txt").write_text("one\0two 汉字\0\0three", encoding="utf-8")
    (tmp_path / "b.txt").write_text("")
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert list(tokenizer_side.documents(paths)) == ["one", "two 汉字", "", "three"]
    task = {"files": paths, "most_bytes": (tmp_path / "a.txt").stat().st_size // 2}
    assert tokenizer_side.sample(task) == ["one", ""]


def test_ratios_are_the_peers_share_of_ours() -> None:
    found = {"ours": {"cold": {"cpu": 2.0}}, "tiktoken": {"cold": {"cpu": 15.0}}}
    assert tokenizer.ratio(found, "tiktoken", "cold", "cpu") == 7.5
    assert tokenizer.ratio(found, "gigatoken", "cold", "cpu") is None


def test_it_measures_ours_and_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    corpus.standard_library(tmp_path, 0.3)
    (tmp_path / "chinese.txt").write_text("今天天气很好，我们去公园散步。" * 200, encoding="utf-8")
    tokenizer.main(tokenizer.Config(corpus=tmp_path, vocab_size=1024))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("train", "encode"))] == [
        ["train", "mixed"], ["encode", "mixed"], ["train", "Chinese"], ["encode", "Chinese"]
    ]  # fmt: skip
    result = json.loads(lines[-1])
    assert result["benchmark"] == "tokenizer" and result["identical"] is True and result["han_run_vs_text"] > 0
    assert not [name for name in result if name.startswith("train_vs")], "no peer was asked for"


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no corpus in .*python -m bench\.corpus"):
        tokenizer.main(tokenizer.Config(corpus=tmp_path))
    with pytest.raises(UserError, match="--threads must be at least 1"):
        tokenizer.main(tokenizer.Config(threads=0))

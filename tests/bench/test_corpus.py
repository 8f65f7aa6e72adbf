"""The corpus of real text: documents from packages, and their kinds."""

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.multiplier import corpus
from nanochat.common import UserError


def test_documents_lose_their_markup_and_nothing_else() -> None:
    long = "x" * 200
    page = "<html><script>if (a < b) {}</script><p>One &amp; two</p>\n\n\n<b>three</b></html>"
    text = corpus.document("a.html", f"{page}{long}".encode())
    assert text == f"One & two\n\nthree{long}\n"
    assert corpus.document("a.txt", f"<b>{long}\0".encode()) == f"<b>{long}"
    assert corpus.document("a.txt", b"\xff" * 300) is None
    assert corpus.document("a.txt", b"short") is None


def test_the_language_of_a_text_follows_from_its_letters() -> None:
    texts = {
        "russian": "Пакет устанавливает программу.",
        "chinese": "本软件包用于安装程序。",
        "english": "The file is read by the shell.",
    }
    for kind, text in texts.items():
        assert [language for language in texts if corpus.speaks(language, text)] == [kind]


def package(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """Build a Debian package with these files."""
    root = folder / "root"
    (root / "DEBIAN").mkdir(parents=True)
    fields = {
        "Package": name,
        "Version": "1",
        "Architecture": "all",
        "Maintainer": "A <a@b>",
        "Description": "x",
        "Installed-Size": "900",
    }
    control = "".join(f"{field}: {value}\n" for field, value in fields.items())
    (root / "DEBIAN" / "control").write_text(control)
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    command = ["dpkg-deb", "--build", str(root), str(folder / f"{name}_1_all.deb")]
    subprocess.run(command, check=True, capture_output=True)
    shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb makes the packages")
def test_packages_become_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chinese = "中文文档。" * 100
    english = "English text. " * 100
    russian = "Это русский текст о пакетах. " * 30
    files = {
        "usr/share/doc/a.html": f"<p>{chinese}</p>".encode(),
        "usr/share/doc/b.txt.gz": gzip.compress(english.encode()),
        "usr/share/doc/again.txt": english.encode(),
        "usr/share/doc/picture.png": b"x" * 1000,
        "usr/share/doc/ru.txt": russian.encode(),
    }
    packages = tmp_path / "packages"
    packages.mkdir()
    package(packages, "docs", files)
    package(packages, "english", {"usr/share/doc/en.md": english.encode()})
    lists = {"english": "english", "chinese": "docs gone", "russian": "docs"}
    monkeypatch.setattr(corpus, "PACKAGES", lists)
    monkeypatch.setattr(corpus.shutil, "which", lambda name: name)
    config = corpus.Config(tmp_path, english=1, chinese=1)
    corpus.main(config)
    assert corpus.documents(tmp_path, "english") == [english]
    assert corpus.documents(tmp_path, "chinese") == [chinese + "\n"]
    assert corpus.documents(tmp_path, "russian") == [russian]
    (tmp_path / "russian.txt").write_text("the user's")
    corpus.main(config)
    assert (tmp_path / "russian.txt").read_text() == "the user's", "the corpus is made once"


def test_an_old_package_list_stops_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*command: str, cwd: Path | None = None) -> str:
        raise UserError(f"`{' '.join(command)}` failed: E: {words}")

    monkeypatch.setattr(corpus, "tool", fails)
    words = "Failed to fetch pool/docs_1_all.deb  404  Not Found"
    with pytest.raises(UserError, match="apt-get update") as stopped:
        corpus.download("docs", tmp_path)
    assert not isinstance(stopped.value, corpus.MissingPackageError), "it would be skipped"
    words = "Unable to locate package docs"
    with pytest.raises(corpus.MissingPackageError):
        corpus.download("docs", tmp_path)

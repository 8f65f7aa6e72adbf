"""Makes a corpus of real text from Debian's documentation packages: English, Chinese and Russian.

python -m bench.multiplier.corpus DIR                 # about 210 MB; needs apt-get and dpkg-deb
python -m bench.multiplier.corpus DIR --english 4 --chinese 2 --russian 1

bench.multiplier and bench.tokenizer read the corpus: one file for each language, with NUL between
its documents. Packages are downloaded to DIR/packages and read there; nothing is installed.
"""

import gzip
import html
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from bench import tables
from bench.processes import refuse
from nanochat.common import UserError, atomic_path, log, read_json, write_json
from nanochat.data.command_line import run

# Packages are used in this order, the small ones first, until there is enough text.
PACKAGES = {
    "english": """
        manpages-dev git-doc python3-doc postgresql-doc linux-doc nodejs-doc
        libreoffice-help-en-us libreoffice-help-fr libreoffice-help-de libreoffice-help-es
        vim-doc default-jdk-doc rust-doc
    """,
    "chinese": """
        manpages-zh debian-reference-zh-cn libreoffice-help-zh-cn libreoffice-help-zh-tw
        maint-guide-zh-cn debian-faq-zh-cn lilypond-doc-html-zh debian-edu-doc-zh-cn
        debian-handbook installation-guide-amd64 gnome-user-docs kicad-doc-zh linuxcnc-doc-zh-cn
    """,
    "russian": """
        debian-faq-ru maint-guide-ru developers-reference-ru aptitude-doc-ru
        libreoffice-help-ru
    """,
}
KINDS = tuple(PACKAGES)
SEPARATOR = "\0"
DOCUMENTS = {".html", ".htm", ".txt", ".md", ".rst", *(f".{section}" for section in range(1, 9))}
SHORTEST = 200  # characters of a document
LONGEST = 2_000_000
LETTERS = {"chinese": re.compile("[\u3400-\u9fff]"), "russian": re.compile("[а-яё]")}
LETTER_SHARE = 0.3  # of the characters, for prose in the language
CHINESE_SHARE = 0.1  # of a document of a Chinese package, for one that is not English
FOREIGN = re.compile(r"[^\x00-\x7f]")
FOREIGN_SHARE = 0.002  # of the characters of English prose, at most
MARKUP = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.DOTALL | re.IGNORECASE)
EMPTY_LINES = re.compile(r"[ \t]*\n\s*\n\s*")
ABOUT = "about.json"
FEW_KIB = 500  # a package this small only depends on its current version, like python3-doc


class MissingPackageError(UserError):
    """The archive has no package of this name."""


def tool(*command: str, cwd: Path | None = None) -> str:
    """Return the output of a system command; UserError with its last line if it fails."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        words = result.stderr.strip().splitlines() or ["it printed nothing"]
        raise UserError(f"`{' '.join(command)}` failed: {words[-1]}")
    return result.stdout


def download(package: str, folder: Path) -> Path:
    """Return the package's file in `folder`, downloaded if it is missing.

    Raises MissingPackageError if this version of Debian lacks the package. Raises UserError if the
    file cannot be fetched: a corpus without it would differ from another machine's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package}_*.deb"
    if not list(folder.glob(pattern)):
        try:
            tool("apt-get", "download", package, cwd=folder)
        except UserError as failure:
            if "Failed to fetch" not in str(failure):
                raise MissingPackageError(str(failure)) from None
            raise UserError(
                f"{failure}. If the package list is old, run `apt-get update`; then type the same "
                "command again"
            ) from None
    return sorted(folder.glob(pattern))[0]


def real_package(package: str, folder: Path) -> Path:
    """Return the package's file, or the file of the version that it only depends on."""
    path = download(package, folder)
    for _ in range(3):
        size = tool("dpkg-deb", "-f", str(path), "Installed-Size")
        depends = tool("dpkg-deb", "-f", str(path), "Depends").strip()
        if int(size or 0) >= FEW_KIB or not depends:
            break
        first = re.split(r"[ ,|(]", depends)[0]
        path = download(first, folder)
    return path


def members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each document in a package."""
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
            for member in archive:
                name = member.name.removesuffix(".gz")
                if not member.isfile() or Path(name).suffix not in DOCUMENTS:
                    continue
                file = archive.extractfile(member)
                assert file is not None
                data = file.read()
                if member.name.endswith(".gz"):
                    data = gzip.decompress(data)
                yield name, data


def document(name: str, data: bytes) -> str | None:
    """Return the text of a file without markup; None if it is no UTF-8, too short or too long."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if name.endswith((".html", ".htm")):
        plain = html.unescape(MARKUP.sub("", text))
        text = EMPTY_LINES.sub("\n\n", plain).strip() + "\n"
    text = text.replace(SEPARATOR, "")
    return text if SHORTEST <= len(text) <= LONGEST else None


def speaks(kind: str, text: str, letter_share: float = LETTER_SHARE) -> bool:
    """Return whether a text is prose in the language; packages hold others and markup too."""
    if kind in LETTERS:
        return len(LETTERS[kind].findall(text)) >= letter_share * len(text)
    return len(FOREIGN.findall(text)) <= FOREIGN_SHARE * len(text)


def belongs(kind: str, text: str) -> bool:
    """Return whether a document of a package of this kind enters the corpus.

    The English packages are there for European languages too.
    """
    if kind == "english":
        return True
    return speaks(kind, text, CHINESE_SHARE if kind == "chinese" else LETTER_SHARE)


def documents_of(kind: str, packages: Path) -> Iterator[str]:
    """Yield the documents of a kind, each once. Packages that this Debian lacks are skipped."""
    seen: set[str] = set()
    for package in PACKAGES[kind].split():
        try:
            path = real_package(package, packages)
        except MissingPackageError as failure:
            log(f"skipped {package}: {failure}")
            continue
        log(f"reading {path.stem}")
        for name, data in members(path):
            text = document(name, data)
            if text is not None and text not in seen and belongs(kind, text):
                seen.add(text)
                yield text


def make(folder: Path, megabytes: dict[str, float]) -> None:
    """Write a text file for each kind, and `about.json` with what was asked for."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise UserError(
                f"the corpus is made of Debian packages, and this machine has no {program}; make "
                "the corpus on a Debian or Ubuntu machine, and copy its folder here"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for kind, limit in megabytes.items():
        chosen: list[str] = []
        size = 0
        stream = documents_of(kind, folder / "packages")
        while size < 1e6 * limit:
            text = next(stream, None)
            if text is None:
                break
            chosen.append(text)
            size += len(text.encode())
        with atomic_path(folder / f"{kind}.txt") as path:
            path.write_text(SEPARATOR.join(chosen), encoding="utf-8", newline="")
    write_json(folder / ABOUT, {"megabytes": megabytes, "packages": PACKAGES})


def documents(folder: Path, kind: str) -> list[str]:
    """Return the documents of one kind; UserError (code 2) if the folder is no corpus."""
    path = folder / f"{kind}.txt"
    if not path.exists():
        raise refuse(
            f"--corpus must name a folder with {path.name}, got {folder}; it is made by: "
            "python -m bench.multiplier.corpus DIR"
        )
    content = path.read_bytes().decode()  # read_text would change line endings
    return content.split(SEPARATOR) if content else []


@dataclass(frozen=True)
class Config:
    """Make a corpus of real text. Sizes are in MB; smaller sizes download fewer packages."""

    folder: tyro.conf.Positional[Path]
    """folder to write the corpus to"""
    english: float = 180
    """MB of English and European documentation"""
    chinese: float = 28
    """MB of Chinese documentation"""
    russian: float = 5
    """MB of Russian prose"""


def main(cfg: Config) -> None:
    """Make the corpus unless the folder has one of this size; print the sizes."""
    megabytes = {kind: float(getattr(cfg, kind)) for kind in KINDS}
    for kind, size in megabytes.items():
        if size < 0:
            raise refuse(f"--{kind} must not be negative, got {size:g} MB")
    about = cfg.folder / ABOUT
    if not about.exists() or read_json(about) != {"megabytes": megabytes, "packages": PACKAGES}:
        make(cfg.folder, megabytes)
    sizes = {kind: (cfg.folder / f"{kind}.txt").stat().st_size for kind in KINDS}
    tables.show(("", "MB"), [(kind, f"{size / 1e6:.1f}") for kind, size in sizes.items()])
    tables.finish("corpus", sizes)


if __name__ == "__main__":
    run(main, Config, __doc__)

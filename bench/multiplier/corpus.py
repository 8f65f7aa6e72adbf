"""Makes a corpus of real text from Debian's documentation packages: prose in English, Chinese and Russian.

python -m bench.multiplier.corpus DIR                              # about 210 MB; needs apt-get and dpkg-deb
python -m bench.multiplier.corpus DIR --english 4 --chinese 2 --russian 1

bench.multiplier and bench.tokenizer read the corpus: one file for each kind of text, with NUL between its documents.
Packages are downloaded to DIR/packages and read there; nothing is installed.
"""

import contextlib
import gzip
import hashlib
import html
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import tyro

from nanochat.common import UserError, atomic_path, log, read_json, run, write_json

# Packages are used in this order, the small ones first, until there is enough text.
PACKAGES = {
    "chinese": """
        manpages-zh debian-reference-zh-cn libreoffice-help-zh-cn libreoffice-help-zh-tw
        maint-guide-zh-cn debian-faq-zh-cn lilypond-doc-html-zh debian-edu-doc-zh-cn
        debian-handbook installation-guide-amd64 gnome-user-docs kicad-doc-zh linuxcnc-doc-zh-cn
    """,
    "english": """
        manpages-dev git-doc python3-doc postgresql-doc linux-doc nodejs-doc
        libreoffice-help-en-us libreoffice-help-fr libreoffice-help-de libreoffice-help-es
        vim-doc default-jdk-doc rust-doc
    """,
    "russian": """
        debian-faq-ru maint-guide-ru developers-reference-ru aptitude-doc-ru
        libreoffice-help-ru
    """,
}
KINDS = tuple(PACKAGES)
SEPARATOR = "\0"
DOCUMENTS = {".html", ".htm", ".txt", ".md", ".rst", *(f".{section}" for section in range(1, 9))}
SHORTEST, LONGEST = 200, 2_000_000  # characters of a document
LETTERS = {"chinese": re.compile("[\u3400-\u9fff]"), "russian": re.compile("[а-яё]")}
LETTER_SHARE = 0.3  # of a document's characters, for prose in the language
FOREIGN = re.compile(r"[^\x00-\x7f]")
FOREIGN_SHARE = 0.002  # of the characters of English prose, at most
MARKUP = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.DOTALL | re.IGNORECASE)
EMPTY_LINES = re.compile(r"[ \t]*\n\s*\n\s*")
ABOUT = "about.json"
FEW_KIB = 500  # a package this small only depends on its current version, like python3-doc


@dataclass
class Kind:
    """One file of the corpus while it is being written."""

    limit: int  # bytes
    bytes: int = 0
    documents: int = 0
    packages: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether the file has as many bytes as it should."""
        return self.bytes >= self.limit


# --- packages --------------------------------------------------------------------------------------


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
                f"{failure}. If the package list is old, run `apt-get update`; then type the same command again"
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
                if Path(name).suffix not in DOCUMENTS:
                    continue
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    data = file.read()
                    yield name, gzip.decompress(data) if member.name.endswith(".gz") else data


# --- documents -------------------------------------------------------------------------------------


def document(name: str, data: bytes) -> str | None:
    """Return the text of a file without markup; None if it is not UTF-8, or too short or too long."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if name.endswith((".html", ".htm")):
        plain = html.unescape(MARKUP.sub("", text))
        text = EMPTY_LINES.sub("\n\n", plain).strip() + "\n"
    text = text.replace(SEPARATOR, "")
    return text if SHORTEST <= len(text) <= LONGEST else None


def language_of(text: str) -> str:
    """Return `chinese` if more than a tenth of the characters are Han, else `english`."""
    han = len(LETTERS["chinese"].findall(text))
    return "chinese" if han > len(text) / 10 else "english"


def speaks(kind: str, text: str) -> bool:
    """Return whether a document is prose in the language: packages hold other languages and markup too."""
    if kind in LETTERS:
        return len(LETTERS[kind].findall(text)) >= LETTER_SHARE * len(text)
    return len(FOREIGN.findall(text)) <= FOREIGN_SHARE * len(text)


class Writer:
    """Sorts documents into the open files of a corpus, each document once."""

    def __init__(self, files: dict[str, TextIO], megabytes: dict[str, float]):
        self.files = files
        self.kinds = {kind: Kind(round(size * 1e6)) for kind, size in megabytes.items()}
        self._digests: set[bytes] = set()

    def read(self, package: Path, only: str | None = None) -> None:
        """Add a package's documents to their kinds until those are full; `only` prose in this language."""
        size = sum(kind.bytes for kind in self.kinds.values())
        for name, data in members(package):
            text = document(name, data)
            if text is not None and (only is None or speaks(only, text)):
                self.add(only or language_of(text), text, package.stem)
        added = sum(kind.bytes for kind in self.kinds.values()) - size
        log(f"{package.stem}: {added / 1e6:.1f} MB")

    def add(self, name: str, text: str, package: str) -> None:
        """Write a document unless its kind is full or has it already."""
        kind = self.kinds[name]
        encoded = text.encode()
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        if kind.full or digest in self._digests:
            return
        self._digests.add(digest)
        if kind.documents:
            self.files[name].write(SEPARATOR)
        self.files[name].write(text)
        kind.bytes += len(encoded)
        kind.documents += 1
        if package not in kind.packages:
            kind.packages.append(package)


def make(folder: Path, megabytes: dict[str, float]) -> None:
    """Write a text file for each kind, and `about.json`. Packages that this Debian lacks are skipped."""
    if missing := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
        raise UserError(
            f"the corpus is made of Debian packages, and this machine has no {' and no '.join(missing)}; make the "
            "corpus on a Debian or Ubuntu machine, and copy its folder here"
        )
    with contextlib.ExitStack() as stack:
        files = {}
        for kind in KINDS:
            path = stack.enter_context(atomic_path(folder / f"{kind}.txt"))
            files[kind] = stack.enter_context(path.open("w", encoding="utf-8", newline=""))
        writer = Writer(files, megabytes)
        for kind, packages in PACKAGES.items():
            for package in packages.split():
                if writer.kinds[kind].full:
                    break
                try:
                    path = real_package(package, folder / "packages")
                except MissingPackageError as failure:
                    log(f"skipped {package}: {failure}")
                    continue
                writer.read(path, "russian" if kind == "russian" else None)
    kinds = {name: asdict(kind) for name, kind in writer.kinds.items()}
    write_json(folder / ABOUT, {"asked": request_of(megabytes), "kinds": kinds})


def request_of(megabytes: dict[str, float]) -> dict[str, Any]:
    """Return what decides the text of a corpus."""
    return {"megabytes": megabytes, "packages": PACKAGES}


def documents(folder: Path, kind: str) -> list[str]:
    """Return the documents of one kind; UserError (code 2) if the folder is no corpus."""
    path = folder / f"{kind}.txt"
    if not path.exists():
        raise UserError(
            f"--corpus must name a folder with {path.name}, got {folder}; it is made by: "
            "python -m bench.multiplier.corpus DIR",
            exit_code=2,
        )
    content = path.read_bytes().decode()  # read_text would change line endings
    return content.split(SEPARATOR) if content else []


# --- command line ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Make a corpus of real text. Sizes are in MB, millions of bytes; smaller sizes download fewer packages."""

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
            raise UserError(f"--{kind} must not be negative, got {size:g} MB", exit_code=2)
    about = cfg.folder / ABOUT
    if not about.exists() or read_json(about)["asked"] != request_of(megabytes):
        cfg.folder.mkdir(parents=True, exist_ok=True)
        make(cfg.folder, megabytes)
    kinds = read_json(about)["kinds"]
    for name, kind in kinds.items():
        packages = ", ".join(kind["packages"])
        size = kind["bytes"] / 1e6
        log(f"{name:<8}{size:8.1f} MB in {kind['documents']:,} documents: {packages}")
    sizes = {name: kind["bytes"] for name, kind in kinds.items()}
    print(json.dumps({"benchmark": "corpus", **sizes}))


if __name__ == "__main__":
    run(main, Config, __doc__)

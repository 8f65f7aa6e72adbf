"""Makes a corpus of real text from Debian's documentation packages: source code, and prose in six languages.

python -m bench.corpus DIR                              # about 320 MB; needs apt-get and dpkg-deb
python -m bench.corpus DIR --english 4 --chinese 2 --code 2 --others 1

bench.tokenizer and bench.patterns read the corpus. Packages are downloaded to DIR/packages and read there; nothing is
installed.
"""

import contextlib
import gzip
import hashlib
import html
import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from nanochat.common import UserError, atomic_path, log, read_json, run, write_json

# Packages are used in this order, the small ones first, until there is enough text.
PACKAGES = {
    "chinese": (
        "manpages-zh",
        "debian-reference-zh-cn",
        "libreoffice-help-zh-cn",
        "libreoffice-help-zh-tw",
        "maint-guide-zh-cn",
        "debian-faq-zh-cn",
        "lilypond-doc-html-zh",
        "debian-edu-doc-zh-cn",
        "debian-handbook",
        "installation-guide-amd64",
        "gnome-user-docs",
        "kicad-doc-zh",
        "linuxcnc-doc-zh-cn",
    ),
    "english": (
        "manpages-dev",
        "git-doc",
        "python3-doc",
        "postgresql-doc",
        "linux-doc",
        "nodejs-doc",
        "libreoffice-help-en-us",
        "libreoffice-help-fr",
        "libreoffice-help-de",
        "libreoffice-help-es",
        "vim-doc",
        "default-jdk-doc",
        "rust-doc",
    ),
    "code": ("libboost-dev", "linux-headers-amd64", "libeigen3-dev", "libpython3.11-testsuite"),
    "russian": (
        "debian-faq-ru",
        "maint-guide-ru",
        "developers-reference-ru",
        "aptitude-doc-ru",
        "libreoffice-help-ru",
    ),
    "japanese": (
        "debian-faq-ja",
        "maint-guide-ja",
        "debian-reference-ja",
        "developers-reference-ja",
        "aptitude-doc-ja",
        "libreoffice-help-ja",
    ),
    "german": (
        "debian-faq-de",
        "maint-guide-de",
        "debian-reference-de",
        "developers-reference-de",
        "libreoffice-help-de",
    ),
    "french": (
        "debian-faq-fr",
        "maint-guide-fr",
        "debian-reference-fr",
        "developers-reference-fr",
        "aptitude-doc-fr",
        "libreoffice-help-fr",
    ),
}
KINDS = tuple(PACKAGES)
OTHERS = (
    "russian",
    "japanese",
    "german",
    "french",
)  # held out: their documents are in no other file of the corpus
SEPARATOR = "\0"  # between the documents of a file
DOCUMENTS = {".html", ".htm", ".txt", ".md", ".rst", *(f".{section}" for section in range(1, 9))}
SOURCES = {".h", ".hpp", ".ipp", ".c", ".cpp", ".py", ".java", ".rs", ".js", ".S"}
SHORTEST, LONGEST = 200, 2_000_000  # characters of a document
HAN = re.compile("[\u3400-\u9fff]")
# The share of a document's characters, or of its words, that must match, for the document to be in the language.
CHARACTERS = {
    "chinese": (HAN, 0.3),
    "russian": (re.compile("[а-яё]"), 0.3),
    "japanese": (re.compile("[ぁ-ヺ]"), 0.15),
}
WORDS = {
    "german": (re.compile(r"\b(?:der|die|das|und|nicht|mit|ist|von|zu|den|werden)\b"), 0.08),
    "french": (re.compile(r"\b(?:le|la|les|des|est|et|pour|une|que|dans|du)\b"), 0.08),
}
MARKUP = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.DOTALL | re.IGNORECASE)
ABOUT = "about.json"


@dataclass
class Kind:
    """One file of the corpus while it is being written."""

    wanted: int  # bytes
    bytes: int = 0
    documents: int = 0
    packages: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether the file has as many bytes as wanted."""
        return self.bytes >= self.wanted


# --- packages -----------------------------------------------------------------------------------------


def tool(*command: str, cwd: Path | None = None) -> str:
    """The output of a system command; UserError with its last line if it fails."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        words = result.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise UserError(f"`{' '.join(command)}` failed: {words[0]}")
    return result.stdout


class MissingPackageError(UserError):
    """The archive has no package of this name."""


def download(package: str, folder: Path) -> Path:
    """The package's file in `folder`, downloaded if it is missing.

    MissingPackageError if this version of Debian does not have the package; UserError if it has, but the file was not
    to be had, since a corpus without it would have less text than another machine's, and a different one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob(f"{package}_*.deb"))
    if not found:
        try:
            tool("apt-get", "download", package, cwd=folder)
        except UserError as failure:
            if "Failed to fetch" not in str(failure):
                raise MissingPackageError(str(failure)) from None
            raise UserError(
                f"{failure}. If the package list is old, run `apt-get update`; then type the same command again"
            ) from None
        found = sorted(folder.glob(f"{package}_*.deb"))
    return found[0]


def real_package(package: str, folder: Path) -> Path:
    """The package's file, or, if it only depends on its current version like python3-doc, the file of that version."""
    path = download(package, folder)
    for _ in range(3):
        size = int(tool("dpkg-deb", "-f", str(path), "Installed-Size") or 0)  # KiB
        depends = tool("dpkg-deb", "-f", str(path), "Depends")
        if size >= 500 or not depends.strip():
            break
        path = download(re.split(r"[ ,|(]", depends.strip())[0], folder)
    return path


def members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the documents and source files in a package, unpacked in memory."""
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
    ) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
            for member in archive:
                name = member.name.removesuffix(".gz")
                if not member.isfile() or Path(name).suffix not in DOCUMENTS | SOURCES:
                    continue
                content = archive.extractfile(member)
                if content is not None:
                    data = content.read()
                    yield name, gzip.decompress(data) if member.name.endswith(".gz") else data


# --- documents ----------------------------------------------------------------------------------------


def document(name: str, data: bytes) -> str | None:
    """The text of a file without markup; None if it is not UTF-8, or too short or too long for a document."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if name.endswith((".html", ".htm")):
        text = (
            re.sub(r"[ \t]*\n\s*\n\s*", "\n\n", html.unescape(MARKUP.sub("", text))).strip() + "\n"
        )
    text = text.replace(SEPARATOR, "")
    return text if SHORTEST <= len(text) <= LONGEST else None


def kind_of(name: str, text: str) -> str:
    """`code` by the file's name, `chinese` if more than a tenth of the characters are Han, else `english`."""
    if Path(name).suffix in SOURCES:
        return "code"
    return "chinese" if len(HAN.findall(text)) > len(text) / 10 else "english"


def make(folder: Path, megabytes: dict[str, float]) -> dict[str, Kind]:
    """Write `english.txt`, `chinese.txt` and `code.txt`, their documents separated by NUL, and `about.json`."""
    if missing := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
        raise UserError(
            f"the corpus is made of Debian packages, and this machine has no {' and no '.join(missing)}; make the "
            "corpus on a Debian or Ubuntu machine, and copy its folder here"
        )
    kinds = {kind: Kind(round(megabytes[kind] * 1e6)) for kind in KINDS}
    seen: set[bytes] = set()
    with contextlib.ExitStack() as stack:
        paths = {kind: stack.enter_context(atomic_path(folder / f"{kind}.txt")) for kind in KINDS}
        with contextlib.ExitStack() as opened:
            files = {
                kind: opened.enter_context(path.open("w", encoding="utf-8", newline=""))
                for kind, path in paths.items()
            }
            for kind in KINDS:
                for package in PACKAGES[kind]:
                    if not kinds[kind].full:
                        _read(
                            package,
                            folder / "packages",
                            kinds,
                            files,
                            seen,
                            kind if kind in OTHERS else None,
                        )
    about = {
        kind: {"bytes": k.bytes, "documents": k.documents, "packages": k.packages}
        for kind, k in kinds.items()
    }
    write_json(
        folder / ABOUT, {"asked": {"megabytes": megabytes, "packages": PACKAGES}, "kinds": about}
    )
    return kinds


def _read(
    package: str,
    folder: Path,
    kinds: dict[str, Kind],
    files: dict,
    seen: set[bytes],
    language: str | None,
) -> None:
    """Add a package's documents to their kinds until those are full, or, with `language`, only documents in it.

    A package that this version of Debian does not have is skipped.
    """
    try:
        path = real_package(package, folder)
    except MissingPackageError as failure:
        log(f"skipped {package}: {failure}")
        return
    before = sum(kind.bytes for kind in kinds.values())
    for name, data in members(path):
        text = document(name, data)
        if text is None or (language and not speaks(language, text)):
            continue
        kind = kinds[kind_name := language or kind_of(name, text)]
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if kind.full or digest in seen:
            continue
        seen.add(digest)
        if kind.documents:
            files[kind_name].write(SEPARATOR)
        files[kind_name].write(text)
        kind.bytes += len(text.encode())
        kind.documents += 1
        if path.stem not in kind.packages:
            kind.packages.append(path.stem)
    log(f"{path.stem}: {(sum(kind.bytes for kind in kinds.values()) - before) / 1e6:.1f} MB")


def standard_library(folder: Path, megabytes: float) -> None:
    """Write a corpus without Debian's archive: the sources of Python's standard library, all of kind `code`."""
    library, size, texts = Path(sysconfig.get_paths()["stdlib"]), 0, []
    for path in sorted(library.rglob("*.py")):
        if "site-packages" in path.parts or size >= megabytes * 1e6:
            continue
        text = path.read_text(encoding="utf-8", errors="replace").replace(SEPARATOR, "")
        if SHORTEST <= len(text) <= LONGEST:
            texts.append(text)
            size += len(text.encode())
    if not texts:
        raise UserError(
            f"there are no source files in {library}; give --corpus DIR, a folder made by `python -m bench.corpus DIR`"
        )
    for kind in KINDS:
        with atomic_path(folder / f"{kind}.txt") as path:
            path.write_text(
                SEPARATOR.join(texts) if kind == "code" else "", encoding="utf-8", newline=""
            )
    about = {kind: {"bytes": 0, "documents": 0, "packages": []} for kind in KINDS}
    about["code"] = {
        "bytes": size,
        "documents": len(texts),
        "packages": [f"Python {sys.version.split()[0]}"],
    }
    write_json(folder / ABOUT, {"asked": {}, "kinds": about})


def read(path: Path) -> list[str]:
    """The documents in one file of a corpus."""
    content = path.read_bytes().decode()  # read_text would change line endings
    return content.split(SEPARATOR) if content else []


def read_kind(folder: Path, kind: str) -> list[str]:
    """The documents of one kind; UserError (code 2) if the folder is no corpus."""
    path = folder / f"{kind}.txt"
    if not path.exists():
        raise UserError(
            f"--corpus must name a folder with {path.name}, got {folder}; it is made by: python -m bench.corpus DIR",
            2,
        )
    return read(path)


def speaks(kind: str, text: str) -> bool:
    """Whether a document is prose in the language of its kind: packages also hold other languages and markup."""
    if kind in CHARACTERS:
        character, share = CHARACTERS[kind]
        return len(character.findall(text)) >= share * len(text)
    if kind in WORDS:
        word, share = WORDS[kind]
        return len(word.findall(text)) >= share * len(text.split())
    return len(re.findall(r"[^\x00-\x7f]", text)) <= 0.002 * len(text)


def draw(
    folder: Path, kind: Literal["english", "chinese"], megabytes: Sequence[float]
) -> list[list[str]]:
    """Draw distinct random documents in a language, cut to 10,000 characters: a list for each size in `megabytes`.

    UserError if the corpus does not have that much text.
    """
    whole = read_kind(folder, kind)
    some = [text for text in dict.fromkeys(text[:10_000] for text in whole) if speaks(kind, text)]
    random.Random(0).shuffle(some)
    parts: list[list[str]] = []
    for wanted in megabytes:
        part, size = [], 0
        while size < wanted * 1e6:
            if not some:
                raise UserError(
                    f"{folder / kind}.txt holds less than {sum(megabytes):g} MB of {kind.title()}; ask for less text, "
                    "or make a larger corpus with python -m bench.corpus",
                    2,
                )
            part.append(some.pop())
            size += len(part[-1].encode())
        parts.append(part)
    return parts


# --- command line -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Make a corpus of real text. Sizes are in MB, millions of bytes; smaller sizes download fewer packages."""

    folder: tyro.conf.Positional[Path]
    """folder to write the corpus to"""
    english: float = 180
    """MB of English and European documentation"""
    chinese: float = 28
    """MB of Chinese documentation"""
    code: float = 90
    """MB of source code"""
    others: float = 5
    """MB of prose in each of Russian, Japanese, German and French, which no other file of the corpus has"""


def main(cfg: Config) -> None:
    """Make the corpus unless the folder has one of this size; print the sizes."""
    flags = {kind: "others" if kind in OTHERS else kind for kind in KINDS}
    asked = {kind: float(getattr(cfg, flag)) for kind, flag in flags.items()}
    if negative := [kind for kind, size in asked.items() if size < 0]:
        raise UserError(
            f"--{flags[negative[0]]} must not be negative, got {asked[negative[0]]:g} MB",
            exit_code=2,
        )
    about = cfg.folder / ABOUT
    wanted = {
        "megabytes": asked,
        "packages": {kind: list(names) for kind, names in PACKAGES.items()},
    }
    if not (about.exists() and read_json(about)["asked"] == wanted):
        cfg.folder.mkdir(parents=True, exist_ok=True)
        make(cfg.folder, asked)
    kinds = read_json(about)["kinds"]
    for kind, found in kinds.items():
        packages = ", ".join(found["packages"])
        log(
            f"{kind:<8}{found['bytes'] / 1e6:8.1f} MB in {found['documents']:,} documents: {packages}"
        )
    print(
        json.dumps(
            {"benchmark": "corpus", **{kind: found["bytes"] for kind, found in kinds.items()}}
        )
    )


if __name__ == "__main__":
    run(main, Config, __doc__)

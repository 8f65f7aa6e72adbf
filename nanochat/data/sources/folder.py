"""Corpora that are written here: TinyWorld, and your own files or folders."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from nanochat.common import UserError, base_dir, log, tr, visible, warn
from nanochat.data.corpora import DROPPED, MAKE_TINYWORLD, Corpus
from nanochat.data.shards import read_about, write_shards
from nanochat.data.sources.fetch import Bar, Bars
from nanochat.data.sources.table import SOURCES
from nanochat.data.textfiles import READERS, documents
from nanochat.data.tinyworld import world as tinyworld


class _Quiet(contextlib.AbstractContextManager[Any]):
    """A bar that shows nothing."""

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, by: float, skipped: bool = False) -> None:
        pass

    def say(self, line: str) -> None:
        pass


def quiet(title: str, total: float | None, unit: str) -> Bar:
    """Show nothing."""
    return _Quiet()


def make_tinyworld(bars: Bars = quiet) -> Corpus:
    """Write TinyWorld, unless the version of this package is already there."""
    corpus = Corpus("tinyworld", base_dir() / "base_data" / "tinyworld")
    about = {"kind": "tinyworld", "make": MAKE_TINYWORLD, "fingerprint": tinyworld.VERSION}
    if _is_made(corpus, about):
        return corpus
    return _make(corpus, tinyworld.documents(), about, bars)


def check_name(name: str) -> None:
    """UserError (code 2) if a corpus cannot have this name."""
    if not name or name.startswith(".") or {*"/:,"} & {*name} or visible(name) != name:
        raise UserError(
            "the name of a corpus must be a plain folder name without / : , and control characters, got "
            f"{name!r}; choose one with --name",
            2,
        )


def import_folder(
    source: Path,
    name: str | None = None,
    text_column: str = "text",
    bars: Bars = quiet,
    make: str | None = None,
) -> Corpus:
    """Make a corpus from a .parquet, .jsonl, .txt or .md file, or from all such files in a folder and its subfolders.

    Files are read in order of path. A .txt file is one document, split at lines `<|endoftext|>` and, beyond 20,000
    characters, at the next blank line. `make` is the command that makes the corpus again, if it is not the import.
    UserError names the file and line that cannot be read.
    """
    source = source.expanduser().resolve()
    name = name or source.stem
    check_name(name)
    if visible(str(source)) != str(source):
        raise UserError(
            f"the path {source} has control characters or is not UTF-8: rename the file or folder",
            2,
        )
    corpus = Corpus(name, base_dir() / "base_data" / name)
    files = (
        [source]
        if source.is_file()
        else sorted(path for path in source.rglob("*") if path.is_file())
    )
    files = [path for path in files if path.suffix in READERS]
    if not files:
        raise UserError(
            f"{source} holds no {', '.join(READERS)} file, so there is nothing to import; check the path, or convert "
            "your files to one of these formats",
            exit_code=2,
        )
    state = hashlib.sha256(
        str([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]).encode()
    )
    column = f" --text_column {quote(text_column)}" if text_column != "text" else ""
    make = (
        make
        or f"python -m nanochat.dataset --data {quote(str(source))} --name {quote(name)}{column}"
    )
    about = {
        "kind": "import",
        "make": make,
        "source": str(source),
        "fingerprint": state.hexdigest(),
    }
    if _is_made(corpus, about):
        return corpus
    if name in ("tinyworld", *SOURCES) or (
        corpus.folder.exists() and read_about(corpus.folder).get("source") != str(source)
    ):
        raise UserError(
            f"another corpus is already named {name!r}; choose another name with --name",
            exit_code=2,
        )
    return _make(corpus, documents(files, text_column), about, bars)


def _is_made(corpus: Corpus, about: dict[str, Any]) -> bool:
    """Whether a complete corpus with exactly this description exists."""
    there = read_about(corpus.folder)
    if {key: there.get(key) for key in about} != about:
        return False
    if any(not (corpus.folder / name).exists() for name in there["shards"]):
        return False
    log(f"{corpus.name} is already there: {_summary(there)} in {corpus.folder}")
    return True


def _make(corpus: Corpus, source: Iterable[str], about: dict[str, Any], bars: Bars) -> Corpus:
    dropped = read_about(corpus.folder).get(DROPPED, {})
    with bars(corpus.name, None, "documents") as bar:

        def counted() -> Iterator[str]:
            for text in source:
                yield text
                bar.advance(1)

        made = write_shards(corpus.folder, counted(), about=about)
    log(f"wrote {_summary(made)} to {corpus.folder}")
    if dropped.get("documents"):  # their numbers mean other documents now
        warn(
            tr(
                "{corpus} was written again, so its {count:,} documents that were left out are back. Leave them out "
                "again with: {command}",
                corpus=corpus.name,
                count=dropped["documents"],
                command=dropped["make"],
            )
        )
    return corpus


def _summary(about: dict[str, Any]) -> str:
    counts, characters = about["documents"], about["characters"]
    return (
        f"{counts['train']:,} documents ({characters['train']:,} characters) for training, "
        f"{counts['val']:,} held out, {len(about['shards'])} shards"
    )

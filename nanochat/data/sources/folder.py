"""Write corpora on this machine: TinyWorld, or the user's own files and folders."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from nanochat.common import UserError, base_dir, log, required_appendix, tr, visible, warn
from nanochat.data.corpora import DROPPED, MAKE_TINYWORLD, Corpus
from nanochat.data.shards import read_about, write_shards
from nanochat.data.sources.fetch import Bar, Bars
from nanochat.data.sources.listing import ending, files_of
from nanochat.data.sources.published import SOURCES
from nanochat.data.sources.textfiles import READERS, documents

MAX_NAME_BYTES = 200  # a file name may have 255, and some names add to it


class _Quiet(contextlib.AbstractContextManager[Any]):
    """A progress bar that shows nothing."""

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, by: float, skipped: bool = False) -> None:
        pass

    def say(self, line: str) -> None:
        pass


def quiet(
    title: str,
    total: float | None,
    unit: str,
) -> Bar:
    """Return a progress bar that shows nothing."""
    return _Quiet()


def make_tinyworld(bars: Bars = quiet) -> Corpus:
    """Write the TinyWorld corpus unless this version of it is already complete, and return it."""
    tinyworld = required_appendix("nanochat.data.tinyworld.world", "--data tinyworld")
    corpus = Corpus("tinyworld", base_dir() / "base_data" / "tinyworld")
    about = {"kind": "tinyworld", "make": MAKE_TINYWORLD, "fingerprint": tinyworld.VERSION}
    if _is_complete(corpus, about):
        return corpus
    return _write(corpus, tinyworld.documents(), about, bars)


def check_name(name: str) -> None:
    """Raise UserError (exit code 2) unless `name` can be the name of a corpus."""
    is_hidden = name.startswith(".")
    has_forbidden = any(character in name for character in "/:,")
    is_printable = visible(name) == name and name.splitlines() == [name] and "\t" not in name
    is_long = len(name.encode(errors="replace")) > MAX_NAME_BYTES
    if is_hidden or has_forbidden or is_long or not is_printable:
        raise UserError(
            tr(
                "the name of a corpus must be a plain folder name of at most {bytes} bytes without "
                "/ : , and control characters, got {name!r}; choose one with --name",
                bytes=MAX_NAME_BYTES,
                name=name,
            ),
            2,
        )


def import_folder(
    source: Path,
    name: str | None = None,
    text_column: str = "text",
    bars: Bars = quiet,
    make: str | None = None,
    skip_bad_lines: bool = False,
) -> Corpus:
    """Make a corpus from a file of one of the types in READERS or a folder of them, and return it.

    Subfolders are included, hidden files are not, and files are read in order of path. Nothing is
    written if nothing has changed since an earlier import. A .txt or .md file is divided into
    documents at `<|endoftext|>` lines, and at the first blank line after more than 20,000
    characters. `make` is the command that makes the corpus again, by default the import command.
    `skip_bad_lines` leaves out lines that are not JSON or not text. Raises UserError (exit code 2)
    if there is no file to import or the name, path or column cannot be used, and UserError if a
    file is damaged or there are fewer than two different documents.
    """
    source = source.expanduser().resolve()
    name = name or source.stem
    check_name(name)
    if visible(str(source)) != str(source):
        raise UserError(
            tr(
                "the path {source} has control characters or is not UTF-8: rename the file "
                "or folder",
                source=source,
            ),
            2,
        )
    files = files_of(str(source), READERS) if ending(source) in READERS or source.is_dir() else []
    if not files:
        raise UserError(
            tr(
                "{source} holds no {readers} file, so there is nothing to import; check the "
                "path, or convert your files to one of these formats",
                source=source,
                readers=", ".join(READERS),
            ),
            exit_code=2,
        )
    if make is None:
        make = f"python -m nanochat.dataset --data {quote(str(source))} --name {quote(name)}"
        if text_column != "text":
            make += f" --text_column {quote(text_column)}"
        if skip_bad_lines:
            make += " --skip_bad_lines"
    about = {
        "kind": "import",
        "make": make,
        "source": str(source),
        "fingerprint": _fingerprint(files),
    }
    corpus = Corpus(name, base_dir() / "base_data" / name)
    if _is_complete(corpus, about):
        return corpus
    is_reserved = name == "tinyworld" or name in SOURCES
    if is_reserved or _is_of_another_source(corpus, source):
        raise UserError(
            tr(
                "another corpus is already named {name!r}; choose another name with --name",
                name=name,
            ),
            exit_code=2,
        )
    return _write(corpus, documents(files, text_column, skip_bad_lines), about, bars)


def _fingerprint(files: list[Path]) -> str:
    """Return a digest of the paths, sizes and modification times of files."""
    states = []
    for file in files:
        status = file.stat()
        states.append((str(file), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(str(states).encode()).hexdigest()


def _is_of_another_source(corpus: Corpus, source: Path) -> bool:
    if not corpus.folder.exists():
        return False
    return read_about(corpus.folder).get("source") != str(source)


def _is_complete(corpus: Corpus, about: dict[str, Any]) -> bool:
    """Return whether the corpus that `about` describes exists and is complete; if so, log it."""
    existing = read_about(corpus.folder)
    if {key: existing.get(key) for key in about} != about:
        return False
    if any(not (corpus.folder / name).exists() for name in existing["shards"]):
        return False
    log(
        tr(
            "{name} is already there: {existing} in {folder}",
            name=corpus.name,
            existing=_summary(existing),
            folder=corpus.folder,
        )
    )
    return True


def _write(
    corpus: Corpus,
    texts: Iterable[str],
    about: dict[str, Any],
    bars: Bars,
) -> Corpus:
    """Write the documents of a corpus, and return the corpus.

    Warns if documents had been left out of the old corpus, because they are included again.
    """
    dropped = read_about(corpus.folder).get(DROPPED, {})
    with bars(corpus.name, None, tr("documents")) as bar:

        def counted() -> Iterator[str]:
            for text in texts:
                yield text
                bar.advance(1)

        about = write_shards(corpus.folder, counted(), about=about)
    log(tr("wrote {summary} to {folder}", summary=_summary(about), folder=corpus.folder))
    if dropped.get("documents"):  # the indices in the old lists now mean other documents
        warn(
            tr(
                "{corpus} was written again, so its {count:,} documents that were left out are "
                "back. Leave them out again with: {command}",
                corpus=corpus.name,
                count=dropped["documents"],
                command=dropped["make"],
            )
        )
    return corpus


def _summary(about: dict[str, Any]) -> str:
    counts = about["documents"]
    characters = about["characters"]
    return tr(
        "{documents:,} documents ({characters:,} characters) for training, {held_out:,} held out, "
        "{shards} shards",
        documents=counts["train"],
        characters=characters["train"],
        held_out=counts["val"],
        shards=len(about["shards"]),
    )

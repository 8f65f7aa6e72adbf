"""Parquet shards of documents: write them, read them in batches, and check them for damage.

The last shard of a corpus holds the documents for validation.
"""

import hashlib
import itertools
import os
import reprlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import UserError, fsync_path, read_json, sha256_of, tr, write_json
from nanochat.data.library_words import in_words
from nanochat.data.parquet_footers import check_packing

COLUMN = "text"
ABOUT = "corpus.json"
ROWS_PER_GROUP = 1_000
ROWS_PER_SHARD = 20_000
HELD_OUT = 50  # one document in 50 is held out for validation
# With fewer documents, exactly this share of the different ones is held out, but at least one.
SMALL_CORPUS = 1_000
BATCH_CHARACTERS = 1 << 24  # in a list of documents, unless a single document is longer
# Rows to unpack at a time. A file may store a long text once and repeat it in every row.
FEW_ROWS = 50
# Enough for a stable validation loss; further held-out documents go to training instead.
VALIDATION_CHARACTERS = 20_000_000


def shard_name(number: int) -> str:
    """Return the file name of shard `number`."""
    return f"shard_{number:05d}.parquet"


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of the shards in a folder, in order."""
    return sorted(folder.glob("shard_*.parquet"))


def read_about(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's corpus.json, or {} if the folder has none.

    The entry `make` is the command that makes the corpus, and the entry `shards` maps the name of
    each shard to a description. Raises UserError if corpus.json is damaged.
    """
    path = folder / ABOUT
    try:
        about = read_json(path) if path.exists() else {}
    except ValueError as failure:
        raise _unreadable(path, str(failure.__cause__)) from failure
    if not isinstance(about, dict):
        raise _unreadable(path, tr("it is not an object"))
    types = {"make": str, "kind": str, "source": str, "characters": dict, "shards": dict}
    for name, kind in types.items():
        if name in about and not isinstance(about[name], kind):
            raise _unreadable(
                path, tr("its {name!r} is {value}", name=name, value=reprlib.repr(about[name]))
            )
    for name, entry in about.get("shards", {}).items():
        if "/" in name or not isinstance(entry, dict):
            raise _unreadable(path, tr("its shards are not described by name"))
    return about


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(
        tr(
            "{path} is damaged: {why}. Delete {parent} and make the corpus again with python "
            "-m nanochat.dataset.",
            path=path,
            why=why,
            parent=path.parent,
        )
    )


# --- writing -------------------------------------------------------------------------------------


class _Writer:
    """Writes documents as rows of parquet files, with up to `rows_per_shard` rows in each file."""

    def __init__(
        self,
        folder: Path,
        prefix: str,
        rows_per_shard: int,
    ):
        self.folder = folder
        self.prefix = prefix
        self.rows_per_shard = rows_per_shard
        self.documents = 0
        self.characters = 0
        self.paths: list[Path] = []
        self._group: list[str] = []  # documents that are not in the file yet
        self._group_characters = 0
        self._rows_in_file = 0
        self._file: pq.ParquetWriter | None = None

    def add(self, text: str) -> None:
        self._group.append(text)
        self.documents += 1
        self.characters += len(text)
        self._group_characters += len(text)
        shard_is_full = self._rows_in_file + len(self._group) == self.rows_per_shard
        group_is_long = self._group_characters >= BATCH_CHARACTERS
        if shard_is_full or group_is_long or len(self._group) == ROWS_PER_GROUP:
            self._write_group()
        if shard_is_full:
            self.close()

    def _write_group(self) -> None:
        if not self._group:
            return
        table = pa.table({COLUMN: pa.array(self._group, pa.string())})
        if self._file is None:
            self.paths.append(self.folder / f"{self.prefix}{len(self.paths):05d}")
            # Documents differ, so a dictionary would save nothing, and its page has no checksum.
            self._file = pq.ParquetWriter(
                self.paths[-1],
                table.schema,
                compression="zstd",
                use_dictionary=False,
                write_page_checksum=True,
            )
        self._file.write_table(table)
        self._rows_in_file += len(self._group)
        self._group = []
        self._group_characters = 0

    def close(self) -> None:
        """Write the remaining documents, and finish the current file."""
        self._write_group()
        if self._file is not None:
            self._file.close()
            with open(self.paths[-1], "rb") as file:
                os.fsync(file.fileno())
        self._file = None
        self._rows_in_file = 0


def write_shards(
    folder: Path,
    documents: Iterable[str],
    rows_per_shard: int = ROWS_PER_SHARD,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a corpus to a folder, and return the content of its corpus.json.

    The corpus consists of training shards, a validation shard, and corpus.json, which includes
    `about`. Whether a document is held out for validation depends on a hash of its text: about one
    in 50 is, and at least one in a small corpus, until the validation shard is full. The folder
    appears only when all files are complete, and replaces any folder of the same name. Raises
    UserError if a split would be empty, or if a document is not valid Unicode.
    """
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(folder)
    temporary.mkdir()
    try:
        train = _Writer(temporary, "train-", rows_per_shard)
        val = _Writer(temporary, "val-", rows_per_shard)
        for text, held_out in _split(documents):
            val_is_full = val.characters >= VALIDATION_CHARACTERS or val.documents >= rows_per_shard
            writer = val if held_out and not val_is_full else train
            writer.add(text)
        train.close()
        val.close()
        if not train.paths or not val.paths:
            raise _too_few(train.documents + val.documents)
        files = {}
        for number, path in enumerate([*train.paths, *val.paths]):
            shard = path.rename(temporary / shard_name(number))
            files[shard.name] = {"bytes": shard.stat().st_size, "sha256": sha256_of(shard)}
        content = {
            **(about or {}),
            "documents": {"train": train.documents, "val": val.documents},
            "characters": {"train": train.characters, "val": val.characters},
            "shards": files,
        }
        write_json(temporary / ABOUT, content)
        _replace(folder, temporary)
        return content
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _too_few(documents: int) -> UserError:
    """Return the refusal of a corpus whose documents would all be in the same split."""
    if documents < SMALL_CORPUS:
        return UserError(
            tr(
                "a corpus needs at least two different documents, since one is held out "
                "for validation; got {documents} document(s). Add more text.",
                documents=documents,
            )
        )
    return UserError(
        tr(
            "a corpus needs at least two different documents, since one is held out for "
            "validation; these {documents:,} repeat so few texts that none was chosen. Leave out "
            "the copies, or add more text.",
            documents=documents,
        )
    )


def _replace(folder: Path, temporary: Path) -> None:
    """Rename the folder `temporary` to `folder`, and remove any folder that had this name."""
    if folder.exists():  # rename it first, so that no half-deleted folder has this name
        old = folder.with_name(f".{folder.name}.tmp-old-{os.getpid()}")
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)
    else:
        temporary.rename(folder)
    fsync_path(folder.parent)


def _remove_left_over(folder: Path) -> None:
    """Remove the temporary folders of processes that ended while they wrote `folder`."""
    for path in folder.parent.glob(f".{folder.name}.tmp-*"):
        pid = int(path.name.rpartition("-")[2])
        # In a container, the killed process may have had the same ID as this one.
        if pid == os.getpid() or not _is_running(pid):
            shutil.rmtree(path)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process belongs to another user
    return True


def _split(documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each document, and whether it is to be held out for validation."""
    numbered = enumerate(documents)
    beginning = list(itertools.islice(numbered, SMALL_CORPUS))
    if len(beginning) < SMALL_CORPUS:
        digests = [_digest(number, text) for number, text in beginning]
        smallest = sorted(set(digests))
        held_out = set(smallest[: max(1, len(smallest) // HELD_OUT)])
        for (_, text), digest in zip(beginning, digests, strict=True):
            yield text, digest in held_out
        return
    for number, text in itertools.chain(beginning, numbered):
        yield text, _digest(number, text) % HELD_OUT == 0


def _digest(number: int, text: str) -> int:
    """Return a 64-bit hash of a document.

    Raises UserError if the document, whose index is `number`, is not valid Unicode.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as failure:
        raise UserError(
            tr(
                "documents must be valid Unicode, but document {number} has half of a "
                "surrogate pair (U+{text:04X}) at character {start}. Remove that character "
                "from the source and type the same command again.",
                number=number,
                text=ord(text[failure.start]),
                start=failure.start,
            )
        ) from None
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big")


# --- reading -------------------------------------------------------------------------------------


def read_column(
    path: Path,
    column: str,
    size: int = 1_000,
) -> Iterator[list[str | None]]:
    """Yield the texts of a parquet column, in lists of at most `size` texts.

    A list also has at most BATCH_CHARACTERS (16.8 million) characters, unless it is a single longer
    text. Raises ValueError, OSError or ArrowException if the file is damaged.
    """
    check_packing(path, [column])
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        # With each batch of a categorical column, pyarrow copies all different texts so far.
        is_categorical = pa.types.is_dictionary(file.schema_arrow.field(column).type)
        rows_at_a_time = size if is_categorical else FEW_ROWS
        rows = 0
        texts: list[str | None] = []
        characters = 0
        for batch in file.iter_batches(batch_size=rows_at_a_time, columns=[column]):
            rows += batch.num_rows
            for text in batch.column(0).to_pylist():
                length = len(text or "")
                if texts and (len(texts) == size or characters + length > BATCH_CHARACTERS):
                    yield texts
                    texts = []
                    characters = 0
                texts.append(text)
                characters += length
        if texts:
            yield texts
        if rows != file.metadata.num_rows:  # no checksum covers the footer, which holds this count
            raise ValueError(
                tr(
                    "it has {rows:,} rows, expected {expected:,}",
                    rows=rows,
                    expected=file.metadata.num_rows,
                )
            )


def batches(path: Path, size: int = 1_000) -> Iterator[list[str]]:
    """Yield the documents of a shard, in lists of at most `size` documents.

    Rows without text are skipped. Raises UserError if the shard is missing or damaged.
    """
    _check_size(path)
    try:
        schema = pq.read_schema(path)
        if COLUMN not in schema.names:
            raise ValueError(
                tr(
                    "it has no column {column!r} but {columns}",
                    column=COLUMN,
                    columns=", ".join(schema.names),
                )
            )
        kind = schema.field(COLUMN).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(
                tr("its column {column!r} holds {kind}, not text", column=COLUMN, kind=kind)
            )
        for texts in read_column(path, COLUMN, size):
            yield [text for text in texts if text]
    except (pa.ArrowException, OSError, ValueError) as failure:
        raise _damaged(path, in_words(failure).splitlines()[0]) from failure


def count_rows(path: Path) -> int:
    """Return the number of rows in a shard, from its footer alone.

    Raises UserError if the shard is missing, has another size than in corpus.json, or has a damaged
    footer.
    """
    _check_size(path)
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as failure:
        raise _damaged(path, in_words(failure).splitlines()[0]) from failure


def texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the documents of all shards, in order.

    Raises UserError if a shard is missing or damaged.
    """
    for path in paths:
        for batch in batches(path):
            yield from batch


def check_sha256(path: Path) -> None:
    """Raise UserError if a shard is missing, or if its size or SHA-256 differs from corpus.json.

    A size or hash that corpus.json does not record is not checked.
    """
    _check_size(path)
    expected = _recorded(path).get("sha256")
    if expected and sha256_of(path) != expected:
        raise _damaged(path, tr("its SHA-256 is not {expected}", expected=expected))


def _check_size(path: Path) -> None:
    expected = _recorded(path).get("bytes")
    if not path.exists():
        raise _damaged(path, tr("it is missing"))
    size = path.stat().st_size
    if expected is not None and size != expected:
        raise _damaged(
            path, tr("it has {size:,} bytes, expected {expected:,}", size=size, expected=expected)
        )


def _recorded(path: Path) -> dict[str, Any]:
    """Return a shard's entry in corpus.json, with its size and SHA-256, or {} if it has none."""
    return read_about(path.parent).get("shards", {}).get(path.name, {})


def _damaged(path: Path, why: str) -> UserError:
    """Return the error for a damaged shard, with the reason `why` and the command that fixes it."""
    about = read_about(path.parent)
    make = about.get("make")
    if make is None:  # no command made the shards: they were copied into the folder
        return UserError(
            tr(
                "the shard {path} is damaged: {why}. Copy it again from its source.",
                path=path,
                why=why,
            )
        )
    # A downloaded shard can be fetched again alone; shards that were made here are made again
    # together.
    broken = path if about.get("kind") == "download" else path.parent
    return UserError(
        tr(
            "the shard {path} is damaged: {why}. Fix it with: rm -r {broken} && {make}",
            path=path,
            why=why,
            broken=quote(str(broken)),
            make=make,
        )
    )

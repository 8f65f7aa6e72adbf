"""Parquet shards of documents: write them with a held-out last shard, read them in batches, check them for damage."""

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

from nanochat.common import UserError, fsync_path, read_json, sha256_of, write_json

COLUMN = "text"
ABOUT = "corpus.json"
ROWS_PER_GROUP = 1_000
ROWS_PER_SHARD = 20_000
HELD_OUT = 50  # one document in 50 is held out for validation
FEW = 1_000  # with fewer documents exactly this share is held out; in a larger corpus, this share on average
LARGE = 1 << 28  # bytes; what unpacks to more must not be packed better than any text
PACKED = 1_000  # times; zstd packs prose about 3 times
BATCH_CHARACTERS = 1 << 24  # in a list of documents, unless a single one is longer
VALIDATION_CHARACTERS = (
    20_000_000  # enough for a stable figure; further held-out documents go to training instead
)


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"shard_{number:05d}.parquet"


def shard_paths(folder: Path) -> list[Path]:
    """The shards in a folder, in order."""
    return sorted(folder.glob("shard_*.parquet"))


def read_about(folder: Path) -> dict[str, Any]:
    """The content of a folder's corpus.json: `make` is the command that made the corpus, `shards` lists its files. {}
    if there is no corpus.json."""
    path = folder / ABOUT
    try:
        about = read_json(path) if path.exists() else {}
    except ValueError as failure:
        raise _unreadable(path, str(failure.__cause__)) from failure
    if not isinstance(about, dict):
        raise _unreadable(path, "it is not an object")
    for name, kind in (
        ("make", str),
        ("kind", str),
        ("source", str),
        ("characters", dict),
        ("shards", dict),
    ):
        if not isinstance(about.get(name, kind()), kind):
            raise _unreadable(path, f"its {name!r} is {reprlib.repr(about[name])}")
    if not all(
        isinstance(known, dict) and "/" not in name
        for name, known in about.get("shards", {}).items()
    ):
        raise _unreadable(path, "its shards are not described by name")
    return about


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged: {why}. Delete {path.parent} and make the corpus again with python -m nanochat.dataset."
    )


# --- writing -------------------------------------------------------------------------------------


class _Writer:
    """Writes documents as rows of parquet files, `rows_per_shard` rows to a file."""

    def __init__(self, folder: Path, prefix: str, rows_per_shard: int):
        self.folder, self.prefix, self.rows_per_shard = folder, prefix, rows_per_shard
        self.documents = self.characters = 0
        self.paths: list[Path] = []
        self._rows: list[str] = []
        self._in_shard = 0
        self._file: pq.ParquetWriter | None = None

    def add(self, text: str) -> None:
        self._rows.append(text)
        self.documents += 1
        self.characters += len(text)
        if (
            len(self._rows) == ROWS_PER_GROUP
            or self._in_shard + len(self._rows) == self.rows_per_shard
        ):
            self._flush()
        if self._in_shard == self.rows_per_shard:
            self.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        table = pa.table({COLUMN: pa.array(self._rows, pa.string())})
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
        self._in_shard += len(self._rows)
        self._rows = []

    def close(self) -> None:
        """Finish the current file."""
        self._flush()
        if self._file is not None:
            self._file.close()
            with open(self.paths[-1], "rb") as f:
                os.fsync(f.fileno())
        self._file, self._in_shard = None, 0


def write_shards(
    folder: Path,
    documents: Iterable[str],
    rows_per_shard: int = ROWS_PER_SHARD,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a corpus: training shards, one shard of held-out documents, and corpus.json, whose content is returned.

    About 2 % of the documents are held out, at least one. A hash of the text decides which, so equal documents never
    land in both splits. The folder appears only when all files are written, and replaces a folder of the same name.
    UserError if there are fewer than two different documents, or if a document is not valid Unicode.
    """
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(folder)
    temporary.mkdir()
    try:
        train = _Writer(temporary, "train-", rows_per_shard)
        held_out = _Writer(temporary, "val-", rows_per_shard)
        for text, chosen in _split(documents):
            full = (
                held_out.characters >= VALIDATION_CHARACTERS or held_out.documents >= rows_per_shard
            )
            (held_out if chosen and not full else train).add(text)
        train.close()
        held_out.close()
        if not train.paths or not held_out.paths:
            raise UserError(
                "a corpus needs at least two different documents, since one is held out for validation; "
                f"got {train.documents + held_out.documents} document(s). Add more text."
            )
        files = {}
        for number, path in enumerate([*train.paths, *held_out.paths]):
            final = path.rename(temporary / shard_name(number))
            files[final.name] = {"bytes": final.stat().st_size, "sha256": sha256_of(final)}
        content = {
            **(about or {}),
            "documents": {"train": train.documents, "val": held_out.documents},
            "characters": {"train": train.characters, "val": held_out.characters},
            "shards": files,
        }
        write_json(temporary / ABOUT, content)
        if folder.exists():  # rename it first, so that no half-deleted folder has this name
            old = folder.with_name(f".{folder.name}.tmp-old-{os.getpid()}")
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
        fsync_path(folder.parent)
        return content
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_left_over(folder: Path) -> None:
    """Remove the temporary folders of processes that were killed while they wrote this folder."""
    for path in folder.parent.glob(f".{folder.name}.tmp-*"):
        pid = int(path.name.rpartition("-")[2])
        # In a container, the killed process may have had the number of this one.
        if pid == os.getpid() or not _runs(pid):
            shutil.rmtree(path)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process belongs to another user
    return True


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _split(documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each document and whether it is held out."""
    numbered = enumerate(documents)
    first = list(itertools.islice(numbered, FEW))
    digests = sorted({_checked_digest(number, text) for number, text in first})
    few = set(digests[: max(1, len(digests) // HELD_OUT)]) if len(first) < FEW else None
    for number, text in itertools.chain(first, numbered):
        digest = _checked_digest(number, text)
        yield text, digest in few if few is not None else digest % HELD_OUT == 0


def _checked_digest(number: int, text: str) -> int:
    try:
        return _digest(text)
    except UnicodeEncodeError as failure:
        raise UserError(
            f"documents must be valid Unicode, but document {number} has half of a surrogate pair "
            f"(U+{ord(text[failure.start]):04X}) at character {failure.start}. Remove that character from the source "
            "and type the same command again."
        ) from None


# --- reading -------------------------------------------------------------------------------------


# pyarrow ends the process where it describes a column of a damaged footer, so footers are read here. A footer is a
# struct in Thrift's compact protocol: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LISTS, _STRUCT = 1, 2, 3, 7, 8, (9, 10), 12
_DICTIONARIES = {2, 8}  # the encodings PLAIN_DICTIONARY and RLE_DICTIONARY


def _number(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, and where it ends."""
    number = shift = 0
    while True:
        byte, at = data[at], at + 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A value of a Thrift type, and where it ends; a struct becomes a dict by the numbers of its fields."""
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _BYTE:
        return data[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        size, at = _number(data, at)
        return data[at : at + size], at + size
    if kind in _LISTS:
        head, at = data[at], at + 1
        count, at = (head >> 4, at) if head < 0xF0 else _number(data, at)
        values, of = [], head & 0x0F
        for _ in range(
            count
        ):  # every element takes a byte, so a wrong count ends at the end of the data
            value, at = _value(data, at, _BYTE if of in (_TRUE, _FALSE) else of)
            values.append(value)
        return values, at
    if kind == _STRUCT:
        fields, number = {}, 0
        while head := data[at]:
            number, at = (number + (head >> 4), at + 1) if head >> 4 else _signed(data, at + 1)
            fields[number], at = _value(data, at, head & 0x0F)
        return fields, at + 1
    if kind in (4, 5, 6):  # i16, i32, i64
        return _signed(data, at)
    raise ValueError(f"its footer has a value of the unknown type {kind}")


def _signed(data: bytes, at: int) -> tuple[int, int]:
    number, at = _number(data, at)
    return (number >> 1) ^ -(number & 1), at


def _chunks(path: Path) -> Iterator[tuple[str, set[int], int, int, int]]:
    """Of each column in each row group: name, encodings, number of values, unpacked bytes and packed bytes."""
    with open(path, "rb") as file:
        end = file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        if size > end:
            raise ValueError("its footer is longer than the file")
        file.seek(end - size)
        data = file.read(size)
    try:
        for group in _value(data, 0, _STRUCT)[0].get(4, []):
            for column in group[1]:
                about = column[3]
                name = b".".join(about[3]).decode("utf-8", "replace")
                yield name, set(about[2]), about[5], about[6], about[7]
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        raise ValueError("its footer is damaged") from failure


def check_packing(path: Path, columns: Iterable[str] = ()) -> None:
    """Raise ValueError if a part of a parquet file unpacks to far more than any text does; all columns without names.

    Only the footer is read. A dictionary may repeat each value in every row, so its size counts that often.
    """
    wanted = {*columns}
    for name, encodings, count, size, packed in _chunks(path):
        most = size * count if encodings & _DICTIONARIES else size
        if (not wanted or name in wanted) and size > max(1 << 20, PACKED * packed) and most > LARGE:
            raise ValueError(
                f"{packed:,} bytes of its column {name!r} unpack to {size:,} and may be repeated to {most:,}, and no "
                "text packs that well"
            )


def read_column(path: Path, column: str, size: int = 1_000) -> Iterator[list[Any]]:
    """The values of a column of a parquet file, in lists of at most `size` values and about BATCH_CHARACTERS.

    Texts are read through dictionaries, so one that is stored once and repeated is held once. ValueError, OSError or
    ArrowException if the file is damaged.
    """
    check_packing(path, [column])
    with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=[column]) as file:
        rows = 0
        for batch in file.iter_batches(batch_size=size, columns=[column]):
            rows += batch.num_rows
            values = batch.column(0)
            if isinstance(values, pa.DictionaryArray):
                used = values.indices.unique()
                texts = dict(
                    zip(used.to_pylist(), values.dictionary.take(used).to_pylist(), strict=True)
                )
                yield from _short_lists([texts[number] for number in values.indices.to_pylist()])
            else:
                yield values.to_pylist()
        if rows != file.metadata.num_rows:  # no checksum covers the footer, which holds this count
            raise ValueError(f"it has {rows:,} rows, expected {file.metadata.num_rows:,}")


def _short_lists(values: list[str | None]) -> Iterator[list[str | None]]:
    """Split a list where its texts exceed BATCH_CHARACTERS."""
    start = characters = 0
    for number, text in enumerate(values):
        characters += len(text or "")
        if characters > BATCH_CHARACTERS and number > start:
            yield values[start:number]
            start, characters = number, len(text or "")
    yield values[start:]


def batches(path: Path, size: int = 1_000) -> Iterator[list[str]]:
    """The documents of one shard, in lists. Rows without text are skipped. UserError if the shard is damaged."""
    _check_size(path)
    try:
        schema = pq.read_schema(path)
        if COLUMN not in schema.names:
            raise ValueError(f"it has no column {COLUMN!r} but {', '.join(schema.names)}")
        kind = schema.field(COLUMN).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(f"its column {COLUMN!r} holds {kind}, not text")
        for texts in read_column(path, COLUMN, size):
            yield [text for text in texts if text]
    except (pa.ArrowException, OSError, ValueError) as failure:
        raise _damaged(
            path, str(failure).splitlines()[0] if str(failure) else repr(failure)
        ) from failure


def count_rows(path: Path) -> int:
    """How many rows a shard has; only its footer is read. UserError if the shard is damaged."""
    _check_size(path)
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as failure:
        raise _damaged(path, str(failure).splitlines()[0]) from failure


def texts(paths: Iterable[Path]) -> Iterator[str]:
    """The documents of shards, one after another. UserError if a shard is damaged."""
    for path in paths:
        for batch in batches(path):
            yield from batch


def check_sha256(path: Path) -> None:
    """Raise UserError if a shard does not have the SHA-256 in corpus.json. A shard without a SHA-256 there passes."""
    _check_size(path)
    expected = read_about(path.parent).get("shards", {}).get(path.name, {}).get("sha256")
    if expected and sha256_of(path) != expected:
        raise _damaged(path, f"its SHA-256 is not {expected}")


def _check_size(path: Path) -> None:
    expected = read_about(path.parent).get("shards", {}).get(path.name, {}).get("bytes")
    if not path.exists():
        raise _damaged(path, "it is missing")
    size = path.stat().st_size
    if expected is not None and size != expected:
        raise _damaged(path, f"it has {size:,} bytes, expected {expected:,}")


def _damaged(path: Path, why: str) -> UserError:
    """The error for a damaged shard: what is wrong, and the command that fixes it."""
    about = read_about(path.parent)
    make = about.get("make", "python -m nanochat.dataset ...")
    # A downloaded shard can be fetched again alone; shards that were made here are made again together.
    broken = path if about.get("kind") == "download" else path.parent
    return UserError(
        f"the shard {path} is damaged: {why}. Fix it with: rm -r {quote(str(broken))} && {make}"
    )

"""Refuse parquet files that unpack to far more than any text does, before their data is read.

Only the footer is read, a struct in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. It is parsed here
because pyarrow ends the whole process when asked about a column in a damaged footer.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import tr

LARGE = 1 << 28  # bytes; a column that unpacks to more must not be packed better than any text
PACKED = 1_000  # a ratio that no text reaches; zstd packs prose to about a third of its size

# Types of Thrift's compact protocol.
_TRUE = 1
_FALSE = 2
_BYTE = 3
_INTEGERS = (4, 5, 6)  # i16, i32, i64
_DOUBLE = 7
_BINARY = 8
_LISTS = (9, 10)
_STRUCT = 12

_DICTIONARIES = {2, 8}  # the encodings PLAIN_DICTIONARY and RLE_DICTIONARY


def check_packing(path: Path, columns: Iterable[str] = ()) -> None:
    """Raise ValueError if a parquet column unpacks to far more than text, or the footer is damaged.

    Without `columns`, all columns are checked. A dictionary may repeat a value in every row, so the
    size of a column with a dictionary is multiplied by the number of values in the column.
    """
    names = set(columns)
    for chunk in _column_chunks(path):
        if names and chunk.name not in names:
            continue
        repeated_bytes = chunk.unpacked_bytes
        if chunk.encodings & _DICTIONARIES:
            repeated_bytes *= chunk.values
        is_dense = chunk.unpacked_bytes > max(1 << 20, PACKED * chunk.packed_bytes)
        if is_dense and repeated_bytes > LARGE:
            raise ValueError(
                tr(
                    "{packed:,} bytes of its column {column!r} unpack to {unpacked:,} "
                    "and may be repeated to {repeated:,}, and no text packs that well",
                    packed=chunk.packed_bytes,
                    column=chunk.name,
                    unpacked=chunk.unpacked_bytes,
                    repeated=repeated_bytes,
                )
            )


@dataclass(frozen=True)
class _ColumnChunk:
    """The footer's description of one column in one row group."""

    name: str
    encodings: set[int]
    values: int
    unpacked_bytes: int
    packed_bytes: int


def _column_chunks(path: Path) -> Iterator[_ColumnChunk]:
    """Yield the description of each column in each row group of a parquet file.

    Raises ValueError if the footer is damaged.
    """
    data = _read_footer(path)
    try:
        metadata, _ = _value(data, 0, _STRUCT)
        for group in metadata.get(4, []):  # FileMetaData.row_groups
            for column in group[1]:  # RowGroup.columns
                about = column[3]  # ColumnChunk.meta_data
                name = b".".join(about[3]).decode("utf-8", "replace")
                yield _ColumnChunk(name, set(about[2]), about[5], about[6], about[7])
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        raise ValueError(tr("its footer is damaged")) from failure


def _read_footer(path: Path) -> bytes:
    """Return the footer of a parquet file, which is followed by its size and a magic word.

    Raises ValueError if that size is larger than the file, and OSError if the file has fewer than 8
    bytes.
    """
    with open(path, "rb") as file:
        end = file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        if size > end:
            raise ValueError(tr("its footer is longer than the file"))
        file.seek(end - size)
        return file.read(size)


# --- Thrift's compact protocol: each function returns a value and the position after it ----------


def _value(
    data: bytes,
    at: int,
    kind: int,
) -> tuple[Any, int]:
    """Read a value of the Thrift type `kind`, and return it with the position after it.

    A struct becomes a dict by field ID. A double is skipped and returned as None. Raises ValueError
    if the type is unknown.
    """
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _BYTE:
        return data[at], at + 1
    if kind in _INTEGERS:
        return _signed(data, at)
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        size, at = _number(data, at)
        return data[at : at + size], at + size
    if kind in _LISTS:
        return _list(data, at)
    if kind == _STRUCT:
        return _struct(data, at)
    raise ValueError(tr("its footer has a value of the unknown type {kind}", kind=kind))


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned integer with seven bits per byte; return it and the position after it."""
    number = 0
    shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _signed(data: bytes, at: int) -> tuple[int, int]:
    number, at = _number(data, at)
    return (number >> 1) ^ -(number & 1), at


def _list(data: bytes, at: int) -> tuple[list[Any], int]:
    head = data[at]
    at += 1
    count = head >> 4
    if count == 0xF:  # too many for the four bits
        count, at = _number(data, at)
    kind = head & 0x0F
    if kind in (_TRUE, _FALSE):
        kind = _BYTE
    values = []
    # Each element takes at least one byte, so a count that is too large fails at the end of `data`.
    for _ in range(count):
        value, at = _value(data, at, kind)
        values.append(value)
    return values, at


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    fields = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4  # relative to the previous field
        else:
            number, at = _signed(data, at)
        fields[number], at = _value(data, at, head & 0x0F)
    return fields, at + 1

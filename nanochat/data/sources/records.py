"""Reads the values of a file of records: JSON in its usual layouts, CSV and parquet.

JSON may be a value per line, one list, one object with the list under "data", or values over
several lines one after another. Files may be compressed with gzip.
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import UserError, parse_json, tr
from nanochat.data.library_words import in_words, json_problem
from nanochat.data.sources.encodings import lines, problem_of
from nanochat.data.sources.listing import ending

ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv", ".csv.gz", ".parquet")
SHOWN = 5  # how many bad lines a message shows
_PARQUET = b"PAR1"
# The columns in which pandas saves the index of a table, as CSV and as parquet. They hold no data.
_INDEX = ("", "__index_level_0__")
_WRAPPER = "data"  # the key under which a file that is one object holds its records
_ABOUT = ("version", "name", "description", "license", "info", "metadata", "total", "count")


@dataclass(frozen=True)
class Entry:
    """A value of a file and its place, such as "line 3", or why there is none at that place."""

    place: str
    value: Any = None
    problem: str = ""


@dataclass
class BadLines:
    """The lines that cannot be used: their number, and the first of them with the reason."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, place: str, reason: object) -> None:
        """Count a line."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(tr("{place}: {reason}", place=place, reason=reason))

    def __str__(self) -> str:
        more = self.count - len(self.first)
        lines = self.first if more == 0 else [*self.first, tr("and {more:,} more", more=more)]
        return "\n  ".join(lines)


def entries(path: Path) -> Iterator[Entry]:
    """Yield the values of a file. Raises UserError if the file is damaged or of an unknown kind."""
    with open(path, "rb") as file:
        is_parquet = file.read(4) == _PARQUET
    if is_parquet or ending(path) == ".parquet":
        yield from _rows(path)
    elif ending(path) in (".csv", ".csv.gz"):
        yield from _table(path)
    else:
        yield from _json(path)


# --- tables --------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[Entry]:
    """Yield the rows of a parquet file as objects.

    Parquet gives every object all the keys that any of them has, with null for missing ones: such
    keys are left out again.
    """
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1_000):
                for row in batch.to_pylist():
                    number += 1
                    record = _without_index(without_nulls(row))
                    yield Entry(tr("row {number}", number=number), record)
    except (pa.ArrowException, OSError) as failure:
        raise UserError(
            tr(
                "{path} cannot be read after row {number:,}: {failure}. Get the file again "
                "or leave it out",
                path=path,
                number=number,
                failure=in_words(failure),
            )
        ) from failure


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of objects that have no value."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _without_index(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _INDEX}


def _table(path: Path) -> Iterator[Entry]:
    """Yield the rows of a CSV file, which begins with the names of its columns."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.DictReader(_checked(path), strict=True)
    try:
        for row in reader:
            place = tr("line {number}", number=reader.line_num)
            if None in row or None in row.values():  # too many cells or too few
                yield Entry(
                    place, problem=tr("it needs {cells} cells", cells=len(reader.fieldnames or ()))
                )
            else:
                yield Entry(place, _without_index(row))
    except csv.Error as failure:
        raise UserError(
            tr(
                "{path}, line {line} is not CSV: {failure}. Save the table again as CSV "
                "with commas",
                path=path,
                line=reader.line_num,
                failure=in_words(failure),
            )
        ) from failure


def _checked(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Raises UserError if one is not text."""
    for number, line in lines(path):
        problem = problem_of(line, path)
        if problem:
            raise UserError(
                tr("{path}, line {number}: {problem}", path=path, number=number, problem=problem)
            )
        yield line


# --- JSON ----------------------------------------------------------------------------------------


def _json(path: Path) -> Iterator[Entry]:
    """Yield the values of a file that has one per line, or else of one in another layout."""
    numbered = ((number, line) for number, line in lines(path) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    entry = _value(*first, path)
    if entry.problem:
        values = _values_over_lines(path, first[1].strip() in ("[", "{"))
        if values:
            yield from chain.from_iterable(map(_records_in, values))
            return
    second = next(numbered, None)
    if second is None:
        yield from _records_in(entry)
        return
    yield entry
    for number, line in chain([second], numbered):
        yield _value(number, line, path)


def _value(
    number: int,
    line: str,
    path: Path,
) -> Entry:
    """Return the value of a line."""
    place = tr("line {number}", number=number)
    problem = problem_of(line, path)
    if problem:
        return Entry(place, problem=problem)
    try:
        return Entry(place, parse_json(line.strip()))
    except ValueError as broken:
        # A position would count from this line.
        is_json = isinstance(broken, json.JSONDecodeError)
        reason = json_problem(broken) if is_json else in_words(broken)
        return Entry(place, problem=tr("this is not JSON: {reason}", reason=reason))


def _values_over_lines(path: Path, surely: bool) -> list[Entry]:
    """Return the values of a file in which a value goes over several lines.

    After a mistake nothing more can be read, so that the last entry may be a problem. The result is
    empty if there is a mistake and no value before it goes over lines, unless one `surely` does:
    such a file has a value per line.
    """
    text = "".join(line for _, line in lines(path))
    if problem_of(text, path):
        return []
    values: list[Entry] = []
    decoder = json.JSONDecoder()
    line = 1
    end = 0
    position = _next_value(text, end)
    while position < len(text):
        line += text.count("\n", end, position)
        try:
            value, next_end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as broken:
            return [*values, _mistake(broken, line)] if surely else []
        values.append(Entry(tr("line {number}", number=line), value))
        inner_lines = text.count("\n", position, next_end)
        surely = surely or inner_lines > 0
        line += inner_lines
        end = next_end
        position = _next_value(text, end)
    if len(values) == 1:
        return [Entry("", values[0].value)]
    return values


def _mistake(broken: ValueError | RecursionError, line: int) -> Entry:
    """Return the entry for a value that begins in line `line` and cannot be read."""
    if isinstance(broken, json.JSONDecodeError):
        line = broken.lineno
        reason = tr(
            "this is not JSON: {reason}, column {column}; nothing after it can be read",
            reason=json_problem(broken),
            column=broken.colno,
        )
    elif isinstance(broken, RecursionError):
        reason = tr("it is nested too deeply")
    else:
        reason = tr("this is not JSON: {reason}", reason=in_words(broken))
    return Entry(tr("line {number}", number=line), problem=reason)


def _next_value(text: str, position: int) -> int:
    """Return the position of the first character from `position` on that is not white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _records_in(entry: Entry) -> Iterator[Entry]:
    """Yield the records of a list or of an object with a list under "data"; else the entry."""
    value = entry.value
    if isinstance(value, Mapping) and isinstance(value.get(_WRAPPER), list):
        others = [key for key in value if key not in (_WRAPPER, *_ABOUT)]
        if others:
            problem = tr(
                'beside "{wrapper}" there are keys that belong to no record: {others}',
                wrapper=_WRAPPER,
                others=others[:5],
            )
            yield Entry(entry.place or tr("item {number}", number=1), problem=problem)
            return
        value = value[_WRAPPER]
    elif not isinstance(value, list) or _is_conversation(value):
        yield Entry(entry.place or tr("item {number}", number=1), value, entry.problem)
        return
    for number, item in enumerate(value, start=1):
        place = tr("item {number}", number=number)
        if entry.place:
            place = tr("{line}, {item}", line=entry.place, item=place)
        yield Entry(place, item)


def _is_conversation(values: list[Any]) -> bool:
    """Return whether a list holds the messages of one conversation instead of records."""
    if not values or not isinstance(values[0], Mapping):
        return False
    return "role" in values[0] or "from" in values[0]

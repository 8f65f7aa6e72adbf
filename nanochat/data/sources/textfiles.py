"""Read documents from the user's own files: parquet, JSON, CSV and plain text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import UserError, log, tr, warn
from nanochat.data.library_words import in_words
from nanochat.data.shards import read_column
from nanochat.data.sources.encodings import lines, problem_of
from nanochat.data.sources.listing import ending
from nanochat.data.sources.records import BadLines, entries

# The line between two documents in the .txt files of published data sets.
END_OF_TEXT = "<|endoftext|>"
LONG_TXT = 20_000  # characters; a longer .txt document is split at the next blank line


def documents(
    files: list[Path],
    column: str,
    skip_bad_lines: bool = False,
) -> Iterator[str]:
    """Yield the documents of a list of files, in order.

    Documents without text are skipped, and their count is logged. Lines that are not JSON and texts
    that are not valid Unicode are counted; `skip_bad_lines` leaves them out with a warning. Raises
    UserError if a file is damaged or has such lines, and UserError (exit code 2) if a file of
    records has no field `column` or holds anything but text and nulls there.
    """
    empty = 0
    for path in files:
        bad = BadLines()
        for where, text in READERS[ending(path)](path, column):
            if isinstance(text, Problem):
                bad.add(where, text.reason)
            elif not text or text.isspace():
                empty += 1
            elif has_surrogate(text):
                bad.add(where, tr("the text is not valid Unicode, it has half of a surrogate pair"))
            elif skip_bad_lines or not bad.count:  # after a mistake the rest is only counted
                yield text
        _report(path, bad, skip_bad_lines)
    if empty:
        log(tr("skipped {empty:,} documents without text", empty=empty))


def _report(
    path: Path,
    bad: BadLines,
    skip_bad_lines: bool,
) -> None:
    """Raise UserError about the bad lines of a file, or warn if they may be skipped."""
    if not bad.count:
        return
    if skip_bad_lines:
        warn(
            tr(
                "{path}: {count:,} lines cannot be used and are left out:\n  {bad}",
                path=path,
                count=bad.count,
                bad=bad,
            )
        )
        return
    if bad.count == 1:
        raise UserError(
            tr("{bad}. Fix the line, or leave it out with --skip_bad_lines", bad=bad.first[0])
        )
    raise UserError(
        tr(
            "{path}: {count:,} lines cannot be used:\n  {bad}\nFix these lines, or leave them out "
            "with --skip_bad_lines",
            path=path,
            count=bad.count,
            bad=bad,
        )
    )


def has_surrogate(text: str) -> bool:
    """Return whether a text has half of a surrogate pair, so that it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


@dataclass(frozen=True)
class Problem:
    """Why there is no text at a place of a file."""

    reason: str


# --- one reader for each type: each yields where a document is, and its text -----------------


def _read_parquet(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    try:
        schema = pq.read_schema(path)
        if column not in schema.names:
            raise _no_column(path, column, schema.names)
        kind = schema.field(column).type
        if not _holds_text(kind):
            text_columns = [field.name for field in schema if _holds_text(field.type)]
            raise _no_text(path, column, str(kind), text_columns)
        row = 0
        for values in read_column(path, column):
            for text in values:
                yield tr("{path} row {row}", path=path, row=row), text
                row += 1
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError) as failure:
        raise UserError(
            tr(
                "{path} cannot be read: {failure}. Get the file again or leave it out.",
                path=path,
                failure=in_words(failure),
            )
        ) from failure


def _holds_text(kind: pa.DataType) -> bool:
    """Return whether a parquet column of type `kind` can hold only texts and missing values."""
    if pa.types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    is_string_view = getattr(pa.types, "is_string_view", None)  # from pyarrow 16 on
    if is_string_view is not None and is_string_view(kind):
        return True
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)


def _read_records(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    for entry in entries(path):
        where = f"{path} {entry.place}"
        record = entry.value
        if entry.problem:
            yield where, Problem(entry.problem)
            continue
        if not isinstance(record, dict):
            raise _no_column(where, column, [])
        if column not in record:
            raise _no_column(where, column, list(record))
        value = record[column]
        if value is not None and not isinstance(value, str):
            text_fields = [name for name in record if isinstance(record[name], str)]
            raise _no_text(where, column, f"{type(value).__name__} {value!r:.60}", text_fields)
        yield where, value


def _read_txt(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    document: list[str] = []
    length = 0
    last_line = 0  # the last line of the previous document
    for number, line in lines(path):
        problem = problem_of(line, path)
        if problem:
            yield tr("{path} line {number}", path=path, number=number), Problem(problem)
            continue
        is_blank = not line.strip()
        if line.strip() == END_OF_TEXT or (is_blank and length > LONG_TXT):
            yield (
                tr("{path} line {number}", path=path, number=last_line + 1),
                "".join(document).strip(),
            )
            document = []
            length = 0
            last_line = number
        else:
            document.append(line)
            length += len(line)
    yield tr("{path} line {number}", path=path, number=last_line + 1), "".join(document).strip()


READERS = {
    ".parquet": _read_parquet,
    **dict.fromkeys((".jsonl", ".json", ".csv"), _read_records),
    **dict.fromkeys((".jsonl.gz", ".json.gz", ".csv.gz"), _read_records),
    **dict.fromkeys((".txt", ".md", ".txt.gz", ".md.gz"), _read_txt),
}


def _no_column(
    where: object,
    column: str,
    names: list[str],
) -> UserError:
    fields = ", ".join(names) or tr("none")
    return UserError(
        tr(
            "{where} has no field {column!r}; its fields: {fields}. Choose one with --text_column",
            where=where,
            column=column,
            fields=fields,
        ),
        2,
    )


def _no_text(
    where: object,
    column: str,
    kind: str,
    text_fields: list[str],
) -> UserError:
    fields = ", ".join(text_fields) or tr("none")
    return UserError(
        tr(
            "{where}: {column!r} must be text, got {kind}; its fields with text: {fields}. "
            "Choose one with --text_column, or fix the file",
            where=where,
            column=column,
            kind=kind,
            fields=fields,
        ),
        2,
    )

"""Read documents from the user's own files: parquet, JSON lines and plain text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import UserError, log, parse_json, tr
from nanochat.data.shards import read_column

# The line between two documents in the .txt files of published data sets.
END_OF_TEXT = "<|endoftext|>"
LONG_TXT = 20_000  # characters; a longer .txt document is split at the next blank line


def documents(files: list[Path], column: str) -> Iterator[str]:
    """Yield the documents of a list of files, in order.

    Documents without text are skipped, and their count is logged. Raises UserError if a file is
    damaged or not valid Unicode, and UserError (exit code 2) if a parquet or JSON lines file has no
    field `column` or holds anything but text and nulls there.
    """
    empty = 0
    for path in files:
        for where, text in READERS[path.suffix](path, column):
            if not text or text.isspace():
                empty += 1
                continue
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UserError(
                    tr(
                        "{where}: the text is not valid Unicode, it has half of a surrogate "
                        "pair; remove that character and type the same command again",
                        where=where,
                    )
                ) from None
            yield text
    if empty:
        log(tr("skipped {empty:,} documents without text", empty=empty))


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
                yield f"{path} row {row}", text
                row += 1
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError) as failure:
        raise UserError(
            tr(
                "{path} cannot be read: {failure}. Get the file again or leave it out.",
                path=path,
                failure=failure,
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


def _read_jsonl(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as failure:
            raise UserError(
                tr(
                    "{where} is not JSON: {failure}. Fix or remove the line.",
                    where=where,
                    failure=failure,
                )
            ) from failure
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
    lines: list[str] = []
    length = 0
    last_line = 0  # of the previous document
    for number, line in _lines(path):
        is_blank = not line.strip()
        if line.strip() == END_OF_TEXT or (is_blank and length > LONG_TXT):
            yield f"{path} line {last_line + 1}", "".join(lines).strip()
            lines = []
            length = 0
            last_line = number
        else:
            lines.append(line)
            length += len(line)
    yield f"{path} line {last_line + 1}", "".join(lines).strip()


READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".txt": _read_txt, ".md": _read_txt}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the index (from 1) and the text of each line of a file.

    Raises UserError if the file is not UTF-8.
    """
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except UnicodeDecodeError as failure:
        raise UserError(
            tr(
                "{path} is not UTF-8 after line {number}: {reason}. Convert the file, for "
                "example with iconv -f GB18030 -t UTF-8 {name}",
                path=path,
                number=number,
                reason=failure.reason,
                name=path.name,
            )
        ) from failure


def _no_column(
    where: object,
    column: str,
    names: list[str],
) -> UserError:
    fields = ", ".join(names) or "none"
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
    fields = ", ".join(text_fields) or "none"
    return UserError(
        f"{where}: {column!r} must be text, got {kind}; its fields with text: {fields}. Choose one "
        "with --text_column, or fix the file",
        2,
    )

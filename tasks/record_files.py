"""Reads the records of files, folders and patterns, and says which lines cannot be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nanochat.common import UserError, warn
from nanochat.data.sources.listing import files_of
from nanochat.data.sources.records import ENDINGS, BadLines, entries

Record = TypeVar("Record")


def read_file(
    filepath: str | Path,
    to_record: Callable[[Any], Record],
    label: str,
    shape: str,
    skip_bad_lines: bool | None = None,
) -> list[tuple[str, Record]]:
    """Return the records that `to_record` makes from the values in a file, with their places.

    `filepath` names a file, a folder or a pattern such as chats/*.jsonl. nanochat/data/sources/
    records.py says which files are read. In error messages, `label` names a value and `shape` shows
    one. A place is such as "chats.jsonl, line 3".

    Raises UserError, with the number of bad lines and the first of them, if a line cannot be used.
    With `skip_bad_lines` these lines are left out with a warning, unless no other is left; None
    means that there is no such flag to name. Raises UserError (exit code 2) if there is no file.
    """
    files = files_of(str(filepath), ENDINGS)
    if not files:
        raise UserError(
            f"there is no file {Path(filepath).expanduser()}. Check the path; the file should hold "
            f"one {label} per line: {shape}",
            2,
        )
    read_records: list[tuple[str, Record]] = []
    bad = BadLines()
    for path in files:
        for entry in entries(path):
            place = f"{path}, {entry.place}"
            if entry.problem:
                bad.add(place, entry.problem)
                continue
            try:
                read_records.append((place, to_record(entry.value)))
            except ValueError as broken:
                bad.add(place, broken)
    _report(filepath, bad, len(read_records), label, shape, skip_bad_lines)
    return read_records


def _report(
    filepath: str | Path,
    bad: BadLines,
    good: int,
    label: str,
    shape: str,
    skip_bad_lines: bool | None,
) -> None:
    """Raise UserError, or warn if they may be skipped, about lines that cannot be used."""
    if not bad.count:
        if not good:
            raise UserError(f"{filepath} holds no {label}. Write one {label} per line: {shape}")
        return
    total = bad.count + good
    counted = f"{bad.count:,} of {total:,} lines cannot be used"
    if skip_bad_lines and good:
        warn(f"{filepath}: {counted} and are left out:\n  {bad}")
        return
    example = f"A line should look like {shape}"
    remedy = "Fix these lines"
    if good and skip_bad_lines is not None:
        remedy += ", or leave them out with --skip_bad_lines"
    if bad.count == 1:
        raise UserError(f"{bad}. {example}. {remedy}")
    raise UserError(f"{filepath}: {counted}:\n  {bad}\n{example}. {remedy}")

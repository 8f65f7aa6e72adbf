"""Reads the records of files, folders and patterns, and says which lines cannot be used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nanochat.common import UserError, tr, warn
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
            tr(
                "there is no file {path}. Check the path; the file should hold one "
                "{label} per line: {shape}",
                path=Path(filepath).expanduser(),
                label=label,
                shape=shape,
            ),
            2,
        )
    read_records: list[tuple[str, Record]] = []
    bad = BadLines()
    for path in files:
        for entry in entries(path):
            place = tr("{path}, {place}", path=path, place=entry.place)
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
            raise UserError(
                tr(
                    "{filepath} holds no {label}. Write one {label} per line: {shape}",
                    filepath=filepath,
                    label=label,
                    shape=shape,
                )
            )
        return
    total = bad.count + good
    if skip_bad_lines and good:
        warn(
            tr(
                "{filepath}: {count:,} of {total:,} lines cannot be used and are left out:\n"
                "  {bad}",
                filepath=filepath,
                count=bad.count,
                total=total,
                bad=bad,
            )
        )
        return
    remedy = tr("Fix these lines")
    if good and skip_bad_lines is not None:
        remedy = tr("Fix these lines, or leave them out with --skip_bad_lines")
    if bad.count == 1:
        raise UserError(
            tr(
                "{bad}. A line should look like {shape}. {remedy}",
                bad=bad,
                shape=shape,
                remedy=remedy,
            )
        )
    raise UserError(
        tr(
            "{filepath}: {count:,} of {total:,} lines cannot be used:\n  {bad}\n"
            "A line should look like {shape}. {remedy}",
            filepath=filepath,
            count=bad.count,
            total=total,
            bad=bad,
            shape=shape,
            remedy=remedy,
        )
    )

"""Follows a metrics.jsonl while it is written: reads only what is new, and tolerates whatever the
file holds."""

import os
import stat
from pathlib import Path

from nanochat.common import parse_json
from nanochat.serve.runs.table import Table

CHUNK_BYTES = 2 << 20  # read at most at a time, so that a long file delays no other reader for long
LONGEST_LINE = 1 << 16  # bytes; a longer line is left out
LONGEST_NAME = 64  # letters of a figure's name
MOST_STEPS = 2**53  # beyond, a browser cannot count
HUGE = 1e300  # a sum of such values would overflow


def figures_of(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return the step of a line and its figures that are finite numbers; None if the line is none
    of a metrics.jsonl."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    step = entry.get("step")
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        return None
    figures: dict[str, float] = {}
    for name, value in entry.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and -HUGE < value < HUGE and len(name) <= LONGEST_NAME:  # NaN is not between
            figures[name] = float(value)
    return step, figures


def open_regular(path: Path) -> int:
    """Open a file for reading. Raises OSError for a pipe or a device, for which a reader would
    wait."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a regular file")
    return file


class Follower:
    """Reads a metrics.jsonl into a table, piece by piece.

    `done` and `size` count bytes of the file; `bad` counts the lines that were left out because
    they are not figures.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: tuple[int, int] | None = None  # device and number of the file
        self._restart()

    def _restart(self) -> None:
        self.table = Table()
        self.done = self.size = self.bad = 0
        self._begun = b""  # the line that has no end yet
        self._skipping = False  # until the end of a line that is too long

    def read(self) -> None:
        """Read the next piece; if the file was replaced or cut, as by a run that resumes, begin
        again. Raises OSError if the file is gone or no regular file."""
        file = open_regular(self.path)
        try:
            about = os.fstat(file)
            if self._file != (about.st_dev, about.st_ino) or about.st_size < self.done:
                self._restart()
                self._file = (about.st_dev, about.st_ino)
            self.size = about.st_size
            data = os.pread(file, CHUNK_BYTES, self.done)
        finally:
            os.close(file)
        self.done += len(data)
        self._take(data)

    @property
    def behind(self) -> bool:
        """Whether the file has more that was not read yet."""
        return self.done < self.size

    def _take(self, data: bytes) -> None:
        """Take in the next bytes of the file."""
        *lines, unfinished = (self._begun + data).split(b"\n")
        for line in lines:
            self._line(line)
        self._begun = unfinished
        if len(unfinished) > LONGEST_LINE:
            self.bad += not self._skipping
            self._skipping = True
            self._begun = b""

    def _line(self, line: bytes) -> None:
        """Put the figures of a line into the table."""
        if self._skipping:
            self._skipping = False
            return
        if not line.strip():
            return
        entry = figures_of(line) if len(line) <= LONGEST_LINE else None
        if entry is None:
            self.bad += 1
        else:
            self.table.add(*entry)

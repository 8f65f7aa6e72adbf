"""Follows a metrics.jsonl while it is written, reading only what is new.

Lines that are invalid are skipped.
"""

import os
from pathlib import Path

from nanochat.common import parse_json
from nanochat.runtime.samples import open_to_read
from nanochat.serve.runs.table import Table

CHUNK_BYTES = 2 << 20  # most bytes that a request reads, so that long files delay no other request
END_BYTES = 256  # of the end of what was read, by which another file with the same inode is told
LONGEST_LINE = 1 << 16  # bytes; a longer line is left out
LONGEST_NAME = 64  # characters of a figure's name
MOST_STEPS = 2**53  # a browser cannot count beyond this
HUGE = 1e300  # a sum of such values would overflow


def figures_of(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return the step and a dict of the figures in a line, or None if the line is not valid.

    Figures that are NaN or beyond HUGE (1e300), or whose names are too long, are left out.
    """
    try:
        fields = parse_json(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    step = fields.get("step")
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        return None
    figures: dict[str, float] = {}
    for name, value in fields.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and -HUGE < value < HUGE and len(name) <= LONGEST_NAME:  # false for NaN
            figures[name] = float(value)
    return step, figures


class Follower:
    """Reads a metrics.jsonl into a table, piece by piece.

    `done` is how many bytes of the file have been read, and `size` how many it has. `bad` counts
    the lines that were skipped as invalid or too long.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: tuple[int, int] | None = None  # device and inode of the file
        self._restart()

    def _restart(self) -> None:
        self.table = Table()
        self.done = self.size = self.bad = 0
        self._begun = b""  # a line whose end has not been read yet
        self._end = b""  # the last bytes that were read
        self._skipping = False  # true until the end of a line that is too long

    def read(self, readers: int = 1) -> None:
        """Read the next piece of the file, or a part of it if several `readers` share a request.

        If the file was replaced, as when a run resumes, or no longer holds what was read, reading
        starts again from the beginning. Raises OSError if the file cannot be opened or is not a
        regular file.
        """
        file = open_to_read(self.path)
        try:
            file_stat = os.fstat(file)
            identity = (file_stat.st_dev, file_stat.st_ino)
            # File systems give the inode of a deleted file to the next one.
            end = os.pread(file, len(self._end), self.done - len(self._end))
            if self._file != identity or end != self._end:
                self._restart()
                self._file = identity
            self.size = file_stat.st_size
            data = os.pread(file, CHUNK_BYTES // readers, self.done)
        finally:
            os.close(file)
        self.done += len(data)
        self._end = (self._end + data)[-END_BYTES:]
        self._take(data)

    @property
    def behind(self) -> bool:
        """Whether some of the file has not been read yet."""
        return self.done < self.size

    def _take(self, data: bytes) -> None:
        """Process the next bytes of the file, line by line."""
        *lines, unfinished = (self._begun + data).split(b"\n")
        for line in lines:
            self._line(line)
        self._begun = unfinished
        if len(unfinished) > LONGEST_LINE:
            self.bad += not self._skipping
            self._skipping = True
            self._begun = b""

    def _line(self, line: bytes) -> None:
        """Add a line's figures to the table, or count the line as bad if it is invalid or too long.

        Blank lines, and the rest of a line that was counted as too long, are ignored.
        """
        if self._skipping:
            self._skipping = False
            return
        if not line.strip():
            return
        parsed = figures_of(line) if len(line) <= LONGEST_LINE else None
        if parsed is None:
            self.bad += 1
        else:
            self.table.add(*parsed)

"""Writes and reads metrics.jsonl, the source of truth about a run, with one JSON object per line.

The file run.json next to it describes the run.
"""

import contextlib
import fcntl
import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.common import parse_json, to_json, write_atomic, write_json
from nanochat.data.locks import open_regular

# A process that only checks the lock holds it for less than a millisecond.
LOCK_TRIES = 100
LOCK_SECONDS = 0.01


class Jsonl:
    """An open metrics.jsonl in the folder of a stage, to which metrics are appended.

    The attribute `last` is the step of the last line when the file was opened, or -1. If the file
    system has locks, the file stays locked while it is open, so that being_written() can tell a run
    that is still training from one that was killed.
    """

    def __init__(self, folder: Path, step: int):
        """Open the file for a run that has made `step` updates.

        Lines of later steps, which an interrupted run has left, are dropped, as are all lines if
        `step` is 0.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        lines = []
        if step:
            lines = [line for line in read_metrics(folder) if line.get("step", 0) <= step]
        self.last: int = lines[-1].get("step", 0) if lines else -1
        text = "".join(to_json(line) + "\n" for line in lines)
        write_atomic(path, text)  # atomic, so that a kill loses no line
        self._file = io.TextIOWrapper(open_regular(path, owned=False), encoding="utf-8")
        _lock(self._file.fileno())

    def log(self, figures: dict[str, Any]) -> None:
        """Write the metrics as one line.

        Floats are written without rounding. A value that is not finite becomes null.
        """
        self._file.write(to_json(figures) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Unlock and close the file."""
        if not self._file.closed:
            # A forked worker may still hold the file open, and with it the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def _lock(file: int) -> None:
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOCK_SECONDS)
        except OSError:  # a file system without locks, for which being_written() returns None
            return


def being_written(path: Path) -> bool | None:
    """Return whether a training process on this host has a metrics.jsonl open for writing.

    Returns None if the file system has no locks.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(file)


def describe_run(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write run.json with the host, the time and `facts` about the run that begins in `folder`."""
    content = {**facts, "host": socket.gethostname(), "started_at": time.time()}
    write_json(folder / "run.json", content)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in a folder as dicts, up to the first damaged line.

    A kill may have cut the last line short. Values that were not finite are None. If there is no
    file, the list is empty.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            lines.append(parse_json(text))
        except ValueError:  # not JSON, or cut in the middle of a character
            break
    return lines

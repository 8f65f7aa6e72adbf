"""Records of the runs that the page has started: a file beside each run, which outlives the server.

started.json has the process, the argument list and the values of the form; started.log has what the
run printed. Both belong to the user of the server, and nobody else may read or write them.
"""

import contextlib
import dataclasses
import fcntl
import os
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.locate import STAGES
from nanochat.common import UserError, atomic_path, parse_json, to_json
from nanochat.data.locks import NO_LOCKS, open_regular

RECORD, LOG = "started.json", "started.log"
PRIVATE = 0o600  # the mode of both files
OTHERS = 0o077  # the bits of a mode that let anyone but the owner in
MOST_BYTES = 4 << 20  # the largest record; its form may hold long lists
PROC = Path("/proc")


@dataclass(frozen=True)
class Record:
    """A run that the page has started, and its process.

    `born` tells the process from a later one with the same number. `code` is the exit code, or None
    while the process lives and where no server has seen it end.
    """

    pid: int
    born: str
    argv: tuple[str, ...]
    values: Mapping[str, Any]  # the values of the form
    processes: int
    started_at: float  # seconds since 1970
    stopping: bool = False  # whether the page has asked the run to save and stop
    code: int | None = None

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.code is None and born(self.pid) == self.born


def born(pid: int) -> str | None:
    """Return what identifies a living process: the boot of the host, and its start in ticks.

    Returns None if no process has this number, or if it has ended and nobody has read its code yet.
    """
    try:
        words = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if words[0] in "ZX" else f"{boot} {words[19]}"


def read(folder: Path) -> Record | None:
    """Return the record in the folder of a run.

    Returns None if there is none, or one that somebody else may have written: a link, a file of
    another user, or one that others may write.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        with _opened(folder / RECORD) as file:
            content = parse_json(os.read(file, MOST_BYTES))
        content["argv"] = tuple(map(str, content["argv"]))
        record = Record(**content)
        kinds = (
            (record.pid, int),
            (record.born, str),
            (record.values, dict),
            (record.processes, int),
        )
        if all(isinstance(value, kind) for value, kind in kinds) and record.pid > 0:
            return record
    return None


def write(folder: Path, record: Record) -> None:
    """Write the record in the folder of a run, so that readers see all of it or the one before."""
    with atomic_path(folder / RECORD) as temporary:
        temporary.chmod(PRIVATE)
        temporary.write_text(to_json(dataclasses.asdict(record)) + "\n", encoding="utf-8")


def folders(base: Path) -> Iterator[tuple[str, Path]]:
    """Yield the stage and the folder of every run that has a record."""
    for stage, prefix in STAGES.items():
        for path in (base / f"{prefix}_checkpoints").glob(f"*/{RECORD}"):
            yield stage, path.parent


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file that only this user can have written, and yield its file descriptor.

    Raises OSError for every other file.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        is_ours = status.st_uid == os.geteuid() and not status.st_mode & OTHERS
        if not (stat.S_ISREG(status.st_mode) and is_ours):
            raise PermissionError(f"{path} is not a private file of this user")
        yield file
    finally:
        os.close(file)


# --- the process ---------------------------------------------------------------------------------


def start(
    folder: Path, argv: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a run whose output goes to the log in its folder, and return its process.

    The process has a session of its own, so that it outlives the server and its terminal. It holds
    a lock on the log for as long as it lives. Raises BlockingIOError if another process holds that
    lock, and UserError if the log is not a file of this user.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_regular(folder / LOG, owned=True) as log:
        if os.fstat(log.fileno()).st_uid != os.geteuid():
            raise UserError(f"{folder / LOG} belongs to another user: move it away")
        os.fchmod(log.fileno(), PRIVATE)
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as failure:
            if failure.errno not in NO_LOCKS:
                raise
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
        )


def is_locked(folder: Path) -> bool:
    """Return whether a process of the run in this folder holds the lock on its log."""
    with contextlib.suppress(OSError), _opened(folder / LOG) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def ask_to_stop(record: Record) -> bool:
    """Ask the process of a record to save and stop, and return whether it still lives.

    SIGTERM does what Ctrl-C does, but asking twice does not end the run without a save.
    """
    try:
        handle = os.pidfd_open(record.pid)
    except OSError:
        return False
    try:
        if not record.alive:  # another process has its number
            return False
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        return True
    finally:
        os.close(handle)


# --- what it prints ------------------------------------------------------------------------------


def read_log(folder: Path, first: int | None, max_bytes: int) -> tuple[int, bytes, int]:
    """Return a part of a log: its place, at most `max_bytes` bytes, and the size of the log.

    The part begins at the byte `first`, or ends at the end of the log if that is None or beyond the
    end. Raises OSError if there is no log of this user.
    """
    with _opened(folder / LOG) as file:
        size = os.fstat(file).st_size
        if first is None or first > size:
            first = max(0, size - max_bytes)
        return first, os.pread(file, max_bytes, first), size

"""Open and lock files that several processes share, such as locks and incomplete downloads."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from nanochat.common import UserError, tr, warn

# The errors of flock on a file system without locks, such as Lustre mounted without -o flock.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
LINK_OR_PIPE = (errno.ELOOP, errno.ENXIO)  # ENXIO: a pipe that nobody reads, or a socket


def open_regular(path: Path, owned: bool) -> BinaryIO:
    """Open an ordinary file for appending or locking, creating it if it is missing, and return it.

    Raises UserError if the path is a link, a pipe or another special file, which another user may
    have put there. With `owned`, the file must also belong to this user or to the owner of its
    folder, because its content is used.
    """
    try:
        file = open(path, "ab", opener=_open_no_link)  # noqa: SIM115 - the caller closes it
    except OSError as failure:
        if failure.errno not in LINK_OR_PIPE:
            raise
        raise _planted(path, tr("is a link or a pipe, and must be an ordinary file")) from failure
    status = os.fstat(file.fileno())
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = tr("is not an ordinary file")
    elif owned and status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        problem = tr("belongs to user {user}, and must belong to you", user=status.st_uid)
    if problem:
        file.close()
        raise _planted(path, problem)
    return file


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _planted(path: Path, problem: str) -> UserError:
    """Return the refusal of a file that someone else may have put in place of ours."""
    return UserError(
        tr(
            "{path} {problem}. Delete it, then type the same command again",
            path=path,
            problem=problem,
        )
    )


@contextlib.contextmanager
def hold_lock(file: BinaryIO, waiting: Callable[[], None]) -> Iterator[int]:
    """Lock an open file, and yield the file descriptor that holds the lock.

    The lock ends when `file` is closed. If another process holds it, `waiting` is called before the
    wait. On a file system without locks, a temporary file on this host is locked instead until the
    context ends, with one warning per folder. In this case, raises UserError if the job runs on
    several hosts, because such a lock does not exclude other hosts.
    """
    host_lock = None
    try:
        _flock(file, waiting)
    except OSError as failure:
        if failure.errno not in NO_LOCKS:
            raise
        host_lock = _lock_of_this_host(Path(file.name))
    if host_lock is None:
        yield file.fileno()
        return
    with host_lock:
        _flock(host_lock, waiting)
        yield host_lock.fileno()


def _flock(file: BinaryIO, waiting: Callable[[], None]) -> None:
    """Lock a file, calling `waiting` before waiting for another process that holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(file, fcntl.LOCK_EX)


def _lock_of_this_host(path: Path) -> BinaryIO:
    """Open and return the temporary file on this host that is locked in place of `path`.

    Raises UserError if the job runs on several hosts.
    """
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    if ranks > ranks_here:
        raise UserError(
            tr(
                "the file system of {parent} has no locks, so several hosts would write the "
                "same files there at once. Mount it with locks (Lustre: -o flock), or set "
                "NANOCHAT_BASE_DIR to a folder on another file system",
                parent=path.parent,
            )
        )
    _warn_no_locks(path.parent)
    full_path = str(path.absolute()).encode("utf-8", "surrogateescape")
    digest = hashlib.sha256(full_path).hexdigest()[:16]
    name = f"nanochat-{os.getuid()}-{digest}.lock"
    return open_regular(Path(tempfile.gettempdir()) / name, owned=True)


@functools.cache
def _warn_no_locks(folder: Path) -> None:
    warn(
        tr(
            "the file system of {folder} has no locks, so only runs on this host wait for "
            "each other",
            folder=folder,
        )
    )

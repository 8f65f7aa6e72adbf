"""Opens and locks files that other processes find by their names: locks, and incomplete downloads."""

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

from nanochat.common import UserError, warn

# What flock answers on a file system without locks, such as Lustre that is mounted without -o flock.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


def open_known(path: Path, owned: bool) -> BinaryIO:
    """Open a file to append to it or to lock it; create it if it is missing.

    UserError if it is a link, a pipe or another special file, which another user may have put there. With `owned` it
    must belong to this user or to the owner of its folder, because its content is used.
    """
    try:
        file = open(path, "ab", opener=_open_no_link)  # noqa: SIM115 - the caller closes it
    except OSError as failure:
        if failure.errno not in (
            errno.ELOOP,
            errno.ENXIO,
        ):  # ENXIO: a pipe that nobody reads, or a socket
            raise
        raise _planted(path, "is a link or a pipe, and must be an ordinary file") from failure
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        why = "is not an ordinary file"
    elif owned and about.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        why = f"belongs to user {about.st_uid}, and must belong to you"
    else:
        return file
    file.close()
    raise _planted(path, why)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _planted(path: Path, why: str) -> UserError:
    return UserError(f"{path} {why}. Delete it, then type the same command again")


@contextlib.contextmanager
def held(file: BinaryIO, waiting: Callable[[], None]) -> Iterator[int]:
    """Hold the lock of an open file, and yield the descriptor that holds it; `waiting` is called before a wait.

    On a file system without locks a file among the temporary files of this host is locked instead, and one warning
    says so. UserError in a job on several hosts, which such a lock does not keep apart.
    """
    own_lock = None
    try:
        _flock(file, waiting)
    except OSError as failure:
        if failure.errno not in NO_LOCKS:
            raise
        own_lock = _lock_of_this_host(Path(file.name))
    with own_lock or contextlib.nullcontext(file) as holder:
        if own_lock is not None:
            _flock(own_lock, waiting)
        yield holder.fileno()


def _flock(file: BinaryIO, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(file, fcntl.LOCK_EX)


def _lock_of_this_host(path: Path) -> BinaryIO:
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks > int(os.environ.get("LOCAL_WORLD_SIZE") or ranks):
        raise UserError(
            f"the file system of {path.parent} has no locks, so several hosts would write the same files there at "
            "once. Mount it with locks (Lustre: -o flock), or set NANOCHAT_BASE_DIR to a folder on another file system"
        )
    _say_no_locks(path.parent)
    digest = hashlib.sha256(str(path.absolute()).encode("utf-8", "surrogateescape")).hexdigest()[
        :16
    ]
    return open_known(
        Path(tempfile.gettempdir()) / f"nanochat-{os.getuid()}-{digest}.lock", owned=True
    )


@functools.cache
def _say_no_locks(folder: Path) -> None:
    warn(f"the file system of {folder} has no locks, so only runs on this host wait for each other")

"""Download files over HTTP: resume, retry, and check their size and SHA-256.

Each file gets its final name only when it is complete.
"""

import contextlib
import email.utils
import os
import queue
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

import requests

from nanochat.common import (
    DISK_FULL,
    UserError,
    fsync_path,
    read_json,
    sha256_of,
    tr,
    visible,
    write_json,
)
from nanochat.data.library_words import in_words
from nanochat.data.locks import hold_lock, open_regular
from nanochat.data.sources import net
from nanochat.data.sources.hub import how_to_be_admitted

CHUNK = 1 << 16  # bytes written at a time; a broken connection loses less than one chunk
# Bytes of disk space that stay free while a server sends a file whose size it does not give.
RESERVE = 1 << 30
SHA256 = re.compile(r'"?([0-9a-f]{64})"?$')
Result = TypeVar("Result")


@dataclass(frozen=True)
class Remote:
    """A file to fetch, the path to save it to, and its SHA-256 if it is known in advance."""

    url: str
    path: Path
    sha256: str | None = None


@dataclass(frozen=True)
class Fetched:
    """The record of a downloaded file.

    `sha256` is the hash that the file was checked against, or None if no hash was known or another
    process fetched the file.
    """

    path: Path
    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Patience:
    """The limits on failures, stalls and waits in a download."""

    attempts: int = 6
    """Give up after this many failures in a row during which no new byte arrives."""
    attempts_unreached: int = 3
    """The same limit until a server has answered, since there is most likely no network then."""
    stall_seconds: float = 30.0
    """Drop a connection that sends no byte for this long; this counts as a failure."""
    first_wait_seconds: float = 1.0
    """The wait after the first failure, give or take a quarter; every further failure in a row
    doubles it."""
    longest_wait_seconds: float = 60.0
    """The longest wait between two attempts, even if the server asks for a longer one."""


class _Retry(Exception):
    """Raised on a failure after which another attempt may succeed.

    `wait_seconds` is the wait that the server asked for, or None.
    """

    def __init__(self, message: str, wait_seconds: float | None = None):
        super().__init__(visible(message))
        self.wait_seconds = wait_seconds


class _Abandoned(Exception):
    """Raised if another download has failed or the user has pressed Ctrl-C; `.part` files stay."""


def _nothing(_: object) -> None:
    pass


@dataclass
class _Transfer:
    """The settings and state that all requests of one fetch_all() or probe_size() call share."""

    headers: dict[str, str]
    patience: Patience
    hint: str
    check: Callable[[Path], None] = _nothing
    advance: Callable[[float], None] = _nothing
    say: Callable[[str], None] = _nothing
    stop: threading.Event = field(default_factory=threading.Event)
    reached: bool = False  # whether any server has answered


def fetch_all(
    files: Sequence[Remote],
    headers: dict[str, str] | None = None,
    patience: Patience | None = None,
    parallel: int = 3,
    hint: str = "",
    check: Callable[[Path], None] = _nothing,
    advance: Callable[[float], None] = _nothing,
    say: Callable[[str], None] = _nothing,
) -> list[Fetched]:
    """Fetch the files that do not exist yet, and return their records in order.

    Up to `parallel` files are fetched at a time. After a failure or Ctrl-C, an incomplete file
    stays as `NAME.part`, and the next call resumes it. A file of unknown size is discarded if it
    leaves less than RESERVE bytes (1 GiB) of the disk free.

    `check` gets the path of each fetched file. It must raise ValueError if the content is not what
    was expected (a login page, for example), and UserError if no further attempt can help.
    `advance` is called with the number of new bytes whenever some arrive, or a negative number if
    some are discarded, and `say` with a message before each retry. `hint` is advice that ends an
    error message, unless more specific advice does. Raises UserError if a file cannot be fetched.
    """
    transfer = _Transfer(headers or {}, patience or Patience(), hint, check, advance, say)
    missing = [remote for remote in files if not remote.path.exists()]
    waiting: queue.SimpleQueue[Remote] = queue.SimpleQueue()
    finished: queue.SimpleQueue[Fetched | BaseException] = queue.SimpleQueue()
    for remote in missing:
        remote.path.parent.mkdir(parents=True, exist_ok=True)
        waiting.put(remote)

    def fetch_waiting() -> None:
        while not transfer.stop.is_set():
            try:
                finished.put(_fetch(waiting.get_nowait(), transfer))
            except queue.Empty:
                return
            except BaseException as failure:  # handed to the caller's thread, which raises it
                finished.put(failure)
                return

    # Daemon threads, so that Ctrl-C does not wait for a stalled connection.
    count = min(parallel, len(missing))
    threads = [threading.Thread(target=fetch_waiting, daemon=True) for _ in range(count)]
    fetched: dict[Path, Fetched] = {}
    try:
        for thread in threads:
            thread.start()
        while len(fetched) < len(missing):
            record_or_failure = finished.get()
            if isinstance(record_or_failure, BaseException):
                raise record_or_failure
            fetched[record_or_failure.path] = record_or_failure
    finally:
        transfer.stop.set()
        for thread in threads:
            thread.join(timeout=1)
    return [fetched[remote.path] for remote in missing]


def probe_size(
    url: str,
    headers: dict[str, str],
    patience: Patience | None = None,
    hint: str = "",
) -> int | None:
    """Return the size of a remote file in bytes, or None if the server does not give it.

    Raises UserError if the server cannot be reached or its answer cannot be used.
    """
    transfer = _Transfer(headers, patience or Patience(), hint)

    def ask() -> int | None:
        with _request(url, transfer, {}) as response:
            return _total(response, transfer)

    return _retrying(ask, lambda: 0, url, transfer)


def check_space(folder: Path, needed: float) -> None:
    """Create `folder`, and raise UserError if its disk has less than `needed` bytes free."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            tr(
                "the download needs about {needed:.1f} GB, but {folder} has {free:.1f} GB "
                "free. Free some space, fetch fewer files, or set NANOCHAT_BASE_DIR to a "
                "folder on another disk.",
                needed=needed / 1e9,
                folder=folder,
                free=free / 1e9,
            )
        )


def part_of(path: Path) -> Path:
    """Return the path of a file's `.part` file, which holds its bytes while it is incomplete."""
    return path.with_name(path.name + ".part")


def part_size(path: Path) -> int:
    """Return the size of a file's `.part` file in bytes, or 0 if it has none."""
    partial_path = part_of(path)
    return partial_path.stat().st_size if partial_path.exists() else 0


# --- one file ------------------------------------------------------------------------------------


def _fetch(remote: Remote, transfer: _Transfer) -> Fetched:
    """Fetch a file in as many attempts as `transfer.patience` allows, and return its record."""

    def attempt() -> Fetched:
        return _attempt(remote, transfer)

    def progress() -> int:
        return part_size(remote.path)

    return _retrying(attempt, progress, remote.url, transfer)


def _retrying(
    attempt: Callable[[], Result],
    progress: Callable[[], int],
    url: str,
    transfer: _Transfer,
) -> Result:
    """Call `attempt` until it succeeds, and return its result.

    Raises UserError after too many failures in a row during which `progress()` did not grow, and
    _Abandoned if the transfer is stopped before a retry.
    """
    failures = 0
    patience = transfer.patience
    while True:
        bytes_before = progress()
        try:
            return attempt()
        except _Retry as problem:
            failures = 1 if progress() > bytes_before else failures + 1
            limit = patience.attempts if transfer.reached else patience.attempts_unreached
            if failures >= limit:
                raise _gave_up(problem, failures, progress(), url, transfer.hint) from problem
            wait = _wait_seconds(failures, problem.wait_seconds, patience)
            transfer.say(
                tr(
                    "{file}: {problem}; trying again in {wait:.0f} s",
                    file=url.rpartition("/")[2],
                    problem=problem,
                    wait=wait,
                )
            )
            if transfer.stop.wait(wait):
                raise _Abandoned from problem


def _wait_seconds(
    failures: int,
    requested: float | None,
    patience: Patience,
) -> float:
    """Return the longer of the backoff and `requested`, in seconds, up to the longest wait."""
    backoff = patience.first_wait_seconds * 2 ** (failures - 1) * random.uniform(0.75, 1.25)
    return min(max(backoff, requested or 0), patience.longest_wait_seconds)


def _gave_up(
    problem: _Retry,
    failures: int,
    arrived: int,
    url: str,
    hint: str,
) -> UserError:
    tries = tr("{failures} attempts", failures=failures) if failures > 1 else tr("1 attempt")
    saved = ""
    if arrived:
        saved = tr(" The {arrived:,} bytes that arrived are kept as a .part file.", arrived=arrived)
    return UserError(
        tr(
            "could not download {url}: {problem} ({tries}).{saved} {hint}",
            url=url,
            problem=problem,
            tries=tries,
            saved=saved,
            hint=hint,
        ).rstrip()
    )


def _attempt(remote: Remote, transfer: _Transfer) -> Fetched:
    """Fetch the missing bytes of a file, and return its record.

    Raises UserError if the disk is full.
    """
    try:
        return _fetch_remaining(remote, transfer)
    except OSError as failure:
        if failure.errno not in DISK_FULL:
            raise
        raise UserError(
            tr(
                "the disk is full: {path} keeps the {path_2:,} bytes that arrived. Free some "
                "space and type the same command again, which resumes the download, or "
                "delete the file",
                path=part_of(remote.path),
                path_2=part_size(remote.path),
            )
        ) from failure


def _fetch_remaining(remote: Remote, transfer: _Transfer) -> Fetched:
    """Complete, check and rename a file's `.part` file, and return the file's record.

    If another process has completed the file meanwhile, nothing is fetched. Raises _Retry if
    another attempt may succeed.
    """
    partial_path = part_of(remote.path)
    # A second process that fetches the same file waits here.
    with open_regular(partial_path, owned=True) as file, hold_lock(file, waiting=lambda: None):
        if remote.path.exists():
            partial_path.unlink(missing_ok=True)
            return Fetched(remote.path, remote.path.stat().st_size, None)
        offset = file.seek(0, os.SEEK_END)  # another process may have written while we waited
        with _request(remote.url, transfer, _resume_headers(remote.path, offset)) as response:
            total = _total(response, transfer)
            if response.status_code == 416:  # the .part file is complete, or of another file
                if total != offset:
                    why = tr("the part on disk does not belong to the file")
                    raise _start_over(file, transfer, why)
            else:
                _check_range(response, file, offset, transfer)
                _note_etag(remote.path, response)
                check_space(partial_path.parent, (total or 0) - file.tell())
                _receive(response, file, total, transfer)
            promised_sha256 = remote.sha256 or _promised_sha256(response)
        file.flush()
        os.fsync(file.fileno())
        if promised_sha256 and sha256_of(partial_path) != promised_sha256:
            why = tr(
                "the downloaded file does not have the promised SHA-256 {sha256}",
                sha256=promised_sha256,
            )
            raise _start_over(file, transfer, why)
        try:
            transfer.check(partial_path)
        except UserError:  # no further attempt would help
            raise
        except ValueError as problem:
            raise _start_over(file, transfer, in_words(problem)) from problem
        size = file.tell()
        os.replace(partial_path, remote.path)
    _etag_file(remote.path).unlink(missing_ok=True)
    fsync_path(remote.path.parent)
    return Fetched(remote.path, size, promised_sha256)


def _check_range(
    response: requests.Response,
    file: BinaryIO,
    offset: int,
    transfer: _Transfer,
) -> None:
    """Check that a response continues the `.part` file at `offset`, and empty that file if not.

    Raises _Retry if the response holds neither the remaining bytes nor the complete file.
    """
    if response.status_code == 206:
        if _first_byte(response) != offset:
            raise _start_over(file, transfer, tr("the server sent a range that was not asked for"))
    elif offset:  # the server does not support ranges, or the file has changed
        _empty(file, transfer)


def _receive(
    response: requests.Response,
    file: BinaryIO,
    total: int | None,
    transfer: _Transfer,
) -> None:
    """Append the bytes of a response to the `.part` file.

    Raises _Retry if the connection breaks off or the size is not `total`, _Abandoned if the
    transfer is stopped, and UserError if `total` is None and the file leaves less than RESERVE
    bytes (1 GiB) of the disk free.
    """
    limit = total
    if limit is None:
        limit = file.tell() + shutil.disk_usage(file.name).free - RESERVE
    try:
        for chunk in response.iter_content(CHUNK):
            file.write(chunk)
            transfer.advance(len(chunk))
            if file.tell() > limit:
                break
            if transfer.stop.is_set():
                raise _Abandoned
    except requests.RequestException as failure:
        reason = _in_one_line(failure)
        if total:
            broken = tr(
                "the connection broke off at {arrived:,} of {total:,} bytes: {reason}",
                arrived=file.tell(),
                total=total,
                reason=reason,
            )
        else:
            broken = tr(
                "the connection broke off at {arrived:,} bytes: {reason}",
                arrived=file.tell(),
                reason=reason,
            )
        raise _Retry(broken) from failure
    arrived = file.tell()
    if total is not None and arrived < total:
        raise _Retry(
            tr(
                "the connection ended at {arrived:,} of {total:,} bytes",
                arrived=arrived,
                total=total,
            )
        )
    if total is not None and arrived > limit:
        why = tr("{arrived:,} bytes arrived for a file of {total:,}", arrived=arrived, total=total)
        raise _start_over(file, transfer, why)
    if arrived > limit:
        _empty(file, transfer)
        raise UserError(
            tr(
                "could not download {url}: the server does not say how large the file is, "
                "and has sent {arrived:,} bytes, which leaves less than {reserve:.0f} GB "
                "of the disk free. Nothing was kept. {hint}",
                url=response.url,
                arrived=arrived,
                reserve=RESERVE / 1e9,
                hint=transfer.hint,
            )
        )


def _request(
    url: str,
    transfer: _Transfer,
    headers: dict[str, str],
) -> requests.Response:
    """Request a file, and return the open response if its status is 200, 206 or 416.

    In any other case, raises _Retry if a later attempt may succeed, or UserError if it cannot.
    """
    all_headers = {"Accept-Encoding": "identity", **transfer.headers, **headers}
    timeout = transfer.patience.stall_seconds
    try:
        response = net.request("GET", url, headers=all_headers, stream=True, timeout=timeout)
    except (
        requests.exceptions.InvalidURL,
        requests.exceptions.InvalidSchema,
        requests.exceptions.MissingSchema,
    ) as failure:
        problem = tr(
            "{url!r} is not a web address: {failure}. {hint}",
            url=url,
            failure=failure,
            hint=transfer.hint,
        )
        raise UserError(problem.rstrip()) from failure
    except requests.RequestException as failure:
        raise _Retry(_in_one_line(failure)) from failure
    transfer.reached = True
    status = response.status_code
    if status in (200, 206, 416):
        return response
    response.close()
    if status in (408, 429) or status >= 500:
        wait_seconds = _retry_after(response)
        raise _Retry(
            tr("the server answered {status} {reason}", status=status, reason=response.reason),
            wait_seconds,
        )
    advice = how_to_be_admitted(url) if status in (401, 403) else transfer.hint
    problem = tr(
        "could not download {url}: the server answered {status} {reason}. {advice}",
        url=url,
        status=status,
        reason=response.reason,
        advice=advice,
    )
    raise UserError(problem.rstrip())


# --- headers and notes ---------------------------------------------------------------------------


def _etag_file(path: Path) -> Path:
    return path.with_name(path.name + ".part.json")


def _resume_headers(path: Path, offset: int) -> dict[str, str]:
    """Return the headers that ask for a file's bytes from `offset` on, or {} if `offset` is 0.

    If a saved ETag shows that the file has changed, the server sends all of it.
    """
    if not offset:
        return {}
    headers = {"Range": f"bytes={offset}-"}
    # Without a saved ETag, only the size and the SHA-256 at the end can reveal a change.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        headers["If-Range"] = read_json(_etag_file(path))["etag"]
    return headers


def _note_etag(path: Path, response: requests.Response) -> None:
    etag = response.headers.get("ETag", "")
    if response.status_code == 200:
        _etag_file(path).unlink(missing_ok=True)
        if etag.startswith('"'):  # If-Range does not allow a weak ETag, W/"..."
            write_json(_etag_file(path), {"etag": etag})


def _total(response: requests.Response, transfer: _Transfer) -> int | None:
    """Return the size of the complete file in bytes, or None if the server does not give it.

    The size is read from Content-Range if the status is 206 or 416, and otherwise from
    Content-Length. Raises UserError if that header is malformed.
    """
    if response.status_code in (206, 416):
        size = response.headers.get("Content-Range", "").rpartition("/")[2]
    else:
        size = response.headers.get("Content-Length", "")
    if size in ("", "*"):
        return None
    if not re.fullmatch("[0-9]{1,15}", size):
        problem = tr(
            "could not download {url}: the server gives {size!r} as the size of the "
            "file, which must be a number of bytes. {hint}",
            url=response.url,
            size=size[:40],
            hint=transfer.hint,
        )
        raise UserError(problem.rstrip())
    return int(size)


def _first_byte(response: requests.Response) -> int | None:
    match = re.match(r"bytes ([0-9]+)-", response.headers.get("Content-Range", ""))
    return int(match.group(1)) if match else None


def _promised_sha256(response: requests.Response) -> str | None:
    """Return the SHA-256 that the server promised for a file, or None.

    Hugging Face and its mirrors send it with the redirect to a large file.
    """
    for answer in (*response.history, response):
        match = SHA256.match(answer.headers.get("X-Linked-Etag", ""))
        if match:
            return match.group(1)
    return None


def _retry_after(response: requests.Response) -> float | None:
    """Return the seconds to wait according to the Retry-After header, which may also hold a date.

    Returns None if the header is missing or malformed.
    """
    value = response.headers.get("Retry-After", "")
    if re.fullmatch("[0-9]+", value):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
        return max(0.0, date.timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _empty(file: BinaryIO, transfer: _Transfer) -> None:
    file.flush()
    transfer.advance(-file.tell())
    file.truncate(0)
    file.seek(0)


def _start_over(
    file: BinaryIO,
    transfer: _Transfer,
    why: str,
) -> _Retry:
    """Empty the `.part` file, and return the _Retry exception to raise, with the message `why`."""
    _empty(file, transfer)
    return _Retry(why)


def _in_one_line(failure: requests.RequestException) -> str:
    """Return a one-line description of a network failure."""
    text = str(failure)
    if isinstance(failure, requests.Timeout) or "timed out" in text:
        return tr("no answer in time")
    if isinstance(failure, requests.exceptions.ProxyError):
        return tr("the proxy could not be reached")
    if isinstance(failure, requests.exceptions.SSLError):
        return tr("no secure connection ({reason})", reason=text[:200])
    if "NameResolutionError" in text or "Name or service" in text:
        return tr("the server's name could not be resolved")
    match = re.search(r"\[Errno -?\d+\] ([^'\")]+)", text)
    return match.group(1).lower() if match else text[:200]

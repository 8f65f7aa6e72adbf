"""Files over HTTP that arrive whole: resumed, retried, checked by size and SHA-256, then renamed into place."""

import contextlib
import email.utils
import fcntl
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
from typing import BinaryIO

import requests

from nanochat.common import UserError, fsync_path, read_json, sha256_of, write_json

CHUNK = 1 << 16  # bytes written at a time; a broken connection loses less than one
SHA256 = re.compile(r'"?([0-9a-f]{64})"?$')


@dataclass(frozen=True)
class Remote:
    """A file to fetch: where it is and where it goes."""

    url: str
    path: Path


@dataclass(frozen=True)
class Fetched:
    """A file that arrived; `sha256` is what the server promised and was found, None if it promised nothing."""

    path: Path
    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Patience:
    """How long to go on trying."""

    attempts: int = 6
    """Failures in a row, with no new byte between them, before giving up."""
    attempts_unreached: int = 3
    """The same as long as no server has answered at all: most likely there is no network."""
    stall_seconds: float = 30.0
    """A connection that gives no byte for so long is dropped and tried again."""
    first_wait_seconds: float = 1.0
    """The wait after the first failure; it doubles with each one, with jitter."""
    longest_wait_seconds: float = 60.0


class _Retry(Exception):
    """Something that may go better next time; `wait_seconds` if the server said when."""

    def __init__(self, message: str, wait_seconds: float | None = None):
        super().__init__(message)
        self.wait_seconds = wait_seconds


class _Abandoned(Exception):
    """Another download failed, or the user pressed Ctrl-C; parts stay."""


@dataclass
class _Transfer:
    """What the threads of one `fetch_all` share."""

    headers: dict[str, str]
    patience: Patience
    hint: str
    check: Callable[[Path], None]
    advance: Callable[[float], None]
    say: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)
    reached: bool = False  # whether any server has answered


def fetch_all(
    files: Sequence[Remote],
    headers: dict[str, str] | None = None,
    patience: Patience | None = None,
    parallel: int = 3,
    hint: str = "",
    check: Callable[[Path], None] = lambda path: None,
    advance: Callable[[float], None] = lambda by: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Fetched]:
    """Fetch what is missing, a few files at a time, and return what arrived, in the order of `files`.

    A file under its final name is taken as done. A broken one stays as `NAME.part` and is continued by the next
    call. `check` raises ValueError for content that is not what was meant (such as a login page); `advance` gets
    bytes as they come (negative when a part is thrown away), `say` a line for each retry; `hint` ends each message
    of failure. Raises UserError when a file cannot be had; Ctrl-C leaves the parts.
    """
    transfer = _Transfer(headers or {}, patience or Patience(), hint, check, advance, say)
    missing = [remote for remote in files if not remote.path.exists()]
    waiting: queue.SimpleQueue[Remote] = queue.SimpleQueue()
    finished: queue.SimpleQueue[Fetched | BaseException] = queue.SimpleQueue()
    for remote in missing:
        remote.path.parent.mkdir(parents=True, exist_ok=True)
        waiting.put(remote)

    def work() -> None:
        while not transfer.stop.is_set():
            try:
                finished.put(_fetch(waiting.get_nowait(), transfer))
            except queue.Empty:
                return
            except BaseException as failure:  # handed to the caller's thread, which raises it
                finished.put(failure)
                return

    # Daemons, so that Ctrl-C does not wait for a stalled connection.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(parallel, len(missing)))]
    done = {}
    try:
        for thread in threads:
            thread.start()
        while len(done) < len(missing):
            result = finished.get()
            if isinstance(result, BaseException):
                raise result
            done[result.path] = result
    finally:
        transfer.stop.set()
        for thread in threads:
            thread.join(timeout=1)
    return [done[remote.path] for remote in missing]


def probe_size(url: str, headers: dict[str, str], patience: Patience | None = None, hint: str = "") -> int | None:
    """The size of a remote file in bytes, None if the server does not say. UserError as for `fetch_all`."""
    transfer = _Transfer(headers, patience or Patience(), hint, lambda _: None, lambda _: None, lambda _: None)

    def ask() -> int | None:
        with _request(url, transfer, {}) as response:
            return _total(response)

    return _retrying(ask, lambda: 0, url, transfer)


def check_space(folder: Path, needed: float) -> None:
    """Raise UserError if a folder's disk has not `needed` bytes free."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the download needs about {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free. Free some "
            "space, ask for fewer files, or set NANOCHAT_BASE_DIR to a folder on another disk."
        )


def part_of(path: Path) -> Path:
    """Where a file is kept until it is whole."""
    return path.with_name(path.name + ".part")


def part_size(path: Path) -> int:
    """How many bytes of a file have already come."""
    part = part_of(path)
    return part.stat().st_size if part.exists() else 0


# --- one file ------------------------------------------------------------------------------------


def _fetch(remote: Remote, transfer: _Transfer) -> Fetched:
    return _retrying(lambda: _attempt(remote, transfer), lambda: part_size(remote.path), remote.url, transfer)


def _retrying(attempt: Callable, progress: Callable[[], int], url: str, transfer: _Transfer):
    """Call `attempt` until it succeeds or fails too often without `progress` growing."""
    failures, patience = 0, transfer.patience
    while True:
        before = progress()
        try:
            return attempt()
        except _Retry as problem:
            failures = 1 if progress() > before else failures + 1
            if failures >= (patience.attempts if transfer.reached else patience.attempts_unreached):
                tries = f"{failures} attempts" if failures > 1 else "1 attempt"
                raise UserError(f"could not download {url}: {problem} ({tries}). {transfer.hint}".rstrip()) from problem
            wait = patience.first_wait_seconds * 2 ** (failures - 1) * random.uniform(0.75, 1.25)
            wait = min(max(wait, problem.wait_seconds or 0), patience.longest_wait_seconds)
            transfer.say(f"{url.rpartition('/')[2]}: {problem}; trying again in {wait:.0f} s")
            if transfer.stop.wait(wait):
                raise _Abandoned from problem


def _attempt(remote: Remote, transfer: _Transfer) -> Fetched:
    """Ask for what is missing of a file, append it to the part, check the whole and rename it."""
    part = part_of(remote.path)
    with open(part, "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # a second process that fetches the same file waits here
        if remote.path.exists():
            part.unlink(missing_ok=True)
            return Fetched(remote.path, remote.path.stat().st_size, None)
        offset = f.tell()
        with _request(remote.url, transfer, _resume_headers(remote.path, offset)) as response:
            total = _total(response)
            if response.status_code == 416 and total != offset:
                raise _start_over(f, transfer, "the part that had come does not belong to the file")
            if response.status_code != 416:
                if offset and response.status_code == 200:  # the server knows no ranges, or the file has changed
                    _empty(f, transfer)
                elif response.status_code == 206 and _first_byte(response) != offset:
                    raise _start_over(f, transfer, "the server sent another range than asked for")
                _note_etag(remote.path, response)
                _receive(response, f, total, transfer)
            promised = _promised_sha256(response)
        f.flush()
        os.fsync(f.fileno())
        if promised and sha256_of(part) != promised:
            raise _start_over(f, transfer, f"what came does not have the promised SHA-256 {promised}")
        try:
            transfer.check(part)
        except ValueError as problem:
            raise _start_over(f, transfer, str(problem)) from problem
        size = f.tell()
        os.replace(part, remote.path)
    _etag_file(remote.path).unlink(missing_ok=True)
    fsync_path(remote.path.parent)
    return Fetched(remote.path, size, promised)


def _receive(response: requests.Response, f: BinaryIO, total: int | None, transfer: _Transfer) -> None:
    """Append a response's bytes to the part."""
    try:
        for chunk in response.iter_content(CHUNK):
            f.write(chunk)
            transfer.advance(len(chunk))
            if transfer.stop.is_set():
                raise _Abandoned
    except requests.RequestException as failure:
        so_far = f"at {f.tell():,} of {total:,} bytes" if total else f"at {f.tell():,} bytes"
        raise _Retry(f"the connection broke off {so_far}: {_words(failure)}") from failure
    if total is not None and f.tell() < total:
        raise _Retry(f"the connection ended at {f.tell():,} of {total:,} bytes")
    if total is not None and f.tell() > total:
        raise _start_over(f, transfer, f"{f.tell():,} bytes came of a file of {total:,}")


def _request(url: str, transfer: _Transfer, headers: dict[str, str]) -> requests.Response:
    """Open a response of status 200, 206 or 416; anything else is a reason to wait or to give up."""
    everything = {"Accept-Encoding": "identity", **transfer.headers, **headers}
    try:
        response = requests.get(url, headers=everything, stream=True, timeout=transfer.patience.stall_seconds)
    except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, requests.exceptions.MissingSchema) as e:
        raise UserError(f"{url!r} is no web address: {e}. {transfer.hint}".rstrip()) from e
    except requests.RequestException as failure:
        raise _Retry(_words(failure)) from failure
    transfer.reached = True
    status = response.status_code
    if status in (200, 206, 416):
        return response
    response.close()
    if status in (408, 429) or status >= 500:
        raise _Retry(f"the server answered {status} {response.reason}", _retry_after(response))
    token = " If the data needs an account, set HF_TOKEN to a token that may read it." if status in (401, 403) else ""
    raise UserError(f"could not download {url}: the server answered {status} {response.reason}.{token} {transfer.hint}")


# --- headers and notes ---------------------------------------------------------------------------


def _etag_file(path: Path) -> Path:
    return path.with_name(path.name + ".part.json")


def _resume_headers(path: Path, offset: int) -> dict[str, str]:
    """Ask for the rest of a part, and only if the file on the server is still the same."""
    if not offset:
        return {}
    headers = {"Range": f"bytes={offset}-"}
    # Without a note the size and the SHA-256 at the end must do.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        headers["If-Range"] = read_json(_etag_file(path))["etag"]
    return headers


def _note_etag(path: Path, response: requests.Response) -> None:
    etag = response.headers.get("ETag", "")
    if response.status_code == 200:
        _etag_file(path).unlink(missing_ok=True)
        if etag.startswith('"'):  # a weak one, W/"...", may not be used in If-Range
            write_json(_etag_file(path), {"etag": etag})


def _total(response: requests.Response) -> int | None:
    """The size of the whole file, from Content-Range for a part, else from Content-Length."""
    if response.status_code in (206, 416):
        size = response.headers.get("Content-Range", "").rpartition("/")[2]
    else:
        size = response.headers.get("Content-Length", "")
    return int(size) if size.isdigit() else None


def _first_byte(response: requests.Response) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match.group(1)) if match else None


def _promised_sha256(response: requests.Response) -> str | None:
    """The SHA-256 that Hugging Face and its mirrors name beside the redirect to large files."""
    for answer in (*response.history, response):
        if match := SHA256.match(answer.headers.get("X-Linked-Etag", "")):
            return match.group(1)
    return None


def _retry_after(response: requests.Response) -> float | None:
    """Retry-After in seconds, given as such or as a date."""
    value = response.headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _empty(f: BinaryIO, transfer: _Transfer) -> None:
    f.flush()
    transfer.advance(-f.tell())
    f.truncate(0)
    f.seek(0)


def _start_over(f: BinaryIO, transfer: _Transfer, why: str) -> _Retry:
    """Throw a part away; the next attempt begins at its first byte."""
    _empty(f, transfer)
    return _Retry(why)


def _words(failure: requests.RequestException) -> str:
    """A network failure in a line."""
    if isinstance(failure, requests.Timeout) or "timed out" in str(failure):
        return "no answer in time"
    if isinstance(failure, requests.exceptions.ProxyError):
        return "the proxy could not be reached"
    if isinstance(failure, requests.exceptions.SSLError):
        return f"no secure connection ({str(failure)[:200]})"
    text = str(failure)
    if "NameResolutionError" in text or "Name or service" in text:
        return "the server's name could not be resolved"
    match = re.search(r"\[Errno -?\d+\] ([^'\")]+)", text)
    return match.group(1).lower() if match else text[:200]

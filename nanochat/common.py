"""The basics that every file shares: messages in two languages, atomic files, and appendices.

Appendices are modules that may be missing. data/command_line.py reads the flags of a script.
"""

import contextlib
import contextvars
import dataclasses
import errno
import functools
import gettext
import hashlib
import importlib
import json
import math
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The first of these that is set chooses the language of messages.
LANGUAGE_VARIABLES = ("NANOCHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
own_language = contextvars.ContextVar("own_language", default="")  # that of this thread or task
MAX_JSON_BYTES = 1 << 28  # larger JSON files are refused
# Characters that a terminal obeys or that reverse the direction of text: control characters except
# tab and line feed, bidirectional marks, and halves of surrogate pairs, which Python uses for the
# bytes of a file name that is not UTF-8.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
DAY_SECONDS = 86_400
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of file systems that cannot flush a folder, such as CIFS and WSL drives.
NO_FOLDER_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.ENOSYS)


# --- messages ------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Return a text with characters that could control a terminal spelled out, such as `\\x1b`.

    A message may quote a file name, which must not be able to control the terminal.
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def language() -> str:
    """Return the language of messages, "zh" or "en", from NANOCHAT_LANG or else from the locale."""
    values = (own_language.get(), *map(os.environ.get, LANGUAGE_VARIABLES))
    chosen = next(filter(None, values), "en")
    return "zh" if chosen.lower().startswith("zh") else "en"


@functools.cache
def _catalogue(language: str) -> gettext.NullTranslations:
    folder = Path(__file__).with_name("data") / "locale"
    return gettext.translation("nanochat", folder, [language], fallback=language == "en")


def tr(template: str, **values: Any) -> str:
    """Return an English template translated to the user's language and filled with `values`.

    The Chinese templates are in data/locale; `python -m dev.messages` keeps them complete.
    """
    return _catalogue(language()).gettext(template).format(**values)


def tr_help(text: str) -> str:
    """Return a help text in the user's language; one that the catalogue lacks stays English."""
    plain = " ".join(text.split())
    chinese = _catalogue(language()).pgettext("help", plain) if plain else ""
    return text if chinese == plain else chinese


class UserError(ValueError):
    """A problem that the user can fix, with a message that says what happened and what to do.

    `run` prints this message and exits with `exit_code`, whereas a bug in the code gets a
    traceback. The message should also name the rule and the value that broke it. Its control
    characters, which a file name or a server's response may contain, are spelled out by visible().
    """

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(visible(message))
        self.exit_code = exit_code


def rank() -> int:
    """Return the rank of this process in the job, or 0 outside torchrun or if RANK is invalid."""
    word = os.environ.get("RANK", "")
    return int(word) if word.isdecimal() else 0


def log(message: str = "") -> None:
    """Print a line to standard output, on rank 0 only."""
    if rank() == 0:
        print(visible(message), flush=True)


def warn(message: str) -> None:
    """Print a warning to standard error, on rank 0 only."""
    if rank() == 0:
        print(tr("warning: {text}", text=visible(message)), file=sys.stderr, flush=True)


@dataclasses.dataclass
class Pulse:
    """Signs of life of a process: its progress, its step, and whether it has been asked to stop."""

    moments: int = 0  # how often the process has reported progress
    step: int = 0
    stop_reason: str = ""  # the first signal that asked the process to stop, or another reason
    catching: bool = False  # whether signals are noted here instead of ending the process
    at_once: bool = False  # whether a signal interrupts the current work at once

    def beat(self, step: int | None = None) -> None:
        """Record that this process is making progress and, if given, which step it has reached."""
        self.moments += 1
        if step is not None:
            self.step = step

    def rest(self) -> None:
        """Forget the progress so far: until the next beat(), nothing counts as hanging."""
        self.moments = 0

    def ask(self, why: str) -> None:
        """Ask this process to save and stop as soon as it can; only the first reason is kept."""
        self.stop_reason = self.stop_reason or why


# --- files ---------------------------------------------------------------------------------------


def base_dir() -> Path:
    """Return the folder of all data, checkpoints and reports, creating it if necessary.

    NANOCHAT_BASE_DIR names it; the default is ~/.cache/nanochat. Raises UserError if the folder
    cannot be created.
    """
    name = os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat"
    try:
        folder = Path(name).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as failure:  # RuntimeError if the user has no home folder
        raise UserError(
            tr(
                "the base folder cannot be made: {failure}. Set NANOCHAT_BASE_DIR to a "
                "folder that you may write, then type the same command again.",
                failure=appendix("nanochat.data.library_words").in_words(failure),
            )
        ) from failure
    return folder


def folder_for_scripts() -> Path:
    """Return the base folder, for a shell script.

    Raises UserError if the folder cannot be created or this user may not write there.
    """
    folder = base_dir()
    if not os.access(folder, os.W_OK):
        raise UserError(
            tr(
                "the base folder {folder} cannot be written. Set NANOCHAT_BASE_DIR to a "
                "folder that you may write, then type the same command again.",
                folder=folder,
            )
        )
    return folder


def fsync_path(path: Path) -> None:
    """Flush a file's content to disk or, if the file system supports it, a folder's entries."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as failure:
        if failure.errno not in NO_FOLDER_FLUSH or not path.is_dir():
            raise


@functools.cache
def _leftovers(folder: str) -> dict[str, list[str]]:
    """Return a dict from the names of files in a folder to the paths of their temporary files.

    Killed writes leave temporary files behind. A folder is listed only once per process, because
    listing a large folder takes longer than a write.
    """
    leftovers: dict[str, list[str]] = {}
    for file in os.scandir(folder):
        name, marker, _ = file.name.rpartition(".tmp-")
        if marker and name.startswith("."):
            leftovers.setdefault(name[1:], []).append(file.path)
    return leftovers


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of killed writes to `path` that are more than a day old."""
    leftovers = _leftovers(os.path.abspath(path.parent))
    for leftover in leftovers.get(path.name, []):
        with contextlib.suppress(OSError):  # another process may have removed it
            age = time.time() - os.lstat(leftover).st_mtime
            if age > DAY_SECONDS:
                os.unlink(leftover)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` if the block succeeds.

    The temporary file is flushed to disk before the rename, and removed after a failure. If the
    disk is full, the OSError names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    # O_EXCL and a random name, because another user could put a link at a predictable name
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
    new_file = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    os.close(os.open(temporary, new_file, 0o666))
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_path(path.parent)
    except OSError as failure:
        if failure.errno in DISK_FULL:
            failure.filename = failure.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that readers see either all of the old content or all of the new."""
    content = data.encode() if isinstance(data, str) else data
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, with non-ASCII text unescaped and null for NaN and infinities."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value with None in place of every NaN and infinity, and lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file atomically; to_json() describes the text."""
    write_atomic(path, to_json(value, indent=1) + "\n")


def check_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> None:
    """Raise ValueError if an existing path is not a regular file of at most `max_bytes` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(tr("it is not a regular file"))
    if status.st_size > max_bytes:
        sizes = {"size": status.st_size, "most": max_bytes}
        raise ValueError(tr("it has {size:,} bytes, and at most {most:,} are read", **sizes))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if the text is not JSON or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(tr("it is nested too deeply")) from None


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises UserError, caused by a ValueError with the reason, if the file is not a regular file, is
    too large or is not JSON. Raises OSError if the file cannot be opened.
    """
    try:
        check_regular(path)
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as failure:
        raise UserError(
            tr(
                "{path} cannot be read as JSON: {failure}. Delete it, or copy it again from "
                "its source",
                path=path,
                failure=appendix("nanochat.data.library_words").in_words(failure),
            )
        ) from failure


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- appendices ----------------------------------------------------------------------------------


def appendix(name: str) -> Any:
    """Import and return an optional module, or return None if this copy of nanochat lacks it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{name}.".startswith(f"{missing.name}."):
            return None
        raise


def required_appendix(name: str, purpose: str) -> Any:
    """Import and return the module `name`, or raise UserError (exit code 2) if it is missing."""
    module = appendix(name)
    if module is None:
        names = {"purpose": purpose, "module": name}
        needs = tr("{purpose} needs {module}, which this copy of nanochat does not have", **names)
        raise UserError(needs + tr(": restore its file, or do without {purpose}", **names), 2)
    return module


if __name__ == "__main__":  # so that shell scripts use the same folder
    try:
        print(folder_for_scripts())
    except UserError as _mistake:
        sys.exit(f"error: {_mistake}")

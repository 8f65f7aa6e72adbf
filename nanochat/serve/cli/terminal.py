"""Input and output of a chat in a terminal: reads what the user types, handles Ctrl-C, and shows
text safely."""

import codecs
import contextlib
import io
import locale
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from nanochat import common

HISTORY_LINES = 1000
UTF8_LOCALES = ("C.UTF-8", "en_US.UTF-8", "zh_CN.UTF-8")
LINE_EDITOR = (
    "set input-meta on",  # these three matter only where no locale of UTF8_LOCALES is installed
    "set output-meta on",
    "set convert-meta off",
    "tab: self-insert",  # a chat has no file names to complete, and pasted text may have tabs
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def language(flag: str) -> str:
    """Return en or zh: what the flag says, or, for auto, the language of the terminal's locale."""
    return common.language() if flag == "auto" else flag


# --- what is shown -------------------------------------------------------------------------------


def harmless(text: str) -> str:
    """Replace control characters in a model's text: a reply must not be able to control the
    terminal."""
    return CONTROL.sub("\ufffd", text)


def dim(text: str, stream: TextIO) -> str:
    """Text in grey if the stream shows colours, else unchanged."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return text if os.environ.get("TERM") == "dumb" else f"\033[2m{text}\033[0m"


def take_any_text() -> None:
    """Let standard input and output carry any text, whatever the locale says."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without UTF-8 shows ? for unknown characters.
            stream.reconfigure(errors="replace")
    if not isinstance(sys.stdin, io.TextIOWrapper):
        return
    if codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8")  # what a keyboard sends, whatever the locale says


# --- what is typed -------------------------------------------------------------------------------


def ask() -> str:
    """Read one line, or several lines between triple quotes. EOFError at the end of input."""
    text = input("> ")
    if text.startswith('"""'):
        text = text[3:]
        while not text.endswith('"""'):
            text += "\n" + input("... ")
        text = text[:-3]
    return text


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[], str]]:
    """Yield ask(). Inside this block Ctrl-C raises KeyboardInterrupt only in ask(), and only once
    per call.

    So holding the keys a moment too long neither ends the chat nor stops the next answer.
    """
    asking = False

    def press(number: int, frame: Any) -> None:
        nonlocal asking
        if asking:
            asking = False
            raise KeyboardInterrupt

    def ask_once() -> str:
        nonlocal asking
        asking = True
        try:
            return ask()
        finally:
            asking = False

    before = signal.signal(signal.SIGINT, press)
    try:
        yield ask_once
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed: the first never interrupts a pass, a
    second raises."""
    presses = 0

    def press(number: int, frame: Any) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def utf8() -> Iterator[None]:
    """Inside this block the line editor reads UTF-8 even if the terminal's locale is C or is not
    installed.

    Without it the editor takes each byte of a Chinese character for a key pressed with Alt, and
    lists files or recalls old lines. The editor looks at the environment for each line, so the
    environment is what changes.
    """
    name = "LC_ALL" if os.environ.get("LC_ALL") else "LC_CTYPE"
    before = os.environ.get(name)
    if _ascii_only():
        os.environ[name] = next(filter(_installed, UTF8_LOCALES), "C")
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _ascii_only() -> bool:
    """Whether the terminal's locale is not installed or has only ASCII characters."""
    if not _installed(""):
        return True
    return locale.nl_langinfo(locale.CODESET) in ("ANSI_X3.4-1968", "US-ASCII")


def _installed(name: str) -> bool:
    """Whether the system has this locale; "" is the environment's. It is then in use."""
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except locale.Error:
        return False
    return True


@contextlib.contextmanager
def history(path: Path) -> Iterator[str]:
    """Inside this block the arrow keys recall earlier lines and chats. Only the user may read the
    history file.

    Yields the reason if the lines cannot be saved for the next chat, else "".
    """
    with utf8():
        try:
            # Here, because the import changes input(), and Windows does not have it.
            import readline
        except ImportError:
            yield "this Python has no readline"
            return
        for setting in LINE_EDITOR:
            readline.parse_and_bind(setting)
        problem = _read_history(readline, path)
        readline.set_history_length(HISTORY_LINES)
        try:
            yield problem
        finally:
            # A folder that became full or read-only does not end a chat in error.
            with contextlib.suppress(OSError):
                readline.write_history_file(path)


def _read_history(readline: Any, path: Path) -> str:
    """Read the history file, creating it if needed. Return the reason if it is not writable, else
    ""."""
    problem = ""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError as failure:
        problem = failure.strerror or str(failure)
    with contextlib.suppress(OSError):  # the file may be in another line editor's format
        readline.read_history_file(path)
    return problem

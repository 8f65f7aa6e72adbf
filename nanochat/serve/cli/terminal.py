"""Reads what the user types in a terminal chat, handles Ctrl-C, and makes text safe to print."""

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
from nanochat.common import tr
from nanochat.data.library_words import os_problem
from nanochat.data.locks import open_regular

HISTORY_LINES = 1000
UTF8_LOCALES = ("C.UTF-8", "en_US.UTF-8", "zh_CN.UTF-8")
LINE_EDITOR = (
    "set input-meta on",  # these three matter only if no locale of UTF8_LOCALES is installed
    "set output-meta on",
    "set convert-meta off",
    "tab: self-insert",  # a chat has no file names to complete, and pasted text may have tabs
)
# Control characters but tab and newline, characters that reverse the direction of what follows, and
# halves of surrogate pairs.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def language(flag: str) -> str:
    """Return "en" or "zh": `flag` itself, or common.language() if `flag` is "auto"."""
    return common.language() if flag == "auto" else flag


# --- what is shown -------------------------------------------------------------------------------


def harmless(text: str) -> str:
    """Return a model's text with U+FFFD for each character that matches CONTROL.

    A reply must not be able to control the terminal, or to look different from what it says.
    """
    return CONTROL.sub("\ufffd", text)


def dim(text: str, stream: TextIO) -> str:
    """Return text, dimmed if `stream` is a terminal with colours and NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return text if os.environ.get("TERM") == "dumb" else f"\033[2m{text}\033[0m"


def take_any_text() -> None:
    """Keep standard input and output from failing on text outside the locale's encoding."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without UTF-8 then shows ? for each character that it does not have.
            stream.reconfigure(errors="replace")
    if not isinstance(sys.stdin, io.TextIOWrapper):
        return
    if codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8")  # what keyboards send, whatever the locale is


# --- what is typed -------------------------------------------------------------------------------


def ask() -> str:
    """Read one line, or several lines between triple quotes, and return the text.

    Raises EOFError at the end of input.
    """
    text = input("> ")
    if text.startswith('"""'):
        text = text[3:]
        while not text.endswith('"""'):
            text += "\n" + input("... ")
        text = text[:-3]
    return text


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[], str]]:
    """Yield a function that reads a message like ask(), and ignore Ctrl-C except while it reads.

    While it reads, Ctrl-C raises KeyboardInterrupt, but only once per call. So holding the keys a
    moment too long does not end the chat. Inside this block, stoppable() may handle Ctrl-C instead.
    """
    asking = False

    def handle_interrupt(signal_number: int, frame: Any) -> None:
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

    previous_handler = signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield ask_once
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed inside this block.

    The first Ctrl-C only makes that function return true, so it never interrupts a forward pass.
    Later ones raise KeyboardInterrupt.
    """
    presses = 0

    def handle_interrupt(signal_number: int, frame: Any) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@contextlib.contextmanager
def utf8() -> Iterator[None]:
    """Inside this block, make the line editor read UTF-8 if the terminal's locale has only ASCII.

    In such a locale, or one that is not installed, the editor would take each byte of a Chinese
    character for a key pressed with Alt, and list files or recall old lines. The editor reads the
    environment again for each line, which is why the locale is changed there.
    """
    name = "LC_ALL" if os.environ.get("LC_ALL") else "LC_CTYPE"
    previous_locale = os.environ.get(name)
    if _ascii_only():
        os.environ[name] = next(filter(_installed, UTF8_LOCALES), "C")
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if previous_locale is not None:
            os.environ[name] = previous_locale


def _ascii_only() -> bool:
    """Return whether the terminal's locale is not installed or has only ASCII characters."""
    if not _installed(""):
        return True
    return locale.nl_langinfo(locale.CODESET) in ("ANSI_X3.4-1968", "US-ASCII")


def _installed(name: str) -> bool:
    """Switch to the locale `name` ("": the environment's), and return whether it is installed."""
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except locale.Error:
        return False
    return True


@contextlib.contextmanager
def history(path: Path) -> Iterator[str]:
    """Inside this block, let the arrow keys recall lines of this chat and of earlier ones.

    Yields "", or the reason why lines cannot be recalled or saved for the next chat. A new history
    file is readable only by the user.
    """
    with utf8():
        try:
            # Imported here, because the import changes input(), and Windows has no readline.
            import readline
        except ImportError:
            yield tr("this Python has no readline")
            return
        for setting in LINE_EDITOR:
            readline.parse_and_bind(setting)
        problem = _read_history(readline, path)
        readline.set_history_length(HISTORY_LINES)
        try:
            yield problem
        finally:
            # A folder that has become full or read-only must not end a chat with an error.
            with contextlib.suppress(OSError):
                if not problem:
                    with common.atomic_path(path) as temporary:
                        temporary.chmod(0o600)
                        readline.write_history_file(temporary)


def _read_history(readline: Any, path: Path) -> str:
    """Read the history file if there is one, and return "" or why it cannot be written."""
    try:
        with open_regular(path, owned=True):
            pass
    except common.UserError:  # reading a pipe would block, and writing would follow a link
        return tr("it must be an ordinary file of yours")
    except OSError as failure:
        return os_problem(failure)
    with contextlib.suppress(OSError):  # the file may be in another line editor's format
        readline.read_history_file(path)
    return ""

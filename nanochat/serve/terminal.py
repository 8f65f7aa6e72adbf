"""Input and output of a chat in a terminal: reads what the user types, handles Ctrl-C, and shows text safely."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

HISTORY_LINES = 1000
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def language(asked: str) -> str:
    """en or zh: the language asked for, or, for auto, the language of the terminal's locale."""
    if asked != "auto":
        return asked
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


# --- what is shown -------------------------------------------------------------------------------


def harmless(text: str) -> str:
    """Replace control characters in a model's text: a reply must not be able to control the terminal."""
    return CONTROL.sub("\ufffd", text)


def dim(text: str, stream: TextIO) -> str:
    """Text in grey if the stream shows colours, else unchanged."""
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\033[2m{text}\033[0m"


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
    """Give ask(). Inside this block Ctrl-C raises KeyboardInterrupt only in ask(), and only once per call.

    So holding the keys a moment too long neither ends the chat nor stops the next answer.
    """
    asking = False

    def press(number: int, frame: Any) -> None:
        nonlocal asking
        if asking:
            asking = False
            raise KeyboardInterrupt

    def asked() -> str:
        nonlocal asking
        asking = True
        try:
            return ask()
        finally:
            asking = False

    before = signal.signal(signal.SIGINT, press)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Give a function that tells whether Ctrl-C was pressed: the first never interrupts a pass, a second raises."""
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
def history(path: Path) -> Iterator[None]:
    """Inside this block the arrow keys recall earlier lines and chats. Only the user may read the history file."""
    try:
        import readline  # here, because the import changes input(), and Windows does not have it
    except ImportError:
        yield
        return
    path.touch(mode=0o600)
    with contextlib.suppress(OSError):  # the file may be in another line editor's format
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        readline.write_history_file(path)

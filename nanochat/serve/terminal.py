"""The two sides of a chat in a terminal: what is typed, with Ctrl-C kept in its place, and what is shown."""

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
    """en or zh: what was asked for, or, for auto, what the terminal's locale begins with."""
    if asked != "auto":
        return asked
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


# --- what is shown -------------------------------------------------------------------------------


def harmless(text: str) -> str:
    """A model's words without control characters: a reply must not steer the terminal."""
    return CONTROL.sub("\ufffd", text)


def dim(text: str, stream: TextIO) -> str:
    """Text in grey where a stream shows colours, else as it is."""
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\033[2m{text}\033[0m"


# --- what is typed -------------------------------------------------------------------------------


def ask() -> str:
    """A line from the keyboard, or several between two lines with triple quotes. EOFError at the end of input."""
    text = input("> ")
    if text.startswith('"""'):
        text = text[3:]
        while not text.endswith('"""'):
            text += "\n" + input("... ")
        text = text[:-3]
    return text


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[], str]]:
    """Gives ask(); within, Ctrl-C breaks into that with KeyboardInterrupt, once a call, and into nothing else.

    So a key held a moment too long neither ends the chat nor stops the answer to what is typed next.
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
    """Within, Ctrl-C is only remembered, so that it never breaks into a pass of the model; a second one ends all."""
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
    """Within, the arrow keys bring back what was typed, in earlier chats too; the file is the user's alone."""
    try:
        import readline  # here, because it changes how input() works, and Windows has none
    except ImportError:
        yield
        return
    path.touch(mode=0o600)
    with contextlib.suppress(OSError):  # a file in another editing library's format
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        readline.write_history_file(path)

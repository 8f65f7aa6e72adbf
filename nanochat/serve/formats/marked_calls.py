"""What both forms of calls share: text outside of calls, and the marks that begin one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from nanochat.serve.formats.pieces import (
    Parser,
    Piece,
    Words,
    add_piece,
    first_mark,
    open_beginning,
)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class MarkedCalls(Parser, ABC):
    """Turns the text of a reply into words and calls; see Parser.

    The parser is always in one state, a method that moves text from `_rest` to `pieces` and returns
    whether another state follows. A form of calls adds the states after `_head`.
    """

    marks: Sequence[str]  # with which a call may begin

    def __init__(self) -> None:
        """Begin a reply."""
        self._rest = ""
        self._state: Callable[[list[Piece], bool], bool] = self._outside

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """Add text, and return the pieces that it completes; `last` ends the reply."""
        self._rest += text
        pieces: list[Piece] = []
        while self._state(pieces, last):
            pass
        return pieces

    def held_words(self) -> list[Piece]:
        """Return the words that were held back because they may begin a mark, and pass them on.

        There are none within a call, which something else may interrupt.
        """
        if self._state != self._outside:
            return []
        words = Words(self._rest)
        self._rest = ""
        return [words]

    def _outside(self, pieces: list[Piece], last: bool) -> bool:
        """Pass words on, up to what may be a mark."""
        match = first_mark(self._rest, self.marks)
        start = match[0] if match else len(self._rest)
        if not match and not last:
            start -= open_beginning(self._rest, self.marks)
        add_piece(pieces, Words(self._rest[:start]))
        self._rest = self._rest[start:]
        self._state = self._head if match else self._outside
        return match is not None

    @abstractmethod
    def _head(self, pieces: list[Piece], last: bool) -> bool:
        """Read the beginning of a call, up to its first argument."""

    def _no_call(self, pieces: list[Piece]) -> bool:
        """Pass the opening mark on as text."""
        mark = next(mark for mark in self.marks if self._rest.startswith(mark))
        add_piece(pieces, Words(mark))
        self._rest = self._rest[len(mark) :]
        self._state = self._outside
        return True

"""Calls that are written as Mistral's models do, after the mark [TOOL_CALLS].

They are a list, [{"name": NAME, "arguments": {...}, "id": ID}], or each has a mark of its own, as in
[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}. The ID may be missing. A call is passed on argument by
argument. Anything that is not a call of one of the functions stays text.
"""

import re
import secrets

from nanochat.serve.formats.json_calls import JsonCalls
from nanochat.serve.formats.pieces import Arguments, Call, Piece, Words, add_piece

LISTED = "[TOOL_CALLS]"
_HEAD = re.compile(
    r'(?:\[TOOL_CALLS\]\s*\[|,)\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*\{'
    r"|\[TOOL_CALLS\]\s*([^\s\[\]{]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*\{"
)
_OPEN_HEAD = re.compile(
    r"(?:\[TOOL_CALLS\]|,)\s*(?:\[?\s*(?:\{[^{]{0,200})?|[^\s\[\]{]{1,64}(?:\[[^{]{0,200})?)"
)
_TAIL = re.compile(r"[^\[\]{}]{0,80}\}\s*(?:\]|(?=,\s*\{))?")
_OPEN_TAIL = re.compile(r"[^\[\]{}]{0,80}(?:\}\s*,?\s*)?")


class ListedCalls(JsonCalls):
    """Turns the text of a reply into words and calls; see Parser."""

    marks = (LISTED,)
    # The beginning and the end of a call, and what may become one with more text.
    heads = _HEAD
    open_heads = _OPEN_HEAD
    tails = _TAIL
    open_tails = _OPEN_TAIL

    def _head(self, pieces: list[Piece], last: bool) -> bool:
        """Read up to the arguments of a call, or of the next one in a list."""
        match = self.heads.match(self._rest)
        if match:
            self._is_listed = match[1] is not None
            name = match[1] if self._is_listed else match[2]
            return self._begin(pieces, name, match.end())
        if not last and self.open_heads.fullmatch(self._rest):
            return False
        return self._no_call(pieces)

    def _no_call(self, pieces: list[Piece]) -> bool:
        """Pass the mark, or the first character of what is no call, on as text."""
        mark = self.marks[0]
        begin = len(mark) if self._rest.startswith(mark) else 1
        add_piece(pieces, Words(self._rest[:begin]))
        self._rest = self._rest[begin:]
        self._state = self._outside
        return True

    def _start(self, pieces: list[Piece]) -> None:
        """Begin a call, with an ID that Mistral's templates take."""
        if self._arguments == 0:
            add_piece(pieces, Call(self._name, secrets.token_hex(5)[:9]))

    def _broken(self, pieces: list[Piece], last: bool) -> bool:
        """Pass on what is no JSON as it is, up to the end of the reply."""
        add_piece(pieces, Arguments(self._rest))
        self._rest = ""
        return False

    def _tail(self, pieces: list[Piece], last: bool) -> bool:
        """Read past the end of a call in a list, and of the list; a missing end is accepted."""
        if self._is_listed and self.open_tails.fullmatch(self._rest):
            if not last:
                return False
            self._rest = ""
        match = self.tails.match(self._rest) if self._is_listed else None
        if match:
            self._rest = self._rest[match.end() :]
        another = match is not None and self._rest.startswith((",", ";", "{"))
        self._state = self._head if another else self._outside
        return True

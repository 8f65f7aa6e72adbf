"""Calls that are written as Hermes and Qwen3 do: <tool_call>{"name": ..., "arguments": ...}.

A call is passed on argument by argument. Anything that is not a call of one of the functions stays text.
"""

import json
import re
from collections.abc import Collection

from nanochat.serve.formats.marked_calls import CLOSE, OPEN, MarkedCalls
from nanochat.serve.formats.pieces import Arguments, Call, Piece, add_piece, open_beginning
from nanochat.serve.formats.values import decoded, properties_text

_HEAD = re.compile(
    r'<tool_call>\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_TAIL = re.compile(r"\s*\}(\s*</tool_call>)?")
_STRUCTURE = re.compile(r'["\\{}\[\],]')


def written(name: str, arguments: str) -> str:
    """Return a call as text; `arguments` is JSON, or what the model wrote in its place."""
    return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{CLOSE}'


class JsonCalls(MarkedCalls):
    """Turns the text of a reply into words and calls; see Parser."""

    marks = (OPEN,)

    def __init__(self, names: Collection[str]):
        """Begin a reply, in which the functions with these names may be called."""
        super().__init__()
        self._names = names
        self._name = ""
        self._arguments = 0  # arguments of the open call that have been passed on
        self._property = 0  # where the property that is being read begins
        self._reset_scan(0)

    def _head(self, pieces: list[Piece], last: bool) -> bool:
        """Read up to the arguments. A call in another order is read once it is whole."""
        match = _HEAD.match(self._rest)
        if match:
            return self._begin(pieces, match[1], match.end())
        beginning = self._rest[len(OPEN) :].lstrip()
        content, mark, after = self._rest[len(OPEN) :].partition(CLOSE)
        if not mark and not last and (not beginning or beginning[0] == "{"):
            return False
        call = decoded(content) or {}
        name = call.get("name")
        arguments = call.get("arguments")
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return self._no_call(pieces)
        add_piece(pieces, Call(name))
        add_piece(pieces, Arguments(json.dumps(arguments, ensure_ascii=False)))
        self._rest = after
        self._state = self._outside
        return True

    def _begin(self, pieces: list[Piece], name: str, arguments_begin: int) -> bool:
        """Begin to read the arguments of a call, if a function has this name."""
        if name not in self._names:
            return self._no_call(pieces)
        self._name = name
        self._arguments = 0
        self._property = arguments_begin
        self._reset_scan(arguments_begin)
        self._state = self._properties
        return True

    def _properties(self, pieces: list[Piece], last: bool) -> bool:
        """Read the next argument, which ends at a comma or at the end of the object."""
        end = self._scan()
        if end < 0 and not last:
            return False
        text = self._rest[self._property : end] if end >= 0 else ""
        closes = end >= 0 and self._rest[end] == "}"
        values = decoded(f"{{{text}}}")
        is_blank = closes and not text.strip()
        if values is None or (len(values) != 1 and not is_blank):
            if self._arguments == 0 and end >= 0:
                return self._no_call(pieces)
            self._start(pieces)
            add_piece(pieces, Arguments(", " if self._arguments else "{"))
            self._rest = self._rest[self._property :].lstrip()
            self._state = self._broken
            return True
        self._start(pieces)
        if values:
            add_piece(pieces, Arguments(", " if self._arguments else "{"))
            add_piece(pieces, Arguments(properties_text(values)))
            self._arguments += 1
        self._rest = self._rest[end + 1 :]
        self._property = 0
        self._reset_scan(0)
        if closes:
            add_piece(pieces, Arguments("}" if self._arguments else "{}"))
            self._state = self._tail
        return True

    def _start(self, pieces: list[Piece]) -> None:
        if self._arguments == 0:
            add_piece(pieces, Call(self._name))

    def _broken(self, pieces: list[Piece], last: bool) -> bool:
        """Pass on what is no JSON as it is, up to the closing mark."""
        text, mark, after = self._rest.partition(CLOSE)
        if not mark and not last:
            shown = len(text) - open_beginning(text, (CLOSE,))
            after = text[shown:]
            text = text[:shown]
        add_piece(pieces, Arguments(text))
        self._rest = after
        if mark:
            self._state = self._outside
        return bool(mark)

    def _tail(self, pieces: list[Piece], last: bool) -> bool:
        """Read past the end of a call; a missing mark is accepted."""
        match = _TAIL.match(self._rest)
        is_closed = match is not None and match[1] is not None
        may_close = f"}}{CLOSE}".startswith("".join(self._rest.split()))
        if may_close and not is_closed and not last:
            return False
        self._rest = self._rest[match.end() :] if match else self._rest
        self._state = self._outside
        return True

    # --- JSON ------------------------------------------------------------------------------------

    def _reset_scan(self, start: int) -> None:
        self._scanned = start
        self._depth = 0
        self._in_string = False

    def _scan(self) -> int:
        """Return where the property ends that is being read, or -1 if its end has not arrived."""
        while match := _STRUCTURE.search(self._rest, self._scanned):
            mark = match[0]
            if mark == "\\" and self._in_string:
                if match.end() == len(self._rest):
                    return -1
                self._scanned = match.end() + 1
                continue
            self._scanned = match.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                continue
            elif mark in "{[":
                self._depth += 1
            elif self._depth == 0 and mark in ",}":
                return match.start()
            elif mark in "}]":
                self._depth -= 1
        self._scanned = len(self._rest)
        return -1

"""Calls that are written as Hermes and Qwen3 do: <tool_call>{"name": ..., "arguments": ...}.

A call is passed on argument by argument. What is no call of one of the functions stays text.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from nanochat.serve.formats.pieces import (
    Arguments,
    Call,
    Piece,
    Words,
    add_piece,
    open_beginning,
)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_HEAD = re.compile(
    r'<tool_call>\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_TAIL = re.compile(r"\s*\}\s*</tool_call>")
_STRUCTURE = re.compile(r'["\\{}\[\],]')


def written(name: str, arguments: str) -> str:
    """Return a call as text; `arguments` is JSON, or what the model wrote in its place."""
    return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{CLOSE}'


class JsonCalls:
    """Turns the text of a reply into words and calls; see Parser."""

    def __init__(self, names: Collection[str]):
        """Begin a reply, in which the functions with these names may be called."""
        self._names = names
        self._rest = ""
        self._state = self._outside
        self._name = ""
        self._arguments = -1  # arguments of the open call that have been passed on; -1: no call
        self._property = 0  # where the property that is being read begins
        self._reset_scan(0)

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """Add text, and return the pieces that it completes; `last` ends the reply."""
        self._rest += text
        pieces: list[Piece] = []
        while self._state(pieces, last):
            pass
        return pieces

    # Each state moves text from _rest to `pieces`, and returns whether another state goes on.

    def _outside(self, pieces: list[Piece], last: bool) -> bool:
        start = self._rest.find(OPEN)
        if start < 0:
            start = len(self._rest)
            if not last:
                start -= open_beginning(self._rest, (OPEN,))
            self._state = self._outside
        else:
            self._state = self._head
        add_piece(pieces, Words(self._rest[:start]))
        self._rest = self._rest[start:]
        return self._state == self._head

    def _head(self, pieces: list[Piece], last: bool) -> bool:
        """Read up to the arguments. A call in another order is read once it is whole."""
        match = _HEAD.match(self._rest)
        if match:
            if match[1] not in self._names:
                return self._no_call(pieces)
            self._name = match[1]
            self._arguments = 0
            self._property = match.end()
            self._reset_scan(match.end())
            self._state = self._properties
            return True
        beginning = self._rest[len(OPEN) :].lstrip()
        content, mark, after = self._rest[len(OPEN) :].partition(CLOSE)
        if not mark and not last and (not beginning or beginning[0] == "{"):
            return False
        call = decoded(content)
        name = call.get("name")
        arguments = call.get("arguments")
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return self._no_call(pieces)
        add_piece(pieces, Call(name))
        add_piece(pieces, Arguments(json.dumps(arguments, ensure_ascii=False)))
        self._rest = after
        self._state = self._outside
        return True

    def _no_call(self, pieces: list[Piece]) -> bool:
        """Pass the opening mark on as text."""
        add_piece(pieces, Words(OPEN))
        self._rest = self._rest[len(OPEN) :]
        self._state = self._outside
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
        if len(values) != 1 and not is_blank:
            if self._arguments == 0 and end >= 0:
                return self._no_call(pieces)
            self._start(pieces)
            add_piece(pieces, Arguments(", " if self._arguments else "{"))
            self._rest = self._rest[self._property :].lstrip()
            self._state = self._broken
            return True
        self._start(pieces)
        for key, value in values.items():
            add_piece(pieces, Arguments(", " if self._arguments else "{"))
            argument = json.dumps({key: value}, ensure_ascii=False)[1:-1]
            add_piece(pieces, Arguments(argument))
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
            text, after = text[:shown], text[shown:]
        add_piece(pieces, Arguments(text))
        self._rest = after
        if mark:
            self._state = self._outside
        return bool(mark)

    def _tail(self, pieces: list[Piece], last: bool) -> bool:
        """Read past the end of a call; a missing mark is no fault."""
        match = _TAIL.match(self._rest)
        if not match and not last and f"}}{CLOSE}".startswith("".join(self._rest.split())):
            return False
        end = match.end() if match else len(self._rest) - len(_without_brace(self._rest))
        self._rest = self._rest[end:]
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


def _without_brace(text: str) -> str:
    """Return a text without a brace at its beginning."""
    return text.lstrip().removeprefix("}") if text.lstrip().startswith("}") else text


def decoded(text: str) -> dict[str, Any]:
    """Return the JSON object in a text, or an empty one; line breaks in strings are no fault."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""Calls that are written as Qwen3-Coder and Qwen3.5 do, with each argument in a tag of its own.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>. A call is passed
on argument by argument, as JSON. Anything that is not a call of one of the functions stays text.
"""

import re
from collections.abc import Mapping
from typing import Any

from nanochat.serve.formats.marked_calls import CLOSE, OPEN, MarkedCalls
from nanochat.serve.formats.pieces import Arguments, Call, Piece, add_piece, first_mark
from nanochat.serve.formats.values import object_schema, properties_text, typed

FUNCTION = "<function="
PARAMETER = "<parameter="
END = "</function>"
_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]{1,80})>")
_KEY = re.compile(r"\s*<parameter=([^<>\n]{1,200})>")
_TAIL = re.compile(r"\s*</tool_call>")
# What ends a value; the closing tag may be missing.
_ENDS = ("</parameter>", f"\n{PARAMETER}", END)


class XmlCalls(MarkedCalls):
    """Turns the text of a reply into words and calls; see Parser."""

    marks = (OPEN, FUNCTION)

    def __init__(self, parameters: Mapping[str, Any]):
        """Begin a reply; `parameters` are the schemas of the functions that it may call."""
        super().__init__()
        self._parameters = parameters
        self._name = ""
        self._arguments = 0  # arguments of the open call that have been passed on
        self._head_length = 0  # characters before the first argument, until the call has begun

    def _head(self, pieces: list[Piece], last: bool) -> bool:
        match = _HEAD.match(self._rest)
        if match and match[1].strip() in self._parameters:
            self._name = match[1].strip()
            self._arguments = 0
            self._head_length = match.end()
            self._state = self._argument
            return True
        beginning = self._rest.removeprefix(OPEN).lstrip()
        tag = beginning.removeprefix(FUNCTION)
        is_open = FUNCTION.startswith(beginning) or (
            tag != beginning and len(tag) <= 80 and not re.search(r"[<>\n]", tag)
        )
        if is_open and not match and not last:
            return False
        return self._no_call(pieces)

    def _argument(self, pieces: list[Piece], last: bool) -> bool:
        """Read the next argument, or the end of the call."""
        rest = self._rest[self._head_length :]
        key = _KEY.match(rest)
        if key:
            end = first_mark(rest[key.end() :], _ENDS)
            if end is None:
                return self._wait(pieces, last)
            value = rest[key.end() : key.end() + end[0]]
            self._begin(pieces)
            self._add(pieces, key[1].strip(), value.removeprefix("\n").removesuffix("\n"))
            consumed = key.end() + end[0] + (len(end[1]) if end[1] == _ENDS[0] else 0)
            self._rest = rest[consumed:]
            return True
        tag = rest.lstrip()
        if tag.startswith(END):
            self._begin(pieces)
            add_piece(pieces, Arguments("}" if self._arguments else "{}"))
            self._rest = tag.removeprefix(END)
            self._state = self._tail
            return True
        is_open = (
            PARAMETER.startswith(tag)
            or END.startswith(tag)
            or (tag.startswith(PARAMETER) and not re.search(r"[<>\n]", tag[len(PARAMETER) :]))
        )
        if is_open:
            return self._wait(pieces, last)
        if self._head_length:  # nothing has been passed on
            return self._no_call(pieces)
        self._state = self._outside
        return True

    def _wait(self, pieces: list[Piece], last: bool) -> bool:
        """Wait for more text; at the end of a reply, leave the arguments open."""
        if last:
            self._begin(pieces)
            if not self._arguments:
                add_piece(pieces, Arguments("{"))
            self._rest = ""
        return False

    def _begin(self, pieces: list[Piece]) -> None:
        if self._head_length:
            add_piece(pieces, Call(self._name))
            self._head_length = 0

    def _add(self, pieces: list[Piece], key: str, text: str) -> None:
        """Pass an argument on as JSON."""
        properties = object_schema(self._parameters[self._name])[1].get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        value = typed(text, schema if isinstance(schema, dict) else {})
        add_piece(pieces, Arguments(", " if self._arguments else "{"))
        add_piece(pieces, Arguments(properties_text({key: value})))
        self._arguments += 1

    def _tail(self, pieces: list[Piece], last: bool) -> bool:
        """Read past the closing mark; a missing one is accepted."""
        match = _TAIL.match(self._rest)
        if not match and not last and CLOSE.startswith(self._rest.lstrip()):
            return False
        self._rest = self._rest[match.end() :] if match else self._rest
        self._state = self._outside
        return True

"""Calls that are written as Llama 3.1, 3.2 and 3.3 do: {"name": NAME, "parameters": {...}}.

A call begins the reply, or follows the mark <|python_tag|>, and another may follow it after a
semicolon, a comma or white space. It is passed on argument by argument. Anything that is not a call
of one of the functions stays text.
"""

import re
from collections.abc import Collection

from nanochat.serve.formats.json_calls import JsonCalls
from nanochat.serve.formats.listed_calls import ListedCalls
from nanochat.serve.formats.pieces import Piece, Words, add_piece

TAG = "<|python_tag|>"
_BEFORE = r"(?:<\|python_tag\|>|[;,])?\s*"
_MORE = r"\s*(?:,[^\[\]{}]{0,80})?"  # keys after the arguments


class BareCalls(ListedCalls):
    """Turns the text of a reply into words and calls; see Parser."""

    marks = (TAG,)
    heads = re.compile(
        _BEFORE + r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"'
        r'\s*,\s*"(?:parameters|arguments)"\s*:\s*\{'
    )
    open_heads = re.compile(_BEFORE + r'(?:\{\s*(?:"(?:[nt][^{]{0,200})?)?)?')
    tails = re.compile(_MORE + r"\}(?:\s*(?=[;,]?\s*\{))?")
    open_tails = re.compile(_MORE + r"(?:\}\s*[;,]?\s*)?")
    _start = JsonCalls._start  # IDs need not be short, since no template writes them

    def __init__(self, names: Collection[str]):
        """Begin a reply, in which the functions with these names may be called."""
        super().__init__(names)
        self._state = self._beginning

    def _beginning(self, pieces: list[Piece], last: bool) -> bool:
        """Pass white space on, and find out whether a call may begin the reply."""
        words = self._rest.lstrip()
        if not words and not last:
            return False
        self._state = self._outside
        if words.startswith("{"):
            add_piece(pieces, Words(self._rest[: -len(words)]))
            self._rest = words
            self._state = self._head
        return True

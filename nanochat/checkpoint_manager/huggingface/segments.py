"""Splits a rendered conversation into its special tokens and the texts between them.

What somebody wrote may spell out a special token. safe() replaces the spelling before a chat
template gets the text, and segments() puts it back as ordinary text.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Private-use characters that mark parts of a rendered text. A spelling that safe() has replaced is
# a number between OPEN and CLOSE. The assistant's words are between BEGIN and END. If a text
# contains these characters itself, safe() replaces them in the same way.
OPEN, CLOSE, BEGIN, END = "\ue000", "\ue001", "\ue002", "\ue003"
NUMBER = re.compile(f"{OPEN}(\\d+){CLOSE}")


class Segment(NamedTuple):
    """A part of a rendered conversation: a special token, or text between two of them."""

    text: str
    token: int | None  # None: the segment is ordinary text
    trained: bool


class SpecialTokens:
    """The special tokens of a vocabulary, and texts that have them or spell them out."""

    def __init__(self, ids: Mapping[str, int]):
        """Prepare to split texts; `ids` is a dict from the spelling of a token to its ID."""
        self._ids = ids
        self._replaced = [*ids, OPEN, CLOSE, BEGIN, END]
        self._spelled = _any_of(self._replaced)
        self._borders = re.compile(f"({_any_of([*ids, BEGIN, END]).pattern})")

    def safe(self, text: str) -> str:
        """Return a text without special tokens and marks: a number stands for each of them."""
        return self._spelled.sub(
            lambda match: f"{OPEN}{self._replaced.index(match[0])}{CLOSE}", text
        )

    def _original(self, text: str) -> str:
        """Return the text from which safe() made `text`."""
        return NUMBER.sub(lambda match: self._replaced[int(match[1])], text)

    def segments(self, text: str, trained: bool = False) -> Iterator[Segment]:
        """Yield the segments of a rendered text: special tokens, and the texts between them.

        Segments between BEGIN and END are trained, as is a special token after END; if `trained`,
        all segments are.
        """
        after_words = False  # the words have ended, and the mark that ends the turn may follow
        for piece in self._borders.split(text):
            if piece in (BEGIN, END):
                trained = piece == BEGIN
                after_words = piece == END
            elif piece in self._ids:
                yield Segment(piece, self._ids[piece], trained or after_words)
                after_words = False
            elif piece:
                yield Segment(self._original(piece), None, trained)
                after_words = False


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """Return a pattern that matches each of the texts, the longest one that fits."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))

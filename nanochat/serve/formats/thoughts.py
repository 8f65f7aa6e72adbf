"""Separates the thought at the beginning of a reply from the answer, by the marks around it.

The template may open the thought in the prompt, so that the reply holds only the closing mark.
Marks anywhere else in a reply are text.
"""

from dataclasses import replace
from typing import NamedTuple

from nanochat.data.conversation import Message
from nanochat.serve.formats.pieces import Piece, Thought, Words, add_piece, open_beginning
from nanochat.tokenizer import Tokenizer

LONGEST_OPENING = 32  # tokens of the marks of a thought and the white space after them


class Marks(NamedTuple):
    """The marks around a thought."""

    open: str
    close: str


def thought_state(prompt: list[int], tokenizer: Tokenizer) -> tuple[Marks | None, bool, bool]:
    """Return the marks of thoughts, and whether the prompt has opened or closed the thought.

    The marks are None for a model that does not think.
    """
    if tokenizer.thought_marks is None:
        return None, False, False
    marks = Marks(*tokenizer.thought_marks)
    ending = tokenizer.decode(prompt[-LONGEST_OPENING:]).rstrip()
    return marks, ending.endswith(marks.open), ending.endswith(marks.close)


def closing(prompt: list[int], tokenizer: Tokenizer, thought: str = "") -> list[int]:
    """Return the tokens that come between a prompt and the beginning of an answer to be continued.

    They close the thought that the prompt has opened, if it has, with the words of `thought`, which
    the model thought before it began the answer. There are none after a prompt that has no thought,
    or has closed it.
    """
    marks, opened, closed = thought_state(prompt, tokenizer)
    if not marks or closed or not (opened or thought):
        return []
    opening = "" if opened else f"{marks.open}\n"
    return tokenizer.encode_after(f"{opening}{thought}\n{marks.close}\n\n", mark=False)


def without_thought(message: Message) -> Message:
    """Return a message without its thoughts."""
    fields = {key: value for key, value in message.fields.items() if key != "reasoning_content"}
    return replace(message, fields=fields)


class Thoughts:
    """Turns the text of a reply into thoughts and words; see Parser.

    White space at both ends of a thought, and before the answer after it, is left out.
    """

    def __init__(self, marks: Marks, opened: bool):
        """Begin a reply; `opened` is true if the prompt ends with the opening mark."""
        self._marks = marks
        self._rest = ""
        self._began = opened  # whether the opening mark has passed
        self.thinking = opened
        self._words = False  # whether the answer has begun, or a thought holds other than space

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """Add text, and return the pieces that it completes; `last` ends the reply."""
        self._rest += text
        pieces: list[Piece] = []
        if not self._began:
            self._begin(last)
        if self.thinking:
            self._think(pieces, last)
        if self._began and not self.thinking:
            if not self._words:
                self._rest = self._rest.lstrip()
            self._words = self._words or bool(self._rest)
            add_piece(pieces, Words(self._rest))
            self._rest = ""
        return pieces

    def _begin(self, last: bool) -> None:
        """Decide whether the reply begins with a thought, once its text tells."""
        beginning = self._rest.lstrip()
        if beginning.startswith(self._marks.open):
            self._began = self.thinking = True
            self._rest = beginning
        elif last or not self._marks.open.startswith(beginning):
            self._began = self._words = True

    def _think(self, pieces: list[Piece], last: bool) -> None:
        """Move the text of the thought to `pieces`, up to the closing mark."""
        if not self._words:
            # Some models repeat the mark that the prompt ends with.
            beginning = self._rest.lstrip()
            if not last and self._marks.open.startswith(beginning):
                return
            self._rest = beginning.removeprefix(self._marks.open).lstrip()
            if not self._rest:
                # The mark stays until words follow, so that a second one is taken for words.
                self._rest = "" if last else self._marks.open
                return
            self._words = True
        before, mark, after = self._rest.partition(self._marks.close)
        if mark:
            add_piece(pieces, Thought(before.rstrip()))
            self._rest = after
            self.thinking = self._words = False
            return
        shown = len(before)
        if not last:
            shown -= open_beginning(before, (self._marks.close,))
        shown = len(before[:shown].rstrip())
        add_piece(pieces, Thought(before[:shown]))
        self._rest = "" if last else before[shown:]

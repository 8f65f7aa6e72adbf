"""Closes the thought of a reply once it has as many tokens as it may have.

llguidance can bound the tokens of a text, but ends it then without the mark that closes the
thought, so that the answer would belong to the thought. The mark is written here, one token at a
time.
"""

import json

from nanochat.tokenizer import Tokenizer

BEGINNING = "// thought_budget "  # a comment in llguidance's dialect of Lark


def budget_line(tokens: int, opening: str, closing: str) -> str:
    """Return the last line of a grammar whose reply begins with a thought of at most `tokens`.

    The thought stands between two marks, the first of which is "" if the prompt has it.
    """
    return BEGINNING + json.dumps([tokens, opening, closing])


def budget_of(grammar: str, tokenizer: Tokenizer) -> "ThoughtBudget | None":
    """Return the budget that the last line of a grammar states, or None if it states none."""
    last_line = grammar.rpartition("\n")[2]
    if not last_line.startswith(BEGINNING):
        return None
    tokens, opening, closing = json.loads(last_line.removeprefix(BEGINNING))
    return ThoughtBudget(tokens, opening, closing, tokenizer)


class ThoughtBudget:
    """Counts the tokens of one reply's thought, and says which token must come to close it."""

    def __init__(self, tokens: int, opening: str, closing: str, tokenizer: Tokenizer):
        self._left = tokens
        self._unopened = len(opening.encode())  # bytes of the opening mark that are still to come
        self._closing = closing.encode()
        self._ending = tokenizer.encode_after(f"\n{closing}", mark=False)  # tokens to be written
        self._forced: int | None = None
        self._tail = b""  # the last bytes of the reply, as many as the closing mark has
        self._tokenizer = tokenizer

    def restricted(self, mask: bytes) -> bytes:
        """Return the mask of the tokens that may come next, given the mask without the budget.

        Within a character, the mask does not allow the beginning of the closing mark, which then
        has to wait for the next token.
        """
        self._forced = None
        if self._left > 0 or self._unopened > 0 or not self._ending:
            return mask
        place, bit = divmod(self._ending[0], 8)
        if not mask[place] >> bit & 1:
            return mask
        self._forced = self._ending[0]
        only = bytearray(len(mask))
        only[place] = 1 << bit
        return bytes(only)

    def follow(self, token: int) -> None:
        """Count a token of the reply."""
        text = self._tokenizer.decode_bytes([token])
        if self._unopened > 0:
            self._unopened -= len(text)
        else:
            self._left -= 1
        if token == self._forced:
            self._ending = self._ending[1:]
        if self._closing in self._tail + text:
            self._ending = []
        self._tail = (self._tail + text)[-len(self._closing) :]

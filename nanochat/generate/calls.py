"""Follows the calculator calls of a reply, and gives the tokens of their answers."""

from nanochat.data.calculator import calculate
from nanochat.tokenizer import Tokenizer

FAILED = "error"  # the answer to a calculator call that is not a valid calculation


def answer_marks(tokenizer: Tokenizer) -> list[int]:
    """The marks around an answer of the calculator, as far as the tokenizer has them. A model may not sample them: so
    an answer shown as the calculator's always is the calculator's."""
    marks = tokenizer.special("output_start"), tokenizer.special("output_end")
    return [mark for mark in marks if mark >= 0]


class Calls:
    """The calculator call that is open in one reply, if any."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._expression: list[int] | None = None  # tokens of the open call
        self._opens, self._closes = (
            tokenizer.special("python_start"),
            tokenizer.special("python_end"),
        )

    def copy(self) -> "Calls":
        """The same open call, for a second reply that begins like this one."""
        twin = Calls(self._tokenizer)
        twin._expression = None if self._expression is None else list(self._expression)
        return twin

    def follow(self, token: int) -> list[int]:
        """Add a sampled token; return the tokens of the answer, marks included, when a call closes, else none.

        The answer to an invalid expression is FAILED: without an answer the model would make one up.
        """
        if token == self._opens:
            self._expression = []
        elif self._expression is None:
            return []
        elif token != self._closes:
            self._expression.append(token)
        else:
            answer = calculate(self._tokenizer.decode(self._expression))
            self._expression = None
            text = self._tokenizer.encode(FAILED if answer is None else answer)
            return [
                self._tokenizer.special("output_start"),
                *text,
                self._tokenizer.special("output_end"),
            ]
        return []

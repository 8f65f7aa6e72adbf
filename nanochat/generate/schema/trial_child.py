"""Makes the automaton of a JSON schema in a child process (platforms/child.py), to see whether that
ever ends.

The vocabulary here is the 256 bytes: what takes long in an automaton depends on the schema and not
on the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import llguidance


class _Bytes:
    """A vocabulary of the 256 bytes and an end mark, as llguidance reads it."""

    def __init__(self) -> None:
        self.eos_token_id = self.bos_token_id = 256
        self.tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def begin(overrides: Any) -> Callable[[str], str]:
    """Return a function that makes the automaton of a schema and its first mask.

    `overrides` are options of llguidance's compiler of schemas.
    """
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))

    def answer(schema: str) -> str:
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        except ValueError:
            return "refused"  # the parent will find the reason
        llguidance.LLMatcher(vocabulary, grammar, log_level=0).compute_bitmask()
        return "made"

    return answer

"""Makes the automata of JSON schemas in a child process, to see whether that takes too long.

platforms/child.py starts the process. The vocabulary here is the 256 bytes, because what takes long
in an automaton depends on the schema and not on the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import llguidance


class _Bytes:
    """A vocabulary of the 256 bytes and an end mark, in the form that llguidance reads."""

    def __init__(self) -> None:
        self.eos_token_id = self.bos_token_id = 256
        self.tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def begin(overrides: Any) -> Callable[[str], str]:
    """Return a function that makes a schema's automaton and first mask, and returns "made".

    The function returns "refused" if llguidance does not accept the schema. `overrides` are options
    of llguidance's schema compiler.
    """
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))

    def answer(schema: str) -> str:
        try:
            if schema.startswith("start:"):  # see grammar.py
                grammar = llguidance.LLMatcher.grammar_from_lark(schema)
            else:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        except ValueError:
            return "refused"  # the parent will find the reason
        llguidance.LLMatcher(vocabulary, grammar, log_level=0).compute_bitmask()
        return "made"

    return answer

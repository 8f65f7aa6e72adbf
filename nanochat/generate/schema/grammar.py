"""Keeps a reply inside a JSON schema: an automaton says which tokens may come next.

The automaton is llguidance's, which is imported when the first schema arrives.
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.generate.schema.trial import Trial
from nanochat.tokenizer import ROLES, Tokenizer

# Without white space between values, which a model could otherwise write without end.
OVERRIDES: Any = {"whitespace_flexible": False}
MOST_BYTES = 32_768  # of the text of a schema
MOST_KNOWN = 64  # schemas whose automaton is kept: as many as requests with a schema may wait at the same time


class Grammar:
    """The automaton of one reply. Follow every token with accept()."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def allowed(self) -> bytes:
        """One bit for each token of the vocabulary, the lowest bit of a byte first: 1 where the token may come next."""
        return bytes(self._matcher.compute_bitmask())

    def accept(self, token: int) -> None:
        """Follow a token of the reply."""
        self._matcher.consume_token(token)

    @property
    def failed(self) -> bool:
        """Whether the automaton gave up, because the schema is too complex for its limits."""
        return bool(self._matcher.is_error())


class Schemas:
    """Makes grammars for the vocabulary of one tokenizer. Making the first one reads the whole vocabulary.

    Several threads may use it: a server checks schemas beside the thread that generates.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._trial = Trial(OVERRIDES)
        self._known: dict[str, Any] = {}  # schema -> its automaton before the first token; the latest few
        self._lock = threading.Lock()  # of the automata that are known; making one does not hold it

    def knows(self, schema: str) -> bool:
        """Whether grammar() has the automaton for a schema ready; otherwise it may take seconds to make."""
        with self._lock:
            return schema in self._known

    def grammar(self, schema: str) -> Grammar:
        """The automaton for a schema, as JSON text. UserError if the text is not a schema, if no value can meet it, or
        if the automaton takes too much time or memory."""
        with self._lock:
            if (known := self._known.pop(schema, None)) is not None:
                self._known[schema] = known  # the latest one
                return Grammar(known.deep_copy())
        made = self._compiled(schema)
        with self._lock:
            while len(self._known) >= MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[schema] = made
            return Grammar(made.deep_copy())

    def _compiled(self, schema: str) -> Any:
        text = self._checked(schema)
        import llguidance

        if self._vocabulary is None:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
            self._vocabulary = llguidance.LLTokenizer(wrapper, eos_token=sorted(self._tokenizer.stops))
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=OVERRIDES)
        except ValueError as failure:
            raise UserError(f"the JSON schema cannot be used: {_first_line(failure)}. Correct the schema") from failure
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        problem = matcher.get_error()
        if not problem and not any(matcher.compute_bitmask()):
            problem = "no text meets it"
        if problem:
            raise UserError(f"the JSON schema cannot be met: {_first_line(problem)}. Correct the schema")
        return matcher

    def _checked(self, schema: str) -> str:
        """The schema for llguidance, as JSON text."""
        if len(schema.encode(errors="replace")) > MOST_BYTES:
            raise UserError(
                f"a JSON schema has at most {MOST_BYTES:,} bytes, got {len(schema.encode(errors='replace')):,}: "
                "shorten the schema"
            )
        try:
            content = json.loads(schema)
            if not isinstance(content, dict):
                raise UserError(f"a JSON schema must be an object, got {type(content).__name__}. Correct the schema")
            # {"x-guidance": ...} would change the automaton's own settings
            content = {key: value for key, value in content.items() if key != "x-guidance"}
            text = json.dumps(content)
        except UserError:
            raise
        except (ValueError, RecursionError) as failure:
            raise UserError(f"the JSON schema is not valid JSON: {failure}. Correct the schema") from failure
        self._trial.check(content, text)
        return text


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer):
        self.eos_token_id = tokenizer.special("assistant_end")  # LLTokenizer(eos_token=...) names all ends
        self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        marks = {tokenizer.special(role) for role in ROLES} | tokenizer.stops
        self.special_token_ids = sorted(mark for mark in marks if mark >= 0)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


def allowed_rows(masks: Sequence[bytes], vocab: int, device: torch.device) -> Tensor:  # (n, V) bool
    """The bits of Grammar.allowed() of several rows, one boolean for each token."""
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(masks), -1)
    bits = packed.to(device)[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device)
    return (bits & 1).flatten(1)[:, :vocab].bool()


def _first_line(problem: object) -> str:
    """The first line of a message, without the period at its end."""
    return (str(problem).strip().splitlines() or ["unknown"])[0][:300].rstrip(". ")

"""Keeps a reply within a JSON schema: an automaton says which tokens may come next.

The automaton is llguidance's, which is imported when the first schema arrives.
"""

import hashlib
import itertools
import json
import re
import threading
import time
from typing import Any
from weakref import WeakValueDictionary

from nanochat.common import UserError, tr
from nanochat.data.library_words import in_words
from nanochat.generate.schema.thought_budget import ThoughtBudget, budget_of
from nanochat.generate.schema.trial import Trial
from nanochat.tokenizer import ROLES, Tokenizer

# Without white space between values, which a model could otherwise write without end.
OVERRIDES: Any = {"whitespace_flexible": False}
MOST_BYTES = 32_768  # the largest size of a schema's text
# An automaton grows while it computes masks, by 0.6 to 0.9 kB for each state. One mask takes a
# few milliseconds at most. The patterns and formats that we tried need a tenth of these limits, and
# maxLength: 4000 needs all states.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # the texts would hold the reply
}
# llguidance does not report how much memory an automaton takes up, so the computing time serves as
# a bound. On a slow core, automata grew by 200 MB a second at most.
BYTES_PER_SECOND = 5e8
STATES_BYTES = LIMITS["max_lexer_states"] * 1000
MOST_KNOWN = 64  # automata that are cached for later requests
KNOWN_BYTES = 64e6  # their largest total size, as estimated
# An automaton that has grown more gets no new replies: they would reach its limits by no fault of
# theirs.
WORN_BYTES = 4e6
MOST_REFUSED = 256  # refusals that are remembered
REFUSED_SECONDS = 300.0  # for how long; not forever, as a busy machine may be the reason
# The computing time that a reply may take, to which TOKEN_SECONDS are added for each token.
REPLY_SECONDS = 2.0
TOKEN_SECONDS = 0.002
COSTLY_SECONDS = 0.001  # a mask that takes more is costly


def too_complex() -> str:
    """Return the message for a reply that could not be finished because of its schema."""
    return tr(
        "the JSON schema takes too much work to follow, and its reply could not be finished. "
        "Simplify it: use fewer or shorter patterns and alternatives, and smaller numbers in "
        "minLength and maxLength"
    )


class Automaton:
    """The automaton of a schema, which all replies to the schema share.

    Copies of `matcher` share the states that any of them has computed.
    """

    def __init__(self, matcher: Any, seconds: float):
        """Wrap the automaton `matcher`, which took `seconds` to make."""
        self.matcher = matcher
        self.grown = 0.0  # seconds that replies have computed with it
        self._compile_seconds = seconds

    @property
    def size(self) -> float:
        """The estimated upper bound on the automaton's memory, in bytes."""
        states = min(self.grown * BYTES_PER_SECOND, STATES_BYTES)
        return self._compile_seconds * BYTES_PER_SECOND + states

    @property
    def worn(self) -> bool:
        """Whether the automaton has grown too much for new replies."""
        return self.grown * BYTES_PER_SECOND > WORN_BYTES


class Grammar:
    """Follows one reply; every token of the reply must be passed to accept()."""

    _numbers = itertools.count()

    def __init__(self, automaton: Automaton, budget: ThoughtBudget | None = None):
        self._automaton = automaton
        self._budget = budget
        self._matcher = automaton.matcher.deep_copy()
        self.number = next(self._numbers)  # in the order of arrival
        self.seconds = 0.0  # computing time of this reply
        self.tokens = 0
        self.waited = 0  # steps in which there was no time for the mask; MaskTurns counts them

    def allowed(self) -> bytes:
        """Return one bit for each token of the vocabulary, which is 1 if that token may come next.

        The lowest bit of a byte comes first.
        """
        start = time.thread_time()
        mask = bytes(self._matcher.compute_bitmask())
        self._spend(time.thread_time() - start)
        return mask if self._budget is None else self._budget.restricted(mask)

    def accept(self, token: int) -> None:
        """Advance the automaton by a token of the reply."""
        start = time.thread_time()
        self._matcher.consume_token(token)
        self._spend(time.thread_time() - start)
        self.tokens += 1
        if self._budget is not None:
            self._budget.follow(token)

    def _spend(self, seconds: float) -> None:
        """Count computing time for this reply and for the automaton."""
        self.seconds += seconds
        self._automaton.grown += seconds

    @property
    def costly(self) -> bool:
        """Whether this reply has taken more than 1 ms of computing time per token on average."""
        return self.seconds > COSTLY_SECONDS * max(self.tokens, 1)

    @property
    def failed(self) -> bool:
        """Whether the automaton has reached a limit, or the reply its limit of computing time.

        Once the automaton reaches a limit, allowed() permits end marks only, whether or not the
        reply is complete.
        """
        if self._matcher.is_error():
            return True
        return self.seconds > REPLY_SECONDS + TOKEN_SECONDS * self.tokens


class Schemas:
    """Makes and caches the automata of schemas for one tokenizer.

    Making the first one reads the whole vocabulary. Several threads may share this object: a server
    prepares schemas while another thread generates.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._trial = Trial(OVERRIDES)
        self._cached: dict[str, Automaton] = {}  # by schema; the one used last stands last
        # The latest automaton of each schema, as long as anyone uses it.
        self._in_use: WeakValueDictionary[str, Automaton] = WeakValueDictionary()
        # By the digest of a schema: the reason of its refusal, and when the refusal is forgotten.
        self._refused: dict[bytes, tuple[str, float]] = {}
        # Guards the dictionaries; making an automaton does not hold it.
        self._lock = threading.Lock()

    def is_ready(self, schema: str) -> bool:
        """Return whether prepare() has the automaton for a schema and need not make it."""
        with self._lock:
            automaton = self._cached.get(schema)
            return automaton is not None and not automaton.worn

    def check(self, schema: str) -> None:
        """Raise UserError with the reason if a recent refusal of the schema is remembered."""
        key = _digest(schema)
        with self._lock:
            reason, until = self._refused.get(key, ("", 0.0))
            if reason and time.monotonic() < until:
                raise UserError(reason)
            self._refused.pop(key, None)

    def give_up(self, schema: str) -> None:
        """Make check() refuse a schema for some minutes because a reply could not be finished."""
        self.refuse(schema, too_complex())

    def refuse(self, schema: str, reason: str) -> None:
        """Make check() refuse a schema with `reason` for some minutes."""
        with self._lock:
            self._cached.pop(schema, None)
            while len(self._refused) >= MOST_REFUSED:
                self._refused.pop(next(iter(self._refused)))
            self._refused[_digest(schema)] = (reason, time.monotonic() + REFUSED_SECONDS)

    def grammar(self, schema: str) -> Grammar:
        """Return a new Grammar for one reply that must match a schema, given as JSON text.

        No automaton is made as long as the caller holds what prepare() last returned for the
        schema. Raises UserError if prepare() does.
        """
        with self._lock:
            automaton = self._in_use.get(schema)
            was_cached = self._cached.pop(schema, None) is not None
            if was_cached and automaton is not None and not automaton.worn:
                self._cached[schema] = automaton
        return Grammar(automaton or self.prepare(schema), budget_of(schema, self._tokenizer))

    def prepare(self, schema: str) -> Automaton:
        """Return the automaton for a schema, making it if none is cached or the cached one is worn.

        Raises UserError if the text is not a schema, if no value can meet it, if the automaton
        takes too much time or memory, or if check() raises it.
        """
        with self._lock:
            cached = self._cached.pop(schema, None)
            if cached is not None and not cached.worn:
                self._cached[schema] = cached
                return cached
        self.check(schema)
        start = time.thread_time()
        try:
            matcher = self._compiled(schema)
        except UserError as refusal:
            self.refuse(schema, str(refusal))
            raise
        automaton = Automaton(matcher, time.thread_time() - start)
        with self._lock:
            self._cached[schema] = automaton
            self._in_use[schema] = automaton
            while self._too_large():
                self._cached.pop(next(iter(self._cached)))
        return automaton

    def _too_large(self) -> bool:
        """Return whether the cached automata are too many or take up too much memory."""
        size = sum(automaton.size for automaton in self._cached.values())
        return len(self._cached) > MOST_KNOWN or size > KNOWN_BYTES

    def _compiled(self, schema: str) -> Any:
        """Return llguidance's matcher for a schema.

        Raises UserError if the matcher cannot be made or no text meets the schema.
        """
        text = self._checked(schema)
        import llguidance

        if self._vocabulary is None:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
            ends = sorted(self._tokenizer.stops)
            self._vocabulary = llguidance.LLTokenizer(wrapper, eos_token=ends)
        try:
            if _is_lark(text):
                grammar = llguidance.LLMatcher.grammar_from_lark(text)
            else:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=OVERRIDES)
        except ValueError as failure:
            raise UserError(
                tr(
                    "the JSON schema cannot be used: {reason}. Correct the schema",
                    reason=_first_line(failure),
                )
            ) from failure
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        problem = matcher.get_error()
        if not problem and not any(matcher.compute_bitmask()):
            problem = tr("no text meets it")
        if problem:
            raise UserError(
                tr(
                    "the JSON schema cannot be met: {reason}. Correct the schema",
                    reason=_first_line(problem),
                )
            )
        return matcher

    def _checked(self, schema: str) -> str:
        """Return a schema as JSON text for llguidance.

        Raises UserError if the text is too long or is not a JSON object, or if Trial.check() does.
        """
        size = len(schema.encode(errors="replace"))
        if size > MOST_BYTES:
            raise UserError(
                tr(
                    "a JSON schema has at most {most:,} bytes, got {size:,}: shorten the schema",
                    most=MOST_BYTES,
                    size=size,
                )
            )
        if _is_lark(schema):
            schemas = [json.loads(text) for text in re.findall(r"%json (\{.*)$", schema, re.M)]
            self._trial.check({"anyOf": schemas}, schema)
            return schema
        try:
            content = json.loads(schema)
            if not isinstance(content, dict):
                raise UserError(
                    tr(
                        "a JSON schema must be an object, got {type}. Correct the schema",
                        type=type(content).__name__,
                    )
                )
            content.pop("x-guidance", None)  # it would change the automaton's own settings
            text = json.dumps(content)
        except UserError:
            raise
        except (ValueError, RecursionError) as failure:
            raise UserError(
                tr(
                    "the JSON schema is not valid JSON: {failure}. Correct the schema",
                    failure=in_words(failure),
                )
            ) from failure
        self._trial.check(content, text)
        return text


class _Vocabulary:
    """A tokenizer in the form that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer):
        # LLTokenizer(eos_token=...) names all ends.
        self.eos_token_id = tokenizer.special("assistant_end")
        self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        marks = {tokenizer.special(role) for role in ROLES} | tokenizer.stops
        self.special_token_ids = sorted(mark for mark in marks if mark >= 0)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode_after(text, mark=False)


def _is_lark(schema: str) -> bool:
    """Return whether a schema is a grammar of the server's own, in llguidance's dialect of Lark."""
    return schema.startswith("start:")


def _digest(schema: str) -> bytes:
    return hashlib.sha256(schema.encode(errors="replace")).digest()


def _first_line(problem: object) -> str:
    """Return the first line of a message, up to 300 characters, without the period at its end."""
    lines = str(problem).strip().splitlines() or ["unknown"]
    return lines[0][:300].rstrip(". ")

"""Keeps a reply inside a JSON schema: an automaton says which tokens may come next.

The automaton is llguidance's, which is imported when the first schema arrives.
"""

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.generate.schema.trial import Trial
from nanochat.tokenizer import ROLES, Tokenizer

# Without white space between values, which a model could otherwise write without end.
OVERRIDES: Any = {"whitespace_flexible": False}
MOST_BYTES = 32_768  # of the text of a schema
# An automaton grows while it computes masks: by some .6 to .9 kB for each state. One mask takes a few milliseconds at
# most. The patterns and formats that we tried need a tenth of these limits, and maxLength: 4000 needs all states.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # the texts would hold the reply
}
# llguidance does not say how much memory an automaton has. The time that it computed bounds it: 100 to 200 MB a second
# were the most on a slow core.
BYTES_PER_SECOND = 5e8
STATES_BYTES = LIMITS["max_lexer_states"] * 1000
MOST_KNOWN = 64  # automata that are kept for later requests ...
KNOWN_BYTES = 64e6  # ... and their size together, as estimated
WORN_BYTES = 4e6  # an automaton that has grown more gets no new replies: they would reach its limits by no fault of theirs
MOST_REFUSED = 256  # refusals that are remembered ...
REFUSED_SECONDS = 300.0  # ... for so long, since a busy machine may be the reason
REPLY_SECONDS = 2.0  # that the masks of a reply may take, beside ...
TOKEN_SECONDS = 0.002  # ... so much for each of its tokens
COSTLY_SECONDS = 0.001  # a mask that takes more is costly
TOO_COMPLEX = (
    "the JSON schema takes too much work to follow, and its reply could not be finished. Simplify it: use fewer or "
    "shorter patterns and alternatives, and smaller numbers in minLength and maxLength"
)


class Automaton:
    """What all replies to one schema share. Copies of `matcher` share the states that any of them has computed."""

    def __init__(self, matcher: Any, seconds: float):
        """`seconds` is how long it took to make."""
        self.matcher = matcher
        self.grown = 0.0  # seconds that replies have computed with it
        self._made = seconds

    @property
    def size(self) -> float:
        """About how many bytes it takes at most."""
        return self._made * BYTES_PER_SECOND + min(self.grown * BYTES_PER_SECOND, STATES_BYTES)

    @property
    def worn(self) -> bool:
        """Whether it has grown too much for new replies."""
        return self.grown * BYTES_PER_SECOND > WORN_BYTES


class Grammar:
    """The automaton of one reply. Follow every token with accept()."""

    _numbers = itertools.count()

    def __init__(self, automaton: Automaton):
        self._automaton = automaton
        self._matcher = automaton.matcher.deep_copy()
        self.number = next(self._numbers)  # in the order of arrival
        self.seconds = 0.0  # that this reply has computed
        self.tokens = 0
        self.waited = 0  # steps in which there was no time for the mask; MaskTurns counts them

    def allowed(self) -> bytes:
        """One bit for each token of the vocabulary, the lowest bit of a byte first: 1 where the token may come next."""
        start = time.thread_time()
        mask = bytes(self._matcher.compute_bitmask())
        self._spend(time.thread_time() - start)
        return mask

    def accept(self, token: int) -> None:
        """Follow a token of the reply."""
        start = time.thread_time()
        self._matcher.consume_token(token)
        self._spend(time.thread_time() - start)
        self.tokens += 1

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        self._automaton.grown += seconds

    @property
    def costly(self) -> bool:
        """Whether a mask of this reply takes long."""
        return self.seconds > COSTLY_SECONDS * max(self.tokens, 1)

    @property
    def failed(self) -> bool:
        """Whether the schema is too complex for the limits of automata, or for the time that a reply has. From then on
        allowed() has end marks only, whether or not the reply is complete."""
        return (
            bool(self._matcher.is_error())
            or self.seconds > REPLY_SECONDS + TOKEN_SECONDS * self.tokens
        )


class Schemas:
    """Makes grammars for the vocabulary of one tokenizer. Making the first one reads the whole vocabulary.

    Several threads may use it: a server checks schemas beside the thread that generates.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._trial = Trial(OVERRIDES)
        self._known: dict[str, Automaton] = {}  # by schema; the latest few
        self._used: WeakValueDictionary[str, Automaton] = (
            WeakValueDictionary()
        )  # the latest one of each, while in use
        self._refused: dict[
            bytes, tuple[str, float]
        ] = {}  # digest of a schema -> reason, when it is forgotten
        self._lock = threading.Lock()  # of the dictionaries; making an automaton does not hold it

    def knows(self, schema: str) -> bool:
        """Whether prepare() has the automaton for a schema ready; otherwise it may take seconds to make."""
        with self._lock:
            return (known := self._known.get(schema)) is not None and not known.worn

    def check(self, schema: str) -> None:
        """Raise the UserError with which a schema was refused a short while ago, or with which its reply failed."""
        key = _digest(schema)
        with self._lock:
            reason, until = self._refused.get(key, ("", 0.0))
            if reason and time.monotonic() < until:
                raise UserError(reason)
            self._refused.pop(key, None)

    def refuse(self, schema: str, reason: str) -> None:
        """Let check() refuse a schema for some minutes."""
        with self._lock:
            self._known.pop(schema, None)
            while len(self._refused) >= MOST_REFUSED:
                self._refused.pop(next(iter(self._refused)))
            self._refused[_digest(schema)] = reason, time.monotonic() + REFUSED_SECONDS

    def grammar(self, schema: str) -> Grammar:
        """The automaton for a schema, as JSON text, for one reply. UserError as prepare() raises it.

        This takes no time as long as the caller holds what prepare() returned for the schema.
        """
        with self._lock:
            used = self._used.get(schema)
            if self._known.pop(schema, None) is not None and used is not None and not used.worn:
                self._known[schema] = used  # the latest one
        return Grammar(used or self.prepare(schema))

    def prepare(self, schema: str) -> Automaton:
        """Make the automaton for a schema, unless it is known. UserError if the text is not a schema, if no value can
        meet it, if the automaton takes too much time or memory, or if check() remembers such a refusal."""
        with self._lock:
            known = self._known.pop(schema, None)
            if known is not None and not known.worn:
                self._known[schema] = known  # the latest one
                return known
        self.check(schema)
        start = time.thread_time()
        try:
            matcher = self._compiled(schema)
        except UserError as refusal:
            self.refuse(schema, str(refusal))
            raise
        made = Automaton(matcher, time.thread_time() - start)
        with self._lock:
            self._known[schema] = self._used[schema] = made
            while (
                len(self._known) > MOST_KNOWN
                or sum(each.size for each in self._known.values()) > KNOWN_BYTES
            ):
                self._known.pop(next(iter(self._known)))
        return made

    def _compiled(self, schema: str) -> Any:
        text = self._checked(schema)
        import llguidance

        if self._vocabulary is None:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
            self._vocabulary = llguidance.LLTokenizer(
                wrapper, eos_token=sorted(self._tokenizer.stops)
            )
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=OVERRIDES)
        except ValueError as failure:
            raise UserError(
                f"the JSON schema cannot be used: {_first_line(failure)}. Correct the schema"
            ) from failure
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        problem = matcher.get_error()
        if not problem and not any(matcher.compute_bitmask()):
            problem = "no text meets it"
        if problem:
            raise UserError(
                f"the JSON schema cannot be met: {_first_line(problem)}. Correct the schema"
            )
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
                raise UserError(
                    f"a JSON schema must be an object, got {type(content).__name__}. Correct the schema"
                )
            # {"x-guidance": ...} would change the automaton's own settings
            content = {key: value for key, value in content.items() if key != "x-guidance"}
            text = json.dumps(content)
        except UserError:
            raise
        except (ValueError, RecursionError) as failure:
            raise UserError(
                f"the JSON schema is not valid JSON: {failure}. Correct the schema"
            ) from failure
        self._trial.check(content, text)
        return text


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer):
        self.eos_token_id = tokenizer.special(
            "assistant_end"
        )  # LLTokenizer(eos_token=...) names all ends
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


def _digest(schema: str) -> bytes:
    return hashlib.sha256(schema.encode(errors="replace")).digest()


def _first_line(problem: object) -> str:
    """The first line of a message, without the period at its end."""
    return (str(problem).strip().splitlines() or ["unknown"])[0][:300].rstrip(". ")

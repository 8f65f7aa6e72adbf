"""What comes out of the engine: one event for each token of a reply, and whole replies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nanochat.data.conversation import Part

Finish = Literal["stop", "length", "error"]
# What users read where Event.broken ends a reply.
BROKEN = (
    "the model gives NaN instead of probabilities: its weights are damaged, or its numbers are too "
    "large for this format. Try --dtype float32, or name another step or model"
)
Alternatives = tuple[
    tuple[int, float], ...
]  # the likeliest tokens, each with its log-probability, likeliest first


@dataclass(frozen=True)
class Scored:
    """A token of a prompt, and the natural log of its probability after the tokens before it."""

    token: int
    logprob: float
    alternatives: Alternatives = ()


@dataclass(frozen=True)
class Event:
    """One token of a reply. A `forced` token was not sampled: the engine wrote it as part of a calculator answer."""

    request: int
    token: int
    logprob: float  # natural log of the token's probability over all tokens at temperature 1; 0 if forced
    forced: bool
    # Set on the last token only: "stop" at an end mark or a stop, "length" when no room is left, "error" when the
    # schema takes too much work or the model is `broken`: the reply is not complete.
    finish: Finish | None
    alternatives: Alternatives = ()  # as many as Sampling.logprobs asks for
    reused: int = (
        0  # on the first token: how many tokens of the prompt did not have to be read again
    )
    prompt: Sequence[
        Scored
    ] = ()  # on the first token, if asked for: every token of the prompt but the first
    # What to show, where the request has stop strings: text that may begin a stop string is held back. None: decode
    # the token.
    parts: tuple[Part, ...] | None = None
    matched: str | int | None = (
        None  # the stop string or stop token of the request that ended the reply
    )

    @property
    def broken(self) -> bool:
        """Whether the model gave NaN instead of probabilities. The token then means nothing."""
        return math.isnan(self.logprob)


@dataclass
class Completion:
    """A whole reply, end mark included: every token, whether the token was forced, and its log-probability.

    The other fields hold what the request asked for beyond that; see Event.
    """

    tokens: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    alternatives: list[Alternatives] = field(default_factory=list)
    reused: int = 0
    prompt: Sequence[Scored] = ()
    parts: list[Part] | None = None
    matched: str | int | None = None

    def add(self, event: Event) -> None:
        """Append the token of an event."""
        self.tokens.append(event.token)
        self.forced.append(event.forced)
        self.logprobs.append(event.logprob)
        self.finish = event.finish
        self.reused += event.reused
        self.prompt = event.prompt or self.prompt
        self.matched = event.matched
        if event.alternatives or self.alternatives:
            self.alternatives.append(event.alternatives)
        if event.parts is not None:
            self.parts = [*(self.parts or []), *event.parts]

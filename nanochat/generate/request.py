"""A request: its prompt and reply, its settings, and how much of both the cache holds."""

import random
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from nanochat.generate.adjust import History
from nanochat.generate.reply import Calls, Scored, StoppedReply
from nanochat.generate.sampling import Sampling


class Grammar(Protocol):
    """Follows a reply that must match a JSON schema; see generate/schema/grammar.py."""

    @property
    def failed(self) -> bool: ...

    def accept(self, token: int) -> None: ...


@dataclass(eq=False)
class Request:
    """A request that is waiting, in flight, or finished but still cached in a slot."""

    number: int
    tokens: list[int]  # the prompt, then the reply
    prompt_length: int
    sampling: Sampling
    random: random.Random
    calls: Calls
    history: History | None = None
    stops: StoppedReply | None = None
    grammar: Grammar | None = None
    cached: int = 0  # how many of the tokens are in the cache
    reused: int = 0  # how many of the cached tokens came from another request
    cached_before: int = 0  # how many of the tokens were in the cache before it was suspended
    # Scores of the prompt from its second token on, if requested.
    prompt_scores: list[Scored] = field(default_factory=list)
    # The states of the slot, by the number of tokens after which they were saved.
    saved_states: dict[int, list[Tensor]] = field(default_factory=dict)
    # How many tokens the longest common beginning with another request has, if states are saved.
    branch: int = 0
    last_used: int = 0  # when the slot was last used, for eviction
    spoiled: bool = False  # whether a pass has failed, so that the slot may hold anything
    let_pass: int = 0  # tokens of shorter prompts that were read before this one

    @property
    def prefilling(self) -> bool:
        """Whether any prompt tokens but the last are still to be read.

        The last prompt token is left to the first decoding pass.
        """
        return self.cached < self.prompt_length - 1

    @property
    def unread(self) -> int:
        """The number of prompt tokens that are still to be read, without the last one."""
        return max(self.prompt_length - 1 - self.cached, 0)

    @property
    def generated(self) -> int:
        """The number of tokens of the reply so far."""
        return len(self.tokens) - self.prompt_length

    def again(self) -> "Request":
        """Return a request that continues this reply in another slot, with nothing cached yet."""
        return replace(
            self,
            tokens=list(self.tokens),
            cached=0,
            cached_before=max(self.cached, self.cached_before),
            prompt_scores=[],
            saved_states={},
            spoiled=False,
        )

    def release(self) -> None:
        """Free what only a request in flight needs: a schema's automaton takes up to 20 MB."""
        self.grammar = None
        self.history = None
        self.stops = None

"""One request while the engine works on it, and its checks."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nanochat.common import UserError
from nanochat.generate.adjust import History
from nanochat.generate.calls import Calls
from nanochat.generate.events import Scored
from nanochat.generate.sampling import Sampling
from nanochat.generate.schema.grammar import Grammar
from nanochat.generate.stops import StoppedReply


@dataclass(eq=False)
class Request:
    """A request that waits for a slot or is in flight; after its end, what its slot still holds."""

    number: int
    tokens: list[int]  # the prompt, then the reply
    prompt: int  # how many of the tokens are the prompt
    sampling: Sampling
    random: random.Random
    calls: Calls
    history: History | None = None
    stops: StoppedReply | None = None
    grammar: Grammar | None = None
    cached: int = 0  # how many of the tokens are in the cache
    reused: int = 0  # how many of these were copied or kept from another request
    scores: list[Scored] = field(
        default_factory=list
    )  # of the prompt from its second token on, if asked for
    states: dict[int, list[Tensor]] = field(
        default_factory=dict
    )  # the slot's states after so many tokens
    used: int = 0  # when the slot was last of use, for eviction

    @property
    def prefilling(self) -> bool:
        """Whether the prompt still prefills. The last prompt token is left to the first decoding pass."""
        return self.cached < self.prompt - 1

    @property
    def generated(self) -> int:
        """How many tokens the reply has."""
        return len(self.tokens) - self.prompt


def check(prompt: Sequence[int], sampling: Sampling, length: int, vocab: int) -> None:
    """UserError if the prompt is empty or leaves no room for a reply, or if a token is not in the vocabulary."""
    if not prompt:
        raise UserError(
            "the prompt is empty: it must have at least one token. Pass a text to answer."
        )
    if len(prompt) >= length:
        raise UserError(
            f"the prompt is too long: it has {len(prompt)} tokens, the context holds {length}, and the "
            "reply needs at least one. Shorten the prompt or start a new chat."
        )
    check_tokens("the prompt", prompt, vocab)
    check_tokens("stop_tokens", sampling.stop_tokens, vocab)
    check_tokens("logit_bias", [token for token, _ in sampling.logit_bias], vocab)


def check_tokens(name: str, tokens: Collection[int], vocab: int) -> None:
    """UserError if a token is not in a vocabulary of `vocab` tokens."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab):
        return
    wrong = next(token for token in tokens if not 0 <= token < vocab)
    raise UserError(
        f"{name} holds token {wrong}, but the model's tokens go from 0 to {vocab - 1:,}: send tokens of this model"
    )

"""Chooses tokens from logits, greedily or at random; every row has its own settings and random numbers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanochat.common import UserError

UNIFORM_BITS = 23  # few enough that uniform() times a positive fp32 value always stays below that value


@dataclass(frozen=True)
class Sampling:
    """How to sample a reply. Temperature 0 takes the likeliest token; top_k None samples from all tokens."""

    temperature: float = 1.0
    top_k: int | None = 50
    max_tokens: int = 256
    seed: int = 42

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be finite and at least 0, got {self.temperature}", exit_code=2)
        if self.top_k is not None and self.top_k < 1:
            raise UserError(
                f"top_k must be at least 1, got {self.top_k}. To sample from all tokens, give None, or 0 in a command",
                exit_code=2,
            )
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {self.max_tokens}", exit_code=2)


@dataclass(frozen=True)
class Temperature:
    """A temperature, and the reason for the value in English and Chinese."""

    value: float
    reason: dict[str, str]


def chat_temperature(asked: float | Literal["auto"], corpus: str | None) -> Temperature:
    """What chats with a model of a corpus draw at: what was asked for, or, for auto, what suits the model."""
    if asked != "auto":
        return Temperature(asked, {"en": "asked for", "zh": "您指定的"})
    if corpus == "tinyworld":
        return Temperature(0.0, {"en": "a TinyWorld model knows facts by its likeliest words only",
                                 "zh": "TinyWorld 模型很小，最可能的词才可靠"})  # fmt: skip
    return Temperature(0.6, {"en": "the default", "zh": "默认值"})


def uniform(generator: random.Random) -> float:
    """A random number in [0, 1) for `choose`. The number does not depend on the device."""
    return generator.getrandbits(UNIFORM_BITS) / 2**UNIFORM_BITS


def choose(
    logits: Tensor,  # (B, V) fp32; the logits of banned tokens are overwritten
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],  # one number in [0, 1) per row; unused where the temperature is 0
    banned: Tensor,  # (n,) token ids that are never chosen
) -> tuple[list[int], list[float]]:
    """One token per row, and the natural log of its probability over all tokens at temperature 1.

    The work runs on the device of the logits, and one copy brings the result to the host. The choice of a row does
    not depend on the other rows.
    """
    logprobs, V = torch.log_softmax(logits, dim=1), logits.size(1)
    logits.index_fill_(1, banned, float("-inf"))
    tops = [min(s.top_k or V, V) if s.temperature else 0 for s in samplings]  # tokens to sample from; 0 = greedy
    rows = [(u, s.temperature or 1.0, top) for u, s, top in zip(uniforms, samplings, tops, strict=True)]
    settings = torch.tensor(rows).to(logits.device, non_blocking=True)  # (B, 3)
    choice = logits.argmax(dim=1) if 0 in tops else None
    if widest := max((top for top in tops if top < V), default=0):
        drawn = _draw_top(logits, settings, widest, alike=len(set(tops)) == 1)
        choice = drawn if choice is None else torch.where(settings[:, 2] > 0, drawn, choice)
    if V in tops:
        drawn = _draw(logits, settings)
        choice = drawn if choice is None else torch.where(settings[:, 2] == V, drawn, choice)
    assert choice is not None
    logprob = logprobs.gather(1, choice[:, None]).squeeze(1)
    both = torch.stack((choice.int(), logprob.view(torch.int32))).cpu()  # logprobs as bits, so one copy is enough
    return both[0].tolist(), both[1].view(torch.float32).tolist()


def _draw_top(
    logits: Tensor,  # (B, V)
    settings: Tensor,  # (B, 3): uniform number, temperature, top_k
    widest: int,  # the largest top_k
    alike: bool,  # whether all rows have that top_k
) -> Tensor:  # (B,) token ids
    """Sample from the top_k likeliest tokens of each row."""
    top, index = logits.topk(widest, dim=1)
    if not alike:
        beyond = torch.arange(widest, device=top.device) >= settings[:, 2:].clamp_min(1)
        top = top.masked_fill(beyond, float("-inf"))
    return index.gather(1, _draw(top, settings)[:, None]).squeeze(1)


def _draw(logits: Tensor, settings: Tensor) -> Tensor:
    """Sample from softmax(logits / temperature), (B, K) -> (B,), by inverting the cumulative distribution."""
    cumulative = torch.softmax(logits / settings[:, 1:2], dim=1).cumsum(dim=1)
    return (cumulative <= settings[:, :1] * cumulative[:, -1:]).sum(dim=1)

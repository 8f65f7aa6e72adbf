"""Chooses tokens from logits, greedily or at random; every row has its own settings and random numbers."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.data.traits import Drawing, traits
from nanochat.generate.events import Alternatives

COLDEST = 1e-5  # below this temperature, draws are greedy: fp32 holds no quotient of logits by a smaller number
UNBOUNDED = 3e38  # the largest temperature: fp32 holds no more
MOST_ALTERNATIVES = 20  # likeliest tokens that can be reported beside a token
MOST_STOPS, LONGEST_STOP = (
    16,
    256,
)  # stop strings or stop tokens of a request; characters of a stop string
MOST_BIASES, MOST_BIAS = 1024, 100.0  # tokens with a bias in a request; size of a bias
# Settings that are numbers, with the least and the largest value.
RANGES = (
    ("temperature", 0, UNBOUNDED),
    ("top_p", 1e-6, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-3, 1e3),
    ("presence_penalty", -100, 100),
    ("frequency_penalty", -100, 100),
    ("min_tokens", 0, 1 << 31),
    ("logprobs", 0, MOST_ALTERNATIVES),
)
ALL = 2.0  # a top_p that no sum of probabilities reaches, rounding included
ARGMAX_GROUP = 256  # logits whose largest is found together
UNIFORM_BITS = (
    23  # few enough that uniform() times a positive fp32 value always stays below that value
)


# The logarithm of the sum of the exponentials of each row of logits, (B, V) -> (B,); None where log_softmax costs less
LogTotals = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Sampling:
    """How to sample a reply. Temperature 0 takes the likeliest token; top_k None samples from all tokens.

    UserError for a value that no model could take; Engine.submit() checks what depends on the model.
    """

    temperature: float = 1.0
    top_k: int | None = 50
    max_tokens: int = 256
    seed: int = 42
    top_p: float = 1.0  # sample from the fewest likeliest tokens that have this probability together, after top_k
    min_p: float = (
        0.0  # leave out tokens less likely than this share of the likeliest one's probability
    )
    repetition_penalty: float = (
        1.0  # divides logits above 0, multiplies others; of tokens in prompt or reply
    )
    presence_penalty: float = 0.0  # taken from the logits of tokens in the reply
    frequency_penalty: float = (
        0.0  # taken from the logits of tokens in the reply, once for each occurrence
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, and what is added to its logit
    stop: tuple[str, ...] = ()  # strings that end the reply; the reply's text ends before them
    stop_tokens: tuple[int, ...] = ()  # tokens that end the reply, beside the model's end marks
    min_tokens: int = 0  # tokens of the reply before an end mark or a stop may end it
    ignore_eos: bool = False  # go on after the model's end marks
    logprobs: int = 0  # likeliest tokens to report beside every sampled token
    prompt_logprobs: int | None = (
        None  # report the prompt's log-probabilities, with so many likeliest tokens
    )
    schema: str | None = None  # JSON schema that the reply must meet, as JSON text
    adapter: str = ""  # name of the engine's adapter that the model has for this request; "": none

    def __post_init__(self) -> None:
        for name, low, high in RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                least = (
                    f"from {low:,g} to {high:,g}"
                    if high < UNBOUNDED
                    else f"finite and at least {low:g}"
                )
                raise UserError(f"{name} must be {least}, got {value}", exit_code=2)
        if self.top_k is not None and self.top_k < 1:
            raise UserError(
                f"top_k must be at least 1, got {self.top_k}. To sample from all tokens, give None, or 0 in a command",
                exit_code=2,
            )
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {self.max_tokens}", exit_code=2)
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MOST_ALTERNATIVES:
            raise UserError(
                f"prompt_logprobs must be from 0 to {MOST_ALTERNATIVES}, got {self.prompt_logprobs}",
                exit_code=2,
            )
        for name, most in (
            ("stop", MOST_STOPS),
            ("stop_tokens", MOST_STOPS),
            ("logit_bias", MOST_BIASES),
        ):
            if len(getattr(self, name)) > most:
                raise UserError(
                    f"{name} has at most {most} entries, got {len(getattr(self, name)):,}",
                    exit_code=2,
                )
        for stop in self.stop:
            if not 0 < len(stop) <= LONGEST_STOP:
                raise UserError(
                    f"a stop string has from 1 to {LONGEST_STOP} characters, got one of {len(stop):,}",
                    exit_code=2,
                )
        for token, bias in self.logit_bias:
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                raise UserError(
                    f"a logit_bias must be from -{MOST_BIAS:g} to {MOST_BIAS:g}, got {bias} for token {token}",
                    exit_code=2,
                )
        if self.schema is not None and (self.ignore_eos or self.min_tokens):
            raise UserError(
                "a reply with a schema ends with its value, so ignore_eos and min_tokens do not fit: leave them out",
                exit_code=2,
            )

    @property
    def adjusts(self) -> bool:
        """Whether logits must be changed before a token is chosen."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
        )


def chat_drawing(
    corpus: str | None,
    temperature: float | Literal["auto"] = "auto",
    min_p: float | Literal["auto"] = "auto",
) -> Drawing:
    """How chats with a model of a corpus draw: as asked for, and, where that is auto, as suits the model."""
    suits = traits(corpus).chats
    if temperature == "auto" and min_p == "auto":
        return suits
    return Drawing(
        suits.temperature if temperature == "auto" else temperature,
        suits.min_p if min_p == "auto" else min_p,
        {"en": "asked for", "zh": "由你指定"},
    )


def uniform(generator: random.Random) -> float:
    """A random number in [0, 1) for `choose`. The number does not depend on the device."""
    return generator.getrandbits(UNIFORM_BITS) / 2**UNIFORM_BITS


@dataclass(frozen=True)
class Choice:
    """What was chosen for the rows of a pass: tokens, their log-probabilities over all tokens at temperature 1, and
    the likeliest tokens of each row, as many as any row asked for, likeliest first."""

    tokens: list[int]
    logprobs: list[float]
    alternatives: list[Alternatives]


def choose(
    logits: Tensor,  # (B, V) fp32, overwritten where tokens are banned
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],  # one number in [0, 1) per row; unused where the temperature is 0
    banned: Tensor,  # (n,) token ids that are never chosen
    adjust: Callable[[Tensor], None]
    | None = None,  # changes logits in place before tokens are chosen
    log_totals: LogTotals | None = None,  # of the model that made the logits
) -> Choice:
    """One token per row.

    The work runs on the device of the logits, and one copy brings the result to the host. The choice of a row does
    not depend on the other rows. A setting that no row uses costs nothing.
    """
    count, V = max((s.logprobs for s in samplings), default=0), logits.size(1)
    likelihood = _Likelihood(logits, log_totals, adjust is not None or count > 0)
    if adjust is not None:
        adjust(logits)
    logits.index_fill_(1, banned, float("-inf"))
    # tokens to sample from; 0 = greedy
    tops = [min(s.top_k or V, V) if s.temperature >= COLDEST else 0 for s in samplings]
    rows = [
        (u, s.temperature if top else 1.0, top)
        for u, s, top in zip(uniforms, samplings, tops, strict=True)
    ]
    settings = torch.tensor(rows).to(logits.device, non_blocking=True)  # (B, 3)
    if any(s.min_p and top for s, top in zip(samplings, tops, strict=True)):
        _leave_out_unlikely(logits, settings, samplings)
    nuclei = [
        s.top_p if top and s.top_p < 1 else ALL for s, top in zip(samplings, tops, strict=True)
    ]
    choice = likeliest(logits) if 0 in tops else None
    if widest := max((top for top in tops if top < V), default=0):
        drawn = _draw_top(logits, settings, widest, len(set(tops)) == 1, nuclei)
        choice = drawn if choice is None else torch.where(settings[:, 2] > 0, drawn, choice)
    if V in tops:
        drawn = _draw(logits, settings[:, 1:2], settings[:, 0])
        choice = drawn if choice is None else torch.where(settings[:, 2] == V, drawn, choice)
    assert choice is not None
    sorting = [
        row
        for row, (top, nucleus) in enumerate(zip(tops, nuclei, strict=True))
        if top == V and nucleus != ALL
    ]
    if sorting:  # a nucleus of the whole vocabulary needs every token in order, so only these rows pay for it
        index = torch.tensor(sorting).to(logits.device, non_blocking=True)
        drawn = _draw_top(logits[index], settings[index], V, True, [nuclei[row] for row in sorting])
        choice = choice.index_copy(0, index, drawn)
    return _fetch(choice, likelihood, count)


def choose_among(
    logits: Tensor,  # (R, V) fp32, overwritten where tokens are banned
    rows: Sequence[int],  # the row of each reply
    sampling: Sampling,  # of all replies
    uniforms: Sequence[
        float
    ],  # one number in [0, 1) for each reply; unused where the temperature is 0
    banned: Tensor,  # (n,) token ids that are never chosen
    log_totals: LogTotals | None = None,  # of the model that made the logits
) -> tuple[list[int], list[float]]:
    """The tokens that choose() would give replies of which many share a row, and their log-probabilities.

    What depends on the row alone is computed once for each row. Only temperature and top_k are followed.
    """
    index = torch.tensor(rows).to(logits.device, non_blocking=True)
    likelihood, V = _Likelihood(logits, log_totals), logits.size(1)
    logits.index_fill_(1, banned, float("-inf"))
    if sampling.temperature < COLDEST:
        choice = likeliest(logits)[index]
    else:
        below = torch.tensor(uniforms).to(logits.device, non_blocking=True)
        top, tokens = (
            logits.topk(min(sampling.top_k or V, V), dim=1)
            if (sampling.top_k or V) < V
            else (logits, None)
        )
        place = _draw(top, sampling.temperature, below, index)
        choice = place if tokens is None else tokens[index, place]
    both = torch.stack((choice.int(), likelihood.of(choice, index).view(torch.int32))).cpu()
    return both[0].tolist(), both[1].view(torch.float32).tolist()


def likeliest(logits: Tensor) -> Tensor:  # (B, V) -> (B,)
    """The first of the largest logits of each row.

    On CPUs torch's argmax compares number by number: it takes eight times as long as the largest of each group, which
    is found with vectors, and the argmax of the groups and of one group (32 rows of 32,768: 1.4 ms against 0.2 ms).
    """
    B, V = logits.shape
    if V % ARGMAX_GROUP:
        return logits.argmax(dim=1)
    groups = logits.view(B, -1, ARGMAX_GROUP)
    group = groups.amax(dim=2).argmax(dim=1)  # (B,)
    within = (
        groups.gather(1, group[:, None, None].expand(-1, 1, ARGMAX_GROUP)).squeeze(1).argmax(dim=1)
    )
    return group * ARGMAX_GROUP + within


class _Likelihood:
    """The log-probabilities of tokens at temperature 1. Made before the logits are changed."""

    def __init__(self, logits: Tensor, log_totals: LogTotals | None, whole: bool = False):  # (R, V)
        """`whole`: all of `rows` are asked for, or logits of tokens that may be chosen will change."""
        self._totals = None if whole or log_totals is None else log_totals(logits)  # (R,)
        self.rows = torch.log_softmax(logits, dim=1) if self._totals is None else logits  # (R, V)

    def of(self, tokens: Tensor, rows: Tensor | None = None) -> Tensor:  # (B,), (B,) -> (B,)
        """The log-probability of each token in its row; None: token b is in row b."""
        values = (
            self.rows.gather(1, tokens[:, None]).squeeze(1)
            if rows is None
            else self.rows[rows, tokens]
        )
        if self._totals is None:
            return values
        return values - (self._totals if rows is None else self._totals[rows])


def _fetch(choice: Tensor, likelihood: _Likelihood, count: int) -> Choice:
    """Bring the chosen tokens, and `count` alternatives of each row, to the host in one copy."""
    tokens, values = choice[:, None], likelihood.of(choice)[:, None]
    if count:
        most = likelihood.rows.topk(min(count, likelihood.rows.size(1)), dim=1)
        tokens, values = (
            torch.cat((tokens, most.indices), dim=1),
            torch.cat((values, most.values), dim=1),
        )
    both = torch.stack(
        (tokens.int(), values.view(torch.int32))
    ).cpu()  # logprobs as bits, so one copy is enough
    ids, floats = both[0].tolist(), both[1].view(torch.float32).tolist()
    pairs = (
        [tuple(zip(of[1:], at[1:], strict=True)) for of, at in zip(ids, floats, strict=True)]
        if count
        else []
    )
    return Choice([of[0] for of in ids], [at[0] for at in floats], pairs or [()] * len(ids))


def _leave_out_unlikely(logits: Tensor, settings: Tensor, samplings: Sequence[Sampling]) -> None:
    """Apply each row's min_p: hide tokens whose probability is too small a share of the likeliest token's."""
    logs = [math.log(s.min_p) if s.min_p else float("-inf") for s in samplings]
    shares = torch.tensor(logs).to(logits.device, non_blocking=True)[:, None]  # (B, 1)
    least = logits.amax(dim=1, keepdim=True) + shares * settings[:, 1:2]
    logits.masked_fill_(logits < least, float("-inf"))


def _draw_top(
    logits: Tensor,  # (B, V)
    settings: Tensor,  # (B, 3): uniform number, temperature, top_k
    widest: int,  # the largest top_k
    alike: bool,  # whether all rows have that top_k
    nuclei: Sequence[float],  # top_p of each row, ALL where it is not used
) -> Tensor:  # (B,) token ids
    """Sample from the top_k likeliest tokens of each row, and of these from the ones within top_p."""
    top, index = logits.topk(widest, dim=1)
    if not alike:
        beyond = torch.arange(widest, device=top.device) >= settings[:, 2:].clamp_min(1)
        top = top.masked_fill(beyond, float("-inf"))
    if min(nuclei) < ALL:
        shares = torch.softmax(top / settings[:, 1:2], dim=1)
        before = shares.cumsum(dim=1) - shares  # the probability of the likelier tokens
        limits = torch.tensor(nuclei).to(top.device, non_blocking=True)[:, None]
        beyond = before >= limits
        beyond[:, 0] = False
        top = top.masked_fill(beyond, float("-inf"))
    return index.gather(1, _draw(top, settings[:, 1:2], settings[:, 0])[:, None]).squeeze(1)


def _draw(
    logits: Tensor,  # (R, K)
    temperature: Tensor | float,  # (R, 1), or one for all
    uniforms: Tensor,  # (B,) a number in [0, 1) for each draw
    rows: Tensor | None = None,  # (B,) the row of each draw; None: draw b is from row b
) -> Tensor:  # (B,) places in the rows
    """Sample from softmax(logits / temperature) by inverting the cumulative distribution."""
    cumulative = torch.softmax(logits / temperature, dim=1).cumsum(dim=1)
    cumulative = cumulative if rows is None else cumulative[rows]
    return (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(dim=1)

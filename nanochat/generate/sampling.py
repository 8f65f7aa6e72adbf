"""Chooses tokens from logits, greedily or at random, with separate settings for every row."""

import math
import random
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nanochat.common import UserError, tr
from nanochat.data.traits import Drawing, traits
from nanochat.generate.reply import Alternatives

# Below this temperature the choice is greedy, because the quotient of a logit and a smaller number
# may not fit into fp32.
COLDEST = 1e-5
UNBOUNDED = 3e38  # the largest temperature, close to the largest fp32 number
MOST_ALTERNATIVES = 20  # most likely tokens that can be reported for a position
MOST_STOPS = 64  # stop strings or stop tokens in a request
LONGEST_STOP = 256  # characters in a stop string
MOST_BIASES = 1024  # tokens with a bias in a request
MOST_BIAS = 100.0  # absolute value of a bias
# Settings that are numbers, with the smallest and the largest value.
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
# Settings that are lists, with the largest number of entries.
LONGEST_LISTS = (
    ("stop", MOST_STOPS),
    ("stop_tokens", MOST_STOPS),
    ("logit_bias", MOST_BIASES),
)
NO_NUCLEUS = 2.0  # a top_p that no sum of probabilities reaches, even with rounding errors
ARGMAX_GROUP = 256  # logits in a group whose maximum is found with vector instructions
UNIFORM_BITS = 23  # few enough that uniform() times a positive fp32 value stays below that value


# --- settings ------------------------------------------------------------------------------------


# Returns the log-sum-exp of each row of logits, (B, V) -> (B,), or None if log_softmax costs less.
LogTotals = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Sampling:
    """The settings by which a reply is sampled.

    With a `temperature` of 0, the most likely token is taken; with a `top_k` of None, any token may
    be sampled. Raises UserError (exit code 2) if no model could accept a value; Engine.submit()
    checks what depends on the model.
    """

    temperature: float = 1.0
    top_k: int | None = 50
    max_tokens: int = 256
    seed: int = 42
    # Sample from the fewest most likely tokens whose probabilities add up to this, after top_k.
    top_p: float = 1.0
    # Leave out tokens that are less likely than this share of the most likely token's probability.
    min_p: float = 0.0
    # For tokens in prompt or reply, divide logits above 0 by this, and multiply the others by it.
    repetition_penalty: float = 1.0
    # Subtract these from the logits of tokens in the reply: the first once, the second once for
    # each occurrence.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, and what is added to its logit
    stop: tuple[str, ...] = ()  # strings that end the reply; the reply's text ends before them
    stop_tokens: tuple[int, ...] = ()  # tokens that end the reply, besides the model's end marks
    min_tokens: int = 0  # least tokens in the reply before an end mark or a stop may end it
    ignore_eos: bool = False  # whether to continue after the model's end marks
    logprobs: int = 0  # most likely tokens to report with every sampled token
    # Report the prompt's log-probabilities, with this many most likely tokens at each position.
    prompt_logprobs: int | None = None
    # JSON schema that the reply must meet, as JSON text, or a Lark grammar that begins with start:
    schema: str | None = None
    adapter: str = ""  # name of the engine's adapter that answers this request; "": none

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        if self.schema is not None and (self.ignore_eos or self.min_tokens):
            raise UserError(
                tr(
                    "a reply with a schema ends with its value, so ignore_eos and "
                    "min_tokens do not fit: leave them out"
                ),
                exit_code=2,
            )

    def _check_numbers(self) -> None:
        """Raise UserError (exit code 2) if a number is out of range."""
        for name, low, high in RANGES:
            value = getattr(self, name)
            if low <= value <= high:
                continue
            values = {"name": name, "low": low, "high": high, "value": value}
            message = tr("{name} must be from {low:,g} to {high:,g}, got {value}", **values)
            if high >= UNBOUNDED:
                message = tr("{name} must be finite and at least {low:g}, got {value}", **values)
            raise UserError(message, exit_code=2)
        if self.top_k is not None and self.top_k < 1:
            raise UserError(
                tr(
                    "top_k must be at least 1, got {top_k}. To sample from all tokens, give 0 "
                    "in a command or flag, and None in Python",
                    top_k=self.top_k,
                ),
                exit_code=2,
            )
        if self.max_tokens < 1:
            raise UserError(
                tr("max_tokens must be at least 1, got {max_tokens}", max_tokens=self.max_tokens),
                exit_code=2,
            )
        count = self.prompt_logprobs
        if count is not None and not 0 <= count <= MOST_ALTERNATIVES:
            raise UserError(
                tr(
                    "prompt_logprobs must be from 0 to {most}, got {count}",
                    most=MOST_ALTERNATIVES,
                    count=count,
                ),
                exit_code=2,
            )

    def _check_lists(self) -> None:
        """Raise UserError (exit code 2) if a list, stop string or bias is outside its limits."""
        for name, limit in LONGEST_LISTS:
            entries = len(getattr(self, name))
            if entries > limit:
                raise UserError(
                    tr(
                        "{name} has at most {limit} entries, got {entries:,}",
                        name=name,
                        limit=limit,
                        entries=entries,
                    ),
                    exit_code=2,
                )
        for stop in self.stop:
            if not 0 < len(stop) <= LONGEST_STOP:
                raise UserError(
                    tr(
                        "a stop string has from 1 to {longest} characters, got one of {count:,}",
                        longest=LONGEST_STOP,
                        count=len(stop),
                    ),
                    exit_code=2,
                )
        for token, bias in self.logit_bias:
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                raise UserError(
                    tr(
                        "a logit_bias must be from -{most:g} to {most:g}, got "
                        "{bias} for token {token}",
                        most=MOST_BIAS,
                        bias=bias,
                        token=token,
                    ),
                    exit_code=2,
                )

    @property
    def adjusts(self) -> bool:
        """Whether penalties, biases or `min_tokens` change logits before a token is chosen."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
        )

    def top_k_of(self, vocabulary: int) -> int:
        """Return how many of the most likely tokens to sample from, or 0 for a greedy choice."""
        if self.temperature < COLDEST:
            return 0
        return min(self.top_k or vocabulary, vocabulary)


def check_request(
    prompt: Sequence[int],
    sampling: Sampling,
    length: int,
    vocabulary: int,
) -> None:
    """Raise UserError if the prompt is empty, leaves no room for a reply or has unknown tokens.

    `length` is the limit for prompt and reply together, in tokens. The settings must not name
    unknown tokens either.
    """
    if not prompt:
        raise UserError(
            tr("the prompt is empty: it must have at least one token. Pass a text to answer.")
        )
    if len(prompt) >= length:
        raise UserError(
            tr(
                "the prompt is too long: it has {count} tokens, the context holds "
                "{length}, and the reply needs at least one. Shorten the prompt or start a "
                "new chat.",
                count=len(prompt),
                length=length,
            )
        )
    check_tokens(tr("the prompt"), prompt, vocabulary)
    check_tokens("stop_tokens", sampling.stop_tokens, vocabulary)
    check_tokens("logit_bias", [token for token, _ in sampling.logit_bias], vocabulary)


def check_tokens(
    name: str,
    tokens: Collection[int],
    vocabulary: int,
) -> None:
    """Raise UserError if a token is not in a vocabulary of the given size."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocabulary):
        return
    wrong = next(token for token in tokens if not 0 <= token < vocabulary)
    raise UserError(
        tr(
            "{name} holds token {wrong}, but the model's tokens go from 0 to "
            "{last:,}: send tokens of this model",
            name=name,
            wrong=wrong,
            last=vocabulary - 1,
        )
    )


def chat_drawing(
    corpus: str | None,
    temperature: float | Literal["auto"] = "auto",
    min_p: float | Literal["auto"] = "auto",
    top_k: int | Literal["auto"] = "auto",
    published: Mapping[str, float] | None = None,
) -> Drawing:
    """Return the sampling settings for chats with a model trained on a corpus.

    "auto" stands for the publisher's value, which `published` holds under the names of Drawing, or
    else for the value that suits models of that corpus.
    """
    default = traits(corpus).chats
    if published:
        source = "generation_config.json"
        reason = {"en": f"the publisher's {source}", "zh": f"发布者的 {source}"}
        default = replace(default, **published, reason=reason)
    flags = {"temperature": temperature, "min_p": min_p, "top_k": top_k}
    chosen: dict[str, Any] = {name: value for name, value in flags.items() if value != "auto"}
    if not chosen:
        return default
    return replace(default, **chosen, reason={"en": "asked for", "zh": "由你指定"})


# --- choosing ------------------------------------------------------------------------------------


def sample_settings(
    sampling: Sampling,
    prompt: Sequence[int],
    number: int,
) -> Sampling:
    """Return the settings of one sample of a prompt, which differ from `sampling` only in the seed.

    The new seed depends only on the given seed, `number` (the sample's index) and the prompt.
    """
    return replace(sampling, seed=sample_seeds(sampling.seed, prompt, [number])[0])


def sample_seeds(
    seed: int,
    prompt: Sequence[int],
    numbers: Iterable[int],
) -> list[int]:
    """Return a seed for each sample index in `numbers`, from `seed`, the index and the prompt."""
    prompt_digest = zlib.crc32(array("q", prompt).tobytes())
    return [random.Random(f"{seed}/{number}/{prompt_digest}").getrandbits(63) for number in numbers]


def uniform(generator: random.Random) -> float:
    """Return a random number in [0, 1) for choose(), which does not depend on the device."""
    return generator.getrandbits(UNIFORM_BITS) / 2**UNIFORM_BITS


@dataclass(frozen=True)
class Choice:
    """The tokens chosen for the rows of a pass, with their log-probabilities and alternatives.

    Log-probabilities are over all tokens at temperature 1, before logits are adjusted. The
    alternatives of a row are its most likely tokens, most likely first, as many as the most
    demanding row asks for.
    """

    tokens: list[int]
    logprobs: list[float]
    alternatives: list[Alternatives]


def choose(
    logits: Tensor,  # (B, V) fp32, overwritten where tokens are banned
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],  # one number in [0, 1) per row; unused if the temperature is 0
    banned: Tensor,  # (n,) token ids that are never chosen
    adjust: Callable[[Tensor], None] | None = None,  # changes logits before tokens are chosen
    log_totals: LogTotals | None = None,  # that of the model that computed the logits
) -> Choice:
    """Choose one token per row, and return the tokens with log-probabilities and alternatives.

    The work runs on the device of the logits, with one copy to the host. Up to rounding, the choice
    of a row does not depend on the other rows. A setting that no row uses costs nothing.
    """
    count = max((sampling.logprobs for sampling in samplings), default=0)
    likelihood = _Likelihood(logits, log_totals, adjust is not None or count > 0)
    if adjust is not None:
        adjust(logits)
    logits.index_fill_(1, banned, float("-inf"))
    return _fetch(_chosen(logits, samplings, uniforms), likelihood, count)


def _chosen(
    logits: Tensor,  # (B, V)
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
) -> Tensor:  # (B,) token ids
    """Choose and return the token of each row.

    A row takes its likeliest token (its top_k is 0 here), or draws from its top_k tokens, from all
    tokens (its top_k is V), or from a nucleus of all tokens. Each of the first three kinds that
    occurs is computed for every row, in as few operators as possible. The last one sorts whole
    rows, so it gets only those that ask for it.
    """
    V = logits.size(1)
    top_ks = [sampling.top_k_of(V) for sampling in samplings]
    temperatures = []
    nuclei = []
    for sampling, top_k in zip(samplings, top_ks, strict=True):
        temperatures.append(sampling.temperature if top_k else 1.0)
        nuclei.append(sampling.top_p if top_k and sampling.top_p < 1 else NO_NUCLEUS)
    rows = [*zip(uniforms, temperatures, top_ks, strict=True)]
    settings = torch.tensor(rows).to(logits.device, non_blocking=True)  # (B, 3)
    if any(sampling.min_p and top_k for sampling, top_k in zip(samplings, top_ks, strict=True)):
        _leave_out_unlikely(logits, settings, samplings)

    choice = likeliest(logits) if 0 in top_ks else None
    widest = max((top_k for top_k in top_ks if top_k < V), default=0)
    if widest:
        drawn = _draw_top(logits, settings, widest, len(set(top_ks)) == 1, nuclei)
        choice = drawn if choice is None else torch.where(settings[:, 2] > 0, drawn, choice)
    if V in top_ks:
        drawn = _draw(logits, settings[:, 1:2], settings[:, 0])
        choice = drawn if choice is None else torch.where(settings[:, 2] == V, drawn, choice)
    assert choice is not None
    sorted_rows = [
        row for row, top_k in enumerate(top_ks) if top_k == V and nuclei[row] != NO_NUCLEUS
    ]
    if sorted_rows:
        index = torch.tensor(sorted_rows).to(logits.device, non_blocking=True)
        row_nuclei = [nuclei[row] for row in sorted_rows]
        drawn = _draw_top(logits[index], settings[index], V, True, row_nuclei)
        choice = choice.index_copy(0, index, drawn)
    return choice


def choose_among(
    logits: Tensor,  # (R, V) fp32, overwritten where tokens are banned
    rows: Sequence[int],  # the row of each reply
    sampling: Sampling,  # the settings of all replies
    uniforms: Sequence[float],  # one number in [0, 1) per reply; unused if the temperature is 0
    banned: Tensor,  # (n,) token ids that are never chosen
    log_totals: LogTotals | None = None,  # that of the model that computed the logits
) -> tuple[list[int], list[float]]:
    """Choose a token for each reply, and return the tokens and their log-probabilities.

    Replies may share a row of logits. The tokens are those that choose() would give, but what
    depends on the row alone is computed once per row. Of the sampling settings, only temperature
    and top_k are followed.
    """
    V = logits.size(1)
    index = torch.tensor(rows).to(logits.device, non_blocking=True)
    likelihood = _Likelihood(logits, log_totals)
    logits.index_fill_(1, banned, float("-inf"))
    top_k = sampling.top_k_of(V)
    if top_k == 0:
        choice = likeliest(logits)[index]
    else:
        uniform_numbers = torch.tensor(uniforms).to(logits.device, non_blocking=True)
        if top_k < V:
            top, tokens = logits.topk(top_k, dim=1)
            choice = tokens[index, _draw(top, sampling.temperature, uniform_numbers, index)]
        else:
            choice = _draw(logits, sampling.temperature, uniform_numbers, index)
    return _to_host(choice, likelihood.among(choice, index))


def likeliest(logits: Tensor) -> Tensor:  # (B, V) -> (B,)
    """Return the index of the first maximum in each row.

    On CPUs, torch's argmax compares one number at a time. Finding the maximum of each group with
    vector instructions, then the argmax over the groups and within one group, is about seven times
    as fast (32 rows of 32,768: 0.2 ms instead of 1.4 ms).
    """
    B, V = logits.shape
    if V % ARGMAX_GROUP:
        return logits.argmax(dim=1)
    groups = logits.view(B, -1, ARGMAX_GROUP)
    group = groups.amax(dim=2).argmax(dim=1)  # (B,)
    index = group[:, None, None].expand(-1, 1, ARGMAX_GROUP)
    within = groups.gather(1, index).squeeze(1).argmax(dim=1)
    return group * ARGMAX_GROUP + within


class _Likelihood:
    """Computes log-probabilities at temperature 1, from logits as they are at construction."""

    def __init__(
        self,
        logits: Tensor,  # (R, V)
        log_totals: LogTotals | None,
        all_tokens: bool = False,
    ):
        """Prepare to compute log-probabilities, before the logits are changed.

        `all_tokens` means that the log-probabilities of all tokens are needed, or that the logits
        of tokens that may be chosen will change.
        """
        self._totals = None if all_tokens or log_totals is None else log_totals(logits)  # (R,)
        self.rows = torch.log_softmax(logits, dim=1) if self._totals is None else logits  # (R, V)

    def of(self, tokens: Tensor) -> Tensor:  # (R,) -> (R,)
        """Return the log-probability of one token of each row."""
        values = self.rows.gather(1, tokens[:, None]).squeeze(1)
        return values if self._totals is None else values - self._totals

    def among(self, tokens: Tensor, rows: Tensor) -> Tensor:  # (B,), (B,) -> (B,)
        """Return the log-probability of each token in the given row."""
        values = self.rows[rows, tokens]
        return values if self._totals is None else values - self._totals[rows]


def _fetch(
    choice: Tensor,
    likelihood: _Likelihood,
    count: int,
) -> Choice:
    """Return the Choice of a pass, with `count` alternatives per row, from one copy to the host."""
    logprobs = likelihood.of(choice)
    if not count:
        ids, floats = _to_host(choice, logprobs)
        return Choice(ids, floats, [()] * len(ids))
    top = likelihood.rows.topk(min(count, likelihood.rows.size(1)), dim=1)
    tokens = torch.cat((choice[:, None], top.indices), dim=1)
    values = torch.cat((logprobs[:, None], top.values), dim=1)
    token_rows, value_rows = _to_host(tokens, values)
    alternatives = [
        tuple(zip(ids[1:], floats[1:], strict=True))
        for ids, floats in zip(token_rows, value_rows, strict=True)
    ]
    return Choice([ids[0] for ids in token_rows], [row[0] for row in value_rows], alternatives)


def _to_host(tokens: Tensor, logprobs: Tensor) -> tuple[list, list]:  # both of one shape
    """Copy tokens and fp32 log-probabilities to the host together, and return them as lists."""
    bits = torch.stack((tokens.int(), logprobs.view(torch.int32))).cpu()
    return bits[0].tolist(), bits[1].view(torch.float32).tolist()


def _leave_out_unlikely(
    logits: Tensor,
    settings: Tensor,
    samplings: Sequence[Sampling],
) -> None:
    """Set logits to -inf where the probability is below the row's min_p times the highest one."""
    min_ps = [sampling.min_p for sampling in samplings]
    log_shares = torch.tensor([math.log(min_p) if min_p else float("-inf") for min_p in min_ps])
    log_shares = log_shares.to(logits.device, non_blocking=True)[:, None]  # (B, 1)
    highest = logits.amax(dim=1, keepdim=True)
    threshold = highest + log_shares * settings[:, 1:2]
    logits.masked_fill_(logits < threshold, float("-inf"))


def _draw_top(
    logits: Tensor,  # (B, V)
    settings: Tensor,  # (B, 3): uniform number, temperature, top_k
    widest: int,  # the largest top_k
    same_top_k: bool,  # whether all rows have that top_k
    nuclei: Sequence[float],  # top_p of each row, or NO_NUCLEUS if it is not used
) -> Tensor:  # (B,) token ids
    """Sample a token for each row from those of its top_k most likely ones that top_p keeps."""
    top, index = logits.topk(widest, dim=1)
    if not same_top_k:
        beyond = torch.arange(widest, device=top.device) >= settings[:, 2:].clamp_min(1)
        top = top.masked_fill(beyond, float("-inf"))
    if min(nuclei) < NO_NUCLEUS:
        shares = torch.softmax(top / settings[:, 1:2], dim=1)
        before = shares.cumsum(dim=1) - shares  # the total probability of the more likely tokens
        limits = torch.tensor(nuclei).to(top.device, non_blocking=True)[:, None]
        beyond = before >= limits
        beyond[:, 0] = False
        top = top.masked_fill(beyond, float("-inf"))
    positions = _draw(top, settings[:, 1:2], settings[:, 0])
    return index.gather(1, positions[:, None]).squeeze(1)


def _draw(
    logits: Tensor,  # (R, K)
    temperature: Tensor | float,  # (R, 1), or one for all
    uniforms: Tensor,  # (B,) a number in [0, 1) for each draw
    rows: Tensor | None = None,  # (B,) the row of each draw; None: draw b uses row b
) -> Tensor:  # (B,) positions in the rows
    """Return positions sampled from softmax(logits / temperature) by inverse transform."""
    cumulative = torch.softmax(logits / temperature, dim=1).cumsum(dim=1)
    if rows is not None:
        cumulative = cumulative[rows]
    return (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(dim=1)

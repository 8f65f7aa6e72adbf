"""Chooses tokens from logits, greedily or at random, with separate settings for every row.

Shapes: B rows of a pass, V vocabulary.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.generate.reply import Alternatives
from nanochat.generate.sampling import Sampling

GREEDY = Sampling(temperature=0.0)  # whatever else is set for a row that draws nothing
NO_NUCLEUS = 2.0  # a top_p that no sum of probabilities reaches, even with rounding errors
ARGMAX_GROUP = 256  # logits in a group whose maximum is found with vector instructions
UNIFORM_BITS = 23  # few enough that uniform() times a positive fp32 value stays below that value

# Returns the log-sum-exp of each row of logits, (B, V) -> (B,), or None if log_softmax costs less.
LogTotals = Callable[[Tensor], Tensor | None]


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

    There are four kinds of rows: they take the likeliest token (their top_k is 0 here), or draw
    from their top_k tokens, from all tokens (their top_k is V) or from a nucleus of all tokens.
    Each of the first three kinds that occurs is computed for every row, in as few operators as
    possible. The last kind sorts whole rows, so it is computed only for the rows that ask for it.
    """
    V = logits.size(1)
    samplings = [sampling if sampling.top_k_of(V) else GREEDY for sampling in samplings]
    top_ks = [sampling.top_k_of(V) for sampling in samplings]
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    nuclei = [sampling.top_p if sampling.top_p < 1 else NO_NUCLEUS for sampling in samplings]
    settings = torch.tensor([[*uniforms], temperatures, top_ks])[..., None]
    quantile, temperature, top_k = settings.to(logits.device, non_blocking=True)  # (B, 1) each
    if any(sampling.min_p for sampling in samplings):
        _leave_out_unlikely(logits, temperature, samplings)

    # (top_k, choices of all rows) of each kind; the choices count for rows from that top_k on
    choices: list[tuple[int, Tensor]] = []
    if 0 in top_ks:
        choices.append((0, likeliest(logits)))
    widest = max((k for k in top_ks if k < V), default=0)
    if widest:
        limits = None if len(set(top_ks)) == 1 else top_k
        choices.append((1, _draw_top(logits, temperature, quantile, widest, nuclei, limits)))
    if V in top_ks:
        choices.append((V, _draw(logits, temperature, quantile)))
    (_, choice), *later_choices = choices
    for least_top_k, drawn in later_choices:
        choice = torch.where(top_k.squeeze(1) >= least_top_k, drawn, choice)

    nucleus_rows = [row for row, k in enumerate(top_ks) if k == V and nuclei[row] < NO_NUCLEUS]
    if nucleus_rows:
        rows = torch.tensor(nucleus_rows).to(logits.device, non_blocking=True)
        row_nuclei = [nuclei[row] for row in nucleus_rows]
        drawn = _draw_top(logits[rows], temperature[rows], quantile[rows], V, row_nuclei)
        choice = choice.index_copy(0, rows, drawn)
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
        quantile = torch.tensor(uniforms)[:, None].to(logits.device, non_blocking=True)
        if top_k < V:
            top, tokens = logits.topk(top_k, dim=1)
            choice = tokens[index, _draw(top, sampling.temperature, quantile, index)]
        else:
            choice = _draw(logits, sampling.temperature, quantile, index)
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
    logits: Tensor,  # (B, V), changed in place
    temperature: Tensor,  # (B, 1)
    samplings: Sequence[Sampling],
) -> None:
    """Set logits to -inf where the probability is below the row's min_p times the highest one.

    At temperature T, the probabilities of two logits have the ratio exp((l - highest) / T).
    """
    min_ps = [sampling.min_p for sampling in samplings]
    log_shares = torch.tensor([math.log(min_p) if min_p else float("-inf") for min_p in min_ps])
    log_shares = log_shares.to(logits.device, non_blocking=True)[:, None]  # (B, 1)
    highest = logits.amax(dim=1, keepdim=True)
    threshold = highest + log_shares * temperature
    logits.masked_fill_(logits < threshold, float("-inf"))


def _draw_top(
    logits: Tensor,  # (B, V)
    temperature: Tensor,  # (B, 1)
    quantile: Tensor,  # (B, 1) the random number in [0, 1) of each row
    widest: int,  # the largest top_k
    nuclei: Sequence[float],  # top_p of each row, or NO_NUCLEUS if it is not used
    top_k: Tensor | None = None,  # (B, 1); None: that of every row is `widest`
) -> Tensor:  # (B,) token ids
    """Sample a token for each row from those of its top_k most likely ones that top_p keeps."""
    top, tokens = logits.topk(widest, dim=1)
    if top_k is not None:
        beyond = torch.arange(widest, device=top.device) >= top_k.clamp_min(1)
        top = top.masked_fill(beyond, float("-inf"))
    if min(nuclei) < NO_NUCLEUS:
        shares = torch.softmax(top / temperature, dim=1)
        before = shares.cumsum(dim=1) - shares  # the total probability of the more likely tokens
        limits = torch.tensor(nuclei).to(top.device, non_blocking=True)[:, None]
        beyond = before >= limits
        beyond[:, 0] = False
        top = top.masked_fill(beyond, float("-inf"))
    positions = _draw(top, temperature, quantile)
    return tokens.gather(1, positions[:, None]).squeeze(1)


def _draw(
    logits: Tensor,  # (R, K)
    temperature: Tensor | float,  # (R, 1), or one for all
    quantile: Tensor,  # (B, 1) the random number in [0, 1) of each draw
    rows: Tensor | None = None,  # (B,) the row of each draw; None: draw b uses row b
) -> Tensor:  # (B,) positions in the rows
    """Return positions sampled from softmax(logits / temperature) by inverse transform."""
    cumulative = torch.softmax(logits / temperature, dim=1).cumsum(dim=1)
    if rows is not None:
        cumulative = cumulative[rows]
    return (cumulative <= quantile * cumulative[:, -1:]).sum(dim=1)

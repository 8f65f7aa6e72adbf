"""Keeps RL close to its starting model, with GRPO's KL term as a weight on every sampled token.

Optimizers that normalise the size of a step drift as far on noise as on a signal. Without this
pull, a learning rate that teaches anything within a few hundred steps also makes the model forget
whatever no reward measures.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from nanochat.device import Compute
from nanochat.model import Model
from nanochat.rl.trees import PASS_TOKENS, Sample, logprobs

GRAIN = 8  # rows and tokens of a pass are multiples of this, so that few shapes occur
# In nats: the pull on a token stops growing once the reference finds it this much more likely. The
# cap on the model's own words in fine-tuning (train/replay.py) is 1.0, since a run may read those
# words again, and knows their rare tokens by heart then. Here every step samples new tokens from the
# policy. The mean of r (see below) over them is about 1, so at most one in exp(5) = 148 reaches the
# cap. A lower cap would also weaken the pull on tokens that the policy has really come to avoid.
LARGEST = 5.0

Reply = tuple[tuple[int, ...], tuple[int, ...]]  # the tokens of a prompt and of a reply


def anchored(
    samples: Sequence[Sample],
    strength: float,
    reference: Model,
    compute: Compute,
    trees: bool = False,
) -> tuple[list[Sample], float]:
    """Return samples whose weights also pull the model towards the reference, and the divergence.

    The divergence is an estimate of the sampler's KL divergence from the reference, summed over the
    sampled tokens, in nats: r - log r - 1, with r = reference(token) / sampler(token), capped at
    exp(5) (Schulman 2020, joschu.net/blog/kl-approx.html). Below the cap, its gradient is (1 - r)
    times the gradient of the token's log-likelihood (GRPO, arXiv:2402.03300, equation 4), so
    `strength` * (1 - r) is subtracted from the token's weight. With `trees`, the reference reads
    the replies as trees.
    """
    row_logprobs = logprobs if trees else _row_logprobs
    divergence = 0.0
    pulled = []
    for sample, reference_logprobs in zip(
        samples, row_logprobs(samples, reference, compute), strict=True
    ):
        reply = sample.completion
        weights = list(sample.weights)
        columns = zip(reference_logprobs, reply.logprobs, reply.forced, strict=True)
        for i, (reference_logprob, sampler_logprob, forced) in enumerate(columns):
            if forced:
                continue
            log_ratio = min(reference_logprob - sampler_logprob, LARGEST)
            ratio = math.exp(log_ratio)
            weights[i] -= strength * (1 - ratio)
            divergence += ratio - log_ratio - 1
        pulled.append(replace(sample, weights=weights))
    return pulled, divergence


def _key(sample: Sample) -> Reply:
    return tuple(sample.prompt), tuple(sample.completion.tokens)


def _length(reply: Reply) -> int:
    prompt, tokens = reply
    return len(prompt) + len(tokens)


@torch.no_grad()
def _row_logprobs(samples: Sequence[Sample], model: Model, compute: Compute) -> list[list[float]]:
    """Return, for each sample, the model's log-probability of every token of the reply.

    Each distinct pair of prompt and reply is read only once, in its own row.
    """
    logprobs_of: dict[Reply, list[float]] = {}
    distinct = {_key(sample) for sample in samples}
    unread = sorted(distinct, key=lambda reply: (_length(reply), reply))
    while unread:
        row_tokens = -(-_length(unread[-1]) // GRAIN) * GRAIN
        rows = max(PASS_TOKENS // row_tokens // GRAIN, 1) * GRAIN
        replies = unread[-rows:]
        unread = unread[:-rows]
        logprobs_of |= zip(
            replies, _pass_logprobs(replies, row_tokens, model, compute), strict=True
        )
    return [logprobs_of[_key(sample)] for sample in samples]


def _pass_logprobs(
    replies: Sequence[Reply], row_tokens: int, model: Model, compute: Compute
) -> list[list[float]]:
    """Return the log-probabilities of each reply's tokens, reading all replies in one pass."""
    height = -(-len(replies) // GRAIN) * GRAIN
    tokens = torch.zeros((height, row_tokens + 1), dtype=torch.long)
    # The positions that predict a reply token. Only these go through the head, which is expensive.
    places: list[int] = []
    for number, (prompt, reply) in enumerate(replies):
        tokens[number, : len(prompt) + len(reply)] = torch.tensor([*prompt, *reply])
        first = number * row_tokens + len(prompt) - 1
        places += range(first, first + len(reply))
    places += [0] * (-len(places) % (GRAIN * GRAIN))
    tokens = tokens.to(compute.device)
    predicting = torch.tensor(places).to(compute.device)
    hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    losses = model.token_losses(hidden[predicting], targets[predicting]).float().cpu()
    lengths = [len(reply) for _, reply in replies]
    parts = losses[: sum(lengths)].split(lengths)
    return [(-row_losses).tolist() for row_losses in parts]

"""Holds RL near the model that it started from: GRPO's KL term, as a weight of every sampled token.

Optimizers that normalise the size of a step drift as far on noise as on a signal. Without a pull back, a rate that
teaches anything within a few hundred steps also lets the model forget what no reward speaks for.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from nanochat.device import Compute
from nanochat.model import Model
from nanochat.train.rl.trees import PASS_TOKENS, Sample, logprobs

GRAIN = 8  # rows and tokens of a pass are multiples of this, so that few shapes occur
LARGEST = 5.0  # nats: a token that the reference finds likelier by more than this is pulled as if by so much

Reply = tuple[tuple[int, ...], tuple[int, ...]]  # the tokens of a prompt and of a reply


def anchored(
    samples: Sequence[Sample],
    strength: float,
    reference: Model,
    compute: Compute,
    trees: bool = False,
) -> tuple[list[Sample], float]:
    """Samples whose weights also pull the model towards the reference, and the sum over all tokens of the estimate of
    the KL divergence between both, in nats (r - log r - 1; Schulman 2020, joschu.net/blog/kl-approx.html).

    With r = reference(token) / sampler(token), the gradient of that estimate is (1 - r) times that of the token's
    log-likelihood (GRPO, arXiv:2402.03300, equation 4), so `strength` * (1 - r) is taken from its weight. The reference
    reads the replies as `trees`, if it can.
    """
    read = logprobs if trees else _row_logprobs
    total, pulled = 0.0, []
    for sample, known in zip(samples, read(samples, reference, compute), strict=True):
        reply, weights = sample.completion, list(sample.weights)
        pairs = zip(known, reply.logprobs, reply.forced, strict=True)
        for at, (theirs, ours, forced) in enumerate(pairs):
            if not forced:
                log_ratio = min(theirs - ours, LARGEST)
                ratio = math.exp(log_ratio)
                weights[at] -= strength * (1 - ratio)
                total += ratio - log_ratio - 1
        pulled.append(replace(sample, weights=weights))
    return pulled, total


def _key(sample: Sample) -> Reply:
    return tuple(sample.prompt), tuple(sample.completion.tokens)


@torch.no_grad()
def _row_logprobs(samples: Sequence[Sample], model: Model, compute: Compute) -> list[list[float]]:
    """The model's log-probability of each token of each sample's reply; each distinct reply is read once, as a row."""
    known: dict[Reply, list[float]] = {}
    left = sorted(
        {_key(sample) for sample in samples},
        key=lambda reply: (len(reply[0]) + len(reply[1]), reply),
    )
    while left:
        longest = sum(map(len, left[-1]))
        T = -(-longest // GRAIN) * GRAIN
        rows = max(PASS_TOKENS // T // GRAIN, 1) * GRAIN
        part, left = left[-rows:], left[:-rows]
        height = -(-len(part) // GRAIN) * GRAIN
        tokens = torch.zeros((height, T + 1), dtype=torch.long)
        for row, (prompt, reply) in zip(tokens, part, strict=False):
            row[: len(prompt) + len(reply)] = torch.tensor([*prompt, *reply])
        lengths = [len(reply) for _, reply in part]
        # The positions that predict a token of a reply; only there are losses wanted, and a head costs much.
        places = [
            row * T + len(prompt) - 1 + i
            for row, (prompt, reply) in enumerate(part)
            for i in range(len(reply))
        ]
        places += [0] * (-len(places) % (GRAIN * GRAIN))
        tokens, at = tokens.to(compute.device), torch.tensor(places).to(compute.device)
        hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
        losses = model.token_losses(hidden[at], tokens[:, 1:].flatten()[at]).float().cpu()
        known |= dict(
            zip(
                part,
                ((-of_reply).tolist() for of_reply in losses[: sum(lengths)].split(lengths)),
                strict=True,
            )
        )
    return [known[_key(sample)] for sample in samples]

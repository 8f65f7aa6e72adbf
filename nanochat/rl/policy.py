"""What RL learns from rewards: advantages, the weight of every token, and the loss of a policy.

The flags below spell the published methods:

    Dr. GRPO (arXiv:2503.20783)  --loss=ppo --average=limit --clip_high=0.2
    GRPO (arXiv:2402.03300)      --loss=ppo --average=reply --clip_high=0.2 --advantage=normalized --kl=0.04
    DAPO (arXiv:2503.14476)      --loss=ppo --advantage=normalized --oversample=2 --overlong_tokens=64
    CISPO (arXiv:2506.13585)     --loss=cispo --advantage=normalized
    GSPO (arXiv:2507.18071)      --loss=gspo --average=reply --advantage=normalized
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.common import Rare, UserError
from nanochat.context import TREE, model_arguments

Average = Literal["token", "reply", "limit"]

LARGEST_LOG_RATIO = 20.0  # keeps the exponential of a ratio finite


@dataclass(frozen=True)
class PolicyFlags:
    """How RL turns rewards into updates."""

    loss: Literal["reinforce", "ppo", "cispo", "gspo"] = "reinforce"
    """reinforce: log-likelihood times advantage, for one update per rollout; ppo: clipped ratio of each token.
    cispo: log-likelihood times a clipped ratio; gspo: clipped ratio of the whole reply"""
    updates_per_rollout: int = 1
    """optimizer updates on the replies of a step, all of them each time; more than 1 needs a loss with ratios"""
    clip_low: Rare[float | None] = None
    """a token or reply that became less likely than 1 minus this ratio is not pushed further down; default: 0.2.
    With gspo 0.0003. Not used by cispo"""
    clip_high: Rare[float | None] = None
    """a token or reply that became likelier than 1 plus this ratio is not pushed further up; default: 0.28.
    With gspo 0.0004"""
    advantage: Literal["mean", "normalized"] = "mean"
    """mean: the reward minus the mean of the problem's replies; normalized: divided by their deviation too"""
    kl: float = 0.0
    """how strongly tokens are pulled back to the model that RL starts from (GRPO's KL term); 0: not at all.
    A copy of that model is kept"""
    average: Average = "token"
    """how the losses of tokens are averaged; token: over all tokens of the step; reply: within each reply first.
    limit: their sum is divided by the number of replies times max_new_tokens"""
    oversample: int = 1
    """sample so many times examples_per_step problems; train on the first ones whose replies differ in reward"""
    overlong_tokens: int = 0
    """replies that reach into the last so many tokens of max_new_tokens lose up to 1 of their reward.
    0: replies that were cut off are not trained on"""

    @property
    def clip(self) -> tuple[float, float]:
        """How far a ratio may fall below 1 and rise above 1 before its gradient ends."""
        low, high = (3e-4, 4e-4) if self.loss == "gspo" else (0.2, 0.28)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def check(self, max_new_tokens: int) -> None:
        """Raise UserError (code 2) if the flags do not go together."""
        (low, high), updates = self.clip, self.updates_per_rollout
        rules = (
            (updates >= 1, f"--updates_per_rollout must be at least 1, got {updates}"),
            (
                updates == 1 or self.loss != "reinforce",
                "--updates_per_rollout above 1 needs a loss "
                f"with ratios, since the replies come from the model before the first update, got --loss={self.loss}: "
                "take --loss=ppo",
            ),
            (0 < low <= 1, f"--clip_low must be above 0 and at most 1, got {low:g}"),
            (high > 0, f"--clip_high must be above 0, got {high:g}"),
            (0 <= self.kl < math.inf, f"--kl must be at least 0, got {self.kl:g}"),
            (self.oversample >= 1, f"--oversample must be at least 1, got {self.oversample}"),
            (
                0 <= self.overlong_tokens < max_new_tokens,
                "--overlong_tokens must be from 0 to less than "
                f"--max_new_tokens={max_new_tokens}, got {self.overlong_tokens}",
            ),
        )
        for holds, rule in rules:
            if not holds:
                raise UserError(rule, exit_code=2)

    @property
    def ratio_loss(self) -> "PolicyLoss | None":
        """The loss of --loss; None for reinforce, whose losses the model weighs and sums."""
        return None if self.loss == "reinforce" else PolicyLoss(self.loss, *self.clip)


# --- rewards -------------------------------------------------------------------------------------


def shaped(reward: float, length: int, limit: int, overlong: int) -> float:
    """The reward of a reply of `length` tokens, minus what it loses in the last `overlong` tokens below the limit: a
    share that grows from 0 to 1 (DAPO's soft punishment)."""
    return reward - max(length - (limit - overlong), 0) / overlong if overlong else reward


def shuffled(rewards: Sequence[float], seed: str) -> list[float]:
    """The same rewards in random order: a control from which nothing can be learned."""
    dealt = list(rewards)
    random.Random(seed).shuffle(dealt)
    return dealt


def advantages(
    rewards: Sequence[float], kind: Literal["mean", "normalized"] = "mean"
) -> tuple[float, ...]:
    """Return the advantage of every reply to one problem.

    All are 0 where all rewards are equal: nothing can be learned from them.
    """
    if max(rewards) == min(rewards):  # exactly, since a rounded mean would leave tiny advantages
        return (0.0,) * len(rewards)
    mean = fmean(rewards)
    unit = pstdev(rewards, mean) if kind == "normalized" else 1.0
    return tuple((reward - mean) / unit for reward in rewards)


def token_weights(
    advantage: float, forced: Sequence[bool], skipped: bool
) -> list[float]:  # one for each token of the reply
    """The weight of each token's loss: the advantage of its reply.

    Tokens that the model did not choose weigh 0. So do all tokens of a reply that is `skipped`,
    such as one that was cut off: its reward says nothing about its beginning.
    """
    return [0.0 if chosen_for_it or skipped else advantage for chosen_for_it in forced]


def averaged(
    weights: Sequence[float], average: Average, tokens: float, replies: float, limit: int
) -> list[float]:
    """The weights of one reply for an update that divides the sum of all losses by `tokens`.

    `tokens` and `replies` are those that the whole step trains, `limit` the most tokens of a reply.
    """
    own_targets = sum(weight != 0 for weight in weights)
    if average == "token" or not own_targets:
        return list(weights)
    return [
        weight * tokens / (replies * (own_targets if average == "reply" else limit))
        for weight in weights
    ]


# --- loss ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLoss:
    """Losses of the ratio between the model's probability of a sampled token and the probability it was sampled with.

    The figures are the share of tokens whose gradient the clipping ended, and how far the policy has moved from the
    sampler: an estimate of their KL divergence in nats a token, which is never negative.
    """

    kind: Literal["ppo", "cispo", "gspo"]
    low: float
    high: float
    figures: tuple[str, ...] = ("clipped", "policy_shift")

    def __call__(
        self,
        model: nn.Module,
        inputs: Tensor,  # (B, T), one reply a row, or trees of replies
        targets: Tensor,  # (B, T), or (N,) of trees; -1 = not trained
        **extras: Tensor,  # weights, and sampled, the sampler's log-probability of each target, shaped like targets;
        # copies, for how many replies each target is trained, by default for one;
        # gspo over trees: replies, the number of each target's reply, below N; and the tensors of a Tree
    ) -> tuple[Tensor, Tensor]:  # (), (2,)
        """Return the sum of the loss over all targets, and the sums of both figures over all of
        their copies."""
        weights, sampled, copies = extras["weights"], extras["sampled"], extras.get("copies", 1.0)
        tree = model_arguments({name: extras[name] for name in TREE if name in extras})
        trained = targets >= 0
        logprobs = -model(inputs, targets, reduction="none", **tree)
        moved = torch.where(trained, logprobs - sampled, 0.0).clamp(
            -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO
        )
        shift = moved.exp() - 1 - moved
        if self.kind == "gspo":
            # The ratio of a reply is the geometric mean of its tokens' ratios. The gradient goes to each token by its
            # own weight (the paper's GSPO-token), since --kl pulls the tokens of a reply differently.
            mean = _mean_of_reply(moved, trained, extras.get("replies")).detach()
            moved = mean + (moved - moved.detach())
        ratio = moved.exp()
        if self.kind == "cispo":
            gains = ratio.detach().clamp_max(1 + self.high) * weights * logprobs
            clipped = ratio > 1 + self.high
        else:
            bounded = ratio.clamp(1 - self.low, 1 + self.high)
            gains = torch.minimum(ratio * weights, bounded * weights)
            clipped = bounded * weights < ratio * weights
        loss = -torch.where(trained, gains, 0.0).sum()
        clipped_sum = ((clipped & trained) * copies).sum()
        shift_sum = (torch.where(trained, shift, 0.0) * copies).sum()
        return loss, torch.stack((clipped_sum, shift_sum))


def _mean_of_reply(values: Tensor, trained: Tensor, replies: Tensor | None) -> Tensor:
    """Return for each target the mean over the trained targets of its reply.

    Replies are rows, or their numbers tell them apart.
    """
    if replies is None:
        return (
            values.sum(dim=1, keepdim=True) / trained.sum(dim=1, keepdim=True).clamp_min(1)
        ).expand_as(values)
    sums = torch.zeros_like(values).index_add(0, replies, values)
    counts = torch.zeros_like(values).index_add(0, replies, trained.to(values.dtype))
    return (sums / counts.clamp_min(1))[replies]

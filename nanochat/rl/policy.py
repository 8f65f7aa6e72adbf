"""Turns rewards into advantages, token weights and a policy loss.

These flags select the published methods:

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

from nanochat.common import UserError, tr
from nanochat.data.command_line import Rare
from nanochat.rl.trees import TREE, model_arguments

Average = Literal["token", "reply", "limit"]

LARGEST_LOG_RATIO = 20.0  # keeps the exponential of a ratio finite


@dataclass(frozen=True)
class PolicyFlags:
    """The flags that decide how RL turns rewards into updates."""

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
    A copy of that model is kept, unless an adapter is trained"""
    average: Rare[Average] = "token"
    """how the losses of tokens are averaged; token: over all tokens of the step; reply: within each reply first.
    limit: their sum is divided by the number of replies times max_new_tokens"""
    oversample: Rare[int] = 1
    """sample so many times examples_per_step problems; train on the first ones whose replies differ in reward"""
    overlong_tokens: Rare[int] = 0
    """replies that reach into the last so many tokens of max_new_tokens, or of the context, lose up to 1 of their reward.
    0: replies that were cut off are not trained on"""

    @property
    def clip(self) -> tuple[float, float]:
        """The distances below and above 1 at which ratios are clipped (cispo: only above)."""
        low, high = (3e-4, 4e-4) if self.loss == "gspo" else (0.2, 0.28)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def check(self, max_new_tokens: int) -> None:
        """Raise UserError (exit code 2) if a flag is out of range or flags conflict."""
        low, high = self.clip
        updates = self.updates_per_rollout
        rules = (
            (
                updates >= 1,
                tr("--updates_per_rollout must be at least 1, got {updates}", updates=updates),
            ),
            (
                updates == 1 or self.loss != "reinforce",
                tr(
                    "--updates_per_rollout above 1 needs a loss with ratios, since the replies "
                    "come from the model before the first update, got --loss={loss}: "
                    "take --loss=ppo",
                    loss=self.loss,
                ),
            ),
            (0 < low <= 1, tr("--clip_low must be above 0 and at most 1, got {low:g}", low=low)),
            (high > 0, tr("--clip_high must be above 0, got {high:g}", high=high)),
            (0 <= self.kl < math.inf, tr("--kl must be at least 0, got {kl:g}", kl=self.kl)),
            (
                self.oversample >= 1,
                tr("--oversample must be at least 1, got {oversample}", oversample=self.oversample),
            ),
            (
                0 <= self.overlong_tokens < max_new_tokens,
                tr(
                    "--overlong_tokens must be from 0 to less than "
                    "--max_new_tokens={max_new_tokens}, got {overlong_tokens}",
                    max_new_tokens=max_new_tokens,
                    overlong_tokens=self.overlong_tokens,
                ),
            ),
        )
        for holds, rule in rules:
            if not holds:
                raise UserError(rule, exit_code=2)

    @property
    def ratio_loss(self) -> "PolicyLoss | None":
        """The loss that --loss names, or None for reinforce, whose losses the model sums itself."""
        return None if self.loss == "reinforce" else PolicyLoss(self.loss, *self.clip)


# --- rewards -------------------------------------------------------------------------------------


def shaped(reward: float, length: int, limit: int, overlong: int) -> float:
    """Return the reward of a reply, less a penalty if the reply comes close to the token limit.

    The penalty grows from 0 to 1 over the last `overlong` tokens below `limit` (DAPO's soft
    punishment); if `overlong` is 0, there is none. `length` is the number of tokens of the reply.

    If `limit` is less than `overlong`, the penalty does not begin at 0. What all replies to a problem
    lose alike then has no effect on their advantages.
    """
    return reward - max(length - (limit - overlong), 0) / overlong if overlong else reward


def shuffled(rewards: Sequence[float], seed: str) -> list[float]:
    """Return the rewards in random order, as a control from which nothing can be learned."""
    reordered = list(rewards)
    random.Random(seed).shuffle(reordered)
    return reordered


def advantages(
    rewards: Sequence[float], kind: Literal["mean", "normalized"] = "mean"
) -> tuple[float, ...]:
    """Return the advantages of all replies to one problem: their rewards minus the mean reward.

    If `kind` is "normalized", they are divided by the standard deviation. If all rewards are equal
    up to rounding, as 0.1 + 0.2 and 0.3 are, all advantages are 0.
    """
    if math.isclose(max(rewards), min(rewards), abs_tol=1e-9):
        return (0.0,) * len(rewards)
    mean = fmean(rewards)
    unit = pstdev(rewards, mean) if kind == "normalized" else 1.0
    return tuple((reward - mean) / unit for reward in rewards)


def token_weights(
    advantage: float, forced: Sequence[bool], skipped: bool
) -> list[float]:  # one for each token of the reply
    """Return the weight of each token's loss, which is the advantage of its reply.

    Tokens that the model did not choose weigh 0. So do all tokens of a `skipped` reply, such as one
    that was cut off, because its reward says nothing about its beginning.
    """
    return [0.0 if is_forced or skipped else advantage for is_forced in forced]


def averaged(
    weights: Sequence[float], average: Average, tokens: float, replies: float, limit: int
) -> list[float]:
    """Return the weights of one reply, rescaled so that the step averages losses as `average` says.

    The update divides the sum of all losses by `tokens`. `tokens` and `replies` are the numbers of
    tokens and replies that the whole step trains on, and `limit` is the maximum number of tokens of
    a reply.
    """
    targets = sum(weight != 0 for weight in weights)
    if average == "token" or not targets:
        return list(weights)
    divisor = replies * (targets if average == "reply" else limit)
    return [weight * tokens / divisor for weight in weights]


# --- loss ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLoss:
    """A loss on the clipped ratio of a token's probability now to its probability when sampled.

    With gspo, the ratio is the geometric mean over the trained tokens of a reply. `figures` names
    two statistics: the share of tokens whose ratio was clipped, and an estimate of the KL
    divergence between policy and sampler in nats per token, which is never negative.
    """

    kind: Literal["ppo", "cispo", "gspo"]
    low: float
    high: float
    figures: tuple[str, ...] = ("clipped", "policy_shift")

    def __call__(
        self,
        model: nn.Module,
        inputs: Tensor,  # (B, T), one reply per row, or trees of replies
        targets: Tensor,  # (B, T), or (N,) of trees; -1 = not trained
        # `weights`, and the sampler's log-probabilities `sampled`, both shaped like targets.
        # `copies`: the number of replies for which each target is trained, by default 1.
        # `replies`, for gspo over trees: the index of each target's reply, below N.
        # For trees, also the tensors of a Tree.
        **extras: Tensor,
    ) -> tuple[Tensor, Tensor]:  # (), (2,)
        """Return the loss summed over all targets, and both `figures` summed over all copies."""
        weights = extras["weights"]
        copies = extras.get("copies", 1.0)
        tree = model_arguments({name: extras[name] for name in TREE if name in extras})
        trained = targets >= 0
        logprobs = -model(inputs, targets, reduction="none", **tree)
        log_ratios = torch.where(trained, logprobs - extras["sampled"], 0.0)
        log_ratios = log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        shift = log_ratios.exp() - 1 - log_ratios
        if self.kind == "gspo":
            # The ratio of a reply is the geometric mean of its tokens' ratios. Each token's
            # gradient has its own weight (GSPO-token), since --kl pulls tokens differently.
            mean = _mean_of_reply(log_ratios, trained, extras.get("replies")).detach()
            log_ratios = mean + (log_ratios - log_ratios.detach())
        ratio = log_ratios.exp()
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
    """Return, for each target, the mean of `values` over the trained targets of its reply.

    `values` must be 0 for other targets. `replies` gives the index of each target's reply; if it is
    None, every row is a reply.
    """
    if replies is None:
        counts = trained.sum(dim=1, keepdim=True).clamp_min(1)
        means = values.sum(dim=1, keepdim=True) / counts
        return means.expand_as(values)
    sums = torch.zeros_like(values).index_add(0, replies, values)
    counts = torch.zeros_like(values).index_add(0, replies, trained.to(values.dtype))
    return (sums / counts.clamp_min(1))[replies]

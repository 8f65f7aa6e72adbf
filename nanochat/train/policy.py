"""The arithmetic of reinforcement learning: from rewards to the weight of each token. No torch, no model."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Group:
    """The samples of one prompt: their rewards, and each reward less the group's mean."""

    rewards: tuple[float, ...]
    advantages: tuple[float, ...]

    @property
    def flat(self) -> bool:
        """Whether all samples did equally well, so that nothing can be learned from them."""
        return not any(self.advantages)


def group(rewards: Sequence[float]) -> Group:
    """Reward minus the mean of its group, not divided by the deviation (Dr. GRPO, arXiv 2503.20783)."""
    mean = fmean(rewards)
    equal = max(rewards) == min(rewards)  # exactly, since a rounded mean would leave tiny advantages
    return Group(tuple(rewards), tuple(0.0 if equal else reward - mean for reward in rewards))


def shuffled(rewards: Sequence[float], seed: str) -> list[float]:
    """The same rewards dealt at random: a control from which nothing can be learned."""
    dealt = list(rewards)
    random.Random(seed).shuffle(dealt)
    return dealt


def token_weights(
    advantage: float, forced: Sequence[bool], truncated: bool
) -> list[float]:  # one for each token of the sample
    """The weight of each token's loss: its sample's advantage; 0 for tokens that the model did not choose, and for
    samples that were cut off, whose reward says nothing about their beginning."""
    return [0.0 if chosen_for_it or truncated else advantage for chosen_for_it in forced]

"""The arithmetic of reinforcement learning against tables by hand, and its losses against plain ones."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from nanochat.common import UserError
from nanochat.rl.policy import (
    Average,
    PolicyFlags,
    PolicyLoss,
    advantages,
    averaged,
    shaped,
    shuffled,
    token_weights,
)
from nanochat.train.flags import StageFlags
from scripts import chat_rl
from tests.support.tiny_model import on_cpu, tiny_checkpoint


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], (0.75, -0.25, -0.25, -0.25)),
        ([1.0, 1.0, 0.0, 0.0], (0.5, 0.5, -0.5, -0.5)),
        ([0.0, 0.5, 1.0], (-0.5, 0.0, 0.5)),
    ],
)
def test_an_advantage_is_the_reward_less_the_mean_and_on_demand_divided_by_the_deviation(rewards, expected):
    assert advantages(rewards) == pytest.approx(expected)
    found = torch.tensor(advantages(rewards, "normalized"))
    assert found.mean().item() == pytest.approx(0, abs=1e-6)
    assert found.std(correction=0).item() == pytest.approx(1)
    assert found.argmax() == torch.tensor(rewards).argmax()


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_give_no_advantage_whatever_the_mean_rounds_to(reward):
    assert advantages([reward] * 3) == advantages([reward] * 3, "normalized") == (0.0, 0.0, 0.0)
    assert advantages([reward]) == (0.0,)
    assert advantages([reward + 0.3, reward + 0.1 + 0.2], "normalized") == (0.0, 0.0)


def test_only_chosen_tokens_of_replies_that_count_are_weighted():
    forced = [False, True, True, False]
    assert token_weights(0.5, forced, skipped=False) == [0.5, 0.0, 0.0, 0.5]
    assert token_weights(-0.25, forced, skipped=False) == [-0.25, 0.0, 0.0, -0.25]
    assert token_weights(0.5, forced, skipped=True) == [0.0] * 4
    assert token_weights(0.5, [], skipped=False) == []


@pytest.mark.parametrize(("length", "lost"), [(10, 0.0), (12, 0.0), (13, 0.25), (14, 0.5), (16, 1.0)])
def test_a_reply_near_the_limit_loses_a_growing_share(length, lost):
    assert shaped(1.0, length, limit=16, overlong=4) == 1 - lost
    assert shaped(1.0, length, limit=16, overlong=0) == 1.0


def test_averages_by_hand():
    """Two replies of 1 and 3 trained tokens, of at most 8; the update divides the sum of all losses by 4 tokens."""
    short, long = [2.0], [1.0, 0.0, 1.0, 1.0]

    def summed(average: Average) -> tuple[float, float]:
        return sum(averaged(short, average, 4, 2, 8)) / 4, sum(averaged(long, average, 4, 2, 8)) / 4

    assert summed("token") == (2 / 4, 3 / 4)
    assert summed("reply") == (2 / 2, 1 / 2)  # the mean of each reply, over two replies
    assert summed("limit") == (2 / 16, 3 / 16)
    assert averaged(short, "token", 4, 2, 8) == short  # the same bits
    assert averaged([0.0, 0.0], "reply", 4, 2, 8) == [0.0, 0.0]


class Table(nn.Module):
    """A policy whose log-probabilities are its parameters."""

    def __init__(self, logprobs: Tensor):
        super().__init__()
        self.logprobs = nn.Parameter(logprobs)

    def forward(self, inputs: Tensor, targets: Tensor, reduction: str, **extras: Any) -> Tensor:
        assert reduction == "none" and not extras
        return torch.where(targets >= 0, -self.logprobs, 0.0)


def losses_by_hand(kind: str, now: Tensor, then: Tensor, weight: Tensor, low: float, high: float) -> list[Tensor]:
    """The loss of each token of one reply, as the papers write it."""
    ratios = (now - then).exp()
    if kind == "gspo":
        ratios = (now - then).mean().exp().repeat(len(now))
    found = []
    for ratio, logprob, advantage in zip(ratios, now, weight, strict=True):
        if kind == "cispo":
            found.append(-min(ratio.item(), 1 + high) * advantage * logprob)
        elif (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
            found.append(-(1 + high if advantage > 0 else 1 - low) * advantage + 0 * logprob)  # a constant
        else:
            found.append(-ratio * advantage)
    return found


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
def test_losses_and_gradients_are_those_of_the_papers(kind):
    draw = torch.Generator().manual_seed(1)
    then = -2 * torch.rand(4, 6, generator=draw)
    now = then + 0.5 * torch.randn(4, 6, generator=draw)
    weights = torch.randn(4, 1, generator=draw).expand(4, 6).clone()
    targets = torch.randint(0, 9, (4, 6), generator=draw)
    targets[0, 3:] = targets[2, :2] = targets[3] = -1  # a short reply, a prompt, and a row of padding
    policy = Table(now)
    loss, (clipped, shift) = PolicyLoss(kind, 0.2, 0.28)(policy, targets, targets, weights=weights, sampled=then)
    loss.backward()
    found = policy.logprobs.grad
    assert found is not None

    other = now.clone().requires_grad_()
    rows = [targets[row] >= 0 for row in range(3)]
    expected = sum(
        sum(losses_by_hand(kind, other[row][trained], then[row][trained], weights[row][trained], 0.2, 0.28))
        for row, trained in enumerate(rows)
    )
    expected.backward()  # type: ignore[union-attr]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)  # type: ignore[union-attr]
    torch.testing.assert_close(found, other.grad)
    moved = (now - then)[targets >= 0]
    if kind == "cispo":
        assert clipped.item() == int((moved.exp() > 1.28).sum()) > 0
    else:  # what is clipped has no gradient, and everything else has one
        assert clipped.item() == sum(int((found[row][trained] == 0).sum()) for row, trained in enumerate(rows)) > 0
    assert shift.item() == pytest.approx((moved.exp() - 1 - moved).sum().item(), rel=1e-5)


def test_a_probability_that_exploded_gives_no_infinite_loss():
    policy = Table(torch.tensor([[0.0, -300.0]]))
    targets = torch.tensor([[1, 1]])
    loss, figures = PolicyLoss("ppo", 0.2, 0.28)(
        policy, targets, targets, weights=torch.tensor([[-1.0, -1.0]]), sampled=torch.tensor([[-300.0, 0.0]])
    )
    assert bool(loss.isfinite()) and bool(figures.isfinite().all())


def test_gspo_clips_much_closer_unless_told():
    assert PolicyFlags(loss="ppo").clip == (0.2, 0.28) and PolicyFlags(loss="gspo").clip == (3e-4, 4e-4)
    assert PolicyFlags(loss="gspo", clip_low=0.1, clip_high=0.2).clip == (0.1, 0.2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"updates_per_rollout": 0}, "--updates_per_rollout must be at least 1, got 0"),
        ({"updates_per_rollout": 2}, "got --loss=reinforce: take --loss=ppo"),
        ({"loss": "ppo", "clip_low": 1.5}, "--clip_low must be above 0 and at most 1, got 1.5"),
        ({"loss": "ppo", "clip_high": 0.0}, "--clip_high must be above 0, got 0"),
        ({"kl": -0.1}, "--kl must be at least 0, got -0.1"),
        ({"oversample": 0}, "--oversample must be at least 1, got 0"),
        ({"overlong_tokens": 16}, "less than --max_new_tokens=16, got 16"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, words):
    with pytest.raises(UserError, match=words) as refused:
        PolicyFlags(**flags).check(max_new_tokens=16)
    assert refused.value.exit_code == 2


def test_shuffled_rewards_are_the_same_ones_in_an_order_of_the_seed():
    rewards = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.25, 1.0]
    dealt = [shuffled(rewards, str(seed)) for seed in range(20)]
    assert all(sorted(one) == sorted(rewards) for one in dealt)
    assert shuffled(rewards, "3") == dealt[3]
    assert len({tuple(one) for one in dealt}) > 10
    assert rewards == [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.25, 1.0]  # the list that was given stays as it was


def test_the_stage_of_a_fine_tuned_model_is_named() -> None:
    tiny_checkpoint("tune", tag="made")
    with pytest.raises(UserError, match=r"--source=tune") as refused:
        chat_rl.train(chat_rl.Config(stage=StageFlags(model_tag="made")), on_cpu())
    assert refused.value.exit_code == 2

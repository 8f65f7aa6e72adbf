"""The arithmetic of reinforcement learning against tables by hand."""

import pytest

from nanochat.train.rollout import group, shuffled, token_weights


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 0.0, 0.0, 0.0], (0.75, -0.25, -0.25, -0.25)),
        ([1.0, 1.0, 0.0, 0.0], (0.5, 0.5, -0.5, -0.5)),
        ([0.0, 0.5, 1.0], (-0.5, 0.0, 0.5)),
    ],
)
def test_an_advantage_is_the_reward_less_the_mean_and_not_divided_by_the_deviation(rewards, advantages):
    made = group(rewards)
    assert made.rewards == tuple(rewards)
    assert made.advantages == pytest.approx(advantages)
    assert sum(made.advantages) == pytest.approx(0)
    assert not made.flat


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_are_flat_whatever_the_mean_rounds_to(reward):
    made = group([reward] * 3)  # the mean of three 0.1 is not 0.1
    assert made.flat and made.advantages == (0.0, 0.0, 0.0)


def test_a_single_sample_is_flat():
    assert group([1.0]).flat


def test_only_chosen_tokens_of_whole_samples_are_weighted():
    forced = [False, True, True, False]
    assert token_weights(0.5, forced, truncated=False) == [0.5, 0.0, 0.0, 0.5]
    assert token_weights(-0.25, forced, truncated=False) == [-0.25, 0.0, 0.0, -0.25]
    assert token_weights(0.5, forced, truncated=True) == [0.0] * 4
    assert token_weights(0.5, [], truncated=False) == []


def test_shuffled_rewards_are_the_same_ones_in_an_order_of_the_seed():
    rewards = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.25, 1.0]
    dealt = [shuffled(rewards, str(seed)) for seed in range(20)]
    assert all(sorted(one) == sorted(rewards) for one in dealt)
    assert shuffled(rewards, "3") == dealt[3]
    assert len({tuple(one) for one in dealt}) > 10
    assert rewards == [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.25, 1.0]  # the list that was given stays as it was


def test_shuffling_leaves_no_sample_with_a_better_chance():
    first = sum(shuffled([1.0, 0.0, 0.0, 0.0], str(seed))[0] for seed in range(2000)) / 2000
    assert first == pytest.approx(0.25, abs=0.03)

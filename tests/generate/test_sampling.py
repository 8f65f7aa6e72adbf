"""Sampling: draws follow the distribution, and a row gets the same token alone and in a batch."""

import math
import random

import pytest
import torch

from nanochat.common import UserError
from nanochat.generate.sampling import Sampling, chat_temperature, choose, uniform

NONE = torch.tensor([], dtype=torch.long)


def rows(logits: list[float], count: int) -> torch.Tensor:
    return torch.tensor(logits).repeat(count, 1)


def frequencies(tokens: list[int], size: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=size) / len(tokens)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (1.0, 3), (0.5, 3), (2.0, 50), (1.0, 1)])
def test_draws_follow_the_tempered_and_truncated_distribution(temperature, top_k):
    logits, count = [1.0, -0.5, 2.0, 0.3, -3.0], 20_000
    generator = random.Random(5)
    sampling = Sampling(temperature, top_k)
    uniforms = [uniform(generator) for _ in range(count)]
    tokens, _ = choose(rows(logits, count), [sampling] * count, uniforms, NONE)
    kept = sorted(range(5), key=lambda i: -logits[i])[: top_k or 5]
    weights = [math.exp(logits[i] / temperature) if i in kept else 0.0 for i in range(5)]
    expected = torch.tensor(weights) / sum(weights)
    assert torch.allclose(frequencies(tokens, 5), expected, atol=0.015)
    assert set(tokens) <= set(kept)


def test_temperature_zero_takes_the_likeliest_and_needs_no_draw():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    tokens, _ = choose(logits, [Sampling(0.0)] * 6, [0.999] * 6, NONE)
    assert tokens == logits.argmax(dim=1).tolist()


def test_logprobs_are_those_of_the_whole_distribution_at_temperature_one():
    logits = 3 * torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    samplings = [Sampling(0.0), Sampling(0.3, 2), Sampling(2.0, None), Sampling(1.0, 50)]
    tokens, logprobs = choose(logits, samplings, [0.1, 0.5, 0.9, 0.3], NONE)
    expected = torch.log_softmax(logits, dim=1)
    for i, token in enumerate(tokens):
        assert logprobs[i] == pytest.approx(expected[i, token].item(), abs=1e-6)


def test_banned_tokens_are_never_chosen_greedy_or_drawn():
    logits = rows([5.0, 4.0, 1.0, 0.0], 3)
    samplings = [Sampling(0.0), Sampling(1.0, 1), Sampling(1.0, None)]
    for u in (0.0, 0.3, 0.999):
        tokens, _ = choose(logits, samplings, [u] * 3, torch.tensor([0, 1]))
        assert tokens[:2] == [2, 2] and tokens[2] in (2, 3)


def test_the_ends_of_the_unit_interval_choose_possible_tokens():
    last = 1 - 2**-23
    logits = torch.tensor([[-200.0, 0.0, 0.0, -200.0]])
    for k in (None, 2, 4):
        for u in (0.0, last):
            tokens, _ = choose(logits, [Sampling(1.0, k)], [u], NONE)
            assert tokens[0] in (1, 2)


def test_a_row_chooses_the_same_alone_and_among_others():
    logits = torch.randn(8, 60, generator=torch.Generator().manual_seed(3))
    samplings = [Sampling(t, k) for t in (0.0, 0.7, 1.5) for k in (None, 5, 50)][:8]
    uniforms = [uniform(random.Random(i)) for i in range(8)]
    together, _ = choose(logits, samplings, uniforms, NONE)
    alone = [choose(logits[i : i + 1], [samplings[i]], [uniforms[i]], NONE)[0][0] for i in range(8)]
    assert together == alone


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": 0},
              {"top_k": -1}, {"max_tokens": 0}],
)  # fmt: skip
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize(
    ("asked", "corpus", "expected"),
    [
        ("auto", "tinyworld", 0.0),
        ("auto", "fineweb", 0.6),
        ("auto", None, 0.6),
        (0.9, "tinyworld", 0.9),
        (0.0, "x", 0.0),
    ],
)
def test_chats_with_a_small_world_take_the_likeliest_words_unless_asked_otherwise(asked, corpus, expected):
    temperature = chat_temperature(asked, corpus)
    assert temperature.value == expected and set(temperature.reason) == {"en", "zh"}

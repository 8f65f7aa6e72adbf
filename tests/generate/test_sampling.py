"""Sampling: draws follow the distribution, and a row gets the same token alone and in a batch."""

import math
import random

import pytest
import torch

from nanochat.generate.choice import choose, choose_among, likeliest, uniform
from nanochat.generate.sampling import Sampling, chat_drawing
from nanochat.platforms.operations import Operations

NONE = torch.tensor([], dtype=torch.long)


def rows(logits: list[float], count: int) -> torch.Tensor:
    return torch.tensor(logits).repeat(count, 1)


def frequencies(tokens: list[int], size: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=size) / len(tokens)


def test_temperature_zero_takes_the_likeliest_and_needs_no_draw():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    tokens = choose(logits, [Sampling(0.0)] * 6, [0.999] * 6, NONE).tokens
    assert tokens == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("temperature", [1e-50, 1e-44, 1e-38, 1e-7])
@pytest.mark.parametrize("top_k", [None, 3])
def test_temperature_too_small_for_fp32_takes_the_likeliest(temperature: float, top_k: int | None) -> None:
    """The quotient of logits by such a number is infinite, and the draw was token 0, whatever the logits."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 20
    logits[:, 0] = -30
    choice = choose(logits.clone(), [Sampling(temperature, top_k)] * 6, [0.999] * 6, NONE)
    assert choice.tokens == logits.argmax(dim=1).tolist()
    assert all(math.isfinite(logprob) for logprob in choice.logprobs)


def test_logprobs_are_those_of_the_whole_distribution_at_temperature_one():
    logits = 3 * torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    samplings = [Sampling(0.0), Sampling(0.3, 2), Sampling(2.0, None), Sampling(1.0, 50)]
    choice = choose(logits, samplings, [0.1, 0.5, 0.9, 0.3], NONE)
    expected = torch.log_softmax(logits, dim=1)
    for i, token in enumerate(choice.tokens):
        assert choice.logprobs[i] == pytest.approx(expected[i, token].item(), abs=1e-6)


def test_banned_tokens_are_never_chosen_greedy_or_drawn():
    logits = rows([5.0, 4.0, 1.0, 0.0], 3)
    samplings = [Sampling(0.0), Sampling(1.0, 1), Sampling(1.0, None)]
    for u in (0.0, 0.3, 0.999):
        tokens = choose(logits, samplings, [u] * 3, torch.tensor([0, 1])).tokens
        assert tokens[:2] == [2, 2] and tokens[2] in (2, 3)


def test_the_ends_of_the_unit_interval_choose_possible_tokens():
    last = 1 - 2**-23
    logits = torch.tensor([[-200.0, 0.0, 0.0, -200.0]])
    for k in (None, 2, 4):
        for u in (0.0, last):
            tokens = choose(logits, [Sampling(1.0, k)], [u], NONE).tokens
            assert tokens[0] in (1, 2)


@pytest.mark.parametrize(
    ("corpus", "asked", "expected"),
    [
        ("tinyworld", ("auto", "auto"), (1.0, 0.5)),
        ("fineweb", ("auto", "auto"), (0.6, 0.0)),
        (None, ("auto", "auto"), (0.6, 0.0)),
        ("tinyworld", (0.9, "auto"), (0.9, 0.5)),
        ("tinyworld", ("auto", 0.0), (1.0, 0.0)),
        ("x", (0.0, 0.2), (0.0, 0.2)),
    ],
)
def test_chats_with_a_small_world_draw_among_its_likeliest_words_unless_asked_otherwise(corpus, asked, expected):
    drawing = chat_drawing(corpus, *asked)
    assert (drawing.temperature, drawing.min_p) == expected and set(drawing.reason) == {"en", "zh"}
    assert (drawing.reason["en"] == "asked for") == (asked != ("auto", "auto"))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0, None), Sampling(1.0, 3), Sampling(0.5, 3), Sampling(2.0, 50), Sampling(1.0, None, top_p=0.7),
     Sampling(0.8, 4, top_p=0.6), Sampling(1.0, None, min_p=0.2), Sampling(1.5, 5, min_p=0.1, top_p=0.9),
     Sampling(1.0, None, top_p=1e-6)],
)  # fmt: skip
def test_draws_follow_the_tempered_and_truncated_distribution(sampling: Sampling) -> None:
    logits, count = [1.0, -0.5, 2.0, 0.3, -3.0, 1.7], 20_000
    generator = random.Random(6)
    uniforms = [uniform(generator) for _ in range(count)]
    tokens = choose(rows(logits, count), [sampling] * count, uniforms, NONE).tokens
    # By hand: cool, drop what min_p forbids, keep the top_k, then the fewest that reach top_p.
    weights = {i: math.exp(logit / sampling.temperature) for i, logit in enumerate(logits)}
    order = sorted(weights, key=lambda i: -weights[i])
    kept = [i for i in order if weights[i] >= sampling.min_p * weights[order[0]]][: sampling.top_k]
    total, nucleus = sum(weights[i] for i in kept), []
    for i in kept:
        nucleus.append(i)
        if sum(weights[j] for j in nucleus) >= sampling.top_p * total:
            break
    share = sum(weights[i] for i in nucleus)
    expected = torch.tensor([weights[i] / share if i in nucleus else 0.0 for i in range(6)])
    assert torch.allclose(frequencies(tokens, 6), expected, atol=0.015)
    assert set(tokens) <= set(nucleus)


def test_rows_with_every_kind_of_setting_choose_the_same_alone_and_together() -> None:
    logits = torch.randn(9, 80, generator=torch.Generator().manual_seed(7)) * 2
    samplings = [
        Sampling(0.0), Sampling(1.0), Sampling(1.0, None), Sampling(1.0, None, top_p=0.8), Sampling(0.7, 10, top_p=0.5),
        Sampling(1.2, 30, min_p=0.1), Sampling(1.0, None, min_p=0.3), Sampling(0.0, logprobs=3), Sampling(2.0, None),
    ]  # fmt: skip
    for u in (0.0, 0.31, 0.77, 0.999):
        together = choose(logits.clone(), samplings, [u] * 9, NONE)
        for i, sampling in enumerate(samplings):
            alone = choose(logits[i : i + 1].clone(), [sampling], [u], NONE)
            assert alone.tokens[0] == together.tokens[i]


def test_alternatives_are_the_likeliest_tokens_before_anything_is_changed() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(8))
    banned = logits[0].argmax()[None]
    wanted = torch.log_softmax(logits, dim=1).topk(4, dim=1)
    choice = choose(logits.clone(), [Sampling(0.0, logprobs=2), Sampling(logprobs=4)], [0.5, 0.5], banned)
    for row in range(2):
        ids, values = zip(*choice.alternatives[row], strict=True)
        assert list(ids) == wanted.indices[row].tolist()
        assert values == pytest.approx(wanted.values[row].tolist())
    assert choice.tokens[0] != banned.item()
    assert choose(logits, [Sampling()] * 2, [0.5, 0.5], NONE).alternatives == [(), ()]


@pytest.mark.parametrize("size", [512, 1024, 700])
def test_the_first_of_equal_logits_is_the_likeliest(size: int) -> None:
    logits = torch.randn(40, size, generator=torch.Generator().manual_seed(9)).round()  # many are equal
    assert torch.equal(likeliest(logits), logits.argmax(dim=1))


class Totals(Operations):
    """Operations that know the total of each row at once, as a CPU's kernels do."""

    def log_totals(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.logsumexp(dim=1)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.7), Sampling(1.3, None), Sampling(1.0, 5)])
def test_replies_that_share_a_row_choose_as_rows_of_their_own(sampling: Sampling) -> None:
    logits = 3 * torch.randn(4, 256, generator=torch.Generator().manual_seed(4))
    shared, banned = [0, 2, 2, 1, 3, 3, 3], logits[2].argmax()[None]
    uniforms = [uniform(random.Random(i)) for i in range(len(shared))]
    own = logits[torch.tensor(shared)]
    expected = torch.log_softmax(own, dim=1)
    for log_totals in (None, Totals().log_totals):
        alone = choose(own.clone(), [sampling] * len(shared), uniforms, banned, None, log_totals)
        tokens, logprobs = choose_among(logits.clone(), shared, sampling, uniforms, banned, log_totals)
        assert tokens == alone.tokens and banned.item() not in tokens
        for found in (logprobs, alone.logprobs):
            assert found == pytest.approx([expected[i, token].item() for i, token in enumerate(tokens)], abs=1e-5)


def test_penalties_and_alternatives_do_not_change_log_probabilities() -> None:
    logits = 3 * torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    expected = torch.log_softmax(logits, dim=1)
    for given in ({"adjust": lambda changed: changed.mul_(0.5)}, {}):
        samplings = [Sampling(1.0, 50, logprobs=0 if given else 2)] * 3
        choice = choose(logits.clone(), samplings, [0.2, 0.6, 0.9], NONE, log_totals=Totals().log_totals, **given)
        for row, token in enumerate(choice.tokens):
            assert choice.logprobs[row] == pytest.approx(expected[row, token].item(), abs=1e-5)
            for other, logprob in choice.alternatives[row]:
                assert logprob == pytest.approx(expected[row, other].item(), abs=1e-5)

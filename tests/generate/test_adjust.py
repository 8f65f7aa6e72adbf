"""Penalties, biases and masks change the logits that a formula written out says, and no others."""

import random

import pytest
import torch

from nanochat.common import UserError
from nanochat.generate.adjust import History, adjuster
from nanochat.generate.choice import choose
from nanochat.generate.sampling import Sampling, check_request

NONE = torch.tensor([], dtype=torch.long)
V = 40


def expected(logits: list[float], prompt: list[int], reply: list[int], s: Sampling, ends: list[int]) -> list[float]:
    out = list(logits)
    for token in range(V):
        if s.repetition_penalty != 1 and token in (*prompt, *reply):
            out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        out[token] -= reply.count(token) * s.frequency_penalty + (token in reply) * s.presence_penalty
        out[token] += dict(s.logit_bias).get(token, 0.0)
        if token in ends and len(reply) < s.min_tokens:
            out[token] = float("-inf")
    return out


def test_rows_are_adjusted_as_the_formula_says_and_neighbours_stay():
    rng, generator = random.Random(1), torch.Generator().manual_seed(2)
    samplings = [
        Sampling(repetition_penalty=1.7),
        Sampling(presence_penalty=0.6, frequency_penalty=0.3),
        Sampling(repetition_penalty=0.8, frequency_penalty=-0.4, logit_bias=((3, 5.0), (9, -100.0)), min_tokens=4),
        Sampling(min_tokens=90),
    ]
    logits = torch.randn(6, V, generator=generator) * 3
    histories, wanted = [], []
    for row, sampling in enumerate(samplings):
        prompt, reply = ([rng.randrange(V) for _ in range(count)] for count in (8, 2 + 3 * row))
        history = History(prompt, sampling, [7, 8], 60)
        for token in reply:
            history.add(token)
        histories.append(history)
        wanted.append(expected(logits[row].tolist(), prompt, reply, sampling, [7, 8]))
    adjust = adjuster([*histories, None, None], {})
    changed = logits.clone()
    adjust(changed)
    assert torch.allclose(changed[:4], torch.tensor(wanted), atol=1e-5)
    assert torch.equal(changed[4:], logits[4:])


def test_a_minimum_length_of_a_request_that_nothing_ends_leaves_the_biases_of_all_rows_alone():
    endless = Sampling(min_tokens=4, ignore_eos=True)
    biased = Sampling(logit_bias=((3, 1.5),))
    logits = torch.zeros(2, V)
    adjuster([History([1], endless, [], 10), History([1], biased, [7], 10)], {})(logits)
    assert logits[1, 3] == 1.5 and logits.count_nonzero() == 1


def only(*tokens: int) -> bytes:
    """A mask that allows a few tokens."""
    return sum(1 << token for token in tokens).to_bytes(8, "little")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_mask_chooses_allowed_tokens_only(temperature):
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(4))
    adjust = adjuster([None] * 3, {1: only(5, 39)})
    free = choose(logits.clone(), [Sampling(temperature)] * 3, [0.4] * 3, NONE)
    bound = choose(logits.clone(), [Sampling(temperature)] * 3, [0.4] * 3, NONE, adjust)
    assert bound.tokens[1] in (5, 39) and bound.tokens[::2] == free.tokens[::2]


# --- checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": 0}, {"max_tokens": 0}, {"top_p": 0},
     {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": float("nan")}, {"repetition_penalty": 0},
     {"presence_penalty": 1e9}, {"frequency_penalty": float("inf")}, {"min_tokens": -1}, {"logprobs": 10**9},
     {"prompt_logprobs": 10**9}, {"prompt_logprobs": -1}, {"stop": tuple("x" for _ in range(10_000))}, {"stop": ("",)},
     {"stop": ("x" * 10_000,)}, {"stop_tokens": tuple(range(10_000))}, {"logit_bias": ((1, 1e9),)},
     {"logit_bias": ((1, float("nan")),)}, {"logit_bias": tuple((i, 1.0) for i in range(9999))}],
)  # fmt: skip
def test_settings_beyond_their_bounds_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=next(iter(wrong)).replace("stop_tokens", "stop")):
        Sampling(**wrong)


def test_a_schema_with_settings_that_deny_its_end_is_refused():
    for wrong in ({"ignore_eos": True}, {"min_tokens": 3}):
        with pytest.raises(UserError, match="leave them out"):
            Sampling(schema="{}", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([1, V], Sampling(), "the prompt holds token 40.*from 0 to 39"),
        ([-1, 2], Sampling(), "the prompt holds token -1"),
        ([2**70], Sampling(), "the prompt holds token"),
        ([1], Sampling(stop_tokens=(V,)), "stop_tokens holds token 40"),
        ([1], Sampling(logit_bias=((-2, 1.0),)), "logit_bias holds token -2"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(prompt, sampling, message):
    with pytest.raises(UserError, match=message):
        check_request(prompt, sampling, 100, V)

"""Replies sampled as trees are those of the engine."""

import pytest
import torch

from nanochat.common import UserError
from nanochat.engine import Completion, Engine
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPT
from nanochat.rl import groups
from nanochat.rl.groups import Groups
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer, words

TOKENIZER = tiny_tokenizer()
PROMPTS = [words(3, 1), words(9, 2), words(30, 3), words(9, 4), [5]]


def model_with(**factors: float) -> GPT:
    """A model that says some special tokens more often."""
    model = tiny_gpt(TOKENIZER.vocab_size, bigram_rows=211, offset_layers=1)
    with torch.no_grad():
        for role, factor in factors.items():
            model.lm_head.weight[TOKENIZER.special(role)] *= factor
    return model


def check(found: list[Completion], expected: list[Completion]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.forced, one.finish) == (other.tokens, other.forced, other.finish)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, 50, 12, 7), Sampling(0.4, 3, 20, 8), Sampling(0.3, None, 12, 9), Sampling(0.0, None, 12),
        Sampling(1.0, 50, 1, 3),
    ],
    ids=["top-k", "few", "all tokens", "greedy", "one token"],
)  # fmt: skip
def test_replies_are_those_of_the_engine(sampling: Sampling) -> None:
    model = model_with(assistant_end=3.0)
    length = max(map(len, PROMPTS)) + sampling.max_tokens
    expected = Engine(model, TOKENIZER, 64, length).generate(PROMPTS, sampling, 8)
    check(Groups(model, TOKENIZER).generate(PROMPTS, sampling, 8), expected)


def test_the_calculator_answers_in_every_reply_that_calls_it() -> None:
    model = model_with(python_start=6.0, python_end=6.0, assistant_end=2.0)
    sampling = Sampling(1.0, 50, 24, 5)
    expected = Engine(model, TOKENIZER, 64, 60).generate(PROMPTS, sampling, 16)
    assert any(any(reply.forced) for reply in expected)
    check(Groups(model, TOKENIZER).generate(PROMPTS, sampling, 16), expected)


def test_equal_replies_are_one_object_and_each_is_announced() -> None:
    model, heard = model_with(assistant_end=3.0), []
    found = Groups(model, TOKENIZER).generate(
        PROMPTS, Sampling(0.1, 50, 6, 1), 16, lambda at, reply: heard.append((at, reply))
    )
    assert sorted(at for at, _ in heard) == list(range(len(PROMPTS) * 16))
    assert all(found[at] is reply for at, reply in heard)
    for first in range(0, len(found), 16):
        group = found[first : first + 16]
        assert len({id(reply) for reply in group}) == len({tuple(reply.tokens) for reply in group})
    assert len({id(reply) for reply in found}) < len(found) / 2


def test_the_cache_serves_larger_and_smaller_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "PASS_TOKENS", 40)  # several prefill passes
    model = model_with(assistant_end=3.0)
    one = Groups(model, TOKENIZER)
    for prompts, samples, limit in ((PROMPTS[:2], 2, 4), (PROMPTS, 24, 10), (PROMPTS[2:], 3, 6)):
        sampling = Sampling(1.0, 50, limit, 11)
        length = max(map(len, prompts)) + limit
        check(
            one.generate(prompts, sampling, samples),
            Engine(model, TOKENIZER, 8, length).generate(prompts, sampling, samples),
        )


def test_new_weights_are_followed() -> None:
    model = model_with(assistant_end=3.0)
    sampling = Sampling(1.0, 50, 10, 11)
    one = Groups(model, TOKENIZER)
    before = one.generate(PROMPTS, sampling, 4)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    after = one.generate(PROMPTS, sampling, 4)
    assert [reply.tokens for reply in before] != [reply.tokens for reply in after]
    check(after, Engine(model, TOKENIZER, 64, 40).generate(PROMPTS, sampling, 4))


def test_no_prompt_gives_no_reply_and_a_bad_prompt_is_refused() -> None:
    model = model_with()
    assert Groups(model, TOKENIZER).generate([], Sampling(), 4) == []
    with pytest.raises(UserError, match="the prompt is empty"):
        Groups(model, TOKENIZER).generate([[]], Sampling(), 4)
    with pytest.raises(UserError, match="too long"):
        Groups(model, TOKENIZER).generate([words(160, 1)], Sampling(), 4)

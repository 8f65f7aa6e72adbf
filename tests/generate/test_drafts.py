"""Replies with drafts are those without, token by token, whatever is guessed."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.engine import Completion, Engine
from nanochat.generate import drafts
from nanochat.generate.drafts import Drafts, Ngrams, SmallerModel, check_tokenizer
from nanochat.generate.request import Request
from nanochat.generate.sampling import Sampling, sample_settings
from nanochat.gpt import GPT
from tests.support.recurrent_model import Recurrent
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer, words

TOKENIZER = tiny_tokenizer()
LENGTH = 160
SETTINGS = [
    Sampling(0.0, max_tokens=40, logprobs=3),
    Sampling(1.0, 20, max_tokens=40, seed=3, frequency_penalty=0.5, logit_bias=((5, 1.0),)),
    Sampling(0.7, None, max_tokens=30, seed=4, top_p=0.9, prompt_logprobs=1, min_tokens=9),
    Sampling(1.0, None, max_tokens=200, seed=5, stop=("never said",)),
    Sampling(0.3, 5, max_tokens=1, seed=6),
    Sampling(1.3, None, max_tokens=60, seed=7, min_p=0.02, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def model() -> GPT:
    return tiny_gpt(TOKENIZER.vocab_size, LENGTH, bigram_rows=211, offset_layers=1)


class Prophet:
    """Knows the replies, and guesses a token wrong with a given probability."""

    def __init__(self, replies: dict[int, list[int]], right: float):
        self.replies, self.right, self.rng = replies, right, random.Random(1)

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        guesses = []
        for request, count in zip(requests, counts, strict=True):
            said = self.replies.get(request.prompt_length, [])[request.generated :][:count]
            guesses.append([token if self.rng.random() < self.right else (token + 1) % 200 for token in said])
        return guesses


def replies_of(engine: Engine, cases: Sequence[tuple[list[int], Sampling]]) -> list[Completion]:
    replies = {engine.submit(prompt, sampling): Completion() for prompt, sampling in cases}
    while engine.busy:
        for event in engine.step():
            replies[event.request].add(event)
    return list(replies.values())


def cases() -> list[tuple[list[int], Sampling]]:
    prompts = [words(20 + 9 * i, 91 + i) for i in range(len(SETTINGS))]
    return [(prompt, sample_settings(sampling, prompt, 0)) for prompt, sampling in zip(prompts, SETTINGS, strict=True)]


def assert_same(got: Completion, expected: Completion) -> None:
    assert got.tokens == expected.tokens and got.finish == expected.finish and got.forced == expected.forced
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert [[token for token, _ in row] for row in got.alternatives] == [
        [token for token, _ in row] for row in expected.alternatives
    ]


@pytest.fixture(scope="module", params=["windows", "recurrent"])
def without_drafts(request: pytest.FixtureRequest, model: GPT) -> tuple[Any, list[Completion], list[Completion]]:
    """A model, its replies to cases(), and its replies to each of these with its prompt."""
    tested: Any = Recurrent(TOKENIZER, LENGTH) if request.param == "recurrent" else model

    def alone(prompt: list[int], sampling: Sampling) -> Completion:
        return replies_of(Engine(tested, TOKENIZER, slots=1), [(prompt, sampling)])[0]

    replies = [alone(*case) for case in cases()]
    again = [alone(followed(case[0], reply), SETTINGS[0]) for case, reply in zip(cases(), replies, strict=True)]
    return tested, replies, again


def followed(prompt: list[int], reply: Completion) -> list[int]:
    return [*prompt, *reply.tokens][: LENGTH - 30]


# Every pair of values, with either model.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "right", "pad"),
    [(1, 0.0, False), (4, 0.0, True), (1, 0.7, True), (4, 0.7, False), (4, 1.0, False), (1, 1.0, True)],
)
def test_replies_are_those_without_drafts(without_drafts, monkeypatch, slots, right, pad):
    monkeypatch.setattr(drafts, "MOST_TOKENS", 16)
    tested, expected, replies_to_all = without_drafts
    prophet = Prophet({len(case[0]): reply.tokens for case, reply in zip(cases(), expected, strict=True)}, right)
    engine = Engine(tested, TOKENIZER, slots=slots, pad=pad, drafts=Drafts(prophet))
    for got, reply in zip(replies_of(engine, cases()), expected, strict=True):
        assert_same(got, reply)
    assert engine.drafts is not None and engine.drafts.guessed
    # what finished replies leave behind is as good as what was read
    for case, reply, wanted in zip(cases(), expected, replies_to_all, strict=True):
        again = replies_of(engine, [(followed(case[0], reply), SETTINGS[0])])[0]
        assert_same(again, wanted)


@pytest.mark.parametrize("right", [0.7, 1.0])
def test_calculator_answers_are_those_without_drafts(model, right):
    mark = TOKENIZER.special
    likely = [mark("python_start"), mark("python_end"), *TOKENIZER.encode("1 2 3 + *")]
    sampling = Sampling(1.0, None, max_tokens=80, ignore_eos=True, logit_bias=tuple((t, 9.0) for t in set(likely)))
    prompt = words(20, 12)
    (expected,) = Engine(model, TOKENIZER, slots=1).generate([prompt], sampling)
    assert sum(expected.forced) > 10
    drafts_of = Drafts(Prophet({20: expected.tokens}, right))
    assert_same(Engine(model, TOKENIZER, slots=1, drafts=drafts_of).generate([prompt], sampling)[0], expected)
    assert drafts_of.right > 10


def test_a_reply_with_a_schema_is_the_one_without_drafts(model):
    sampling = Sampling(1.0, None, max_tokens=40, schema='{"enum": ["the cat", "the mat"]}')
    prompt = words(20, 13)
    (expected,) = Engine(model, TOKENIZER, slots=1).generate([prompt], sampling)
    engine = Engine(model, TOKENIZER, slots=1, drafts=Drafts(Prophet({20: expected.tokens}, 1.0)))
    assert_same(engine.generate([prompt], sampling)[0], expected)


def test_right_guesses_save_passes(model):
    prompt = words(30, 5)
    sampling = Sampling(0.0, max_tokens=60, ignore_eos=True)
    plain = Engine(model, TOKENIZER, slots=1)
    (expected,) = plain.generate([prompt], sampling)
    engine = Engine(model, TOKENIZER, slots=1, drafts=Drafts(Prophet({30: expected.tokens}, 1.0)))
    assert engine.generate([prompt], sampling)[0].tokens == expected.tokens
    assert engine.passes < plain.passes / 4


def test_ngrams_guess_what_followed_before():
    request: Any = Request(0, [1, 2, 3, 4, 5, 6, 9, 2, 3, 4], 10, SETTINGS[0], random.Random(), None)  # type: ignore[arg-type]
    ngrams = Ngrams()
    assert ngrams.guess([request], [3]) == [[5, 6, 9]]
    request.tokens += [7, 7, 7, 7]
    assert ngrams.guess([request], [4]) == [[7, 7, 7, 7]]
    request.tokens += [100]
    assert ngrams.guess([request], [4]) == [[]]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_smaller_model_draws_the_same_numbers(model, seed):
    """If the smaller model is the model itself (seed 1), every guess is right, at any temperature."""
    smaller = Engine(tiny_gpt(TOKENIZER.vocab_size, LENGTH, seed, bigram_rows=211, offset_layers=1), TOKENIZER, slots=2)
    engine = Engine(model, TOKENIZER, slots=2, drafts=Drafts(SmallerModel(smaller)))
    for case in cases():
        if not case[1].adjusts:
            assert_same(replies_of(engine, [case])[0], replies_of(Engine(model, TOKENIZER, slots=1), [case])[0])
    assert engine.drafts is not None and engine.drafts.guessed > 10
    share = engine.drafts.right / engine.drafts.guessed
    assert share > 0.8 if seed == 1 else share < 0.8  # what is guessed beyond the end of a reply is wrong


def test_a_smaller_model_reads_a_long_prompt_in_parts(model, monkeypatch):
    monkeypatch.setattr(drafts, "READ_AHEAD", 16)
    smaller = Engine(model, TOKENIZER, slots=2, prefill_tokens=16)
    engine = Engine(model, TOKENIZER, slots=2, drafts=Drafts(SmallerModel(smaller)))
    case = (words(100, 8), Sampling(0.0, max_tokens=40, ignore_eos=True))
    engine.submit(*case)
    while engine._slots.ready() == 0:
        engine.step()
    assert smaller.prompt_tokens_read == 16
    while engine.busy:
        engine.step()
    assert engine.drafts is not None and engine.drafts.right


def test_a_draft_of_another_tokenizer_is_refused():
    with pytest.raises(UserError, match="sft/d4") as refusal:
        check_tokenizer(TOKENIZER, tiny_tokenizer(288), "sft/d4")
    assert refusal.value.exit_code == 2
    check_tokenizer(TOKENIZER, tiny_tokenizer(), "sft/d4")

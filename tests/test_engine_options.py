"""What a request may ask of the engine beyond temperature and top_k, with a real model and many neighbours."""

import json
from dataclasses import replace

import pytest
import torch

from nanochat.common import UserError
from nanochat.engine import Completion, Engine
from nanochat.generate.sampling import Sampling
from nanochat.generate.schema import grammar
from nanochat.gpt import GPT
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer, words

TOKENIZER = tiny_tokenizer()
LENGTH = 160
END = TOKENIZER.special("assistant_end")


@pytest.fixture(scope="module")
def model() -> GPT:
    return tiny_gpt(TOKENIZER.vocab_size, LENGTH)


def heard(engine: Engine, requests: list[int]) -> list[Completion]:
    """Step until all requests are done."""
    found = {request: Completion() for request in requests}
    while engine.busy:
        for event in engine.step():
            found[event.request].add(event)
    return list(found.values())


def replies(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> list[Completion]:
    return heard(engine, [engine.submit(*request) for request in asked])


SCHEMA = json.dumps({"type": "array", "items": {"enum": ["cat", 12, True]}, "minItems": 2, "maxItems": 4})
SETTINGS = [
    Sampling(0.0, max_tokens=20, repetition_penalty=1.3),
    Sampling(1.0, None, 20, 5, top_p=0.8, presence_penalty=0.5),
    Sampling(0.9, 20, 20, 6, min_p=0.05, frequency_penalty=0.7, logprobs=3),
    Sampling(1.0, None, 60, 1, schema=SCHEMA),
    Sampling(1.0, 50, 20, 7, logit_bias=((5, 4.0), (6, -100.0)), min_tokens=15),
    Sampling(1.3, 50, 20, 8, stop=("a", "猫"), prompt_logprobs=2),
    Sampling(0.0, max_tokens=20, prompt_logprobs=0, ignore_eos=True),
    Sampling(1.0, None, 60, 3, schema=SCHEMA),
    Sampling(1.0, 50, 20, 9, stop_tokens=(97, 101, 115, 116), logprobs=1),
]


def test_every_option_gives_the_same_reply_alone_and_among_neighbours(model):
    asked = [(words(10 + 7 * i, i), sampling) for i, sampling in enumerate(SETTINGS)]
    together = replies(Engine(model, TOKENIZER, slots=5, prefill_tokens=40), asked)
    for request, reply in zip(asked, together, strict=True):
        (alone,) = replies(Engine(model, TOKENIZER, slots=1), [request])
        assert reply.tokens == alone.tokens and reply.finish == alone.finish
        assert (reply.parts, reply.matched, reply.forced) == (alone.parts, alone.matched, alone.forced)
        assert reply.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert [token.token for token in reply.prompt_scores] == [token.token for token in alone.prompt_scores]
        if request[1].schema:
            assert reply.finish == "stop" and reply.tokens[-1] == END
            value = json.loads(TOKENIZER.decode(reply.tokens[:-1]))
            assert 2 <= len(value) <= 4 and all(item in ("cat", 12, True) for item in value)


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_of_a_prompt_equal_the_models(model, count):
    asked = [words(length, length) for length in (1, 2, 40, 100)]
    sampling = Sampling(0.0, max_tokens=1, prompt_logprobs=count)
    engine = Engine(model, TOKENIZER, slots=4, prefill_tokens=48)
    for prompt, reply in zip(asked, replies(engine, [(prompt, sampling) for prompt in asked]), strict=True):
        logprobs = torch.log_softmax(model(torch.tensor([prompt]))[0], dim=1).detach()
        assert [scored.token for scored in reply.prompt_scores] == prompt[1:]
        for place, scored in enumerate(reply.prompt_scores):
            assert scored.logprob == pytest.approx(logprobs[place, scored.token].item(), abs=1e-4)
            best = logprobs[place].topk(max(count, 1))
            assert [value for _, value in scored.alternatives] == pytest.approx(best.values.tolist()[:count], abs=1e-4)
        if len(prompt) > 1:  # the figure that base_eval and base_loss report
            ids = torch.tensor([prompt])
            loss = model(ids[:, :-1], ids[:, 1:]).item()
            assert -sum(scored.logprob for scored in reply.prompt_scores) / (len(prompt) - 1) == pytest.approx(
                loss, abs=1e-4
            )


def test_scores_of_a_common_context_are_computed_once(model):
    context, engine = words(60, 11), Engine(model, TOKENIZER, slots=4)
    asked = [[*context, *words(count, count)] for count in (5, 6, 7)]
    sampling = Sampling(0.0, max_tokens=1, prompt_logprobs=1)
    got = replies(engine, [(prompt, sampling) for prompt in asked])
    assert engine.prompt_tokens_read < 60 + 3 * 8
    for prompt, reply in zip(asked, got, strict=True):
        (alone,) = replies(Engine(model, TOKENIZER, slots=1), [(prompt, sampling)])
        assert [s.token for s in reply.prompt_scores] == prompt[1:]
        assert [s.logprob for s in reply.prompt_scores] == pytest.approx(
            [s.logprob for s in alone.prompt_scores], abs=1e-4
        )
    unscored = Sampling(0.0, max_tokens=1)
    engine.generate([context], unscored)
    (reply,) = replies(engine, [([*context[:50], 3, 4], replace(sampling, prompt_logprobs=5))])
    assert reply.reused == 0 and len(reply.prompt_scores) == 51  # nobody has the five likeliest tokens of that context


def test_alternatives_accompany_every_sampled_token(model):
    (reply,) = replies(Engine(model, TOKENIZER), [(words(9, 3), Sampling(0.0, max_tokens=8, logprobs=4))])
    assert len(reply.alternatives) == len(reply.tokens)
    for token, logprob, forced, likeliest in zip(
        reply.tokens, reply.logprobs, reply.forced, reply.alternatives, strict=True
    ):
        assert forced or (len(likeliest) == 4 and likeliest[0] == (token, pytest.approx(logprob)))


def test_a_stop_string_ends_the_reply_before_it(model):
    prompt, sampling = words(12, 21), Sampling(1.0, None, 60, 4, ignore_eos=True)
    (free,) = replies(Engine(model, TOKENIZER), [(prompt, replace(sampling, stop=("never said",)))])
    text = "".join(part.text for part in free.parts or [] if part.kind == "text")
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    (reply,) = replies(Engine(model, TOKENIZER), [(prompt, replace(sampling, stop=("zzzz", stop)))])
    assert "".join(part.text for part in reply.parts or [] if part.kind == "text") == text[: text.index(stop)]
    assert reply.finish == "stop" and reply.matched == stop
    assert free.tokens[: len(reply.tokens)] == reply.tokens and len(reply.tokens) < len(free.tokens)


def test_stop_tokens_end_a_reply_and_min_tokens_put_the_end_off(model):
    prompt, sampling = words(12, 22), Sampling(1.0, None, 40, 3)
    (free,) = replies(Engine(model, TOKENIZER), [(prompt, replace(sampling, ignore_eos=True))])
    assert len(free.tokens) == 40 and free.finish == "length"
    chosen = free.tokens[5]
    (reply,) = replies(Engine(model, TOKENIZER), [(prompt, replace(sampling, stop_tokens=(chosen,)))])
    assert reply.tokens[-1] == chosen == reply.matched and reply.finish == "stop" and len(reply.tokens) <= 6
    bias = ((END, 100.0),)
    (at_once,) = replies(Engine(model, TOKENIZER), [(prompt, replace(sampling, logit_bias=bias))])
    (later,) = replies(Engine(model, TOKENIZER), [(prompt, replace(sampling, logit_bias=bias, min_tokens=7))])
    assert at_once.tokens == [END] and at_once.finish == later.finish == "stop"
    assert len(later.tokens) == 8 and later.tokens.index(END) == 7


def test_samples_of_a_prompt_differ_and_the_first_is_the_only_ones(model):
    prompt, sampling = words(40, 23), Sampling(1.0, 50, 12, 99)
    engine = Engine(model, TOKENIZER, slots=3)
    found = engine.generate([prompt], sampling, samples=5)
    (alone,) = Engine(model, TOKENIZER).generate([prompt], sampling)
    tokens = [tuple(reply.tokens) for reply in found]
    assert list(tokens[0]) == alone.tokens and len(set(tokens)) == 5
    assert engine.prompt_tokens_read == 39


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        ([1, 10**6], {}),
        ([-1], {}),
        ([1], {"logit_bias": ((10**6, 1.0),)}),
        ([1], {"stop_tokens": (10**6,)}),
        ([1], {"schema": '{"enum": []}'}),
        ([1], {"schema": "{"}),
    ],
)
def test_what_cannot_be_done_is_refused_at_submit_and_neighbours_go_on(model, prompt, wrong):
    engine = Engine(model, TOKENIZER, slots=2)
    engine.submit([1, 2, 3], Sampling(0.0, max_tokens=3, ignore_eos=True))
    engine.step()
    with pytest.raises(UserError):
        engine.submit(prompt, Sampling(**wrong))
    assert len(engine.step()) == len(engine.step()) == 1 and not engine.busy


def test_a_reply_whose_schema_takes_too_much_work_ends_with_an_error_and_its_schema_is_refused(model, monkeypatch):
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 300)
    pattern = "|".join(f".*{letter}.{{20}}X" for letter in "abcde")
    sampling = Sampling(1.0, None, 100, 1, schema=json.dumps({"type": "string", "pattern": pattern}))
    engine = Engine(model, TOKENIZER, slots=1)
    (reply,) = engine.generate([[1, 2, 3]], sampling)
    assert reply.finish == "error" and len(reply.tokens) < 100
    with pytest.raises(UserError, match="too much work"):
        engine.check([1, 2, 3], sampling)

"""The batched engine gives the same replies as plain recomputation, without a cache and one request at a time."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanochat import engine as engine_module
from nanochat.cache import Cache
from nanochat.common import UserError
from nanochat.data.calculator import calculate
from nanochat.engine import Completion, Engine
from nanochat.generate.choice import choose, uniform
from nanochat.generate.reply import FAILED, Event
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPT
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LENGTH = 160
GREEDY = Sampling(temperature=0.0, max_tokens=24)


def mark(role: str) -> int:
    return TOKENIZER.special(role)


@pytest.fixture(scope="module")
def model() -> GPT:
    """A model that often opens and closes calculator calls, and sometimes ends its turn."""
    model = tiny_gpt(TOKENIZER.vocab_size, LENGTH)
    with torch.no_grad():
        for role in ("python_start", "python_end"):
            model.lm_head.weight[mark(role)] *= 3
    return model


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(TOKENIZER.vocab_size - 9) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def recomputed(model: GPT, prompt: list[int], sampling: Sampling, length: int = LENGTH) -> Completion:
    """The reference: the whole sequence through the model for every token, without a cache and without a batch."""
    ids, reply, generator = list(prompt), Completion(), random.Random(sampling.seed)
    banned = torch.tensor([mark("output_start"), mark("output_end")])
    expression: list[int] | None = None
    queue: list[int] = []
    while reply.finish is None:
        forced = bool(queue)
        if forced:
            token, logprob = queue.pop(0), 0.0
        else:
            logits = model(torch.tensor([ids]))[:, -1]
            choice = choose(logits, [sampling], [uniform(generator)], banned)
            token, logprob = choice.tokens[0], choice.logprobs[0]
        if token == mark("python_start"):
            expression = []
        elif token == mark("python_end") and expression is not None:
            answer = calculate(TOKENIZER.decode(expression)) or FAILED
            queue = [mark("output_start"), *TOKENIZER.encode(answer), mark("output_end")]
            expression = None
        elif expression is not None:
            expression.append(token)
        ids.append(token)
        reply.tokens.append(token)
        reply.forced.append(forced)
        reply.logprobs.append(logprob)
        if token in (mark("assistant_end"), mark("bos")):
            reply.finish = "stop"
        elif len(reply.tokens) == sampling.max_tokens or len(ids) == length:
            reply.finish = "length"
    return reply


def run(engine: Engine, ids: list[int]) -> dict[int, Completion]:
    """Step until all requests are done."""
    replies = {request: Completion() for request in ids}
    while engine.busy:
        for event in engine.step():
            replies[event.request].add(event)
    return replies


def assert_same(got: Completion, expected: Completion) -> None:
    assert got.tokens == expected.tokens
    assert got.forced == expected.forced
    assert got.finish == expected.finish
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


# --- weights that are no numbers -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "sampling"),
    [
        (math.nan, GREEDY), (math.inf, GREEDY), (math.nan, Sampling(1.0, None)), (math.inf, Sampling(1.0, 5, logprobs=2)),
        (math.nan, Sampling(min_p=0.1)),
    ],
)  # fmt: skip
def test_a_model_of_nan_ends_every_reply_at_its_first_token(value: float, sampling: Sampling) -> None:
    model = tiny_gpt(TOKENIZER.vocab_size, LENGTH)
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight.fill_(value)
    engine = Engine(model, TOKENIZER, slots=3)
    for prompt in prompts([4, 40, 7]):
        engine.submit(prompt, sampling)
    events = [event for _ in range(3) for event in engine.step()]
    assert [(event.finish, event.broken) for event in events] == [("error", True)] * 3
    assert not engine.busy
    with pytest.raises(UserError, match="NaN"):  # an evaluation would give the replies a score
        engine.generate(prompts([4]), sampling)
    assert not engine.busy


# --- batched = unbatched -------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [False, True])
def test_greedy_replies_of_mixed_lengths_equal_recomputation(model, pad):
    asked = prompts([1, 2, 3, 17, 40, 64, 65, 100, 130, 150, 5, 5])
    engine = Engine(model, TOKENIZER, slots=12, pad=pad)
    replies = engine.generate(asked, GREEDY)
    for prompt, reply in zip(asked, replies, strict=True):
        assert_same(reply, recomputed(model, prompt, GREEDY))
    forced = [token for reply in replies for token, forced in zip(reply.tokens, reply.forced, strict=True) if forced]
    assert mark("output_end") in forced  # the calculator took part


def test_a_prompt_longer_than_a_chunk_is_read_between_steps_of_others(model):
    asked = prompts([10, 150], seed=4)
    engine = Engine(model, TOKENIZER, slots=2, prefill_tokens=16)
    first = engine.submit(asked[0], GREEDY)
    replies = {first: Completion()}
    for event in engine.step():
        replies[event.request].add(event)
    second = engine.submit(asked[1], GREEDY)
    replies[second] = Completion()
    while not replies[second].tokens:
        for event in engine.step():
            replies[event.request].add(event)
    assert len(replies[first].tokens) == 1 + 10  # 149 tokens in chunks of 16 take ten steps
    for number, reply in run(engine, [first, second]).items():
        replies[number].tokens += reply.tokens
        assert replies[number].tokens == recomputed(model, asked[number], GREEDY).tokens


def test_short_prompts_pass_a_long_one_which_waits_at_most_as_long_again(model, monkeypatch):
    """A short chat waited until all of a long prompt was read. Here one comes in every step."""
    aside: list[int] = []  # lengths of the slots that were copied to fresh memory
    take = Cache.take

    def counted(cache: Cache, slot: int, tokens: int) -> list[torch.Tensor]:
        aside.append(tokens)
        return take(cache, slot, tokens)

    monkeypatch.setattr(Cache, "take", counted)
    long, *short = prompts([150, *[12] * 40], seed=9)
    engine = Engine(model, TOKENIZER, slots=3, prefill_tokens=16)
    asked = {engine.submit(long, GREEDY): (long, GREEDY)}
    engine.step()
    (first,) = asked
    replies = {first: Completion()}
    quick = Sampling(temperature=0.0, max_tokens=2)
    while not replies[first].tokens:
        prompt = short.pop()
        number = engine.submit(prompt, quick)
        asked[number], replies[number] = (prompt, quick), Completion()
        for event in engine.step():
            replies[event.request].add(event)
    assert max(aside) < 2 * 12  # never the long one
    begun = [number for number, reply in replies.items() if reply.tokens]
    assert 10 < len(begun) < 20 and len(asked) <= 2 + (149 + 150) / 16 + 2
    while engine.busy:
        for event in engine.step():
            replies[event.request].add(event)
    for number, (prompt, sampling) in asked.items():
        assert replies[number].tokens == recomputed(model, prompt, sampling).tokens


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [None, 5])
def test_a_seed_gives_the_same_text_whatever_the_neighbours(model, top_k):
    prompt, *others = prompts([25, 3, 60, 110, 9], seed=5)
    sampling = Sampling(1.0, top_k, max_tokens=30, seed=7)
    engine = Engine(model, TOKENIZER, slots=5)
    noise = [engine.submit(other, Sampling(1.3, 50, 40, seed=i)) for i, other in enumerate(others[:2])]
    engine.step()
    number = engine.submit(prompt, sampling)
    noise += [engine.submit(other, Sampling(0.0)) for other in others[2:]]
    reply = run(engine, [*noise, number])[number]
    assert_same(reply, recomputed(model, prompt, sampling))
    engine.submit(prompt, Sampling(1.0, top_k, max_tokens=30, seed=8))
    assert run(engine, [number + 3])[number + 3].tokens != reply.tokens


def test_generate_samples_differ_and_do_not_depend_on_order_slots_or_other_prompts(model):
    asked = prompts([8, 30, 8], seed=6)
    sampling = Sampling(1.0, 50, max_tokens=12)
    wide = Engine(model, TOKENIZER, slots=9).generate(asked, sampling, samples=3)
    assert len({tuple(reply.tokens) for reply in wide}) == 9
    narrow = Engine(model, TOKENIZER, slots=2).generate(asked[::-1], sampling, samples=3)
    assert [reply.tokens for reply in narrow] == [reply.tokens for i in (2, 1, 0) for reply in wide[3 * i : 3 * i + 3]]


def test_equal_prompts_are_read_once_also_beside_others_and_beyond_the_slots(model):
    asked = prompts([50, 20, 90], seed=9)
    engine = Engine(model, TOKENIZER, slots=8)
    engine.generate(asked[:1], GREEDY, samples=8)
    assert engine.prompt_tokens_read == 49
    engine = Engine(model, TOKENIZER, slots=5, prefill_tokens=24)
    for i, reply in enumerate(engine.generate(asked, GREEDY, samples=4)):
        assert_same(reply, recomputed(model, asked[i // 4], GREEDY))


def test_a_step_makes_the_host_wait_for_the_device_once(model, monkeypatch):
    engine = Engine(model, TOKENIZER, slots=3, pad=True)
    for prompt in prompts([9, 30, 4], seed=14):
        engine.submit(prompt, Sampling(1.0, 5, max_tokens=30))
    waits = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)
        return lambda tensor, *given: waits.append(name) or original(tensor, *given)

    for name in ("cpu", "numpy", "item", "nonzero", "__int__", "__bool__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    for _ in range(10):
        assert engine.step()
    assert waits == ["cpu"] * 10


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [LENGTH, 64])
def test_a_reply_ends_at_the_limit_of_the_model_or_of_the_engine(model, length):
    asked = prompts([length - 1, length - 2, length - 7], seed=10)
    many = Sampling(0.0, max_tokens=1000)
    replies = Engine(model, TOKENIZER, length=length).generate(asked, many)
    for prompt, reply in zip(asked, replies, strict=True):
        assert_same(reply, recomputed(model, prompt, many, length))
    assert [len(reply.tokens) for reply in replies] == [1, 2, 7]


@pytest.mark.parametrize(("length", "message"), [(0, "empty"), (LENGTH, "too long.*160 tokens.*Shorten")])
def test_a_prompt_that_cannot_be_answered_is_refused_in_words(model, length, message):
    engine = Engine(model, TOKENIZER)
    with pytest.raises(UserError, match=message):
        engine.submit([1] * length, GREEDY)
    assert not engine.busy and engine.generate([], GREEDY) == []


def test_a_tokenizer_of_another_size_is_refused(model):
    with pytest.raises(UserError, match="do not belong together"):
        Engine(model, tiny_tokenizer(280))


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"length": 1}, {"length": LENGTH + 1}])
def test_an_impossible_engine_is_refused(model, wrong):
    with pytest.raises(UserError):
        Engine(model, TOKENIZER, **wrong)


def test_generate_after_an_interruption_finds_an_empty_engine(model):
    engine = Engine(model, TOKENIZER, slots=2)

    def interrupt(index: int, completion: Completion) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts([5, 6, 7]), GREEDY, on_done=interrupt)
    assert not engine.busy and engine.free_slots == 2


@pytest.mark.parametrize("pad", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hundreds_of_random_joins_leaves_and_cancels_lose_no_slot(model, pad):
    rng = random.Random(11)
    pool = [
        (prompt, Sampling(temperature, 20, max_tokens=rng.randint(1, 25), seed=rng.randrange(99)))
        for prompt, temperature in zip(
            prompts([1, 3, 3, 8, 20, 45, 80, 120, 150, 158], seed=12), [0.0, 1.0] * 5, strict=True
        )
    ]
    expected = [recomputed(model, *request) for request in pool]
    engine = Engine(model, TOKENIZER, slots=6, prefill_tokens=48, pad=pad)
    alive: dict[int, tuple[int, Completion]] = {}
    finished = cancelled = 0
    for _ in range(400):
        action = rng.random()
        if action < 0.35:
            chosen = rng.randrange(len(pool))
            alive[engine.submit(*pool[chosen])] = chosen, Completion()
        elif action < 0.45 and alive:
            request = rng.choice(list(alive))
            assert engine.cancel(request) and not engine.cancel(request)
            del alive[request]
            cancelled += 1
        for event in engine.step():
            chosen, reply = alive[event.request]
            reply.add(event)
            if event.finish:
                assert_same(reply, expected[chosen])
                del alive[event.request]
                finished += 1
        assert engine.slots - engine.free_slots + engine.waiting == len(alive)
    for request in list(alive):
        engine.cancel(request)
    assert not engine.busy and engine.free_slots == 6
    assert finished > 40 and cancelled > 20


def test_fewer_prompt_tokens_are_read_beside_replies_that_must_not_wait(monkeypatch):
    model = tiny_gpt(TOKENIZER.vocab_size, 1000)
    seconds = iter(range(10_000))  # every step seems to take a second or more
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: next(seconds))
    engine = Engine(model, TOKENIZER, slots=3, length=1000, prefill_tokens=128, most_seconds=0.5)
    engine.submit(prompts([5])[0], Sampling(0.0, max_tokens=900, ignore_eos=True))
    engine.step()
    prompt, longer = prompts([300, 400])
    number = engine.submit(prompt, Sampling(0.0, max_tokens=5))
    read = []
    events: list[Event] = []
    while not any(event.request == number for event in events):
        before = engine.prompt_tokens_read
        events = engine.step()
        read.append(engine.prompt_tokens_read - before)
    assert read[:5] == [128, 64, 32, 16, 16]
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: 0.0)  # now they take no time
    engine.submit(longer, Sampling(0.0, max_tokens=5))
    read = []
    for _ in range(4):
        before = engine.prompt_tokens_read
        engine.step()
        read.append(engine.prompt_tokens_read - before)
    assert read == [16, 32, 64, 128]

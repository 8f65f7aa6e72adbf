"""Prompts that begin like others are not read again, and their replies are those of a cold engine."""

import random

import pytest

from nanochat.engine import Completion, Engine
from nanochat.generate import slots
from nanochat.generate.sampling import Sampling, sample_settings
from nanochat.generate.slots import MIN_PREFIX, STATE_INTERVAL, common_prefix
from nanochat.gpt import GPT
from tests.support.recurrent_model import Recurrent
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer, words

TOKENIZER = tiny_tokenizer()
LENGTH = 160
GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def model() -> GPT:
    return tiny_gpt(TOKENIZER.vocab_size, LENGTH, bigram_rows=211, offset_layers=1)


def cold(model: GPT, prompt: list[int], sampling: Sampling = GREEDY) -> Completion:
    return Engine(model, TOKENIZER, slots=1).generate([prompt], sampling)[0]


def assert_same(got: Completion, expected: Completion) -> None:
    assert got.tokens == expected.tokens and got.finish == expected.finish
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_second_turn_reads_only_its_new_tokens(model):
    engine = Engine(model, TOKENIZER, slots=4)
    first = words(40, 1)
    (reply,) = engine.generate([first], GREEDY)
    second = [*first, *reply.tokens, *words(9, 2)]
    read = engine.prompt_tokens_read
    (answer,) = engine.generate([second], GREEDY)
    # All but the last token of a reply are in the cache, and the last token of a prompt is left to decoding.
    assert engine.prompt_tokens_read - read == 1 + 9 - 1
    assert answer.reused == engine.prompt_tokens_reused == 40 + len(reply.tokens) - 1
    assert_same(answer, cold(model, second))


@pytest.mark.parametrize("shared", [MIN_PREFIX, 33, 59])
def test_a_cut_at_any_token_gives_the_replies_of_a_cold_engine(model, shared):
    engine, seeded = Engine(model, TOKENIZER, slots=3), Sampling(1.0, 20, max_tokens=15, seed=3)
    first = words(60, 3)
    engine.generate([first], GREEDY)
    other = [*first[:shared], *words(70 - shared, 4)]
    (reply,) = engine.generate([other], seeded)
    assert reply.reused == shared
    assert_same(reply, cold(model, other, seeded))
    (again,) = engine.generate([first], GREEDY)  # what the other one copied from is whole
    assert again.reused == 59
    assert_same(again, cold(model, first))


def test_a_short_common_beginning_is_read_again(model):
    engine = Engine(model, TOKENIZER, slots=2)
    first = words(30, 5)
    engine.generate([first], GREEDY)
    (reply,) = engine.generate([[*first[: MIN_PREFIX - 1], *words(20, 6)]], GREEDY)
    assert reply.reused == 0


def test_a_prompt_is_copied_from_a_request_that_still_runs(model):
    engine = Engine(model, TOKENIZER, slots=3, prefill_tokens=32)
    shared = words(64, 7)
    asked = [[*shared, *words(count, 8 + count)] for count in (5, 9, 21)]
    for prompt, reply in zip(asked, engine.generate(asked, GREEDY), strict=True):
        assert_same(reply, cold(model, prompt))
    assert engine.prompt_tokens_read == 64 + 4 + 8 + 20


def test_the_slot_that_was_not_used_for_the_longest_time_is_given_away(model):
    engine = Engine(model, TOKENIZER, slots=1, spare_slots=2)
    one, two, three, four = (words(30, seed) for seed in range(20, 24))
    for prompt in (one, two, three):
        engine.generate([prompt], GREEDY)
    assert engine.generate([one], GREEDY)[0].reused == 29  # now two is the oldest
    engine.generate([four], GREEDY)
    assert engine.generate([three], GREEDY)[0].reused == 29
    assert engine.generate([two], GREEDY)[0].reused == 0


def test_nothing_is_reused_after_the_weights_have_changed(model):
    engine = Engine(model, TOKENIZER, slots=2)
    prompt = words(30, 30)
    engine.generate([prompt], GREEDY)
    engine.forget()
    assert engine.generate([prompt], GREEDY)[0].reused == 0


@pytest.mark.parametrize("pad", [False, True])
def test_chats_that_come_and_go_in_any_order_equal_cold_ones(model, pad):
    """Turns of eight chats with a common beginning, more than the slots, with cancels in between."""
    rng = random.Random(40)
    engine = Engine(model, TOKENIZER, slots=3, prefill_tokens=24, pad=pad, spare_slots=2)
    system = words(20, 41)
    chats = [[*system, *words(3 + 5 * i, 50 + i)] for i in range(8)]
    expected: dict[tuple[int, ...], Completion] = {}
    running: dict[int, tuple[int, list[int], Completion]] = {}
    finished = 0
    for _ in range(110):
        idle = [i for i in range(8) if all(i != chat for chat, _, _ in running.values())]
        if idle and rng.random() < 0.4:
            chat = rng.choice(idle)
            if len(chats[chat]) > LENGTH - 20:
                chats[chat] = chats[chat][:30]
            running[engine.submit(chats[chat], GREEDY)] = chat, list(chats[chat]), Completion()
        elif running and rng.random() < 0.05:
            number = rng.choice(list(running))
            assert engine.cancel(number)
            del running[number]
        for event in engine.step():
            chat, prompt, reply = running[event.request]
            reply.add(event)
            if event.finish:
                key = tuple(prompt)
                expected[key] = expected[key] if key in expected else cold(model, prompt)
                assert_same(reply, expected[key])
                chats[chat] = [*prompt, *reply.tokens, *words(4, finished)]
                del running[event.request]
                finished += 1
        assert engine.slots - engine.free_slots + engine.waiting == len(running)
    assert finished > 10 and engine.prompt_tokens_reused > engine.prompt_tokens_read / 4


def test_prompt_scores_of_finished_requests_are_bounded_together(model, monkeypatch):
    monkeypatch.setattr(slots, "MAX_SAVED_SCORES", 2 * 40)
    engine = Engine(model, TOKENIZER, slots=4)
    scored = Sampling(0.0, max_tokens=1, prompt_logprobs=1)
    first, second = words(30, 31), words(30, 32)
    engine.generate([first], scored)
    engine.generate([second], scored)
    assert engine.generate([second], scored)[0].reused == 28
    again = engine.generate([first], scored)[0]
    assert again.reused == 0 and len(again.prompt_scores) == 29


# --- suspended replies ---------------------------------------------------------------------------

SUSPENDED = [
    Sampling(0.0, max_tokens=25, logprobs=2),
    Sampling(1.0, 20, max_tokens=30, seed=3, frequency_penalty=0.5, logit_bias=((5, 1.0),)),
    Sampling(1.0, None, max_tokens=20, seed=4, prompt_logprobs=1),
    Sampling(1.0, None, max_tokens=20, seed=5, stop=("never said",)),
]


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("slot_count", [1, 4])
def test_suspended_replies_are_those_of_a_cold_engine(model, recurrent, slot_count):
    """With one slot, others take the slot of a suspended reply, and all of it is computed again."""
    tested = Recurrent(TOKENIZER, LENGTH) if recurrent else model
    rng = random.Random(90)
    engine = Engine(tested, TOKENIZER, slots=slot_count, prefill_tokens=24)  # type: ignore[arg-type]
    prompts = [words(30 + 9 * i, 91 + i) for i in range(4)]
    asked = [
        (prompt, sample_settings(sampling, prompt, 0)) for prompt, sampling in zip(prompts, SUSPENDED, strict=True)
    ]
    replies = {engine.submit(*request): Completion() for request in asked}
    suspended: list[int] = []
    pauses = 0
    while engine.busy or suspended:
        if suspended and (not engine.busy or rng.random() < 0.3):
            engine.resume(suspended.pop(0))
        events = engine.step()
        for event in events:
            replies[event.request].add(event)
        running = [event.request for event in events if event.finish is None]
        if running and rng.random() < 0.2:
            suspended.append(rng.choice(running))
            engine.suspend(suspended[-1])
            pauses += 1
    assert pauses > 5
    for prompt, sampling, reply in zip(prompts, SUSPENDED, replies.values(), strict=True):
        fresh = Recurrent(TOKENIZER, LENGTH) if recurrent else model
        (expected,) = Engine(fresh, TOKENIZER, slots=1).generate([prompt], sampling)  # type: ignore[arg-type]
        assert_same(reply, expected)
        assert [score.token for score in reply.prompt_scores] == [score.token for score in expected.prompt_scores]


def test_a_suspended_reply_that_is_resumed_reads_nothing_again(model):
    engine = Engine(model, TOKENIZER, slots=2)
    number = engine.submit(words(40, 95), GREEDY)
    said = [event.token for _ in range(5) for event in engine.step()]
    read, passes = engine.prompt_tokens_read, engine.passes
    engine.suspend(number)
    assert not engine.busy and engine.free_slots == 2
    engine.resume(number)
    while engine.busy:
        said += [event.token for event in engine.step()]
    assert engine.prompt_tokens_read == read and engine.passes == passes + len(said) - 5
    assert said == cold(model, words(40, 95)).tokens


def test_what_a_suspended_request_had_read_itself_does_not_count_as_reused(model):
    engine = Engine(model, TOKENIZER, slots=2, prefill_tokens=24)
    engine.generate([words(30, 97)], GREEDY)
    prompt = [*words(30, 97), *words(70, 98)]
    number = engine.submit(prompt, GREEDY)
    assert engine.step() == []  # it has read a part of its prompt
    engine.suspend(number)
    engine.resume(number)
    reply = Completion()
    while engine.busy:
        for event in engine.step():
            reply.add(event)
    assert (reply.reused, engine.prompt_tokens_reused) == (30, 30)


def test_a_request_that_has_no_slot_yet_can_be_suspended(model):
    engine = Engine(model, TOKENIZER, slots=1)
    number = engine.submit(words(20, 96), GREEDY)
    engine.suspend(number)
    assert not engine.busy and engine.step() == []
    engine.resume(number)
    said = []
    while engine.busy:
        said += [event.token for event in engine.step()]
    assert said == cold(model, words(20, 96)).tokens


def test_a_suspended_request_can_be_cancelled(model):
    engine = Engine(model, TOKENIZER, slots=1)
    number = engine.submit(words(20, 96), GREEDY)
    engine.step()
    engine.suspend(number)
    assert engine.cancel(number) and not engine.cancel(number)


# --- states that cannot be cut -------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("prefilling", [False, True])
def test_a_pass_that_fails_leaves_nothing_to_reuse(model, recurrent, prefilling, monkeypatch):
    """The cache has read tokens that the slot does not count, as after a lack of memory for the logits."""
    if recurrent:
        model = Recurrent(TOKENIZER, LENGTH)
    engine = Engine(model, TOKENIZER, slots=2, prefill_tokens=20)
    prompt = words(60, 80)
    number = engine.submit(prompt, GREEDY)
    said = [event.token for event in engine.step()]
    while not said and not prefilling:
        said = [event.token for event in engine.step()]
    hidden = model.hidden

    def failing(*args):
        hidden(*args)
        raise MemoryError

    monkeypatch.setattr(model, "hidden", failing)
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.undo()
    engine.cancel(number)
    longer = [*prompt, *said, *words(9, 81)]
    (reply,) = engine.generate([longer], GREEDY)
    assert_same(reply, cold(model, longer))


def test_a_recurrent_state_is_reused_at_borders_and_ends_only():
    model = Recurrent(TOKENIZER, 4 * STATE_INTERVAL)
    engine = Engine(model, TOKENIZER, slots=3)  # type: ignore[arg-type]
    first = words(2 * STATE_INTERVAL + 90, 70)
    (reply,) = engine.generate([first], GREEDY)
    cases = {  # a prompt -> how much of it is reused
        (*first, *reply.tokens, 5, 6): len(first) + len(reply.tokens) - 1,  # the whole slot
        tuple(first): len(first) - 1,  # the end of the prompt
        (*first[: 2 * STATE_INTERVAL + 20], *words(9, 71)): 2 * STATE_INTERVAL,
        (*first[: STATE_INTERVAL + 1], *words(9, 72)): STATE_INTERVAL,
        (*first[: STATE_INTERVAL - 1], *words(9, 73)): 0,
    }
    for prompt, reused in cases.items():
        (again,) = engine.generate([list(prompt)], GREEDY)
        fresh = Engine(Recurrent(TOKENIZER, 4 * STATE_INTERVAL), TOKENIZER, slots=1)  # type: ignore[arg-type]
        assert again.reused == reused
        assert again.tokens == fresh.generate([list(prompt)], GREEDY)[0].tokens
        engine = Engine(model, TOKENIZER, slots=3)  # type: ignore[arg-type]
        engine.generate([first], GREEDY)


def test_a_recurrent_state_is_saved_where_conversations_branch():
    """The beginning that agents share lies far before the end of their prompts, and not at a border."""
    model = Recurrent(TOKENIZER, 20 * STATE_INTERVAL)
    engine = Engine(model, TOKENIZER, slots=4)  # type: ignore[arg-type]
    system = words(3 * STATE_INTERVAL + 50, 75)
    reused = []
    for number in range(4):
        prompt = [*system, *words((4 + 3 * number) * STATE_INTERVAL, 76 + number)]
        (reply,) = engine.generate([prompt], GREEDY)
        reused.append(reply.reused)
        assert_same(reply, cold(Recurrent(TOKENIZER, 20 * STATE_INTERVAL), prompt))  # type: ignore[arg-type]
    assert reused[1] in (2 * STATE_INTERVAL, 3 * STATE_INTERVAL)
    assert reused[2:] == [len(system)] * 2


def test_saved_states_are_spread_over_a_long_prompt():
    saved: list[int] = []
    for length in [*range(STATE_INTERVAL, 20_000, STATE_INTERVAL), 20_000]:
        saved.append(length)
        if len(saved) > slots.MAX_SAVED_STATES:
            saved.remove(slots._least_useful(saved, branch=1_280))
    assert saved[0] == 1_280 and saved[-1] == 20_000
    assert saved[-2] > 17_000 and 5_000 < saved[1] < 15_000


# --- parts ---------------------------------------------------------------------------------------


def test_common_prefixes_equal_a_count_token_by_token():
    rng = random.Random(80)
    for _ in range(300):
        a = [rng.randrange(2) if rng.random() < 0.02 else 0 for _ in range(rng.randrange(60))]
        b = [rng.randrange(2) if rng.random() < 0.02 else 0 for _ in range(rng.randrange(60))]
        expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b) == expected

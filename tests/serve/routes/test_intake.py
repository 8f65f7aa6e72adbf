"""Taking requests in: bodies, turns by size, and prompts that fit the context."""

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fastapi import Request

from nanochat.data.conversation import Conversation, Message, Part, assistant, system, user
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.prompts import SLICE, PromptTooLong, make_prompt
from nanochat.serve.server import BODY_BYTES, LARGE_BYTES, decode_json, read_body
from nanochat.serve.waiting import MOST_ADDRESSES, FairQueue, Turn, Turns
from tests.support.fake_engine import ByteTokenizer
from tests.support.tiny_model import tiny_tokenizer

# --- bodies --------------------------------------------------------------------------------------


def body_of(pieces: list[bytes], **headers: str) -> bytes:
    """What read_body makes of a body that comes in pieces."""
    left = list(pieces)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    given = {"content-type": "application/json", **headers}
    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in given.items()]}
    return asyncio.run(read_body(Request(scope, receive)))


def test_body_of_the_largest_size_is_read_in_any_pieces() -> None:
    assert body_of([b"x" * (BODY_BYTES - 1), b"y"]) == b"x" * (BODY_BYTES - 1) + b"y"


@pytest.mark.parametrize("pieces", [[b"x" * (BODY_BYTES + 1)], [b"x" * BODY_BYTES, b"y"]])
def test_larger_body_is_refused(pieces: list[bytes]) -> None:
    with pytest.raises(ApiError, match="262,144 bytes") as caught:
        body_of(pieces)
    assert caught.value.status == 413


def test_body_that_is_announced_too_large_is_not_read_at_all() -> None:
    with pytest.raises(ApiError, match="262,144 bytes"):
        body_of([], **{"content-length": str(BODY_BYTES + 1)})  # with nothing to receive, reading would fail


def test_json_that_is_none_is_refused() -> None:
    assert decode_json(b'{"a": [1]}') == {"a": [1]}
    for body in (b"", b"\xff", b"1" * 5000):
        with pytest.raises(ApiError, match="not valid JSON"):
            decode_json(body)


def test_values_that_are_nested_too_deep_are_refused() -> None:
    """Templates walk them by recursion: 800 lists made the server fail."""
    deepest, texts = b"[" * 100 + b"]" * 100, b'["' + b"[{" * 900 + b'"]'
    assert len(decode_json(deepest)) == len(decode_json(texts)) == 1
    for deep in (b"[" * 100_000, b"[" + deepest + b"]", b'{"a":' * 800 + b"1" + b"}" * 800):
        with pytest.raises(ApiError, match="100 deep") as caught:
            decode_json(deep)
        assert caught.value.status == 400


@pytest.mark.parametrize("piece", [b'{"":0},', b"[],", b'"",', b"0,"])
def test_a_large_body_of_many_values_is_refused_before_it_is_decoded(piece: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_json(b"[" + piece * (LARGE_BYTES // len(piece)) + b"0]")
    assert caught.value.code == "too_many_values"


def test_marks_in_the_texts_of_a_large_body_do_not_count() -> None:
    texts = ['[1, {2: "3"}]', "\\", '\\"', "\n,:[{" * 100_000]
    assert decode_json(json.dumps({"a": texts}).encode()) == {"a": texts}


def test_large_chat_is_refused_without_encoding_all_of_it() -> None:
    tokenizer, encoded = ByteTokenizer(), []
    plain = tokenizer.encode
    tokenizer.encode = lambda text: encoded.append(len(text)) or plain(text)  # type: ignore[method-assign]
    with pytest.raises(PromptTooLong):
        make_prompt(Conversation((user("x" * (8 << 20)),)), 1, True, tokenizer, 5000)  # type: ignore[arg-type]
    assert sum(encoded) <= 2 * SLICE


def thinking(text: str, thought: str = "") -> Message:
    fields = {"reasoning_content": thought} if thought else {}
    return Message("assistant", (Part("text", text),), fields=fields)


def test_a_large_chat_is_cut_to_its_newest_exchanges() -> None:
    tokenizer, encoded = ByteTokenizer(), []
    plain = tokenizer.encode
    tokenizer.encode = lambda text: encoded.append(len(text)) or plain(text)  # type: ignore[method-assign]
    turns = (user("be brief"), *(turn for _ in range(9) for turn in (assistant("y" * (1 << 16)), user("z" * 100))))
    prompt, dropped = make_prompt(Conversation((system("s"), *turns)), 50, True, tokenizer, 5000)  # type: ignore[arg-type]
    assert dropped == 18 and tokenizer.decode(prompt).count("z") == 100
    assert sum(encoded) < 1 << 18
    with pytest.raises(PromptTooLong):
        make_prompt(Conversation(turns), 50, False, tokenizer, 5000)  # type: ignore[arg-type]


def test_old_thoughts_that_the_template_drops_make_no_chat_large() -> None:
    """ByteTokenizer writes no thoughts at all, as templates do before the last question."""
    turns = [turn for _ in range(9) for turn in (user("x"), thinking("y", "hm" * (1 << 16)))]
    prompt, dropped = make_prompt(Conversation((*turns, user("z"))), 1, False, ByteTokenizer(), 500)  # type: ignore[arg-type]
    assert len(prompt) < 100 and dropped == 0
    with pytest.raises(PromptTooLong):  # a thought after the last question is written
        late = (user("x"), thinking("", "hm" * (1 << 18)), Message("tool", (Part("text", "z"),)))
        make_prompt(Conversation(late), 1, False, ByteTokenizer(), 500)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_lacks_are_refused(number: str) -> None:
    with pytest.raises(ApiError, match=f"finite, got {number}: send") as caught:
        decode_json(f'{{"a": [{number}]}}'.encode())
    assert caught.value.status == 400


def test_half_a_surrogate_pair_becomes_the_mark_of_a_missing_character() -> None:
    text = rb'{"\uD800": ["\udc00\ud83d", "\ud83d\ude00", "\\ud800", "\\\ud800", "\ud83dx\ude00", "\u00e9\n"]}'
    texts = ["\ufffd\ufffd", "\U0001f600", r"\ud800", "\\\ufffd", "\ufffdx\ufffd", "\u00e9\n"]
    assert decode_json(text) == {"\ufffd": texts}
    with pytest.raises(ApiError, match="in UTF-8"):
        decode_json(b'"\xed\xa0\x80"')


# --- turns ---------------------------------------------------------------------------------------


def served(waiting: int, arrivals: list[dict[str, Any]], leaving: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The arrivals that get their turn, in order, and those that are refused; the ones at `leaving` leave the queue."""

    async def main() -> tuple[list[int], list[int]]:
        turns, done, refused = Turns(waiting), [], []

        async def one(number: int) -> None:
            try:
                async with turns.turn(**arrivals[number]):
                    await asyncio.sleep(0)
                    done.append(number)
            except asyncio.QueueFull:
                refused.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(len(arrivals))]
        await asyncio.sleep(0)
        for number in leaving:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done, refused

    clock = SimpleNamespace(monotonic=lambda: 0.0)  # a busy host would make one turn longer than another
    with mock.patch("nanochat.serve.waiting.time", clock):
        return asyncio.run(asyncio.wait_for(main(), 30))


def order(sizes: list[int], waiting: int, leaving: tuple[int, ...] = ()) -> tuple[list[int], list[int]]:
    """The sizes that get their turn, in order, and those that are refused."""
    done, refused = served(waiting, [{"size": size} for size in sizes], leaving)
    return [sizes[number] for number in done], [sizes[number] for number in refused]


def test_the_smallest_goes_first_and_equal_ones_in_the_order_of_arrival() -> None:
    assert order([5, 9, 3, 7, 1], waiting=10) == ([5, 1, 3, 7, 9], [])


def test_the_largest_is_refused_when_too_many_wait() -> None:
    done, refused = order([5, 9, 3, 7, 1], waiting=2)
    assert (done, sorted(refused)) == ([5, 1, 3], [7, 9])


def test_a_request_that_has_left_the_queue_takes_no_place_in_it() -> None:
    async def main() -> str:
        turns = Turns(1)

        async def wait() -> None:
            async with turns.turn(size=1):
                pass

        async with turns.turn():
            leaving = asyncio.create_task(wait())
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            staying = asyncio.create_task(wait())
            await asyncio.sleep(0)
            another = asyncio.create_task(wait())  # equal in size, and later than the one that stays
            await asyncio.gather(another, return_exceptions=True)
        await staying
        return type(another.exception()).__name__

    assert asyncio.run(asyncio.wait_for(main(), 30)) == "QueueFull"


def test_one_that_leaves_does_not_stop_the_others() -> None:
    assert order([5, 9, 3, 7, 1], waiting=10, leaving=(0,)) == ([1, 3, 7, 9], [])
    assert order([5, 9, 3, 7, 1], waiting=10, leaving=(1, 2, 4)) == ([5, 7], [])
    assert order([5, 9, 3], waiting=10, leaving=(0, 1, 2)) == ([], [])


def test_random_arrivals_refusals_and_leavers_never_lock_up() -> None:
    draw = random.Random(1)
    for _ in range(300):
        sizes = [draw.randrange(10) for _ in range(draw.randrange(1, 12))]
        leaving = tuple(draw.sample(range(len(sizes)), draw.randrange(len(sizes))))
        done, refused = order(sizes, draw.randrange(1, 5), leaving)
        assert len(done) + len(refused) >= len(sizes) - len(leaving)


# --- prompts -------------------------------------------------------------------------------------


def chat(exchanges: int, *before: Message) -> tuple[Message, ...]:
    turns = [message for i in range(exchanges) for message in (user(f"the cat {i}"), assistant(f"sat {i} on the mat"))]
    return (*before, *turns, user("on what?"))


@pytest.mark.parametrize("before", [(), (system("be brief"),)], ids=["", "with instructions"])
@pytest.mark.parametrize("context", [60, 61, 62, 100, 1000, 5000])
def test_truncation_drops_as_few_exchanges_as_it_can(before: tuple[Message, ...], context: int) -> None:
    """Compared with trying every number of exchanges."""
    tokenizer, messages = tiny_tokenizer(), chat(40, *before)
    prompt, dropped = make_prompt(Conversation(messages), 10, True, tokenizer, context)
    rest = messages[len(before) :]
    fits = [
        count
        for count in range(0, len(rest), 2)
        if len(tokenizer.render_prompt(Conversation((*before, *rest[count:])))) + 10 <= context
    ]
    assert dropped == fits[0]
    assert prompt == tokenizer.render_prompt(Conversation((*before, *rest[dropped:])))


def test_truncation_encodes_no_more_than_the_context_reaches() -> None:
    tokenizer = ByteTokenizer()
    encoded: list[str] = []
    plain = tokenizer.encode
    tokenizer.encode = lambda text: encoded.append(text) or plain(text)  # type: ignore[method-assign]
    make_prompt(Conversation(chat(400)), 1, True, tokenizer, 100)  # type: ignore[arg-type]
    assert len(encoded) < 30


def test_prompt_that_cannot_fit_is_refused_with_its_length() -> None:
    for truncate in (True, False):
        with pytest.raises(ApiError, match="holds 50 tokens; the messages have 104"):
            make_prompt(Conversation((user("x" * 100),)), 1, truncate, ByteTokenizer(), 50)  # type: ignore[arg-type]


def test_a_begun_reply_that_is_longer_than_the_context_is_refused_with_the_lengths_of_both() -> None:
    """It was told that the context holds -45 tokens."""
    with pytest.raises(ApiError, match="holds 50 tokens; the messages have 100"):
        make_prompt(Conversation((user("x"),)), 1, False, ByteTokenizer(), 50, begun=95)  # type: ignore[arg-type]


def by_address(owners: str, waiting: int, leaving: tuple[int, ...] = ()) -> tuple[str, str]:
    """The arrivals that get their turn, in order, and those that are refused; each letter is an address."""
    done, refused = served(waiting, [{"owner": owner} for owner in owners], leaving)
    return " ".join(f"{owners[n]}{n}" for n in done), " ".join(f"{owners[n]}{n}" for n in sorted(refused))


def test_addresses_take_turns_and_the_one_with_most_requests_gives_way() -> None:
    assert by_address("aaaab", waiting=9) == ("a0 b4 a1 a2 a3", "")
    assert by_address("aaaabc", waiting=3) == ("a0 b4 c5 a1", "a2 a3")
    assert by_address("aaa", waiting=1) == ("a0 a1", "a2")


def test_a_turn_passes_on_when_one_leaves() -> None:
    assert by_address("aaab", waiting=9, leaving=(0,)) == ("b3 a1 a2", "")
    assert by_address("aaab", waiting=9, leaving=(1, 3)) == ("a0 a2", "")


def turn_of(owner: str, size: int = 0) -> Turn:
    return Turn(owner, size, comes=None)  # type: ignore[arg-type]


def test_an_address_that_uses_much_time_gives_way_to_one_that_uses_little() -> None:
    queue, order = FairQueue(100), ""
    for owner in "aaaabbbb":
        queue.add(turn_of(owner))
    while turn := queue.next():
        order += turn.owner
        queue.count(turn.owner, 2.0 if turn.owner == "a" else 0.5)
    assert order == "abbbbaaa"


def test_a_newcomer_is_next_however_long_the_others_have_been_served() -> None:
    queue = FairQueue(100)
    for _ in range(9):
        queue.add(turn_of("old"))
    for _ in range(3):
        queue.next()
        queue.count("old", 5.0)
    queue.next()
    queue.add(turn_of("new"))
    queue.add(turn_of("new"))
    queue.count("old", 5.0)
    assert queue.next() is not None
    queue.count("new", 6.0)  # and it does not make up for the time before it came
    following = queue.next()
    assert following is not None and following.owner == "old"


def test_each_address_sends_its_smallest_body_first() -> None:
    arrivals = [("a", 1), ("a", 9), ("b", 8), ("a", 2), ("b", 3)]
    done, _ = served(9, [{"owner": owner, "size": size} for owner, size in arrivals], ())
    assert [arrivals[number] for number in done] == [("a", 1), ("b", 3), ("a", 2), ("b", 8), ("a", 9)]


def test_the_times_of_addresses_that_have_left_are_forgotten() -> None:
    queue = FairQueue(10)
    for number in range(3 * MOST_ADDRESSES):
        queue.add(turn_of(str(number)))
        queue.next()
        queue.count(str(number), 1.0)
    assert len(queue._used) <= MOST_ADDRESSES + 1


def test_the_time_of_an_address_is_remembered_while_some_hundred_others_are_served() -> None:
    queue = FairQueue(10)
    for owner in ("slow", *map(str, range(MOST_ADDRESSES - 1))):
        queue.add(turn_of(owner))
        queue.next()
        queue.count(owner, 9.0 if owner == "slow" else 0.1)
    queue.add(turn_of("slow"))
    queue.add(turn_of("0"))
    following = queue.next()
    assert following is not None and following.owner == "0"

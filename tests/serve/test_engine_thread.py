"""The engine's thread: events reach their ticket, slots come back, the queue is bounded, failures do not end it."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.data.conversation import Conversation, user
from nanochat.generate.sampling import Sampling
from nanochat.serve import engine_thread
from nanochat.serve.engine_thread import Displaced, EngineThread, Ticket
from nanochat.serve.routes.fields import ApiError
from tests.support.fake_engine import ByteTokenizer, FakeEngine


def prompt(text: str) -> list[int]:
    return ByteTokenizer().render_prompt(Conversation((user(text),)))


@dataclass(eq=False)
class Sized:
    """Stands in for an automaton."""

    size: float = 0.0


def ticket(text: str, owner: str = "", holds: Sized | None = None, scores: int = 0) -> Ticket:
    return Ticket([(prompt(text), Sampling())], owner, holds, scores)


@contextlib.asynccontextmanager
async def started(engine: FakeEngine, waiting: int = 4) -> AsyncIterator[EngineThread]:
    thread = EngineThread(engine, waiting)
    thread.start()
    try:
        yield thread
    finally:
        engine.allow(10_000)
        await thread.stop()


async def said(submitted: Ticket) -> str:
    tokens = []
    while True:
        events = [event for _, event in await submitted.events()]
        tokens += [event.token for event in events]
        if events[-1].finish:
            return bytes(tokens[:-1]).decode()


async def until(condition: Any) -> None:
    """Wait for another thread. asynchronous() sets a time limit, which ends a wait for something that never happens."""
    while not condition():
        await asyncio.sleep(0)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own, for at most a minute."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), timeout=60))

    return run


@asynchronous
async def test_every_ticket_gets_its_own_answer():
    async with started(FakeEngine(slots=3), waiting=20) as thread:
        tickets = [ticket(f"问题 {i}") for i in range(20)]
        for each in tickets:
            thread.submit(each)
        assert await asyncio.gather(*map(said, tickets)) == [f"问题 {i}" for i in range(20)]
        for each in tickets:
            thread.release(each)
        await until(lambda: thread.free_slots == 3)
        assert not thread.tickets


@asynchronous
async def test_replies_under_schemas_of_one_address_leave_slots_to_others():
    engine = FakeEngine(slots=16, gated=True)
    async with started(engine, waiting=40) as thread:
        first = [ticket(f"alone {i}", "one", Sized()) for i in range(10)]
        for each in first:
            thread.submit(each)
        engine.allow(1)
        await first[7].events()
        assert [each.begun for each in first] == [True] * 8 + [False] * 2
        plain = ticket("plain", "two")
        thread.submit(plain)
        await until(lambda: plain.begun)
        assert not first[8].begun
        engine.allow(10_000)
        assert await asyncio.gather(*map(said, (plain, *first[8:]))) == ["plain", "alone 8", "alone 9"]


@asynchronous
async def test_beside_another_address_replies_under_schemas_have_fewer_slots():
    engine = FakeEngine(slots=16, gated=True)
    async with started(engine, waiting=40) as thread:
        plain, ruled = ticket("plain", "two"), [ticket(f"ruled {i}", "one", Sized()) for i in range(5)]
        for each in (plain, *ruled):
            thread.submit(each)
        engine.allow(1)
        await asyncio.gather(plain.events(), ruled[1].events())
        assert [each.begun for each in ruled] == [True] * 2 + [False] * 3
        engine.allow(10_000)
        assert await asyncio.gather(*map(said, ruled[2:])) == [f"ruled {i}" for i in range(2, 5)]


@asynchronous
async def test_release_frees_the_slot_of_a_running_ticket_and_the_place_of_a_waiting_one():
    engine = FakeEngine(slots=1, gated=True)
    async with started(engine) as thread:
        running, waiting, last = ticket("running"), ticket("waiting"), ticket("last")
        for each in (running, waiting, last):
            thread.submit(each)
        engine.allow(2)
        await running.events()
        thread.release(waiting)
        thread.release(running)
        engine.allow(1000)
        assert await said(last) == "last"
        thread.release(last)
        await until(lambda: thread.free_slots == 1)
        assert [seen.cancelled for seen in engine.seen] == [True, False]  # the engine never saw the waiting one


@asynchronous
async def test_news_is_not_left_behind_when_the_last_other_ticket_is_released(monkeypatch):
    monkeypatch.setattr(engine_thread, "NEWS_SECONDS", float("inf"))
    engine = FakeEngine(slots=2, gated=True)
    async with started(engine) as thread:
        short, long = ticket("x"), ticket("something longer")
        thread.submit(short)
        thread.submit(long)
        engine.allow(2)  # ends the short reply; the thread holds that news back for a later delivery
        await until(lambda: len(engine.seen) == 2 and engine.seen[0].said == 2)
        thread.release(long)
        assert await said(short) == "x"


@asynchronous
async def test_complete_reply_gives_its_place_to_another_before_anyone_reads_it():
    async with started(FakeEngine(slots=1), waiting=1) as thread:
        unread = [ticket(str(i)) for i in range(10)]
        for each in unread:
            await until(lambda: not thread.full())
            thread.submit(each)
        await until(lambda: not thread.tickets)
        assert [await said(each) for each in unread] == [str(i) for i in range(10)]


@asynchronous
async def test_failing_engine_fails_the_chats_in_flight_and_serves_the_next(capfd):
    engine = FakeEngine(slots=2, fail=True)
    async with started(engine) as thread:
        first, second = ticket("first"), ticket("second")
        thread.submit(first)
        with pytest.raises(RuntimeError, match="the device is gone"):
            await said(first)
        thread.release(first)
        thread.submit(second)
        assert await said(second) == "second"
        assert thread.alive
    assert "the device is gone" in capfd.readouterr().err


@pytest.mark.parametrize("kind", [ValueError, UserError])
@asynchronous
async def test_a_refused_request_is_told_why_and_its_neighbours_are_answered(kind, capsys):
    class Refusing(FakeEngine):
        def submit(self, prompt: list[int], sampling: Sampling) -> int:
            if sampling.schema is not None:
                raise kind("the JSON schema cannot be met")
            return super().submit(prompt, sampling)

    async with started(Refusing(slots=2)) as thread:
        good, bad = ticket("good"), Ticket([(prompt("bad"), Sampling(schema='{"enum": []}'))])
        thread.submit(bad)
        thread.submit(good)
        with pytest.raises(kind, match="cannot be met"):
            await bad.events()
        assert await said(good) == "good"
        assert thread.free_slots == 2 and not thread.tickets
    assert kind is ValueError or capsys.readouterr().err == ""  # a client's mistake is not the server's failure


@asynchronous
async def test_idle_thread_stops_at_once():
    thread = EngineThread(FakeEngine(), 1)
    thread.start()
    await thread.stop()
    assert not thread.alive


# --- addresses -----------------------------------------------------------------------------------


def order(engine: FakeEngine) -> list[str]:
    """The questions in the order in which the engine got them."""
    return [bytes(seen.prompt[2:-2]).decode() for seen in engine.seen]


@asynchronous
async def test_waiting_addresses_take_turns():
    engine = FakeEngine(slots=1, gated=True)
    async with started(engine, waiting=20) as thread:
        names = ["a0", "a1", "a2", "a3", "b0", "c0", "b1"]
        tickets = [ticket(name, owner=name[0]) for name in names]
        thread.submit(tickets[0])
        await until(lambda: tickets[0].begun)
        for each in tickets[1:]:
            thread.submit(each)
        engine.allow(1000)
        assert await asyncio.gather(*map(said, tickets)) == names
        assert order(engine) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


@asynchronous
async def test_full_queue_takes_the_newest_place_of_the_address_with_most():
    engine = FakeEngine(slots=1, gated=True)
    async with started(engine, waiting=4) as thread:
        crowd = [ticket(f"a{i}", "a") for i in range(5)]
        thread.submit(crowd[0])
        await until(lambda: crowd[0].begun)
        for each in crowd[1:]:
            thread.submit(each)
        with pytest.raises(asyncio.QueueFull):
            thread.submit(ticket("a5", "a"))
        newcomer = ticket("b0", "b")
        thread.submit(newcomer)
        with pytest.raises(Displaced):
            await crowd[4].events()
        second = ticket("b1", "b")
        thread.submit(second)
        with pytest.raises(Displaced):
            await crowd[3].events()
        with pytest.raises(asyncio.QueueFull):  # both have two waiting: nobody gives way
            thread.submit(ticket("b2", "b"))
        thread.release(crowd[2])
        thread.submit(ticket("b2", "b"))  # in the place that was given back
        engine.allow(1000)
        assert await asyncio.gather(*map(said, [*crowd[:2], newcomer, second])) == ["a0", "a1", "b0", "b1"]


@asynchronous
async def test_an_address_that_fills_all_slots_gives_one_to_another_at_once():
    engine = FakeEngine(slots=4, gated=True)
    async with started(engine, waiting=40) as thread:
        crowd = [ticket(f"crowd {i}", "a") for i in range(9)]
        for each in crowd:
            thread.submit(each)
        await until(lambda: sum(each.begun for each in crowd) == 4)
        engine.allow(1)
        others = [ticket("one", "b"), ticket("two", "b"), ticket("three", "b")]
        for each in others:
            thread.submit(each)
        engine.allow(1)
        await until(lambda: others[1].begun)
        assert [len(each.suspended) for each in crowd[:4]] == [0, 0, 1, 1]
        assert not others[2].begun  # two slots each are fair
        engine.allow(10_000)
        assert await asyncio.gather(*map(said, others)) == ["one", "two", "three"]
        assert await asyncio.gather(*map(said, crowd)) == [f"crowd {i}" for i in range(9)]
        assert thread.free_slots == 4 and not thread.tickets


@asynchronous
async def test_a_request_gives_way_before_the_engine_has_given_it_a_slot():
    """Another address asks just after the last free slot was promised, and before the step that fills it."""
    engine = FakeEngine(slots=2)
    crowd, other = [ticket(f"crowd {i}", "a") for i in range(2)], ticket("other", "b")
    async with started(engine) as thread:
        submit = engine.submit

        def arrive_behind(*request: Any) -> int:
            number = submit(*request)
            if number == 1:
                thread.submit(other)
            return number

        engine.submit = arrive_behind  # type: ignore[method-assign]
        for each in crowd:
            thread.submit(each)
        assert await asyncio.gather(*map(said, [*crowd, other])) == ["crowd 0", "crowd 1", "other"]


@asynchronous
async def test_chats_are_answered_after_the_thread_has_ended():
    """A fault of the thread's own bookkeeping, here an event of a request that it does not know."""
    engine = FakeEngine(slots=1, gated=True)
    running, waiting = ticket("first"), ticket("second")
    async with started(engine) as thread:
        thread.submit(running)
        thread.submit(waiting)
        await until(lambda: thread._running)
        thread._running.clear()
        engine.allow(1)
        for each in (running, waiting):
            with pytest.raises(ApiError) as refusal:
                await said(each)
            assert (refusal.value.status, refusal.value.code) == (503, "engine_stopped")
        with pytest.raises(ApiError):
            thread.submit(ticket("third"))
        await until(lambda: not thread.alive)  # it tells its chats a moment before it has ended


@asynchronous
async def test_a_suspended_ticket_can_be_released():
    engine = FakeEngine(slots=2, gated=True)
    async with started(engine, waiting=40) as thread:
        crowd, other = [ticket(f"crowd {i}", "a") for i in range(2)], ticket("other", "b")
        for each in crowd:
            thread.submit(each)
        await until(lambda: crowd[1].begun)
        thread.submit(other)
        engine.allow(1)
        await until(lambda: crowd[1].suspended)
        thread.release(crowd[1])
        await until(lambda: engine.seen[1].cancelled)
        engine.allow(10_000)
        assert await said(crowd[0]) == "crowd 0" and await said(other) == "other"


@asynchronous
async def test_the_size_of_all_tickets_and_of_one_addresses_is_bounded_until_their_release(monkeypatch):
    monkeypatch.setattr(engine_thread, "MOST_BYTES", 10_000)
    monkeypatch.setattr(engine_thread, "SCORE_BYTES", 1)
    engine = FakeEngine(slots=8)
    async with started(engine) as thread:
        automaton = Sized(2000)
        first, same = ticket("x", "a", automaton), ticket("y", "a", automaton, scores=2000)
        for each in (first, same):
            thread.submit(each)
        assert await said(first) == "x"
        for refused in (ticket("z", "a", Sized(2000)), ticket("z", "a", scores=2000)):
            with pytest.raises(asyncio.QueueFull):
                thread.submit(refused)
        large = ticket("z", "b", scores=5000)  # alone, an address may have more than its share
        thread.submit(large)
        with pytest.raises(asyncio.QueueFull):
            thread.submit(ticket("z", "c", scores=1000))
        thread.release(large)
        thread.submit(ticket("z", "c", scores=1000))


@asynchronous
async def test_events_that_nobody_reads_end_the_ticket_with_the_most(monkeypatch):
    monkeypatch.setattr(engine_thread, "UNREAD_BYTES", 100 * engine_thread.EVENT_BYTES)
    async with started(FakeEngine(slots=2)) as thread:
        unread, short = ticket("x" * 1000), ticket("y" * 50)
        thread.submit(short)
        thread.submit(unread)
        await until(lambda: not thread.tickets)
        with pytest.raises(ApiError, match="too slowly"):
            await unread.events()
        assert await said(short) == "y" * 50
        await until(lambda: thread.free_slots == 2)


# --- several requests on one ticket --------------------------------------------------------------


@asynchronous
async def test_ticket_of_several_requests_gets_each_answer_under_its_place():
    async with started(FakeEngine(slots=2)) as thread:
        both = Ticket([(prompt(f"question {i}"), Sampling()) for i in range(5)])
        thread.submit(both)
        texts: dict[int, list[int]] = {}
        while both in thread.tickets or both.unfinished:
            for place, event in await both.events():
                texts.setdefault(place, []).append(event.token)
        assert {place: bytes(ids[:-1]).decode() for place, ids in texts.items()} == {
            i: f"question {i}" for i in range(5)
        }
        assert not thread.tickets


@asynchronous
async def test_address_with_many_requests_on_a_ticket_shares_the_slots():
    engine = FakeEngine(slots=1, gated=True)
    async with started(engine) as thread:
        batch, single = Ticket([(prompt(f"a{i}"), Sampling()) for i in range(9)], "a"), ticket("b", "b")
        thread.submit(batch)
        await until(lambda: batch.begun)
        thread.submit(single)
        engine.allow(1000)
        assert await said(single) == "b"
        assert order(engine).index("b") <= 2


@asynchronous
async def test_release_takes_back_all_requests_of_a_ticket():
    engine = FakeEngine(slots=2, gated=True)
    async with started(engine) as thread:
        batch, last = Ticket([(prompt(f"a{i}"), Sampling()) for i in range(5)]), ticket("last")
        thread.submit(batch)
        await until(lambda: thread.free_slots == 0 or len(engine.seen) == 2)
        thread.release(batch)
        thread.submit(last)
        engine.allow(1000)
        assert await said(last) == "last"
        await until(lambda: thread.free_slots == 2)
        assert [seen.cancelled for seen in engine.seen] == [True, True, False]


@asynchronous
async def test_an_engine_that_rests_gives_freed_memory_back(monkeypatch: pytest.MonkeyPatch):
    engine = FakeEngine(slots=1)
    busy_when_given_back: list[bool] = []
    monkeypatch.setattr(engine_thread, "REST_SECONDS", 0.01)
    monkeypatch.setattr(engine_thread, "give_freed_memory_back", lambda: busy_when_given_back.append(engine.busy))
    async with started(engine) as thread:
        await until(lambda: busy_when_given_back)
        earlier = len(busy_when_given_back)
        answered = ticket("once more")
        thread.submit(answered)
        assert await said(answered) == "once more"
        await until(lambda: len(busy_when_given_back) > earlier)
    assert not any(busy_when_given_back)

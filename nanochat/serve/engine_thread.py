"""Runs an engine in a thread of its own, and connects that thread with an asyncio loop."""

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from nanochat.common import UserError


class EngineEvent(Protocol):
    """One token of a request. `finish` is the reason why the reply ended, on the last token only."""

    @property
    def request(self) -> int: ...

    @property
    def finish(self) -> str | None: ...


NEWS_SECONDS = 0.02  # least time between two deliveries: too short for a reader to notice

E = TypeVar("E", bound=EngineEvent)
E_co = TypeVar("E_co", bound=EngineEvent, covariant=True)


class StepEngine(Protocol[E_co]):
    """The part of engine.Engine that the thread uses."""

    @property
    def busy(self) -> bool: ...

    @property
    def free_slots(self) -> int: ...

    def submit(self, prompt: list[int], sampling: Any) -> int: ...

    def step(self) -> Sequence[E_co]: ...

    def cancel(self, request: int) -> bool: ...


class Ticket(Generic[E]):
    """One request to the engine thread, and the queue in which the events of its reply come back."""

    def __init__(self, prompt: list[int], sampling: Any):
        self.prompt = prompt
        self.sampling = sampling
        self.request: int | None = None  # the engine's request number; only the engine thread uses it
        self._news: asyncio.Queue[E | Exception] = asyncio.Queue()

    def tell(self, news: E | Exception) -> None:
        """Queue an event, or the failure that ends the request."""
        self._news.put_nowait(news)

    async def events(self) -> list[E]:
        """Wait for news; return all events since the last call, at least one. Raises what the engine raised."""
        news = [await self._news.get()]
        while not self._news.empty():
            news.append(self._news.get_nowait())
        events: list[E] = []
        for item in news:
            if isinstance(item, Exception):
                raise item
            events.append(item)
        return events


class EngineThread(Generic[E]):
    """Owns the engine: no other thread touches it. Call the public methods on the event loop.

    Commands enter through a queue that the thread empties before every step. One callback delivers the events of all
    tickets, at most every NEWS_SECONDS: Python runs one thread at a time, so the engine stands still while the loop
    sends a piece, and fewer deliveries leave it more time. The loop never waits for the model, and the model never
    waits for a client.
    """

    def __init__(self, engine: StepEngine[E], waiting: int):
        """`waiting` is the number of tickets that may wait beyond the ones that have a slot."""
        self.slots = self.free_slots = engine.free_slots
        self.tickets: set[Ticket[E]] = set()  # submitted; neither released nor at their end
        self._engine = engine
        self._most = self.slots + waiting
        self._inbox: queue.SimpleQueue[tuple[Ticket[E], bool] | None] = queue.SimpleQueue()
        # Only the engine thread uses the next three.
        self._running: dict[int, Ticket[E]] = {}  # by the engine's request number
        self._news: list[tuple[Ticket[E], E | Exception]] = []  # not delivered yet
        self._published = 0.0  # time of the last delivery, by the monotonic clock
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; it delivers to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def full(self) -> bool:
        """Whether as many tickets wait as may wait."""
        return len(self.tickets) >= self._most

    def submit(self, ticket: Ticket[E]) -> None:
        """Queue a ticket; the caller must release it. Raises asyncio.QueueFull if too many tickets wait already.

        The end of a reply gives its place to another ticket, even if its client never reads it.
        """
        if self.full:
            raise asyncio.QueueFull
        self.tickets.add(ticket)
        self._inbox.put((ticket, True))

    def release(self, ticket: Ticket[E]) -> None:
        """Give a ticket back. If its reply is unfinished, the engine cancels it before the next step."""
        self.tickets.discard(ticket)
        self._inbox.put((ticket, False))

    def dismiss(self, reason: Exception) -> None:
        """End every reply with a failure; the owners of the tickets still release them."""
        for ticket in self.tickets:
            ticket.tell(reason)

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while self._obey():
            try:
                events = self._engine.step()
            except Exception as failure:  # the edge of the thread: fail the chats in flight, keep serving new ones
                traceback.print_exc()
                self._fail(failure)
            else:
                self._news += [(self._running[event.request], event) for event in events]
                for event in events:
                    if event.finish is not None:
                        del self._running[event.request]
            self.free_slots = self._engine.free_slots
            if time.monotonic() - self._published >= NEWS_SECONDS:
                self._publish()

    def _obey(self) -> bool:
        """Carry out all commands; wait for one if there is nothing to compute. False if the thread must end."""
        while not self._inbox.empty() or not self._engine.busy:
            if self._inbox.empty():
                self._publish()  # before it waits: a cancel may have left news undelivered
            command = self._inbox.get()
            if command is None:
                return False
            ticket, wanted = command
            if wanted:
                self._admit(ticket)
            elif ticket.request is not None and self._running.pop(ticket.request, None) is not None:
                self._engine.cancel(ticket.request)
            self.free_slots = self._engine.free_slots
        return True

    def _admit(self, ticket: Ticket[E]) -> None:
        try:
            ticket.request = self._engine.submit(ticket.prompt, ticket.sampling)
        except UserError as failure:  # the client's mistake
            self._news.append((ticket, failure))
        except Exception as failure:  # the edge of the thread, as in _run
            traceback.print_exc()
            self._news.append((ticket, failure))
        else:
            self._running[ticket.request] = ticket

    def _fail(self, failure: Exception) -> None:
        self._news += [(ticket, failure) for ticket in self._running.values()]
        for request in self._running:
            self._engine.cancel(request)
        self._running.clear()

    def _publish(self) -> None:
        assert self._loop is not None
        if self._news:
            self._loop.call_soon_threadsafe(self._deliver, self._news)
            self._news, self._published = [], time.monotonic()

    # --- on the loop -----------------------------------------------------------------------------

    def _deliver(self, news: Sequence[tuple[Ticket[E], E | Exception]]) -> None:
        for ticket, item in news:
            ticket.tell(item)
            if isinstance(item, Exception) or item.finish is not None:
                self.tickets.discard(ticket)

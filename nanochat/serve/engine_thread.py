"""Runs an engine in a thread of its own, and connects that thread with an asyncio loop."""

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from nanochat.common import UserError
from nanochat.serve.waiting import Line


class EngineEvent(Protocol):
    """One token of a request. `finish` is the reason why the reply ended, on the last token
    only."""

    @property
    def request(self) -> int: ...

    @property
    def finish(self) -> str | None: ...


# An address may fill one in so many slots with replies under schemas: alone, and where others came
# a short while ago.
SHARE_ALONE = 2
SHARE_BESIDE_OTHERS = 8
RECENT_SECONDS = 60.0
NEWS_SECONDS = 0.02  # least time between two deliveries: too short for a reader to notice

E = TypeVar("E", bound=EngineEvent)
E_co = TypeVar("E_co", bound=EngineEvent, covariant=True)


class StepEngine(Protocol[E_co]):
    """The part of engine.Engine that the thread uses."""

    @property
    def busy(self) -> bool: ...

    @property
    def free_slots(self) -> int: ...

    def check(self, prompt: list[int], sampling: Any) -> None: ...

    def submit(self, prompt: list[int], sampling: Any) -> int: ...

    def step(self) -> Sequence[E_co]: ...

    def cancel(self, number: int) -> bool: ...


class Ticket(Generic[E]):
    """The requests of one client to the engine, and the queue in which the events of the replies
    come back."""

    def __init__(
        self,
        requests: Sequence[tuple[list[int], Any]],
        owner: str = "",
        automaton: object = None,
    ):
        """Each request is a prompt and its sampling settings. `owner` is the address of the client.

        `automaton` is that of the requests' schema, which the ticket keeps alive for the engine;
        None without a schema.
        """
        self.requests = requests
        self.owner = owner
        self.automaton = automaton
        # Only the engine's thread changes the next two.
        self.submitted = 0  # how many of the requests the engine has had
        self.running: dict[int, int] = {}  # the engine's request number -> the index in `requests`
        self.unfinished = len(requests)  # only the event loop uses this
        self._news: asyncio.Queue[tuple[int, E] | Exception] = asyncio.Queue()

    @property
    def begun(self) -> bool:
        """Whether the engine has had one of the requests."""
        return self.submitted > 0

    @property
    def more(self) -> bool:
        """Whether the engine does not have all requests yet."""
        return self.submitted < len(self.requests)

    def tell(self, news: "tuple[int, E] | Exception") -> None:
        """Queue an event of one request, or the failure that ends all of them."""
        self._news.put_nowait(news)

    async def events(self) -> list[tuple[int, E]]:
        """Wait for news; return all events since the last call, at least one, each with the index
        of its request.

        Raises what the engine raised.
        """
        news = [await self._news.get()]
        while not self._news.empty():
            news.append(self._news.get_nowait())
        events: list[tuple[int, E]] = []
        for item in news:
            if isinstance(item, Exception):
                raise item
            events.append(item)
        return events


class Displaced(Exception):
    """A waiting ticket lost its place to a ticket of an address that has fewer."""


class EngineThread(Generic[E]):
    """Owns the engine: no other thread touches it. Call the public methods on the event loop.

    Commands enter through a queue that the thread empties before every step. Tickets wait in a
    line; when the engine has a free slot, the thread hands it one request of the address whose turn
    it is. One callback delivers the events of all tickets, at most every NEWS_SECONDS: Python runs
    one thread at a time, so the engine stands still while the loop sends a piece, and fewer
    deliveries leave it more time. The loop never waits for the model, and the model never waits for
    a client.
    """

    def __init__(self, engine: StepEngine[E], waiting: int):
        """`waiting` tickets may wait beyond the ones that have a slot."""
        self.slots = engine.free_slots
        self.free_slots = self.slots
        self.tickets: set[Ticket[E]] = set()  # submitted; neither released nor at their end
        self.line: Line[Ticket[E]] = Line()
        self._engine = engine
        self._limit = self.slots + waiting  # of tickets
        self._inbox: queue.SimpleQueue[Ticket[E] | Literal["look", "stop"]] = queue.SimpleQueue()
        # Only the engine thread uses the next four.
        self._running: dict[int, Ticket[E]] = {}  # by the engine's request number
        self._news: list[tuple[Ticket[E], tuple[int, E] | Exception]] = []  # not delivered yet
        # Address -> when its latest reply began, by the monotonic clock.
        self._begun: dict[str, float] = {}
        self._published = 0.0  # time of the last delivery, by the monotonic clock
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; it delivers to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step."""
        self._inbox.put("stop")
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def full(self, owner: str = "") -> bool:
        """Whether a ticket of an address would be refused because too many wait."""
        return len(self.tickets) >= self._limit and not self.line.yields_to(owner)

    def submit(self, ticket: Ticket[E]) -> None:
        """Queue a ticket; the caller must release it. Raises asyncio.QueueFull if too many tickets
        wait already.

        When too many wait, the address with most waiting tickets loses its newest one, which hears
        Displaced. The end of a reply gives its place to another ticket, even if its client never
        reads it.
        """
        if self.full(ticket.owner):
            raise asyncio.QueueFull
        if len(self.tickets) >= self._limit:
            loser = self.line.give_way(ticket.owner)
            if loser is None:  # it has begun a moment ago
                raise asyncio.QueueFull
            self.tickets.discard(loser)
            loser.tell(Displaced())
        self.tickets.add(ticket)
        self.line.add(ticket)
        self._inbox.put("look")

    def release(self, ticket: Ticket[E]) -> None:
        """Give a ticket back. The engine cancels its unfinished replies before the next step."""
        self.tickets.discard(ticket)
        self.line.remove(ticket)
        self._inbox.put(ticket)

    def dismiss(self, reason: Exception) -> None:
        """End every reply with a failure; the owners of the tickets still release them."""
        for ticket in self.tickets:
            ticket.tell(reason)

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Carry out commands, hand requests to the engine and step it, until the thread must
        end."""
        while self._obey():
            self._fill()
            try:
                events = self._engine.step()
            except Exception as failure:
                # The edge of the thread: fail the chats in flight, keep serving new ones.
                traceback.print_exc()
                for ticket in set(self._running.values()):
                    self._drop(ticket, failure)
            else:
                for event in events:
                    self._note(event)
            self.free_slots = self._engine.free_slots
            if time.monotonic() - self._published >= NEWS_SECONDS:
                self._publish()

    def _note(self, event: E) -> None:
        """Put an event among the news of its ticket."""
        ticket = self._running[event.request]
        index = ticket.running[event.request]
        self._news.append((ticket, (index, event)))
        if event.finish is not None:
            del self._running[event.request]
            del ticket.running[event.request]

    def _obey(self) -> bool:
        """Carry out all commands; wait for one if there is nothing to compute. False if the thread
        must end."""
        while not self._inbox.empty() or not (self._engine.busy or len(self.line)):
            if self._inbox.empty():
                self._publish()  # before it waits: a cancel may have left news undelivered
            command = self._inbox.get()
            if command == "stop":
                return False
            if isinstance(command, Ticket):
                self._drop(command, None)
            self.free_slots = self._engine.free_slots
        return True

    def _fill(self) -> None:
        """Hand the engine as many requests as it has slots, each time one of the next address."""
        while len(self._running) < self.slots:
            ticket = self.line.next(self._may_begin)
            if ticket is None:
                return
            prompt, sampling = ticket.requests[ticket.submitted]
            try:
                number = self._engine.submit(prompt, sampling)
            except UserError as mistake:
                self._drop(ticket, mistake)
                continue
            except Exception as failure:  # the edge of the thread, as in _run
                traceback.print_exc()
                self._drop(ticket, failure)
                continue
            self._running[number] = ticket
            ticket.running[number] = ticket.submitted
            self._remember(ticket.owner)
            ticket.submitted += 1
            self.line.done_with(ticket)

    def _remember(self, owner: str) -> None:
        """Note that a reply of an address begins now, and forget addresses that came long ago."""
        now = time.monotonic()
        self._begun[owner] = now
        if len(self._begun) <= 2 * self.slots:
            return
        recent = now - RECENT_SECONDS
        self._begun = {name: begun for name, begun in self._begun.items() if begun > recent}

    def _may_begin(self, ticket: Ticket[E]) -> bool:
        """Whether a ticket may have a slot: replies under schemas of one address leave slots to
        other addresses.

        Their masks can cost so much that a chat of another address would wait for minutes until one
        of them ends.
        """
        if ticket.automaton is None:
            return True
        share = SHARE_BESIDE_OTHERS if self._others_came(ticket.owner) else SHARE_ALONE
        running = 0
        for other in self._running.values():
            running += other.automaton is not None and other.owner == ticket.owner
        return running < max(self.slots // share, 1)

    def _others_came(self, owner: str) -> bool:
        """Whether a reply of another address began a short while ago."""
        recent = time.monotonic() - RECENT_SECONDS
        return any(name != owner and begun > recent for name, begun in self._begun.items())

    def _drop(self, ticket: Ticket[E], failure: Exception | None) -> None:
        """Cancel what the engine has of a ticket; with a failure, tell the client of it."""
        self.line.remove(ticket)
        for number in ticket.running:
            del self._running[number]
            self._engine.cancel(number)
        ticket.running.clear()
        if failure is not None:
            self._news.append((ticket, failure))

    def _publish(self) -> None:
        """Let the event loop deliver the news."""
        assert self._loop is not None
        if self._news:
            self._loop.call_soon_threadsafe(self._deliver, self._news)
            self._news = []
            self._published = time.monotonic()

    # --- on the loop -----------------------------------------------------------------------------

    def _deliver(self, news: "Sequence[tuple[Ticket[E], tuple[int, E] | Exception]]") -> None:
        """Put news into the queues of their tickets; a ticket whose replies have all ended frees
        its place."""
        for ticket, item in news:
            ticket.tell(item)
            if isinstance(item, Exception):
                self.tickets.discard(ticket)
            elif item[1].finish is not None:
                ticket.unfinished -= 1
                if not ticket.unfinished:
                    self.tickets.discard(ticket)

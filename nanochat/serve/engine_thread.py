"""Runs an engine in its own thread, and connects that thread with an asyncio event loop."""

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
    """One token of a reply to the engine's request with the ID `request`.

    `finish` says why the reply ended; it is None except on the last token.
    """

    @property
    def request(self) -> int: ...

    @property
    def finish(self) -> str | None: ...


# An address may fill one slot in so many with replies that follow a JSON schema: while it is the
# only address, and while other addresses have been active recently.
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
    """The engine requests of one HTTP request, and a queue for the events of their replies."""

    def __init__(
        self,
        requests: Sequence[tuple[list[int], Any]],
        owner: str = "",
        automaton: object = None,
    ):
        """Make a ticket for engine requests, each a prompt with its sampling settings.

        `owner` is the address of the client. `automaton` is the compiled JSON schema that the
        replies must follow, or None without a schema; the ticket keeps it alive for the engine.
        """
        self.requests = requests
        self.owner = owner
        self.automaton = automaton
        # Only the engine's thread changes the next two.
        self.submitted = 0  # how many of the requests the engine has received
        self.running: dict[int, int] = {}  # the engine's request ID -> the index in `requests`
        self.unfinished = len(requests)  # only the event loop uses this
        self._news: asyncio.Queue[tuple[int, E] | Exception] = asyncio.Queue()

    @property
    def begun(self) -> bool:
        """Whether the engine has received at least one of the requests."""
        return self.submitted > 0

    @property
    def more(self) -> bool:
        """Whether some requests have not been handed to the engine yet."""
        return self.submitted < len(self.requests)

    def tell(self, news: "tuple[int, E] | Exception") -> None:
        """Queue an event with the index of its request, or an exception that ends all replies."""
        self._news.put_nowait(news)

    async def events(self) -> list[tuple[int, E]]:
        """Wait for events, and return all that have arrived since the last call, at least one.

        Each comes with the index of its request in `requests`. Raises the exception that ended the
        replies, if there is one.
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
    """Raised if a ticket lost its place in the line to an address with fewer waiting tickets."""


class EngineThread(Generic[E]):
    """Runs an engine in a thread, which alone submits requests to the engine and steps it.

    Call the public methods on the event loop. Commands enter through a queue that the thread
    empties before every step. Tickets wait in a line. When the engine has a free slot, the thread
    hands it one request of the address whose turn it is.

    One callback delivers the events of all tickets, at most every NEWS_SECONDS while the engine is
    busy. Python runs one thread at a time, so fewer deliveries leave the engine more time. The loop
    never waits for the model, and the model never waits for a client.
    """

    def __init__(self, engine: StepEngine[E], waiting: int):
        """Prepare the thread, which accepts up to `waiting` more tickets than there are slots."""
        self.slots = engine.free_slots
        self.free_slots = self.slots
        self.tickets: set[Ticket[E]] = set()  # submitted, and neither released nor finished
        self.line: Line[Ticket[E]] = Line()
        self._engine = engine
        self._limit = self.slots + waiting  # of tickets
        self._inbox: queue.SimpleQueue[Ticket[E] | Literal["look", "stop"]] = queue.SimpleQueue()
        # Only the engine thread uses the next four.
        self._running: dict[int, Ticket[E]] = {}  # by the engine's request ID
        self._news: list[tuple[Ticket[E], tuple[int, E] | Exception]] = []  # not delivered yet
        # Address -> when its latest reply began, by the monotonic clock.
        self._begun: dict[str, float] = {}
        self._published = 0.0  # time of the last delivery, by the monotonic clock
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread, which delivers events to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step, and wait until it has ended."""
        self._inbox.put("stop")
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def full(self, owner: str = "") -> bool:
        """Return whether submit() would refuse a ticket of the address `owner` for lack of room."""
        return len(self.tickets) >= self._limit and not self.line.yields_to(owner)

    def submit(self, ticket: Ticket[E]) -> None:
        """Queue a ticket, which the caller must release later.

        If there is no room, the address with the most waiting tickets loses its newest one, whose
        events() raises Displaced. Raises asyncio.QueueFull if no ticket can give way. A ticket
        whose replies have all ended takes up no room, even if its client never reads them.
        """
        if self.full(ticket.owner):
            raise asyncio.QueueFull
        if len(self.tickets) >= self._limit:
            loser = self.line.give_way(ticket.owner)
            if loser is None:  # the engine has begun its work on it a moment ago
                raise asyncio.QueueFull
            self.tickets.discard(loser)
            loser.tell(Displaced())
        self.tickets.add(ticket)
        self.line.add(ticket)
        self._inbox.put("look")

    def release(self, ticket: Ticket[E]) -> None:
        """Take a ticket back, and have its unfinished replies cancelled before the next step."""
        self.tickets.discard(ticket)
        self.line.remove(ticket)
        self._inbox.put(ticket)

    def dismiss(self, reason: Exception) -> None:
        """Make events() of each unfinished ticket raise `reason`.

        The tickets must still be released.
        """
        for ticket in self.tickets:
            ticket.tell(reason)

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Carry out commands, hand requests to the engine and step it, until told to stop."""
        while self._obey():
            self._fill()
            try:
                events = self._engine.step()
            except Exception as failure:
                # The edge of the thread: end the chats under way, and keep serving new ones.
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
        """Keep an event for delivery, and forget its request if the reply has ended."""
        ticket = self._running[event.request]
        index = ticket.running[event.request]
        self._news.append((ticket, (index, event)))
        if event.finish is not None:
            del self._running[event.request]
            del ticket.running[event.request]

    def _obey(self) -> bool:
        """Carry out all commands, and return whether the thread should go on.

        While there is nothing to compute, wait for commands.
        """
        while not self._inbox.empty() or not (self._engine.busy or len(self.line)):
            if self._inbox.empty():
                self._publish()  # a cancellation may have left events undelivered
            command = self._inbox.get()
            if command == "stop":
                return False
            if isinstance(command, Ticket):
                self._drop(command, None)
            self.free_slots = self._engine.free_slots
        return True

    def _fill(self) -> None:
        """Hand requests to the engine while it has free slots, with addresses taking turns."""
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
        """Record that a reply of an address begins, and drop old records if there are many."""
        now = time.monotonic()
        self._begun[owner] = now
        if len(self._begun) <= 2 * self.slots:
            return
        cutoff = now - RECENT_SECONDS
        self._begun = {address: begun for address, begun in self._begun.items() if begun > cutoff}

    def _may_begin(self, ticket: Ticket[E]) -> bool:
        """Return whether a ticket may take a slot.

        With replies that follow a JSON schema, one address may fill only a share of the slots, but
        at least one. Without this limit, other addresses could wait minutes for a slot, because the
        token masks of such replies can be slow to compute.
        """
        if ticket.automaton is None:
            return True
        share = SHARE_BESIDE_OTHERS if self._others_came(ticket.owner) else SHARE_ALONE
        running = 0
        for other in self._running.values():
            running += other.automaton is not None and other.owner == ticket.owner
        return running < max(self.slots // share, 1)

    def _others_came(self, owner: str) -> bool:
        """Return whether a reply of another address has begun in the last RECENT_SECONDS."""
        cutoff = time.monotonic() - RECENT_SECONDS
        return any(address != owner and begun > cutoff for address, begun in self._begun.items())

    def _drop(self, ticket: Ticket[E], failure: Exception | None) -> None:
        """Remove a ticket from the line, and cancel its replies that are under way.

        If there is a `failure`, events() of the ticket raises it.
        """
        self.line.remove(ticket)
        for number in ticket.running:
            del self._running[number]
            self._engine.cancel(number)
        ticket.running.clear()
        if failure is not None:
            self._news.append((ticket, failure))

    def _publish(self) -> None:
        """Hand all events that have not been delivered yet to the event loop."""
        assert self._loop is not None
        if self._news:
            self._loop.call_soon_threadsafe(self._deliver, self._news)
            self._news = []
            self._published = time.monotonic()

    # --- on the loop -----------------------------------------------------------------------------

    def _deliver(self, news: "Sequence[tuple[Ticket[E], tuple[int, E] | Exception]]") -> None:
        """Put events and exceptions into the queues of their tickets.

        Tickets whose replies have all ended, or failed, no longer take up room.
        """
        for ticket, item in news:
            ticket.tell(item)
            if isinstance(item, Exception):
                self.tickets.discard(ticket)
            elif item[1].finish is not None:
                ticket.unfinished -= 1
                if not ticket.unfinished:
                    self.tickets.discard(ticket)

"""Runs an engine in its own thread, and connects that thread with an asyncio event loop."""

import asyncio
import queue
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from nanochat.common import UserError, own_language
from nanochat.generate.sampling import Sampling
from nanochat.platforms.host import give_freed_memory_back
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.waiting import Line


class EngineEvent(Protocol):
    """One token of a reply to the engine's request with the ID `request`.

    `finish` says why the reply ended; it is None except on the last token.
    """

    @property
    def request(self) -> int: ...

    @property
    def finish(self) -> str | None: ...


# The share of slots, as one in N, that an address may fill with replies that follow a JSON schema,
# while it is the only address and while other addresses have been active recently.
SHARE_ALONE = 2
SHARE_BESIDE_OTHERS = 8
RECENT_SECONDS = 60.0
REST_SECONDS = 1.0  # without commands, after which freed memory goes back to the system
NEWS_SECONDS = 0.02  # least time between two deliveries: too short for a reader to notice
# The largest total size of all tickets, as estimated, until they are released. One address may have
# half of it.
MOST_BYTES = 512 << 20
SCORE_BYTES = 600  # memory of a log-probability until the answer is sent
TOKEN_BYTES = 40  # memory of a prompt's token
# Events that wait for clients which do not read: their largest total size. The ticket with the most
# then ends.
UNREAD_BYTES = 64 << 20
EVENT_BYTES = 300

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

    def suspend(self, number: int) -> None: ...

    def resume(self, number: int) -> None: ...


class HasSize(Protocol):
    """The compiled JSON schema that replies must follow."""

    @property
    def size(self) -> float:
        """The estimated upper bound on its memory, in bytes."""
        ...


class Ticket(Generic[E]):
    """The engine requests of one HTTP request, and a queue for the events of their replies."""

    def __init__(
        self,
        requests: Sequence[tuple[list[int], Sampling]],
        owner: str = "",
        automaton: HasSize | None = None,
        scores: int = 0,
    ):
        """Make a ticket for engine requests, each a prompt with its sampling settings.

        `owner` is the address of the client. `automaton` is the compiled JSON schema that the
        replies must follow, or None without a schema; the ticket keeps it alive for the engine.
        `scores` is the most log-probabilities that the answer may list.
        """
        self.requests = requests
        self.owner = owner
        self.automaton = automaton
        prompts = {id(prompt): prompt for prompt, _ in requests}  # replies share their prompt
        prompt_tokens = sum(map(len, prompts.values()))
        self.bytes = prompt_tokens * TOKEN_BYTES + scores * SCORE_BYTES
        # Only the engine's thread changes the next three.
        self.submitted = 0  # how many of the requests the engine has received
        self.running: dict[int, int] = {}  # the engine's request ID -> the index in `requests`
        self.suspended: deque[int] = deque()  # IDs of running requests that wait for a slot
        # Only the event loop uses these.
        self.unfinished = len(requests)
        self.failed = False
        self._news: asyncio.Queue[tuple[int, E] | Exception] = asyncio.Queue()

    @property
    def begun(self) -> bool:
        """Whether the engine has received at least one of the requests."""
        return self.submitted > 0

    @property
    def more(self) -> bool:
        """Whether some requests have not been handed to the engine yet, or are suspended."""
        return self.submitted < len(self.requests) or bool(self.suspended)

    @property
    def unread(self) -> int:
        """The estimated size in bytes of the events that events() has not returned yet."""
        alternatives = self.requests[0][1].logprobs if self.requests else 0
        return self._news.qsize() * (EVENT_BYTES + alternatives * SCORE_BYTES // 4)

    def tell(self, news: "tuple[int, E] | Exception") -> None:
        """Queue an event with the index of its request, or an exception that ends all replies.

        After an exception, nothing more is queued.
        """
        if not self.failed:
            self._news.put_nowait(news)
            self.failed = isinstance(news, Exception)

    def fail_at_once(self, failure: Exception) -> None:
        """Make events() raise an exception in place of the events that it has not returned yet."""
        while not self._news.empty():
            self._news.get_nowait()
        self.tell(failure)

    async def events(self) -> list[tuple[int, E]]:
        """Wait for events, and return all that have arrived since the last call, at least one.

        Each comes with the index of its request in `requests`. Raises the exception that ended the
        replies, if there is one.
        """
        news = [await self._news.get()]
        while not self._news.empty():
            news.append(self._news.get_nowait())
        events: list[tuple[int, E]] = []
        for event_or_failure in news:
            if isinstance(event_or_failure, Exception):
                raise event_or_failure
            events.append(event_or_failure)
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
        self._unreleased: set[Ticket[E]] = set()
        self.line: Line[Ticket[E]] = Line()
        self._engine = engine
        self._limit = self.slots + waiting  # the most tickets at once
        self._inbox: queue.SimpleQueue[Ticket[E] | Literal["look", "stop"]] = queue.SimpleQueue()
        # Only the engine thread uses the next four.
        self._running: dict[int, Ticket[E]] = {}  # by the engine's request ID
        self._news: list[tuple[Ticket[E], tuple[int, E] | Exception]] = []  # not delivered yet
        # Address -> when its latest reply began, by the monotonic clock.
        self._begun: dict[str, float] = {}
        self._published = 0.0  # time of the last delivery, by the monotonic clock
        self._ended = False  # by a fault of this file; only the loop reads and writes it
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
        events() raises Displaced. Raises asyncio.QueueFull if no ticket can give way, or if the
        unreleased tickets would be too large together, and ApiError if the thread has ended. A
        ticket whose replies have all ended takes up no room, even if its client never reads them.
        """
        if self._ended:
            raise ended()
        if self.full(ticket.owner) or self._too_large(ticket):
            raise asyncio.QueueFull
        if len(self.tickets) >= self._limit:
            loser = self.line.give_way(ticket.owner)
            if loser is None:  # the engine has begun its work on it a moment ago
                raise asyncio.QueueFull
            self.tickets.discard(loser)
            loser.tell(Displaced())
        self.tickets.add(ticket)
        self._unreleased.add(ticket)
        self.line.add(ticket)
        self._inbox.put("look")

    def _too_large(self, newcomer: Ticket[E]) -> bool:
        """Return whether all tickets would be too large together, or those of one address.

        An address may always have one ticket if all together are not too large.
        """
        if _size_of([*self._unreleased, newcomer]) > MOST_BYTES:
            return True
        earlier = [ticket for ticket in self._unreleased if ticket.owner == newcomer.owner]
        return bool(earlier) and _size_of([*earlier, newcomer]) > MOST_BYTES // 2

    def release(self, ticket: Ticket[E]) -> None:
        """Take a ticket back, and have its unfinished replies cancelled before the next step."""
        self.tickets.discard(ticket)
        self._unreleased.discard(ticket)
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
        """Serve until told to stop. If serving itself fails, end every chat, and refuse new ones."""
        own_language.set("en")  # programs read the engine's refusals
        try:
            self._serve()
        except Exception:  # a fault of this file, since the engine's own are caught in _serve()
            traceback.print_exc()
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._end)

    def _serve(self) -> None:
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
        """Carry out all commands, and return whether the thread should continue.

        While there is nothing to compute, wait for commands.
        """
        while not self._inbox.empty() or not (self._engine.busy or len(self.line)):
            if self._inbox.empty():
                self._publish()  # a cancellation may have left events undelivered
            command = self._next_command()
            if command == "stop":
                return False
            if isinstance(command, Ticket):
                self._drop(command, None)
            self.free_slots = self._engine.free_slots
        return True

    def _next_command(self) -> "Ticket[E] | Literal['look', 'stop']":
        """Wait for a command, and return it.

        If none comes for a while, first give back the memory that the passes have freed.
        """
        try:
            return self._inbox.get(timeout=REST_SECONDS)
        except queue.Empty:
            give_freed_memory_back()
            return self._inbox.get()

    def _fill(self) -> None:
        """Hand requests to the engine while it has slots for them, with addresses taking turns."""
        while (ticket := self._next_ticket()) is not None:
            if ticket.suspended:
                number = ticket.suspended.popleft()
                self._engine.resume(number)
                self._running[number] = ticket
            elif not self._submit_next(ticket):
                continue
            self._remember(ticket.owner)
            self.line.done_with(ticket)

    def _next_ticket(self) -> Ticket[E] | None:
        """Return the ticket whose request gets a slot next, or None if no request may begin.

        If no slot is free, the latest reply of the address with the most slots is suspended for an
        address with at least two fewer.
        """
        if len(self._running) < self.slots:
            return self.line.next(self._may_begin)
        counts = Counter(ticket.owner for ticket in self._running.values())
        ((largest, largest_count),) = counts.most_common(1)

        def deserves(ticket: Ticket[E]) -> bool:
            return counts[ticket.owner] + 2 <= largest_count and self._may_begin(ticket)

        ticket = self.line.next(deserves)
        if ticket is not None:
            self._suspend_latest(largest)
        return ticket

    def _suspend_latest(self, owner: str) -> None:
        """Suspend the address's reply that began last; its ticket waits in front of the others."""
        for number, ticket in reversed(self._running.items()):
            if ticket.owner == owner:
                del self._running[number]
                self._engine.suspend(number)
                ticket.suspended.append(number)
                self.line.add_first(ticket)
                return

    def _submit_next(self, ticket: Ticket[E]) -> bool:
        """Submit a ticket's next request to the engine, and return whether it was accepted.

        If it was not, the ticket is dropped.
        """
        prompt, sampling = ticket.requests[ticket.submitted]
        try:
            number = self._engine.submit(prompt, sampling)
        except UserError as mistake:
            self._drop(ticket, mistake)
            return False
        except Exception as failure:  # the edge of the thread, as in _run
            traceback.print_exc()
            self._drop(ticket, failure)
            return False
        self._running[number] = ticket
        ticket.running[number] = ticket.submitted
        ticket.submitted += 1
        return True

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
            self._running.pop(number, None)  # a suspended request is not there
            self._engine.cancel(number)
        ticket.running.clear()
        ticket.suspended.clear()
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

    def _end(self) -> None:
        """Tell every client that the thread has ended, and let submit() refuse new tickets."""
        self._ended = True
        self.dismiss(ended())

    def _deliver(self, news: "Sequence[tuple[Ticket[E], tuple[int, E] | Exception]]") -> None:
        """Put events and exceptions into the queues of their tickets.

        Tickets whose replies have all ended, or failed, no longer take up room. If too many events
        wait for clients that do not read them, the ticket with the most ends.
        """
        for ticket, event_or_failure in news:
            ticket.tell(event_or_failure)
            if isinstance(event_or_failure, Exception):
                self.tickets.discard(ticket)
            elif event_or_failure[1].finish is not None:
                ticket.unfinished -= 1
                if not ticket.unfinished:
                    self.tickets.discard(ticket)
        while sum(ticket.unread for ticket in self._unreleased) > UNREAD_BYTES:
            largest = max(self._unreleased, key=lambda ticket: ticket.unread)
            text = (
                "the client reads the answer too slowly: ask for a shorter answer, or read faster"
            )
            largest.fail_at_once(ApiError(408, "client_too_slow", text))
            self.tickets.discard(largest)
            self._inbox.put(largest)


def ended() -> ApiError:
    """Return the answer to a request whose engine's thread has ended because of a fault."""
    text = "the engine has stopped after an error, which the server's log shows: restart the server"
    return ApiError(503, "engine_stopped", text)


def _size_of(tickets: Collection[Ticket[Any]]) -> float:
    """Return the estimated size of tickets in bytes, which may share compiled schemas."""
    automata = {id(ticket.automaton): ticket.automaton for ticket in tickets if ticket.automaton}
    size = sum(automaton.size for automaton in automata.values())
    return size + sum(ticket.bytes for ticket in tickets)

"""Queues in which requests wait: for the engine, and for work that is done for one request at a
time.

In a Line, addresses take turns, and the address with the most requests gives way. Turns lets
requests do something one at a time: those with the smallest bodies first, or those of the next
address.
"""

import asyncio
import bisect
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# --- a line by address ---------------------------------------------------------------------------


class Waiter(Protocol):
    """Something that waits in a line."""

    @property
    def owner(self) -> str:
        """The address that it belongs to."""
        ...

    @property
    def begun(self) -> bool:
        """Whether work on a part of it has begun."""
        ...

    @property
    def more(self) -> bool:
        """Whether a part of it still waits."""
        ...


W = TypeVar("W", bound=Waiter)


class Line(Generic[W]):
    """Waiting requests by address. The event loop adds to it while the engine's thread takes from
    it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # No address without requests; the address whose turn it is comes first.
        self._waiting: dict[str, deque[W]] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def add(self, waiter: W) -> None:
        """Let a request wait behind the others of its address."""
        with self._lock:
            self._waiting.setdefault(waiter.owner, deque()).append(waiter)

    def next(self, may_begin: Callable[[W], bool] = lambda waiter: True) -> W | None:
        """Return the oldest request of the address whose turn it is; the turn passes on. None if
        nobody waits.

        An address whose oldest request may not begin yet keeps its turn. The caller begins one part
        of the request; then it calls done_with().
        """
        with self._lock:
            for owner, waiting in self._waiting.items():
                if may_begin(waiting[0]):
                    self._waiting[owner] = self._waiting.pop(owner)  # the address is last now
                    return waiting[0]
            return None

    def done_with(self, waiter: W) -> None:
        """Remove a request that next() returned, unless more parts of it wait."""
        if not waiter.more:
            self.remove(waiter)

    def remove(self, waiter: W) -> bool:
        """Take a request out. False if it does not wait."""
        with self._lock:
            return self._remove(waiter)

    def yields_to(self, newcomer: str) -> bool:
        """Whether an address has so many waiting requests that one would give way to a
        newcomer's."""
        with self._lock:
            return self._largest_owner(newcomer) is not None

    def give_way(self, newcomer: str) -> W | None:
        """Take out the newest request of the address with the most waiting requests, and return it.

        None if that address would be the newcomer's own, the newcomer counted.
        """
        with self._lock:
            owner = self._largest_owner(newcomer)
            if owner is None:
                return None
            newest = self._waiting[owner][-1]
            self._remove(newest)
            return newest

    def _largest_owner(self, newcomer: str) -> str | None:
        """Return the address with the most requests that have not begun; None if it would be the
        newcomer."""
        counts: dict[str, int] = {}
        for owner, waiting in self._waiting.items():
            counts[owner] = sum(not waiter.begun for waiter in waiting)
        largest = max(counts, key=lambda owner: counts[owner], default=newcomer)
        if largest == newcomer:
            return None
        return largest if counts[largest] > counts.get(newcomer, 0) + 1 else None

    def _remove(self, waiter: W) -> bool:
        """Take a request out; the caller holds the lock."""
        waiting = self._waiting.get(waiter.owner)
        if waiting is None or waiter not in waiting:
            return False
        waiting.remove(waiter)
        if not waiting:
            del self._waiting[waiter.owner]
        return True


# --- turns ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Turn:
    """A request that waits for its turn in a queue of Turns. It has one part only."""

    owner: str
    size: int
    comes: asyncio.Future[None]
    begun = False
    more = False


class TurnQueue(Protocol):
    """Decides whose turn is next, and which turn is refused when too many wait."""

    def add(self, turn: Turn) -> Turn | None:
        """Let a turn wait; return the turn that must give way to others, which may be this one."""
        ...

    def next(self) -> Turn | None:
        """Take out the next turn; None if nobody waits."""
        ...

    def remove(self, turn: Turn) -> bool:
        """Take a turn out. False if it does not wait."""
        ...


class SmallestFirst:
    """The turn of the smallest body is next; the largest is refused when more than `limit` wait.

    Preparing a large request takes a hundred times as long as a usual one, so in any other order a
    few clients with large requests would keep all others waiting.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._waiting: list[tuple[int, int, Turn]] = []  # size, arrival, turn; sorted
        self._arrivals = itertools.count()

    def add(self, turn: Turn) -> Turn | None:
        """See TurnQueue."""
        bisect.insort(self._waiting, (turn.size, next(self._arrivals), turn))
        if len(self._waiting) <= self._limit:
            return None
        return self._waiting.pop()[2]

    def next(self) -> Turn | None:
        """See TurnQueue."""
        return self._waiting.pop(0)[2] if self._waiting else None

    def remove(self, turn: Turn) -> bool:
        """See TurnQueue."""
        for index, (_, _, waiting) in enumerate(self._waiting):
            if waiting is turn:
                del self._waiting[index]
                return True
        return False


class ByAddress:
    """Addresses take turns; the one with the most requests gives way when more than `limit`
    wait."""

    def __init__(self, limit: int):
        self._limit = limit
        self._line: Line[Turn] = Line()
        self._latest = ""  # the address that had the latest turn

    def add(self, turn: Turn) -> Turn | None:
        """See TurnQueue."""
        loser = None
        if len(self._line) >= self._limit:
            loser = self._line.give_way(turn.owner)
            if loser is None:
                return turn
        self._line.add(turn)
        return loser

    def next(self) -> Turn | None:
        """See TurnQueue."""
        turn = self._line.next()
        if turn is None:
            return None
        if turn.owner == self._latest:  # another address comes first, if one waits
            turn = self._line.next() or turn
        self._line.done_with(turn)
        self._latest = turn.owner
        return turn

    def remove(self, turn: Turn) -> bool:
        """See TurnQueue."""
        return self._line.remove(turn)


class Turns:
    """Lets requests do something one at a time, in the order of a queue."""

    def __init__(self, queue: TurnQueue):
        self._queue = queue
        self._busy = False

    @contextlib.asynccontextmanager
    async def turn(self, owner: str = "", size: int = 0) -> AsyncIterator[None]:
        """Wait for the turn of a request: `owner` is its address, `size` that of its body in bytes.

        Raises asyncio.QueueFull if others take all places.
        """
        turn = Turn(owner, size, asyncio.get_running_loop().create_future())
        refused = self._queue.add(turn)
        if refused is not None and not refused.comes.done():
            refused.comes.set_exception(asyncio.QueueFull())
        if not self._busy:
            self._begin_next()
        try:
            await turn.comes
        except asyncio.CancelledError:
            waited = self._queue.remove(turn)
            if not waited and _has_come(turn):
                self._end()
            raise
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        """End a turn."""
        self._busy = False
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next turn of a request that still waits for it."""
        while not self._busy:
            turn = self._queue.next()
            if turn is None:
                return
            if not turn.comes.cancelled():
                turn.comes.set_result(None)
                self._busy = True


def _has_come(turn: Turn) -> bool:
    """Whether it is a request's turn: it was neither cancelled nor refused."""
    if not turn.comes.done() or turn.comes.cancelled():
        return False
    return turn.comes.exception() is None

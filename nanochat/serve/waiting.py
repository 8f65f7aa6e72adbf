"""Queues in which requests wait for the engine, or for work that is done one request at a time.

In a Line, addresses take turns, and the address with the most requests makes room for others. Turns
lets requests do something one at a time; the address that has used the least time is next.
"""

import asyncio
import bisect
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# --- a line by address ---------------------------------------------------------------------------


class Waiter(Protocol):
    """A request in a Line; if it has several parts, they begin one by one."""

    @property
    def owner(self) -> str:
        """The address that the request belongs to."""
        ...

    @property
    def begun(self) -> bool:
        """Whether work on any part of the request has begun."""
        ...

    @property
    def more(self) -> bool:
        """Whether any part of the request is still waiting."""
        ...


W = TypeVar("W", bound=Waiter)


class Line(Generic[W]):
    """A line of waiting requests in which addresses take turns.

    It is thread-safe: the event loop adds requests while the engine's thread takes them out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Only addresses with requests; the address whose turn it is comes first.
        self._waiting: dict[str, deque[W]] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def add(self, waiter: W) -> None:
        """Add a request behind the others of its address."""
        with self._lock:
            self._waiting.setdefault(waiter.owner, deque()).append(waiter)

    def add_first(self, waiter: W) -> None:
        """Add a request in front of the others of its address, unless it is in the line already."""
        with self._lock:
            waiting = self._waiting.setdefault(waiter.owner, deque())
            if waiter not in waiting:
                waiting.appendleft(waiter)

    def next(self, may_begin: Callable[[W], bool]) -> W | None:
        """Return the next address's oldest request, or None if no oldest request may begin yet.

        The address then goes to the end of the line. Addresses whose oldest request may not begin
        yet are passed over, and keep their places. The caller begins one part of the request, and
        then calls done_with().
        """
        with self._lock:
            for owner, waiting in self._waiting.items():
                if may_begin(waiting[0]):
                    self._waiting[owner] = self._waiting.pop(owner)  # the address is last now
                    return waiting[0]
            return None

    def done_with(self, waiter: W) -> None:
        """Remove a request that next() returned, unless more parts of it are waiting."""
        if not waiter.more:
            self.remove(waiter)

    def remove(self, waiter: W) -> bool:
        """Remove a request, and return whether it was waiting."""
        with self._lock:
            return self._remove(waiter)

    def yields_to(self, newcomer: str) -> bool:
        """Return whether give_way() would find a request that makes room for `newcomer`."""
        with self._lock:
            return self._largest_owner(newcomer) is not None

    def give_way(self, newcomer: str) -> W | None:
        """Remove and return the newest request of the address with the most requests not begun.

        Returns None if no other address has more of them than `newcomer` would have with one more.
        """
        with self._lock:
            owner = self._largest_owner(newcomer)
            if owner is None:
                return None
            newest = self._waiting[owner][-1]
            self._remove(newest)
            return newest

    def _largest_owner(self, newcomer: str) -> str | None:
        """Return the address with the most requests that have not begun.

        Returns None if no other address has more of them than `newcomer` would have with one more.
        """
        counts: dict[str, int] = {}
        for owner, waiting in self._waiting.items():
            counts[owner] = sum(not waiter.begun for waiter in waiting)
        largest = max(counts, key=lambda owner: counts[owner], default=newcomer)
        if largest == newcomer:
            return None
        return largest if counts[largest] > counts.get(newcomer, 0) + 1 else None

    def _remove(self, waiter: W) -> bool:
        """Remove a request like remove(), but for a caller that already holds the lock."""
        waiting = self._waiting.get(waiter.owner)
        if waiting is None or waiter not in waiting:
            return False
        waiting.remove(waiter)
        if not waiting:
            del self._waiting[waiter.owner]
        return True


# --- turns ---------------------------------------------------------------------------------------

# A turn counts as at least this many seconds, so that addresses alternate if turns take no time.
SHORTEST_TURN = 0.001
MOST_ADDRESSES = 1024  # whose times are remembered although none of their requests waits


@dataclass(eq=False)
class Turn:
    """A request that waits for its turn."""

    owner: str
    size: int
    comes: asyncio.Future[None]  # done when the turn has come, or failed if it was refused


class FairQueue:
    """A queue in which the address that has used the least time is next, with its smallest body.

    A large request can take a hundred times as long to prepare as a usual one. So an address that
    sends large ones delays another address by one turn at most, and its own small ones not at all.
    An address whose first request arrives counts as one that has used as much time as the address
    whose turn it is, so that it neither waits for its turn nor makes up for its absence.

    At most `limit` turns may wait. If there is no room, the address with the most turns loses its
    largest one, and the new turn's address does so if it has as many.
    """

    def __init__(self, limit: int):
        self._limit = limit
        # By address: size, arrival and turn, sorted. Only addresses with turns that wait.
        self._waiting: dict[str, list[tuple[int, int, Turn]]] = {}
        self._used: dict[str, float] = {}  # by address, in seconds; the latest one comes last
        self._latest = 0.0  # how much the address of the latest turn had used before that turn
        self._arrivals = itertools.count()

    def add(self, turn: Turn) -> Turn | None:
        """Add a turn, and return the one that is refused for lack of room, if any."""
        if turn.owner not in self._waiting:
            self._forget()
            self._waiting[turn.owner] = []
            self._used[turn.owner] = max(self._used.get(turn.owner, 0.0), self._latest)
        entry = (turn.size, next(self._arrivals), turn)
        bisect.insort(self._waiting[turn.owner], entry)
        if sum(map(len, self._waiting.values())) <= self._limit:
            return None
        refused = self._waiting[self._largest_owner(turn.owner)][-1][2]
        self.remove(refused)
        return refused

    def next(self) -> Turn | None:
        """Remove and return the next turn, or None if none is waiting."""
        if not self._waiting:
            return None
        owner = min(self._waiting, key=lambda address: self._used[address])
        self._latest = self._used[owner]
        turn = self._waiting[owner][0][2]
        self.remove(turn)
        return turn

    def remove(self, turn: Turn) -> bool:
        """Remove a turn, and return whether it was waiting."""
        entries = self._waiting.get(turn.owner, [])
        for index, (_, _, waiting_turn) in enumerate(entries):
            if waiting_turn is turn:
                del entries[index]
                if not entries:
                    del self._waiting[turn.owner]
                return True
        return False

    def count(self, owner: str, seconds: float) -> None:
        """Record that an address has used `seconds` of time."""
        used = self._used.pop(owner, self._latest)
        self._used[owner] = used + max(seconds, SHORTEST_TURN)
        if owner in self._waiting:
            self._waiting[owner] = self._waiting.pop(owner)  # the first of equal addresses is next

    def _largest_owner(self, newcomer: str) -> str:
        """Return the address with the most waiting turns; of equal ones, `newcomer` if possible."""
        largest_count = max(map(len, self._waiting.values()))
        if len(self._waiting[newcomer]) == largest_count:
            return newcomer
        return next(
            owner for owner, entries in self._waiting.items() if len(entries) == largest_count
        )

    def _forget(self) -> None:
        """Forget the times of addresses without waiting turns, the oldest first, if too many."""
        surplus = max(0, len(self._used) - MOST_ADDRESSES)
        for owner in [*self._used][:surplus]:
            if owner not in self._waiting:
                del self._used[owner]


class Turns:
    """Lets requests do something one at a time, in the order of a FairQueue.

    At most `limit` requests may wait.
    """

    def __init__(self, limit: int):
        self._queue = FairQueue(limit)
        self._busy = False

    @contextlib.asynccontextmanager
    async def turn(self, owner: str = "", size: int = 0) -> AsyncIterator[None]:
        """Wait for a request's turn, which lasts as long as the `async with` block.

        `owner` is the address of the request, and `size` the size of its body in bytes. Raises
        asyncio.QueueFull if the queue refuses the request for lack of room.
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
                self._end(owner, 0.0)
            raise
        start = time.monotonic()
        try:
            yield
        finally:
            self._end(owner, time.monotonic() - start)

    def _end(self, owner: str, seconds: float) -> None:
        """End the current turn, which took `seconds`, and begin the next one."""
        self._busy = False
        self._queue.count(owner, seconds)
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next turn that has not been cancelled, unless another turn is under way."""
        while not self._busy:
            turn = self._queue.next()
            if turn is None:
                return
            if not turn.comes.cancelled():
                turn.comes.set_result(None)
                self._busy = True


def _has_come(turn: Turn) -> bool:
    """Return whether a turn has come, rather than being pending, cancelled or refused."""
    if not turn.comes.done() or turn.comes.cancelled():
        return False
    return turn.comes.exception() is None

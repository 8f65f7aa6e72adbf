"""Queues in which requests wait for the engine, or for work that is done one request at a time.

In a Line, addresses take turns, and the address with the most requests makes room for others. Turns
lets requests do something one at a time: the smallest bodies first, or each address in turn.
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

    def next(self, may_begin: Callable[[W], bool] = lambda waiter: True) -> W | None:
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


@dataclass(eq=False)
class Turn:
    """A request that waits in the queue of a Turns object; as a Waiter, it has only one part."""

    owner: str
    size: int
    comes: asyncio.Future[None]  # done when the turn has come, or failed if it was refused
    begun = False
    more = False


class TurnQueue(Protocol):
    """Decides whose turn is next, and which turn is refused if too many are waiting."""

    def add(self, turn: Turn) -> Turn | None:
        """Add a turn, and return the turn that is refused for lack of room, if any.

        The refused turn may be the new one.
        """
        ...

    def next(self) -> Turn | None:
        """Remove and return the next turn, or None if none is waiting."""
        ...

    def remove(self, turn: Turn) -> bool:
        """Remove a turn, and return whether it was waiting."""
        ...


class SmallestFirst:
    """A queue in which the smallest body is next, and the largest is refused if there is no room.

    At most `limit` turns may wait. A large request can take a hundred times as long to prepare as a
    usual one, so in another order a few large ones could keep all clients waiting.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._waiting: list[tuple[int, int, Turn]] = []  # size, arrival, turn; sorted
        self._arrivals = itertools.count()

    def add(self, turn: Turn) -> Turn | None:
        """Add a turn, and return the one refused for lack of room, if any; see TurnQueue.add()."""
        bisect.insort(self._waiting, (turn.size, next(self._arrivals), turn))
        if len(self._waiting) <= self._limit:
            return None
        return self._waiting.pop()[2]

    def next(self) -> Turn | None:
        """Remove and return the next turn; see TurnQueue."""
        return self._waiting.pop(0)[2] if self._waiting else None

    def remove(self, turn: Turn) -> bool:
        """Remove a turn; see TurnQueue."""
        for index, (_, _, waiting_turn) in enumerate(self._waiting):
            if waiting_turn is turn:
                del self._waiting[index]
                return True
        return False


class ByAddress:
    """A queue in which addresses take turns.

    At most `limit` turns may wait. If there is no room, the newest turn of the address with the
    most turns is refused, or the new turn if its own address would have at least as many.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._line: Line[Turn] = Line()
        self._latest = ""  # the address that had the latest turn

    def add(self, turn: Turn) -> Turn | None:
        """Add a turn, and return the one refused for lack of room, if any; see TurnQueue.add()."""
        loser = None
        if len(self._line) >= self._limit:
            loser = self._line.give_way(turn.owner)
            if loser is None:
                return turn
        self._line.add(turn)
        return loser

    def next(self) -> Turn | None:
        """Remove and return the next turn; see TurnQueue."""
        turn = self._line.next()
        if turn is None:
            return None
        if turn.owner == self._latest:  # another address comes first, if one is waiting
            turn = self._line.next() or turn
        self._line.done_with(turn)
        self._latest = turn.owner
        return turn

    def remove(self, turn: Turn) -> bool:
        """Remove a turn; see TurnQueue."""
        return self._line.remove(turn)


class Turns:
    """Lets requests do something one at a time, in the order that a TurnQueue decides."""

    def __init__(self, queue: TurnQueue):
        self._queue = queue
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
                self._end()
            raise
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        """End the current turn, and begin the next one."""
        self._busy = False
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

"""The line in which requests wait for the engine: addresses take turns, and the one with most requests gives way."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """Something that waits in the line."""

    @property
    def owner(self) -> str:
        """The address that it belongs to."""
        ...

    @property
    def begun(self) -> bool:
        """Whether the engine works on a part of it already."""
        ...

    @property
    def more(self) -> bool:
        """Whether a part of it still waits."""
        ...


W = TypeVar("W", bound=Waiter)


class Line(Generic[W]):
    """Waiting requests by address. The event loop adds to it while the engine's thread takes from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[
            str, deque[W]
        ] = {}  # no empty ones; the address whose turn it is comes first

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def add(self, waiter: W) -> None:
        """Let a request wait behind the others of its address."""
        with self._lock:
            self._waiting.setdefault(waiter.owner, deque()).append(waiter)

    def next(self, may_begin: Callable[[W], bool] = lambda waiter: True) -> W | None:
        """The oldest request of the address whose turn it is; the turn passes on. None if nobody waits.

        An address whose oldest request may not begin yet keeps its turn. The caller begins one part of the request;
        then it calls done_with().
        """
        with self._lock:
            for owner, waiting in self._waiting.items():
                if may_begin(waiting[0]):
                    self._waiting[owner] = self._waiting.pop(owner)  # the address is last now
                    return waiting[0]
            return None

    def done_with(self, waiter: W) -> None:
        """Remove a request that next() gave, unless more parts of it wait."""
        if not waiter.more:
            self.remove(waiter)

    def remove(self, waiter: W) -> bool:
        """Take a request out. False if it does not wait."""
        with self._lock:
            return self._remove(waiter)

    def yields_to(self, newcomer: str) -> bool:
        """Whether an address has so many waiting requests that one would give way to a newcomer's."""
        with self._lock:
            return self._most(newcomer) is not None

    def give_way(self, newcomer: str) -> W | None:
        """Take out the newest request of the address with most waiting requests, and return it.

        None if that address would be the newcomer's own, the newcomer counted.
        """
        with self._lock:
            most = self._most(newcomer)
            if most is None:
                return None
            newest = self._waiting[most][-1]
            self._remove(newest)
            return newest

    def _most(self, newcomer: str) -> str | None:
        counts = {
            owner: sum(not waiter.begun for waiter in waiting)
            for owner, waiting in self._waiting.items()
        }
        most = max(counts, key=lambda owner: counts[owner], default=newcomer)
        return most if most != newcomer and counts[most] > counts.get(newcomer, 0) + 1 else None

    def _remove(self, waiter: W) -> bool:
        waiting = self._waiting.get(waiter.owner)
        if waiting is None or waiter not in waiting:
            return False
        waiting.remove(waiter)
        if not waiting:
            del self._waiting[waiter.owner]
        return True

"""Stores responses for clients that continue or fetch them: in memory only, for a while, and never
more than so many."""

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from nanochat.serve.routes.fields import ApiError

MOST = 1000  # responses
MOST_BYTES = 32 * 2**20  # of all responses together, each with the messages that led to it
SECONDS = 3600.0  # since the last use of a response
GONE = "there is no response {number!r}: it was not stored, is too old, or gave way to newer ones"


class _Entry(NamedTuple):
    used: float
    messages: bytes
    body: bytes

    @property
    def size(self) -> int:
        return len(self.messages) + len(self.body)


class ResponseStore:
    """The responses of all clients. The one that was used least recently goes first; threads may
    share an object."""

    def __init__(
        self,
        max_count: int = MOST,
        max_bytes: int = MOST_BYTES,
        seconds: float = SECONDS,
        now: Callable[[], float] = time.monotonic,
    ):
        """`now` is the clock in seconds."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._now = now
        self._lock = threading.Lock()
        # By owner and id, the last used one last.
        self._entries: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()
        self._bytes = 0

    def of(self, api_key: str) -> "Shelf":
        """The responses of the clients that send a key, which is their Authorization header or
        empty."""
        return Shelf(self, hashlib.sha256(api_key.encode(errors="replace")).digest())

    def put(
        self,
        key: tuple[bytes, str],
        messages: bytes,
        body: bytes,
    ) -> None:
        """Keep a response, and drop what is then too old or too much."""
        with self._lock:
            self._add(key, _Entry(self._now(), messages, body))
            while self._entries and self._too_full():
                self._bytes -= self._entries.popitem(last=False)[1].size

    def _too_full(self) -> bool:
        """Whether the oldest response is too old, or all responses are too many or too large."""
        oldest = next(iter(self._entries.values()))
        if self._now() - oldest.used > self._seconds:
            return True
        return len(self._entries) > self._max_count or self._bytes > self._max_bytes

    def take(self, key: tuple[bytes, str], again: bool) -> _Entry | None:
        """A response, which stays and counts as used if it shall be there `again`; None if it is
        not there."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._bytes -= entry.size
            if self._now() - entry.used > self._seconds:
                return None
            if again:
                self._add(key, entry._replace(used=self._now()))
            return entry

    def _add(self, key: tuple[bytes, str], entry: _Entry) -> None:
        self._entries[key] = entry
        self._bytes += entry.size


class Shelf:
    """The responses of one key. Another key finds none of them, even with their ids."""

    def __init__(self, store: ResponseStore, owner: bytes):
        self._store = store
        self._owner = owner

    def keep(
        self,
        number: str,
        messages: list[dict[str, Any]],
        body: dict[str, Any],
    ) -> None:
        """Keep a response under its id with the messages of its chat, its own among them."""
        key = (self._owner, number)
        chat = json.dumps(messages)
        response = json.dumps(body)
        self._store.put(key, chat.encode(), response.encode())

    def messages(self, number: str) -> list[dict[str, Any]]:
        """The messages of the chat that a response ends. ApiError 400 if it is not kept."""
        entry = self._store.take((self._owner, number), again=True)
        if entry is None:
            text = f"{GONE.format(number=number[:80])}. Send the whole chat as input"
            raise ApiError(400, "previous_response_not_found", text, "previous_response_id")
        return json.loads(entry.messages)

    def response(self, number: str, again: bool = True) -> dict[str, Any]:
        """The response of an id; it is removed unless it shall be there `again`. ApiError 404 if it
        is not kept."""
        entry = self._store.take((self._owner, number), again)
        if entry is None:
            raise ApiError(404, "not_found", GONE.format(number=number[:80]), "response_id")
        return json.loads(entry.body)

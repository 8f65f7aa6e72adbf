"""Stores responses so that clients can continue or fetch them.

The store is in memory only. It keeps a bounded number of responses for a limited time.
"""

import hashlib
import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from nanochat.serve.routes.fields import ApiError

MOST = 1000  # responses
MOST_BYTES = 32 * 2**20  # all responses together, each with the messages before it
SECONDS = 3600.0  # since the last use of a response
GONE = "there is no response {number!r}: it was not stored, is too old, or gave way to newer ones"


class _Entry(NamedTuple):
    address: str  # the client that asked for the response
    used: float
    messages: bytes
    body: bytes

    @property
    def size(self) -> int:
        return len(self.messages) + len(self.body)


class ResponseStore:
    """The stored responses of all clients.

    If there are too many, or they are too large together, the address whose responses are the
    largest together loses the least recently used ones of these. Threads may share a store.
    """

    def __init__(
        self,
        max_count: int = MOST,
        max_bytes: int = MOST_BYTES,
        seconds: float = SECONDS,
        now: Callable[[], float] = time.monotonic,
    ):
        """Make an empty store; responses expire `seconds` after the last use by the clock `now`."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._now = now
        self._lock = threading.Lock()
        # By owner and ID; the one that was used last comes last.
        self._entries: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()
        self._bytes: Counter[str] = Counter()  # by address

    def of(self, authorization: str, address: str) -> "Shelf":
        """Return the Shelf of the clients that send the same key.

        `authorization` is the header that holds the key, or "" if there is none; the scheme may be
        in any case and followed by any spaces. `address` is the one that the client counts for.
        """
        scheme, _, api_key = authorization.strip().partition(" ")
        key = f"{scheme.lower()} {api_key.strip()}"
        return Shelf(self, hashlib.sha256(key.encode(errors="replace")).digest(), address)

    def put(
        self,
        key: tuple[bytes, str],
        address: str,
        messages: bytes,
        body: bytes,
    ) -> None:
        """Store a response from an address, and drop others until no limit is exceeded."""
        with self._lock:
            self._add(key, _Entry(address, self._now(), messages, body))
            self._drop_expired()
            while len(self._entries) > self._max_count or self._bytes.total() > self._max_bytes:
                self._drop_of_largest()

    def _drop_expired(self) -> None:
        """Drop the responses that nobody has used for too long."""
        now = self._now()
        for key, entry in [*self._entries.items()]:
            if now - entry.used <= self._seconds:
                return
            self._remove(key)

    def _drop_of_largest(self) -> None:
        """Drop the least recently used response of the address with the most bytes."""
        ((largest, _),) = self._bytes.most_common(1)
        for key, entry in self._entries.items():
            if entry.address == largest:
                self._remove(key)
                return

    def take(self, key: tuple[bytes, str], again: bool) -> _Entry | None:
        """Return a response's entry, or None if it is not stored or has expired.

        With `again`, the response stays and counts as used now. Otherwise it is removed.
        """
        with self._lock:
            entry = self._remove(key)
            if entry is None:
                return None
            if self._now() - entry.used > self._seconds:
                return None
            if again:
                self._add(key, entry._replace(used=self._now()))
            return entry

    def _add(self, key: tuple[bytes, str], entry: _Entry) -> None:
        self._entries[key] = entry
        self._bytes[entry.address] += entry.size

    def _remove(self, key: tuple[bytes, str]) -> _Entry | None:
        """Remove an entry and return it, or None if it is not stored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes[entry.address] -= entry.size
            if not self._bytes[entry.address]:
                del self._bytes[entry.address]
        return entry


class Shelf:
    """The stored responses of one key, which other keys cannot find even by their IDs."""

    def __init__(
        self,
        store: ResponseStore,
        owner: bytes,
        address: str,
    ):
        self._store = store
        self._owner = owner
        self._address = address

    def keep(
        self,
        response_id: str,
        messages: list[dict[str, Any]],
        body: dict[str, Any],
    ) -> None:
        """Store the response `body`, and the `messages` of its chat, which end with its reply."""
        key = (self._owner, response_id)
        chat = json.dumps(messages)
        response = json.dumps(body)
        self._store.put(key, self._address, chat.encode(), response.encode())

    def messages(self, response_id: str) -> list[dict[str, Any]]:
        """Return the messages of the chat that ends with a stored response.

        Raises ApiError (400) if the response is not stored.
        """
        entry = self._store.take((self._owner, response_id), again=True)
        if entry is None:
            text = f"{GONE.format(number=response_id[:80])}. Send the whole chat as input"
            raise ApiError(400, "previous_response_not_found", text, "previous_response_id")
        return json.loads(entry.messages)

    def response(self, response_id: str, again: bool = True) -> dict[str, Any]:
        """Return the stored response `response_id`, and remove it unless `again` is true.

        Raises ApiError (404) if the response is not stored.
        """
        entry = self._store.take((self._owner, response_id), again)
        if entry is None:
            raise ApiError(404, "not_found", GONE.format(number=response_id[:80]), "response_id")
        return json.loads(entry.body)

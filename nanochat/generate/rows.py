"""Which request holds which slot of the cache, and what finished requests leave there for others.

Requests in flight hold slots 0 .. active - 1: first the decoding ones, then the ones that still prefill, so that every
pass works on one contiguous slice. A request that ends leaves its tokens in a slot behind those. Another request for
the same adapter whose prompt begins with the same tokens takes that slot over, or copies the common part into the slot
that nobody has used for the longest time, whichever loses fewer tokens. A request with a new prompt gets the oldest
slot too.
"""

import itertools
from collections.abc import Iterable

from nanochat.cache import Cache
from nanochat.generate.request import Request

LEAST = 16  # a shorter common prefix is not worth a copy
BORDER = 256  # states that cannot be cut are kept every so many tokens of a prompt ...
MOST_STATES = 4  # ... the latest few of each slot


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common at the start."""
    if a[:LEAST] != b[:LEAST]:
        return next(
            (i for i, (x, y) in enumerate(zip(a[:LEAST], b[:LEAST], strict=False)) if x != y),
            min(len(a), len(b)),
        )
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] and b[:low] are equal
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Rows:
    """The slots of a cache and the requests in them."""

    def __init__(self, cache: Cache, slots: int, rows: int):
        """At most `slots` requests are in flight; the cache has `rows` slots, at least as many."""
        self.cache, self.slots = cache, slots
        self.held: list[Request | None] = [
            None
        ] * rows  # by slot; behind the active ones: what others left
        self.active = 0
        self._clock = itertools.count(1)

    @property
    def running(self) -> list[Request]:
        """The requests in flight, in the order of their slots."""
        return [request for request in self.held[: self.active] if request is not None]

    @property
    def free(self) -> int:
        """How many more requests may be in flight."""
        return self.slots - self.active

    def ready(self) -> int:
        """How many requests are ready to decode; they hold the first slots."""
        return next(
            (slot for slot, request in enumerate(self.running) if request.prefilling), self.active
        )

    # --- common prefixes -------------------------------------------------------------------------

    def _usable(self, request: Request, other: Request) -> int:
        """How many tokens of the request's prompt need not be read again if it has what the other one's slot holds."""
        if (
            request.tokens[:LEAST] != other.tokens[:LEAST]
            or request.sampling.adapter != other.sampling.adapter
        ):
            return 0
        length = min(common_prefix(request.tokens, other.tokens), other.cached, request.prompt - 1)
        if request.sampling.prompt_logprobs is not None:
            if request.sampling.prompt_logprobs != other.sampling.prompt_logprobs:
                return 0
            length = min(
                length - 1, len(other.scores)
            )  # the score of the next token is not the same
        if length != other.cached and not self.cache.cuts_anywhere:
            length = max((tokens for tokens in other.states if tokens <= length), default=0)
        return length if length >= LEAST else 0

    def _best(self, request: Request, slots: Iterable[int]) -> tuple[int, int]:
        """The slot with the longest usable prefix, and that prefix's length; 0 if there is none."""
        lengths = [
            (slot, self._usable(request, other))
            for slot in slots
            if (other := self.held[slot]) is not None
        ]
        return max(lengths, key=lambda pair: pair[1], default=(0, 0))

    def remember(self, requests: Iterable[Request]) -> None:
        """Mark what these requests can use as just used, so that none of them evicts it before the others come."""
        for request in requests:
            slot, length = self._best(request, range(self.active, len(self.held)))
            if length and (other := self.held[slot]) is not None:
                other.used = next(self._clock)

    def share(self, slot: int) -> None:
        """Copy to a prefilling request's slot what a request in flight has read of the same prefix since."""
        request = self.held[slot]
        assert request is not None
        source, length = self._best(
            request, (other for other in range(self.active) if other != slot)
        )
        if length > request.cached:
            self._copy_prefix(source, slot, request, length)

    def promises(self, request: Request, other: Request) -> bool:
        """Whether reading the other request's prompt first spares the request a part of its own."""
        if request.sampling.prompt_logprobs not in (None, other.sampling.prompt_logprobs):
            return False
        if request.sampling.adapter != other.sampling.adapter:
            return False
        length = min(common_prefix(request.tokens, other.tokens), request.prompt - 1)
        cut = self.cache.cuts_anywhere or length >= min(BORDER, other.prompt - 1)
        return cut and length >= request.cached + LEAST

    def _copy_prefix(self, source: int, target: int, request: Request, length: int) -> None:
        """Give a request's slot the first tokens of another slot."""
        other = self.held[source]
        assert other is not None
        self.cache.copy(source, target, length)
        self._cut(target, request, other, length)

    def _cut(self, slot: int, request: Request, other: Request, length: int) -> None:
        """Let a slot that holds the other request's tokens hold only the first `length` of them, for the request."""
        if length != other.cached:
            if self.cache.cuts_anywhere:
                self.cache.cut(slot, length, other.tokens[length - 1])
            else:
                self.cache.restore(slice(slot, slot + 1), other.states[length])
        request.reused += length - request.cached
        request.cached, request.scores = length, other.scores[:length]
        request.states = {
            tokens: state for tokens, state in other.states.items() if tokens <= length
        }

    # --- coming and going ------------------------------------------------------------------------

    def take(self, request: Request) -> None:
        """Give a slot to a request, with the longest prefix of its prompt that any slot holds."""
        first, behind = self.active, range(self.active, len(self.held))
        source, length = self._best(request, range(len(self.held)))
        oldest = min(
            behind, key=lambda slot: left.used if (left := self.held[slot]) is not None else 0
        )
        lost = victim.cached if (victim := self.held[oldest]) is not None else 0
        other = self.held[source] if length else None
        if other is not None and source >= first and other.cached - length <= lost:
            self._swap(
                source, first
            )  # cutting the other one off loses less than giving the oldest slot away
            self._cut(first, request, other, length)
        else:
            self._drop(oldest)
            if oldest != first:
                self._move(first, oldest)
                self._drop(first)
                source = oldest if source == first else source
            if other is not None:
                other.used = next(self._clock)
                self._copy_prefix(source, first, request, length)
        self.held[first] = request
        self.active += 1

    def leave(self, slot: int) -> None:
        """End a request's flight: the last ready request gets its slot, and the prefilling ones move up in their order.
        What the request has in the cache stays in the first slot behind them."""
        gone, ready, last = self.held[slot], self.ready(), self.active - 1
        assert gone is not None
        keep = gone.cached >= LEAST
        first = max(slot, ready - 1)  # the hole left for the prefilling requests to close
        path = [slot, *([first] if first != slot else []), *range(first + 1, last + 1)]
        taken = self.cache.take(slot, gone.cached) if keep and len(path) > 1 else None
        for target, source in itertools.pairwise(path):
            self._move(source, target)
        self.active = last
        self.held[last] = gone if keep else None
        gone.used = next(self._clock)
        if taken is not None:
            self.cache.put(last, taken)
        elif not keep:
            self.cache.clear(slice(last, last + 1))

    def forget(self) -> None:
        """Drop everything that no request in flight holds."""
        for slot in range(self.active, len(self.held)):
            self._drop(slot)

    def keep_states(self, slot: int) -> None:
        """Keep the states of a slot that has reached a border or the end of its prompt, if they cannot be cut."""
        request = self.held[slot]
        assert request is not None
        if not self.cache.cuts_anywhere and (
            request.cached % BORDER == 0 or not request.prefilling
        ):
            request.states[request.cached] = self.cache.kept(slice(slot, slot + 1))
            while len(request.states) > MOST_STATES:
                request.states.pop(next(iter(request.states)))

    def _drop(self, slot: int) -> None:
        self.held[slot] = None
        self.cache.clear(slice(slot, slot + 1))

    def _move(self, source: int, target: int) -> None:
        """Move what a slot holds to a slot whose content is not needed."""
        self.held[target] = moved = self.held[source]
        self.cache.copy(source, target, moved.cached if moved is not None else 0)

    def _swap(self, one: int, two: int) -> None:
        if one != two:
            first, second = self.held[one], self.held[two]
            assert first is not None
            taken = self.cache.take(one, first.cached)
            self.cache.copy(two, one, second.cached if second is not None else 0)
            self.cache.put(two, taken)
            self.held[one], self.held[two] = second, first

"""Assigns the slots of the cache to requests, and finds cached tokens that a request can reuse.

A slot is one row of the key-value cache: the keys, values and states of one sequence. Requests in
flight hold slots 0 .. active - 1. Those that decode come first, then those that still prefill, so
that every pass works on one contiguous slice. A request that ends leaves its tokens in a slot
behind the requests in flight. If the prompt of another request for the same adapter begins with the
same tokens, that request either takes over the slot or copies the common part into the slot that
has been unused for longest, whichever loses fewer tokens. A request with a new prompt also gets the
slot that has been unused for longest.
"""

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor

from nanochat.cache import Cache
from nanochat.generate.request import Request

CHUNK = 512  # most tokens of one prompt in a prefill pass
MIN_PREFIX = 16  # a shorter common prefix is not worth copying
# The states of recurrent layers cannot be shortened, so a prompt's are saved every 256 tokens.
STATE_INTERVAL = 256
MAX_SAVED_STATES = 4  # per slot
# Log-probabilities of prompts that all finished requests together keep, some 160 bytes each.
MAX_SAVED_SCORES = 1 << 18


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix of two lists of tokens."""
    if a[:MIN_PREFIX] != b[:MIN_PREFIX]:
        pairs = zip(a[:MIN_PREFIX], b[:MIN_PREFIX], strict=False)
        differences = (i for i, (x, y) in enumerate(pairs) if x != y)
        return next(differences, min(len(a), len(b)))
    low = 0
    high = min(len(a), len(b))
    while low < high:  # a[:low] == b[:low] always holds
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _least_useful(lengths: list[int], branch: int) -> int:
    """Return which of the saved lengths, in rising order, is to be given up.

    It is one that is close to its neighbours, compared with how far it is from the end, where most
    prompts change. The last length and the length of the branch are not given up.
    """

    def loss(index: int) -> float:
        length = lengths[index]
        earlier = lengths[index - 1] if index else 0
        tokens = (length - earlier) * (lengths[index + 1] - length)
        return tokens / (lengths[-1] - length + STATE_INTERVAL)

    candidates = [index for index in range(len(lengths) - 1) if lengths[index] != branch]
    return lengths[min(candidates, key=loss)]


class Slots:
    """The slots of a cache, and the requests in them."""

    def __init__(self, cache: Cache, in_flight: int, total: int):
        """Create empty slots for a cache that has `total` of them.

        At most `in_flight` requests run together, which must not exceed `total`.
        """
        self.cache = cache
        self.in_flight = in_flight
        # One entry per slot. Slots after the active ones hold cached tokens of finished requests.
        self.requests: list[Request | None] = [None] * total
        self.active = 0
        self.reused_tokens = 0  # prompt tokens that requests have taken from other requests
        self._clock = itertools.count(1)

    @property
    def running(self) -> list[Request]:
        """The requests in flight, in the order of their slots."""
        return [request for request in self.requests[: self.active] if request is not None]

    @property
    def free(self) -> int:
        """The number of further requests that may be in flight."""
        return self.in_flight - self.active

    def ready(self) -> int:
        """Return how many requests are ready to decode; they hold the first slots."""
        for slot, request in enumerate(self.running):
            if request.prefilling:
                return slot
        return self.active

    # --- common prefixes -------------------------------------------------------------------------

    def _reusable(self, request: Request, donor: Request) -> int:
        """Return how many tokens can be reused from the donor's slot, or 0 if below 16."""
        if request.tokens[:MIN_PREFIX] != donor.tokens[:MIN_PREFIX]:
            return 0
        if donor.spoiled or request.sampling.adapter != donor.sampling.adapter:
            return 0
        common = common_prefix(request.tokens, donor.tokens)
        length = min(common, donor.cached, len(request.tokens) - 1)
        if request.sampling.prompt_logprobs is not None:
            if request.sampling.prompt_logprobs != donor.sampling.prompt_logprobs:
                return 0
            # The score of the token after the common prefix differs.
            length = min(length - 1, len(donor.prompt_scores))
        if length != donor.cached and not self.cache.cuts_anywhere:
            saved_lengths = [tokens for tokens in donor.saved_states if tokens <= length]
            length = max(saved_lengths, default=0)
        return length if length >= MIN_PREFIX else 0

    def _longest_prefix(
        self, request: Request, donors: Iterable[Request | None]
    ) -> tuple[Request | None, int]:
        """Return the donor with the longest reusable prefix, and the length of that prefix.

        Returns (None, 0) if no donor has one.
        """
        longest: tuple[Request | None, int] = (None, 0)
        for donor in donors:
            length = 0 if donor is None else self._reusable(request, donor)
            if length > longest[1]:
                longest = (donor, length)
        return longest

    def _branch(self, request: Request) -> int:
        """Return how many of its tokens a request has in common with another slot, but its last.

        A prompt that begins in the same way is likely to come again.
        """
        lengths = [
            min(common_prefix(request.tokens, donor.tokens), donor.cached)
            for donor in self.requests
            if donor is not None and donor.sampling.adapter == request.sampling.adapter
        ]
        return min(max(lengths, default=0), request.prompt_length - 1)

    def share(self, slot: int) -> None:
        """Give a prefilling slot the longest prefix of its prompt that another active slot holds.

        The prefix is copied only if it is longer than what the slot already holds.
        """
        request = self.requests[slot]
        assert request is not None
        neighbours = (other for other in self.running if other is not request)
        donor, length = self._longest_prefix(request, neighbours)
        if donor is not None and length > request.cached:
            self._copy_prefix(slot, request, donor, length)

    def will_share(self, request: Request, donor: Request) -> bool:
        """Return whether the request could reuse more tokens once the donor's prompt is cached.

        Fewer than 16 more do not count.
        """
        if request.sampling.prompt_logprobs not in (None, donor.sampling.prompt_logprobs):
            return False
        if request.sampling.adapter != donor.sampling.adapter:
            return False
        length = min(common_prefix(request.tokens, donor.tokens), request.prompt_length - 1)
        first_saved = min(STATE_INTERVAL, donor.prompt_length - 1)
        usable = self.cache.cuts_anywhere or length >= first_saved
        return usable and length >= request.cached + MIN_PREFIX

    def _copy_prefix(self, slot: int, request: Request, donor: Request, length: int) -> None:
        """Copy the donor's first `length` tokens into `slot`, where the request reuses them."""
        self.cache.copy(self.requests.index(donor), slot, length)
        self._cut(slot, request, donor, length)

    def _cut(self, slot: int, request: Request, donor: Request, length: int) -> None:
        """Cut the donor's tokens in `slot` to the first `length`, which the request then reuses."""
        if length != donor.cached:
            if self.cache.cuts_anywhere:
                self.cache.cut(slot, length, donor.tokens[length - 1])
            else:
                self.cache.restore(slice(slot, slot + 1), donor.saved_states[length])
        reused = max(0, length - max(request.cached, request.cached_before))
        request.reused += reused
        self.reused_tokens += reused
        request.cached = length
        request.prompt_scores = donor.prompt_scores[:length]
        states = donor.saved_states.items()
        request.saved_states = {tokens: state for tokens, state in states if tokens <= length}

    # --- coming and going ------------------------------------------------------------------------

    def admit(self, arrivals: Sequence[Request]) -> None:
        """Give slots to requests, those with shorter prompts first.

        Repeated prompts come last, because they copy the cached tokens of the first ones.
        """
        originals: dict[tuple[str, tuple[int, ...]], Request] = {}  # by adapter and prompt
        copies = []
        for request in sorted(arrivals, key=lambda request: request.prompt_length):
            key = (request.sampling.adapter, tuple(request.tokens))
            if key in originals:
                copies.append(request)
            else:
                originals[key] = request
        copies.sort(key=lambda request: request.number)
        self._protect(originals.values())
        for request in [*originals.values(), *copies]:
            self._take(request)

    def _protect(self, requests: Iterable[Request]) -> None:
        """For each request, mark the inactive slot with the longest reusable prefix as just used.

        Admitting the requests therefore evicts other slots first.
        """
        for request in requests:
            donor, _ = self._longest_prefix(request, self.requests[self.active :])
            if donor is not None:
                donor.last_used = next(self._clock)

    def _take(self, request: Request) -> None:
        """Give a request a slot, with the longest prefix of its prompt that it can reuse."""
        target = self.active
        if not self.cache.cuts_anywhere:
            request.branch = self._branch(request)
        donor, length = self._longest_prefix(request, self.requests)
        oldest = min(range(target, len(self.requests)), key=self._last_used)
        if donor is not None and self._takes_over(donor, length, oldest):
            self._swap(self.requests.index(donor), target)
            self._cut(target, request, donor, length)
        else:
            self._drop(oldest)
            self._swap(oldest, target)
            if donor is not None:
                donor.last_used = next(self._clock)
                self._copy_prefix(target, request, donor, length)
        self.requests[target] = request
        self.active += 1

    def _takes_over(self, donor: Request, length: int, oldest: int) -> bool:
        """Return whether a request gets the donor's slot, rather than a copy of `length` tokens.

        It does if the donor is finished, and cutting its slot loses no more tokens than evicting
        slot `oldest`, which the copy would need.
        """
        is_finished = self.requests.index(donor) >= self.active
        return is_finished and donor.cached - length <= self._cached(oldest)

    def _last_used(self, slot: int) -> int:
        """Return when a slot was last used, or 0 if it is empty."""
        request = self.requests[slot]
        return 0 if request is None else request.last_used

    def leave(self, slot: int) -> None:
        """End a request, leaving its cached tokens in the first slot behind the active ones.

        If there are fewer than 16, or a pass has failed, they are dropped. If the request was
        ready, the last ready request takes its slot. The prefilling requests then move up in order.
        Say that A, B and C decode, and x and y prefill: when A ends, A B C x y becomes C B x y A.
        """
        request = self.requests[slot]
        assert request is not None
        last_ready = max(slot, self.ready() - 1)  # `slot` itself if the request was prefilling
        self._rotate(sorted({slot, *range(last_ready, self.active)}))
        self.active -= 1
        request.last_used = next(self._clock)
        request.release()
        if request.cached < MIN_PREFIX or request.spoiled:
            self._drop(self.active)
        self._limit_scores()

    def _limit_scores(self) -> None:
        """Drop prompt scores of finished requests, the oldest first, if there are too many."""
        finished = [request for request in self.requests[self.active :] if request is not None]
        finished.sort(key=lambda request: request.last_used, reverse=True)
        saved_scores = 0
        for request in finished:
            scores_per_token = 1 + (request.sampling.prompt_logprobs or 0)
            saved_scores += scores_per_token * len(request.prompt_scores)
            if saved_scores > MAX_SAVED_SCORES:
                request.prompt_scores = []

    def forget(self) -> None:
        """Empty every slot that no request in flight holds."""
        for slot in range(self.active, len(self.requests)):
            self._drop(slot)

    def spoil(self) -> None:
        """Reuse nothing that the slots hold, after a pass that may have changed any of them."""
        self.forget()
        for request in self.running:
            request.spoiled = True

    # --- reading prompts -------------------------------------------------------------------------

    def shortest_first(self, first: int) -> None:
        """Let the shortest prompt from slot `first` on, which is to be read next, be read first.

        The prompt that was next lets at most as many tokens pass as it has itself, and only shorter
        prompts of less than half its unread tokens, since exchanging slots copies their contents.
        """
        waiting = self.running[first:]
        shortest = min(waiting, key=lambda request: request.unread)
        next_request = waiting[0]
        let_pass = next_request.let_pass + shortest.unread
        if 2 * shortest.unread < next_request.unread and let_pass <= next_request.prompt_length:
            next_request.let_pass = let_pass
            self._swap(first, first + waiting.index(shortest))

    def prefill_shape(self, first: int, budget: int) -> tuple[int, int]:
        """Return the number of rows and columns of the next prefill pass, from slot `first` on.

        The pass has at most `budget` tokens, at most half of them padding.
        """
        requests = self.running[first:]
        columns = min(self.chunk_end(requests[0]) - requests[0].cached, CHUNK, budget)
        count = 1
        real_tokens = columns
        for slot, request in enumerate(requests[1:], first + 1):
            if (count + 1) * columns > budget:
                break
            self.share(slot)
            tokens = min(self.chunk_end(request) - request.cached, CHUNK)
            if tokens <= 0:  # the whole prompt is cached
                break
            if any(self.will_share(request, earlier) for earlier in requests[:count]):
                break  # the common prefix is copied, not computed twice
            wider_columns = max(columns, tokens)
            padded_area = (count + 1) * wider_columns
            if padded_area > budget or padded_area > 2 * (real_tokens + tokens):
                break
            count += 1
            columns = wider_columns
            real_tokens += tokens
        # A padded row must not run past the end of the cache: the rest of a long prompt waits for
        # the next pass.
        room = min(self.cache.length - request.cached for request in requests[:count])
        return count, min(columns, room)

    def chunk_end(self, request: Request) -> int:
        """Return the last position at which the request's next chunk may end.

        The last token of a prompt is left to the first decoding pass. If the states of a slot
        cannot be cut, they are saved every 256 tokens (STATE_INTERVAL), and where the prompt leaves
        the common beginning with another one, so a chunk ends there.
        """
        end = request.prompt_length - 1
        if self.cache.cuts_anywhere:
            return end
        if request.cached < request.branch < end:
            end = request.branch
        return min(end, (request.cached // STATE_INTERVAL + 1) * STATE_INTERVAL)

    def save_states(self, slot: int) -> None:
        """Save the states of a slot that a later prompt may begin with.

        They are saved after every 256 tokens, where the prompt leaves its common beginning with
        another one, and when its prefill is over. Nothing is saved if the cache can be cut to any
        length.
        """
        request = self.requests[slot]
        assert request is not None
        if self.cache.cuts_anywhere:
            return
        at_border = request.cached % STATE_INTERVAL == 0 or request.cached == request.branch
        if at_border or not request.prefilling:
            request.saved_states[request.cached] = self.cache.copy_states(slice(slot, slot + 1))
            if len(request.saved_states) > MAX_SAVED_STATES:
                del request.saved_states[_least_useful(list(request.saved_states), request.branch)]

    # --- guessed tokens --------------------------------------------------------------------------

    def states(self, count: int) -> list[Tensor]:
        """Return what take_back() needs of the first `count` slots, before they are fed guesses."""
        return [] if self.cache.cuts_anywhere else self.cache.copy_states(slice(0, count))

    def take_back(
        self,
        slot: int,
        cached_before: int,
        fed_tokens: int,
        states: list[Tensor],
    ) -> None:
        """Drop the guesses from a slot, which held `cached_before` tokens and was fed `fed_tokens`.

        Only as many as the request counts stay. If the states cannot be cut, all fed tokens are
        dropped, and those that stay in the reply are fed again.
        """
        request = self.requests[slot]
        assert request is not None
        if request.cached == cached_before + fed_tokens:
            return
        if self.cache.cuts_anywhere:
            self.cache.cut(slot, request.cached, request.tokens[request.cached - 1])
            return
        self.cache.restore(slice(slot, slot + 1), [state[slot : slot + 1] for state in states])
        request.cached = cached_before

    # --- the contents of slots --------------------------------------------------------------------

    def _drop(self, slot: int) -> None:
        """Empty a slot."""
        self.requests[slot] = None
        self.cache.clear(slice(slot, slot + 1))

    def _rotate(self, path: Sequence[int]) -> None:
        """Move what each slot of a path holds to the slot before it, and the first one's to the last.

        The contents of the first slot are copied aside meanwhile.
        """
        first = path[0]
        last = path[-1]
        if first == last:
            return
        request = self.requests[first]
        contents = self.cache.take(first, self._cached(first))
        for target, source in itertools.pairwise(path):
            self.cache.copy(source, target, self._cached(source))
            self.requests[target] = self.requests[source]
        self.cache.put(last, contents)
        self.requests[last] = request

    def _swap(self, slot: int, other: int) -> None:
        """Exchange the contents of two slots, either of which may be empty.

        The slot with fewer tokens is copied aside: fresh memory for 20,000 tokens takes four times
        as long as copying them.
        """
        self._rotate(sorted((slot, other), key=self._cached))

    def _cached(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        request = self.requests[slot]
        return 0 if request is None else request.cached

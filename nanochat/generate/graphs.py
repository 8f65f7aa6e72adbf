"""Replays decoding steps as captured graphs: one launch instead of hundreds of operators.

A graph computes on the memory that it was captured with. So the tokens of a step are copied into a
fixed tensor, the lengths of the rows are read from the cache on the device, and attention reads a
whole block of the cache, masked by those lengths. Rows and blocks are rounded up to powers of two,
as far as the cache allows, so that few graphs are captured.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.generate.adapters import NONE, Adapters
from nanochat.model import Model
from nanochat.platforms.base import Platform

LEAST_KEYS = 256  # cache positions that the smallest graph reads
Shape = tuple[int, int, bool]  # rows, keys, and whether any row has an adapter


def rounded(count: int, limit: int) -> int:
    """Return `count` (at least 1) rounded up to a power of two, or `limit` if that is less."""
    return min(1 << (count - 1).bit_length(), limit)


class DecodeGraphs:
    """The captured decoding steps of a model over a cache.

    A step may overwrite the logits that an earlier step returned.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        platform: Platform,
        adapters: Adapters | None = None,
    ):
        """Prepare to capture; no graph is captured before the first step.

        `platform` captures and replays graphs. `adapters` are the LoRA adapters that requests may
        select.
        """
        self.model = model
        self.cache = cache
        self.platform = platform
        self.adapters = adapters
        self.replays = 0
        slots = cache.positions.size(0)
        self._tokens = torch.zeros(slots, 1, dtype=torch.long, device=cache.positions.device)
        self._pool = platform.graph_pool()
        # by shape: a function that replays the step, and a list that holds its logits
        self._graphs: dict[Shape, tuple[Callable[[], None], list[Tensor]]] = {}

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the steps captured so far."""
        return list(self._graphs)

    def step(
        self,
        tokens: Sequence[int],
        cached: Sequence[int],
        numbers: Sequence[int],
    ) -> Tensor | None:  # (B, V) fp32
        """Feed a token to each of the first B slots, and return the logits that follow.

        `cached` holds the number of tokens in every slot of the cache, and `numbers` the adapter
        index of each row. Returns None, having done nothing, if one of these slots, or a slot
        that pads the step, is full.
        """
        count = len(tokens)
        cache = self.cache
        rows = rounded(count, len(cached))
        longest = max(cached[:rows])
        if longest >= cache.length:
            return None
        keys = rounded(max(LEAST_KEYS, longest + 1), cache.length)
        self._tokens[:count].copy_(torch.tensor(tokens)[:, None], non_blocking=True)
        padding = slice(count, rows)
        saved_states = cache.copy_states(padding) if rows > count else None
        adapted = any(number != NONE for number in numbers)
        with self._adapted(numbers, rows) if adapted else contextlib.nullcontext():
            logits = self._logits((rows, keys, adapted))
        if saved_states:
            cache.restore(padding, saved_states)
        return logits[:count]

    def _adapted(
        self, numbers: Sequence[int], rows: int
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the rows have their adapters, and padding rows have none."""
        if self.adapters is None:
            return contextlib.nullcontext()
        padded = [*numbers, *[NONE] * (rows - len(numbers))]
        return self.adapters.rows(padded, fixed=True)

    def _logits(self, shape: Shape) -> Tensor:
        """Replay the step of a shape, or capture it on first use, and return the logits."""
        if shape not in self._graphs:
            return self._first(shape)
        replay, results = self._graphs[shape]
        replay()
        self.replays += 1
        return results[0]

    def _first(self, shape: Shape) -> Tensor:
        """Run the first step of a shape without a graph, then capture it, and return its logits."""
        rows, keys, _ = shape
        slots = slice(0, rows)
        results: list[Tensor] = []

        def work() -> None:
            tokens = self._tokens[:rows]
            hidden = self.model.hidden(tokens, Cached(self.cache, tokens, slots, keys=keys))
            results[:] = [self.model.logits(hidden[:, 0])]

        work()
        logits = results[0]
        states = self.cache.copy_states(slots)
        self._graphs[shape] = (self.platform.captured(work, self._pool), results)
        self.cache.restore(slots, states)
        return logits

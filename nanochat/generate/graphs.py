"""Decoding steps as captured graphs: a step of a few shapes is one launch instead of hundreds of operators.

A graph computes on the memory that it was captured with. So the tokens of a step are copied into a fixed place, the
lengths of the rows are read from the cache on the device, and attention reads a whole block of the cache, masked by
those lengths. Rows and blocks are rounded up to powers of two, so that few graphs are captured.
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

LEAST_KEYS = 256  # places of the cache that the smallest graph reads


def rounded(count: int, most: int) -> int:
    """The next power of two, but at most `most`."""
    return min(1 << (count - 1).bit_length(), most)


class DecodeGraphs:
    """The captured decoding steps of a model over a cache. The results of a step are overwritten by the next step."""

    def __init__(
        self, model: Model, cache: Cache, platform: Platform, adapters: Adapters | None = None
    ):
        """`platform` is the device's, which can capture. `adapters` are those that rows may have."""
        self.model, self.cache, self.platform, self.adapters = model, cache, platform, adapters
        self.replays = 0
        slots = cache.positions.size(0)
        self._tokens = torch.zeros(slots, 1, dtype=torch.long, device=cache.positions.device)
        self._pool = platform.graph_pool()
        self._graphs: dict[tuple[int, int, bool], tuple[Callable[[], None], list[Tensor]]] = {}

    @property
    def shapes(self) -> list[tuple[int, int, bool]]:
        """The rows and keys of the steps that are captured, and whether any row has an adapter."""
        return list(self._graphs)

    def step(
        self, tokens: Sequence[int], held: Sequence[int], numbers: Sequence[int]
    ) -> Tensor | None:  # (B, V) fp32
        """Feed a token to each of the first B slots, and return the logits of the tokens after them. `held` is how many
        tokens every slot of the cache holds, `numbers` are the rows' adapters. None, and nothing was done, if a slot
        that only pads the step is full."""
        count, cache = len(tokens), self.cache
        rows = rounded(count, len(held))
        if max(held[:rows]) >= cache.length:
            return None
        keys = rounded(max(LEAST_KEYS, max(held[:rows]) + 1), cache.length)
        self._tokens[:count].copy_(torch.tensor(tokens)[:, None], non_blocking=True)
        spare = slice(count, rows)
        kept = cache.kept(spare) if rows > count else None
        adapted = any(number != NONE for number in numbers)
        given = contextlib.nullcontext()
        if adapted and self.adapters is not None:
            given = self.adapters.rows([*numbers, *[NONE] * (rows - count)], fixed=True)
        with given:
            if (rows, keys, adapted) in self._graphs:
                replay, found = self._graphs[rows, keys, adapted]
                replay()
                self.replays += 1
                logits = found[0]
            else:
                logits = self._first(rows, keys, adapted)
        if kept:
            cache.restore(spare, kept)
        return logits[:count]

    def _first(self, rows: int, keys: int, adapted: bool) -> Tensor:
        """Run a step of a new shape operator by operator, then capture it for the steps that follow."""
        found: list[Tensor] = []

        def work() -> None:
            tokens = self._tokens[:rows]
            hidden = self.model.hidden(
                tokens, Cached(self.cache, tokens, slice(0, rows), keys=keys)
            )
            found[:] = [self.model.logits(hidden[:, 0])]

        work()
        first, states = found[0], self.cache.kept(slice(0, rows))
        self._graphs[rows, keys, adapted] = self.platform.captured(work, self._pool), found
        self.cache.restore(slice(0, rows), states)
        return first

"""Reads prompts that begin alike: the common beginning once, then what follows it, over one cache."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.model import Model


class Branches:
    """Hidden states of a model for batches of prompts; its cache is kept from one batch to the next."""

    def __init__(self, model: Model, pad: int):
        """`pad` is the token that fills rows up."""
        self._model, self._pad = model, pad
        self._cache: Cache | None = None

    def hidden(
        self, prompts: Sequence[Sequence[int]], before: Sequence[int]
    ) -> Tensor:  # (B, T, C)
        """The hidden states of each prompt from token before[b] on. Neighbours that have as many tokens before begin
        with these, and they are read once for all of them."""
        if not any(before):
            return self._model.hidden(self._table(prompts).to(self._model.device))
        families = self._families(prompts, before)
        first = [list(prompts[start][: before[start]]) for start, _ in families]
        rest = max(len(prompt) - read for prompt, read in zip(prompts, before, strict=True))
        cache = self._emptied(
            len(prompts), max(before) + rest
        )  # rows that are filled up must have room too
        self._read(cache, first, [0] * len(first))
        for number, (start, count) in reversed(
            list(enumerate(families))
        ):  # a slot that is written is needed no more
            for slot in range(start + count - 1, start - 1, -1):
                if slot != number:
                    cache.copy(number, slot, before[start])
        return self._read(
            cache, [prompt[read:] for prompt, read in zip(prompts, before, strict=True)], before
        )

    @staticmethod
    def _families(prompts: Sequence[Sequence[int]], before: Sequence[int]) -> list[tuple[int, int]]:
        """Where the prompts of each beginning start, and how many they are."""
        found, start = [], 0
        for _, some in groupby(
            zip(prompts, before, strict=True), key=lambda pair: tuple(pair[0][: pair[1]])
        ):
            found.append((start, len(list(some))))
            start += found[-1][1]
        return found

    def _table(self, pieces: Sequence[Sequence[int]]) -> Tensor:  # (B, T)
        table = torch.full((len(pieces), max(map(len, pieces))), self._pad)
        for row, piece in enumerate(pieces):
            table[row, : len(piece)] = torch.tensor(piece)
        return table

    def _emptied(self, slots: int, length: int) -> Cache:
        """A cache of at least this size that holds nothing."""
        if (
            self._cache is None
            or self._cache.length < length
            or self._cache.positions.size(0) < slots
        ):
            self._cache = self._model.new_cache(slots, length)
        self._cache.clear(slice(0, self._cache.positions.size(0)))
        return self._cache

    def _read(
        self, cache: Cache, pieces: Sequence[Sequence[int]], held: Sequence[int]
    ) -> Tensor:  # (B, T, C)
        """Run pieces through the model, the first of them in slot 0, after what their slots hold."""
        new = list(map(len, pieces))
        table = self._table(pieces).to(self._model.device)
        lengths = torch.tensor(new).to(self._model.device)
        return self._model.hidden(
            table, Cached(cache, table, slice(0, len(pieces)), lengths, list(held), new)
        )

"""Runs batches of prompts through a model, which reads each shared prefix only once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.model import Model


@dataclass(frozen=True)
class _Family:
    """Consecutive prompts that share a prefix; `prompts` are their indices."""

    prefix: tuple[int, ...]
    prompts: range


def _families(prefixes: Sequence[tuple[int, ...]]) -> list[_Family]:
    families: list[_Family] = []
    start = 0
    for prefix, members in groupby(prefixes):
        end = start + len(list(members))
        families.append(_Family(prefix, range(start, end)))
        start = end
    return families


class Branches:
    """Computes the hidden states of batches of prompts.

    The key-value cache is reused until a batch needs a larger one.
    """

    def __init__(self, model: Model, pad: int):
        """Prepare to run a model; `pad` is the token that fills up the shorter rows of a batch."""
        self._model = model
        self._pad = pad
        self._cache: Cache | None = None

    def hidden(
        self, prompts: Sequence[Sequence[int]], prefix_lengths: Sequence[int]
    ) -> Tensor:  # (B, T, C)
        """Return, for each prompt b, the hidden states from token prefix_lengths[b] on.

        If consecutive prompts have the same prefix of that length, the model reads it only once.
        """
        if not any(prefix_lengths):
            tokens = self._padded(prompts)
            return self._model.hidden(tokens)
        prefixes = []
        suffixes = []
        for prompt, prefix_length in zip(prompts, prefix_lengths, strict=True):
            prefixes.append(tuple(prompt[:prefix_length]))
            suffixes.append(prompt[prefix_length:])
        # Padding also takes up space in the cache, so every slot has room for the longest suffix.
        cache_length = max(prefix_lengths) + max(map(len, suffixes))
        cache = self._empty_cache(len(prompts), cache_length)
        self._read_prefixes(cache, prefixes)
        return self._extend(cache, suffixes, prefix_lengths)

    def _read_prefixes(self, cache: Cache, prefixes: Sequence[tuple[int, ...]]) -> None:
        """Fill slot b of the cache with prefix b, reading equal consecutive prefixes only once.

        The prefix of family n, the n-th run of equal prefixes, is read into slot n, then copied to
        the slots of all its prompts. Copies go from the last slot to the first. Since family n
        starts at slot n or later, a slot is only overwritten after its own prefix has been copied.
        """
        families = _families(prefixes)
        family_prefixes = [family.prefix for family in families]
        self._extend(cache, family_prefixes, [0] * len(families))
        for number in reversed(range(len(families))):
            family = families[number]
            for slot in reversed(family.prompts):
                if slot != number:
                    cache.copy(number, slot, len(family.prefix))

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:  # (B, T)
        longest = max(map(len, rows))
        table = torch.full((len(rows), longest), self._pad)
        for i, row in enumerate(rows):
            table[i, : len(row)] = torch.tensor(row)
        return table.to(self._model.device)

    def _empty_cache(self, slots: int, length: int) -> Cache:
        """Return an empty cache with at least `slots` slots of at least `length` positions each."""
        cache = self._cache
        if cache is None or cache.length < length or len(cache.positions) < slots:
            cache = self._model.new_cache(slots, length)
            self._cache = cache
        cache.clear(slice(0, len(cache.positions)))
        return cache

    def _extend(
        self,
        cache: Cache,
        rows: Sequence[Sequence[int]],
        cached_lengths: Sequence[int],
    ) -> Tensor:  # (B, T, C)
        """Run row b as a continuation of cache slot b, for every row, and return the hidden states.

        Slot b already holds cached_lengths[b] tokens.
        """
        row_lengths = list(map(len, rows))
        tokens = self._padded(rows)
        lengths = torch.tensor(row_lengths).to(self._model.device)
        slots = slice(0, len(rows))
        context = Cached(cache, tokens, slots, lengths, list(cached_lengths), row_lengths)
        return self._model.hidden(tokens, context)

"""Runs new tokens of requests through the model, and computes the scores of prompts.

Only Passes.decode() can replay a captured graph instead (graphs.py). With `pad`, decoding passes
have only a few shapes, (1, 1), (2, 1), (4, 1) and so on, as far as the slots have room.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.generate.adapters import NONE, Adapters
from nanochat.generate.graphs import DecodeGraphs
from nanochat.generate.reply import Scored
from nanochat.generate.request import Request
from nanochat.model import Model

HEAD_ROWS = 64  # most positions whose logits are in memory at the same time


class Passes:
    """Runs the passes of a model over one cache.

    In decode() and run(), `requests` has one entry per slot, which is None if the slot is empty.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        length: int,
        pad: bool,
        adapters: Adapters | None = None,
        graphs: DecodeGraphs | None = None,
    ):
        """Set up the passes of a model over a cache.

        `length` is the length of a slot in tokens. `pad` rounds the shape of every pass up to
        powers of two, as far as the slots have room. `adapters` are those that requests may ask
        for, and `graphs` replays decoding passes.
        """
        self.model = model
        self.cache = cache
        self.length = length
        self.pad = pad
        self.adapters = adapters
        self.graphs = graphs
        self.count = 0

    def decode(
        self,
        requests: Sequence[Request | None],
        count: int,
        preserved_slots: Sequence[int] = (),
    ) -> Tensor:  # (count, V) fp32
        """Feed the first `count` requests their next tokens, and return the logits that follow.

        The states of the slots in `preserved_slots` are the same afterwards as before.
        """
        slots = [slice(slot, slot + 1) for slot in preserved_slots]
        saved_states = [self.cache.copy_states(slot) for slot in slots]
        logits = self._decoded(requests, count)
        for slot, states in zip(slots, saved_states, strict=True):
            self.cache.restore(slot, states)
        return logits

    def _decoded(
        self,
        requests: Sequence[Request | None],
        count: int,
    ) -> Tensor:  # (count, V) fp32
        """Return the logits after the next tokens, from a replayed graph if possible."""
        rows = [request for request in requests[:count] if request]
        tokens = [request.tokens[request.cached] for request in rows]
        if self.graphs is not None:
            numbers = self._adapter_numbers(rows)
            logits = self.graphs.step(tokens, cached_tokens(requests), numbers)
            if logits is not None:
                self.count += 1
                return logits
        hidden = self.run(requests, 0, [[token] for token in tokens])
        return self.model.logits(hidden[:count, 0])

    def check(
        self,
        requests: Sequence[Request | None],
        chunks: Sequence[Sequence[int]],
    ) -> Tensor:  # (B, T, V) fp32
        """Feed each of the first B requests a chunk; return the logits after each of its tokens."""
        hidden = self.run(requests, 0, chunks)
        count = len(chunks)
        T = max(map(len, chunks))
        return self.model.logits(hidden[:count, :T].flatten(0, 1)).unflatten(0, (count, T))

    def run(
        self,
        requests: Sequence[Request | None],
        first: int,
        chunks: Sequence[Sequence[int]],
    ) -> Tensor:  # (B', T, C), B' >= B
        """Run the new tokens chunks[i] of each slot `first` + i, and return the hidden states.

        Rows after the last chunk are padding.
        """
        cached = cached_tokens(requests)
        rows, T = self._shape(cached, first, chunks)
        padding_rows = rows - len(chunks)
        slots = slice(first, first + rows)
        # A padding row adds one token to its slot; the slot's states are restored below.
        padded_chunks = [*chunks, *[[0]] * padding_rows]
        table = [[*chunk, *[0] * (T - len(chunk))] for chunk in padded_chunks]
        new = [len(chunk) for chunk in padded_chunks]
        idx = torch.tensor(table).to(self.model.device, non_blocking=True)
        lengths = torch.tensor(new).to(self.model.device, non_blocking=True)
        borrowed = slice(first + len(chunks), first + rows)
        saved_states = self.cache.copy_states(borrowed) if padding_rows else None
        context = Cached(
            self.cache,
            idx,
            slots,
            lengths,
            cached=cached[slots],
            new=new,
        )
        with self._adapted(requests[slots]):
            hidden = self.model.hidden(idx, context)
        if saved_states:
            self.cache.restore(borrowed, saved_states)
        self.count += 1
        return hidden

    def _shape(
        self,
        cached: Sequence[int],
        first: int,
        chunks: Sequence[Sequence[int]],
    ) -> tuple[int, int]:
        """Return the number of rows of a pass, and the number of tokens in each.

        With `pad`, they are powers of two, as far as the number of slots and their length allow.
        """
        count = len(chunks)
        T = max(map(len, chunks))
        if not self.pad:
            return count, T
        longest = max(cached[first : first + count])
        if longest + power_of_two(T) <= self.length:
            T = power_of_two(T)
        rows = min(power_of_two(count), len(cached) - first)
        longest = max(cached[first : first + rows])
        if longest + T > self.length:
            rows = count  # a padding slot has no room for the pass
        return rows, T

    def _adapted(self, rows: Sequence[Request | None]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which every row has the adapter that its request asks for."""
        if self.adapters is None:
            return contextlib.nullcontext()
        return self.adapters.rows(self._adapter_numbers(rows))

    def _adapter_numbers(self, rows: Sequence[Request | None]) -> list[int]:
        """Return the index of the adapter that each row's request asks for, or -1 for none."""
        adapters = self.adapters
        if adapters is None:
            return [NONE] * len(rows)
        return [adapters.number(request.sampling.adapter) if request else NONE for request in rows]

    # --- scores of prompts -----------------------------------------------------------------------

    def score(
        self,
        hidden: Tensor,
        requests: Sequence[Request],
        chunks: Sequence[Sequence[int]],
    ) -> None:
        """Add the log-probabilities of prompt tokens to the requests that asked for them.

        `hidden` is what run() returned for these chunks; the hidden state of each token of a chunk
        gives the probability of the token after it.
        """
        scored_rows = [
            row
            for row, request in enumerate(requests)
            if request.sampling.prompt_logprobs is not None
        ]
        if not scored_rows:
            return
        T = hidden.size(1)
        positions: list[int] = []  # indices into the flattened hidden states
        targets: list[int] = []
        count = 0
        for row in scored_rows:
            request = requests[row]
            length = len(chunks[row])
            first = request.cached + 1
            positions += range(row * T, row * T + length)
            targets += request.tokens[first : first + length]
            count = max(count, request.sampling.prompt_logprobs or 0)
        states = hidden.flatten(0, 1)
        scores = iter(self._scores(states, torch.tensor(positions), targets, count))
        for row in scored_rows:
            request = requests[row]
            limit = request.sampling.prompt_logprobs
            for _ in chunks[row]:
                score = next(scores)
                shortened = replace(score, alternatives=score.alternatives[:limit])
                request.prompt_scores.append(shortened)

    def _scores(
        self,
        hidden: Tensor,  # (N, C)
        positions: Tensor,  # (n,) indices of the states that predict the targets
        targets: Sequence[int],  # n tokens
        count: int,
    ) -> list[Scored]:
        """Return a Scored for each target, with up to `count` alternatives."""
        scores: list[Scored] = []
        for start in range(0, len(targets), HEAD_ROWS):
            block = slice(start, start + HEAD_ROWS)
            index = positions[block].to(hidden.device)
            scores += self._block_scores(hidden[index], targets[block], count)
        return scores

    def _block_scores(
        self,
        states: Tensor,  # (n, C)
        targets: Sequence[int],
        count: int,
    ) -> list[Scored]:
        """Return the scores of a block of targets, whose logits are all in memory at once."""
        index = torch.tensor(targets).to(states.device)
        if not count:
            losses = self.model.token_losses(states, index)
            values = (-losses).float().tolist()
            return [Scored(token, value) for token, value in zip(targets, values, strict=True)]
        logprobs = torch.log_softmax(self.model.logits(states), dim=1)
        values = logprobs.gather(1, index[:, None]).squeeze(1).tolist()
        top = logprobs.topk(min(count, logprobs.size(1)), dim=1)
        top_tokens = top.indices.tolist()
        top_values = top.values.tolist()
        scores = []
        for row, token in enumerate(targets):
            alternatives = tuple(zip(top_tokens[row], top_values[row], strict=True))
            scores.append(Scored(token, values[row], alternatives))
        return scores


def cached_tokens(requests: Sequence[Request | None]) -> list[int]:
    """Return the number of cached tokens in each slot."""
    return [request.cached if request else 0 for request in requests]


def power_of_two(count: int) -> int:
    """Return `count` (at least 1) rounded up to a power of two."""
    return 1 << (count - 1).bit_length()

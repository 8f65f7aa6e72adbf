"""Runs new tokens of requests through the model: the shapes of passes, and the scores of prompts.

Passes.decode() is the one place that graphs of fixed shapes replace (graphs.py). With `pad`, a decoding pass has one
of a few shapes, (1, 1), (2, 1), (4, 1) and so on; everything that changes from step to step is in its inputs and in
the cache.
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.generate.adapters import NONE, Adapters
from nanochat.generate.events import Alternatives, Scored
from nanochat.generate.graphs import DecodeGraphs
from nanochat.generate.request import Request
from nanochat.model import Model

HEAD_ROWS = 64  # positions whose logits over the vocabulary are in memory at the same time


class Passes:
    """The passes of a model over one cache."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        length: int,
        pad: bool,
        adapters: Adapters | None = None,
        graphs: DecodeGraphs | None = None,
    ):
        """`pad` rounds the shape of every pass up to one of a few sizes. `adapters` are those that requests ask for,
        `graphs` replay decoding passes."""
        self.model, self.cache, self.length, self.pad = model, cache, length, pad
        self.adapters, self.graphs = adapters, graphs
        self.count = 0

    def decode(
        self, held: Sequence[Request | None], count: int, waiting: Sequence[int] = ()
    ) -> Tensor:  # (count, V) fp32
        """Feed the next token of each of the first `count` requests; return the logits of the tokens after them.

        The slots in `waiting` hold afterwards what they held before.
        """
        kept = [(slice(slot, slot + 1), self.cache.kept(slice(slot, slot + 1))) for slot in waiting]
        logits = self._decoded(held, count)
        for slots, states in kept:
            self.cache.restore(slots, states)
        return logits

    def _decoded(self, held: Sequence[Request | None], count: int) -> Tensor:  # (count, V) fp32
        pieces = [
            request.tokens[request.cached : request.cached + 1]
            for request in held[:count]
            if request
        ]
        if self.graphs is not None:
            tokens = [request.cached if request else 0 for request in held]
            logits = self.graphs.step(
                [token for (token,) in pieces], tokens, self._numbers(held[:count])
            )
            if logits is not None:
                self.count += 1
                return logits
        return self.model.logits(self.run(held, 0, pieces)[:count, 0])

    def run(
        self, held: Sequence[Request | None], first: int, pieces: Sequence[Sequence[int]]
    ) -> Tensor:  # (B', T, C), B' >= B
        """Run new tokens of the requests from slot `first` on through the model; return the hidden states."""
        B, T = len(pieces), max(map(len, pieces))
        tokens = [request.cached if request else 0 for request in held]  # that each slot holds
        if self.pad:  # up to powers of two, as far as the cache has slots and positions
            wider = 1 << (T - 1).bit_length()
            T = wider if max(tokens[first : first + B]) + wider <= self.length else T
            B = min(1 << (B - 1).bit_length(), len(held) - first)
            if (
                max(tokens[first : first + B]) + T > self.length
            ):  # a slot that only pads has no room for the pass
                B = len(pieces)
        spare = B - len(
            pieces
        )  # a padding row claims one token of its slot; the slot's state is restored below
        fresh = [*map(len, pieces), *[1] * spare]
        if T == 1:
            table = [*pieces, *[[0]] * spare]
        else:
            table = [[*piece, *[0] * (T - len(piece))] for piece in pieces] + [[0] * T] * spare
        idx = torch.tensor(table).to(self.model.device, non_blocking=True)
        lengths = torch.tensor(fresh).to(self.model.device, non_blocking=True)
        borrowed = slice(first + len(pieces), first + B)
        kept = self.cache.kept(borrowed) if spare else None
        slots = slice(first, first + B)
        context = Cached(self.cache, idx, slots, lengths, cached=tokens[slots], new=fresh)
        with self._adapted(held[first : first + B]):
            hidden = self.model.hidden(idx, context)
        if kept:
            self.cache.restore(borrowed, kept)
        self.count += 1
        return hidden

    def _adapted(self, rows: Sequence[Request | None]) -> contextlib.AbstractContextManager[None]:
        """Within this, every row of a pass has the adapter that its request asks for."""
        if self.adapters is None:
            return contextlib.nullcontext()
        return self.adapters.rows(self._numbers(rows))

    def _numbers(self, rows: Sequence[Request | None]) -> list[int]:
        """The numbers of the adapters that the requests of rows ask for."""
        adapters = self.adapters
        if adapters is None:
            return [NONE] * len(rows)
        return [adapters.number(request.sampling.adapter) if request else NONE for request in rows]

    def score(
        self, hidden: Tensor, requests: Sequence[Request], pieces: Sequence[Sequence[int]]
    ) -> None:
        """Give the requests that asked for them the log-probabilities of the tokens after each token of their pieces.

        `hidden` is what run() returned for these pieces.
        """
        asking = [
            row
            for row, request in enumerate(requests)
            if request.sampling.prompt_logprobs is not None
        ]
        if not asking:
            return
        T = hidden.size(1)
        places = torch.tensor(
            [row * T + place for row in asking for place in range(len(pieces[row]))]
        )
        wanted = [
            token
            for row in asking
            for token in requests[row].tokens[requests[row].cached + 1 :][: len(pieces[row])]
        ]
        count = max(requests[row].sampling.prompt_logprobs or 0 for row in asking)
        scored = iter(self._scored(hidden.flatten(0, 1), places, wanted, count))
        for row in asking:
            most = requests[row].sampling.prompt_logprobs or 0
            for _ in pieces[row]:
                token = next(scored)
                requests[row].scores.append(
                    Scored(token.token, token.logprob, token.alternatives[:most])
                )

    def _scored(
        self, hidden: Tensor, places: Tensor, wanted: Sequence[int], count: int
    ) -> list[Scored]:
        """The log-probability of each wanted token after the hidden state at its place, and `count` alternatives."""
        found: list[Scored] = []
        device = hidden.device
        for start in range(0, len(wanted), HEAD_ROWS):
            tokens = wanted[start : start + HEAD_ROWS]
            rows = hidden[places[start : start + HEAD_ROWS].to(device)]
            targets = torch.tensor(tokens).to(device)
            if not count:
                values = (-self.model.token_losses(rows, targets)).float().tolist()
                found += [Scored(token, value) for token, value in zip(tokens, values, strict=True)]
                continue
            logprobs = torch.log_softmax(self.model.logits(rows), dim=1)
            most = logprobs.topk(min(count, logprobs.size(1)), dim=1)
            values = logprobs.gather(1, targets[:, None]).squeeze(1).tolist()
            pairs: list[Alternatives] = [
                tuple(zip(ids, of, strict=True))
                for ids, of in zip(most.indices.tolist(), most.values.tolist(), strict=True)
            ]
            found += [Scored(*parts) for parts in zip(tokens, values, pairs, strict=True)]
        return found

"""Generates replies for many requests in one batch; each request has its own length, sampling settings and seed.

A request waits until the cache has a free slot. The engine then prefills the prompt in chunks, and from there on
every step adds one token to every request in flight. When a reply closes a calculator call, the engine writes the
answer. Requests in flight always occupy slots 0 .. n-1 of the cache: first the decoding ones, then the ones that
still prefill. When a request leaves, others move up into its slot, so every pass works on one contiguous slice and
a finished request costs nothing.
"""

import itertools
import random
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from nanochat.common import UserError
from nanochat.data.calculator import calculate
from nanochat.generate.reply import TextStream as TextStream
from nanochat.generate.reply import reply_parts as reply_parts
from nanochat.generate.sampling import Sampling, choose, uniform
from nanochat.nn.cache import Spans
from nanochat.nn.model import Model
from nanochat.tokenizer import Tokenizer

CHUNK = 512  # most tokens of one prompt in a prefill pass
FAILED = "error"  # the answer to a calculator call that is not a valid calculation

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Event:
    """One token of a reply. A `forced` token was not sampled: the engine wrote it as part of a calculator answer."""

    request: int
    token: int
    logprob: float  # natural log of the token's probability over all tokens at temperature 1; 0 if forced
    forced: bool
    finish: Finish | None  # set on the last token only: "stop" at an end mark, "length" when no room is left


@dataclass
class Completion:
    """A whole reply, end mark included: every token, whether the token was forced, and its log probability."""

    tokens: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, event: Event) -> None:
        """Append the token of an event."""
        self.tokens.append(event.token)
        self.forced.append(event.forced)
        self.logprobs.append(event.logprob)
        self.finish = event.finish


@dataclass(eq=False)
class _Request:
    """A request that waits for a slot, or is in flight with its tokens in the cache."""

    number: int
    prompt: list[int]
    sampling: Sampling
    random: random.Random
    pending: list[int]  # tokens of the prompt or reply that are not in the cache yet; never empty
    cached: int = 0  # count of tokens in the cache
    generated: int = 0
    expression: list[int] | None = None  # tokens of a calculator call that is still open

    @property
    def prefilling(self) -> bool:
        """Whether the prompt still prefills. The last prompt token is left to the first decoding pass."""
        return self.generated == 0 and len(self.pending) > 1


class Engine:
    """Runs a model for many requests at once. Not thread-safe: call one engine from one thread only.

    `slots` is the number of requests that run together; further requests wait. `length` is the limit for prompt and
    reply together, in tokens (default and maximum: the model's context). `prefill_tokens` is the most prompt tokens
    read between two decoding passes. `pad` rounds the shape of every pass up to one of a few sizes (default: only on
    accelerators, where every new shape costs a compilation).
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        slots: int = 32,
        length: int | None = None,
        dtype: torch.dtype | None = None,
        prefill_tokens: int = CHUNK,
        pad: bool | None = None,
    ):
        context = model.config.sequence_len
        if tokenizer.vocab_size != model.config.vocab_size:
            raise UserError(
                f"the model has a vocabulary of {model.config.vocab_size} tokens, the tokenizer "
                f"{tokenizer.vocab_size}: they do not belong together. Load the tokenizer saved with the checkpoint."
            )
        self.length = context if length is None else length
        if slots < 1 or not 2 <= self.length <= context:
            raise UserError(
                f"an engine needs at least 1 slot and a length from 2 to {context} tokens (the model's context), got "
                f"{slots} slots and length {length}. Pass other values for slots and length."
            )
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.prefill_tokens = prefill_tokens
        self.pad = model.operations.shape_grain > 1 if pad is None else pad
        self.passes = self.prompt_tokens_read = 0  # passes of the model; prompt tokens prefilled, copies not counted
        self._cache = model.new_cache(slots, self.length, dtype)
        self._active: list[_Request] = []  # the request at index i has slot i
        self._waiting: deque[_Request] = deque()
        self._next_request = 0
        self._stops = {tokenizer.special("assistant_end"), tokenizer.bos}
        # The model may not sample these marks: an answer shown as the calculator's always is the calculator's.
        banned = [tokenizer.special("output_start"), tokenizer.special("output_end")]
        self._banned = torch.tensor(banned, device=model.device)

    # --- requests --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is in flight or waiting."""
        return bool(self._active or self._waiting)

    @property
    def free_slots(self) -> int:
        """How many slots no request occupies."""
        return self.slots - len(self._active)

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Queue a prompt and return its request number. UserError if the prompt is empty or leaves no reply room."""
        if not prompt:
            raise UserError("the prompt is empty: it must have at least one token. Pass a text to answer.")
        if len(prompt) >= self.length:
            raise UserError(
                f"the prompt is too long: it has {len(prompt)} tokens, the context holds {self.length}, and the "
                "reply needs at least one. Shorten the prompt or start a new chat."
            )
        request, self._next_request = self._next_request, self._next_request + 1
        draws = random.Random(sampling.seed)
        self._waiting.append(_Request(request, list(prompt), sampling, draws, pending=list(prompt)))
        return request

    @torch.inference_mode()
    def cancel(self, request: int) -> bool:
        """Drop a request, waiting or in flight; the slot is free at once. False if the request had already ended."""
        for waiting in self._waiting:
            if waiting.number == request:
                self._waiting.remove(waiting)
                return True
        slot = next((slot for slot, active in enumerate(self._active) if active.number == request), None)
        if slot is not None:
            self._leave(slot)
        return slot is not None

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit waiting requests, prefill some of their prompts, and decode a token for each ready request."""
        self._admit()
        self._prefill()
        return self._decode()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        done: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt `samples` times; return all samples of the first prompt, then of the second, ...

        The seed of a sample depends only on the given seed, the sample's number and the prompt, so a reply is the
        same whatever else runs, on any number of ranks. `done` is called with the index of each finished completion.
        Raises UserError like submit().
        """
        if self.busy:
            raise UserError("generate() needs an idle engine, and this one has requests in flight: make another Engine")
        completions = [Completion() for _ in range(len(prompts) * samples)]
        index: dict[int, int] = {}  # request number -> index of its completion
        try:
            for i, prompt in enumerate(prompts):
                mark = zlib.crc32(array("q", prompt).tobytes())
                for sample in range(samples):
                    seed = random.Random(f"{sampling.seed}/{sample}/{mark}").getrandbits(63)
                    index[self.submit(prompt, replace(sampling, seed=seed))] = i * samples + sample
            while self.busy:
                for event in self.step():
                    completions[index[event.request]].add(event)
                    if event.finish and done:
                        done(index[event.request])
        finally:
            for request in index:  # after an error or Ctrl-C, leave no request behind
                self.cancel(request)
        return completions

    # --- slots -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting requests: short prompts first, repeated prompts last, since those are copied."""
        arrived = [self._waiting.popleft() for _ in range(min(self.free_slots, len(self._waiting)))]
        originals: dict[tuple[int, ...], _Request] = {}
        for request in sorted(arrived, key=lambda request: len(request.prompt)):
            originals.setdefault(tuple(request.prompt), request)
        copies = [request for request in arrived if request is not originals[tuple(request.prompt)]]
        self._active += [*originals.values(), *copies]

    def _ready(self) -> int:
        """How many requests are ready to decode; they occupy the first slots."""
        return next((slot for slot, request in enumerate(self._active) if request.prefilling), len(self._active))

    def _leave(self, slot: int) -> None:
        """Free a slot: the last ready request moves into it, and the prefilling ones move up in their order."""
        ready = self._ready()
        first = max(slot, ready - 1)  # the hole left for the prefilling requests to close
        for target, source in itertools.pairwise((slot, first, *range(first + 1, len(self._active)))):
            if source != target:
                self._copy(source, target)
                self._active[target] = self._active[source]
        self._active.pop()
        self._cache.clear(slice(len(self._active), len(self._active) + 1))

    def _copy(self, source: int, target: int) -> None:
        """Copy the cached state of one slot to another."""
        cache, held = self._cache, self._active[source].cached
        cache.k[:, target, :held] = cache.k[:, source, :held]
        cache.v[:, target, :held] = cache.v[:, source, :held]
        cache.positions[target] = cache.positions[source]
        cache.previous[target] = cache.previous[source]

    # --- passes ----------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Prefill prompts, all but their last token, in the order of slots until the budget is spent."""
        budget = self.prefill_tokens
        while budget > 0 and (first := self._ready()) < len(self._active):
            count, columns = self._chunk(self._active[first:], budget)
            requests = self._active[first : first + count]
            pieces = [request.pending[: min(columns, len(request.pending) - 1)] for request in requests]
            self._pass(first, pieces)
            for request, piece in zip(requests, pieces, strict=True):
                self.prompt_tokens_read += len(piece)
                request.cached += len(piece)
                request.pending = request.pending[len(piece) :]
            budget -= count * columns
            self._share(first)

    def _chunk(self, requests: Sequence[_Request], budget: int) -> tuple[int, int]:
        """Rows and columns of the next prefill pass: within the budget, with at most half of the pass as padding."""
        columns = min(len(requests[0].pending) - 1, CHUNK, budget)
        count, real = 1, columns
        for request in requests[1:]:
            wanted = min(len(request.pending) - 1, CHUNK)
            wider = max(columns, wanted)
            area = (count + 1) * wider
            twin = any(request.prompt == other.prompt for other in requests[:count])  # is copied, not computed
            if wanted == 0 or twin or area > budget or area > 2 * (real + wanted):
                break
            count, columns, real = count + 1, wider, real + wanted
        # A padded row must not run past the end of the cache: the rest of a long prompt waits for the next pass.
        return count, min(columns, *(self.length - request.cached for request in requests[:count]))

    def _share(self, first: int) -> None:
        """Copy the prompts that have just been prefilled to later slots whose requests have the same prompt."""
        slots = list(enumerate(self._active[first:], first))
        ready = {tuple(request.prompt): slot for slot, request in slots if not request.prefilling}
        for slot, request in slots:
            source = ready.get(tuple(request.prompt))
            if request.prefilling and request.cached == 0 and source is not None:
                self._copy(source, slot)
                request.cached, request.pending = self._active[source].cached, request.pending[-1:]

    def _pass(self, first: int, pieces: Sequence[Sequence[int]]) -> Tensor:  # (B', T, C), B' >= B
        """Run new tokens of the requests from slot `first` on through the model; return the hidden states."""
        B, T = len(pieces), max(len(piece) for piece in pieces)
        if self.pad:  # up to powers of two, as far as the cache has slots and positions
            B = min(1 << (B - 1).bit_length(), self.slots - first)
        touched = self._active[first : first + B]
        held = max(request.cached for request in touched)
        if self.pad and held + (wider := 1 << (T - 1).bit_length()) <= self.length:
            T = wider
        spare = B - len(pieces)  # a padding row claims one token of its slot; the slot's state is restored below
        table = [[*piece, *[0] * (T - len(piece))] for piece in pieces] + [[0] * T] * spare
        idx = torch.tensor(table).to(self.model.device, non_blocking=True)
        lengths = torch.tensor([len(piece) for piece in pieces] + [1] * spare).to(self.model.device, non_blocking=True)
        cache, borrowed = self._cache, slice(first + len(pieces), first + B)
        kept = (cache.positions[borrowed].clone(), cache.previous[borrowed].clone()) if spare else None
        # A padding row may fall on a slot that no request occupies.
        spans = Spans(
            [request.cached for request in touched] + [0] * (B - len(touched)),
            [len(piece) for piece in pieces] + [1] * spare,
        )
        hidden = self.model.hidden(idx, cache, slice(first, first + B), lengths, spans)
        if kept:
            cache.positions[borrowed], cache.previous[borrowed] = kept
        self.passes += 1
        return hidden

    def _decode(self) -> list[Event]:
        """Feed one pending token of every ready request; sample the next token where nothing more is pending."""
        ready = self._ready()
        if not ready:
            return []
        requests = self._active[:ready]
        hidden = self._pass(0, [request.pending[:1] for request in requests])
        logits = self.model.logits(hidden[:ready, 0])
        # Draw random numbers only for requests that sample; where a forced token follows, the choice is dropped.
        uniforms = [uniform(request.random) if len(request.pending) == 1 else 0.0 for request in requests]
        tokens, logprobs = choose(logits, [request.sampling for request in requests], uniforms, self._banned)
        events, leaving = [], []
        for slot, (request, token, logprob) in enumerate(zip(requests, tokens, logprobs, strict=True)):
            request.cached += 1
            request.pending = request.pending[1:]
            if request.pending:
                continue  # the next step feeds a forced token
            events += self._accept(request, token, logprob)
            if events[-1].finish:
                leaving.append(slot)
        for slot in reversed(leaving):
            self._leave(slot)
        return events

    # --- tokens ----------------------------------------------------------------------------------

    def _accept(self, request: _Request, token: int, logprob: float) -> list[Event]:
        """Add a sampled token to a reply, and the calculator's answer if the token closes a call."""
        answer = self._calculator(request, token)
        events = []
        for i, next_token in enumerate((token, *answer)):
            request.pending.append(next_token)
            request.generated += 1
            held = request.cached + len(request.pending)
            full = request.generated == request.sampling.max_tokens or held == self.length
            finish: Finish | None = "stop" if next_token in self._stops else "length" if full else None
            events.append(Event(request.number, next_token, 0.0 if i else logprob, bool(i), finish))
            if finish:
                break
        return events

    def _calculator(self, request: _Request, token: int) -> list[int]:
        """Follow calculator calls; return the tokens of the answer, marks included, when a call closes, else none.

        The answer to an invalid expression is FAILED: without an answer the model would make one up.
        """
        special = self.tokenizer.special
        if token == special("python_start"):
            request.expression = []
        elif token == special("python_end") and request.expression is not None:
            answer = calculate(self.tokenizer.decode(request.expression))
            request.expression = None
            text = self.tokenizer.encode(FAILED if answer is None else answer)
            return [special("output_start"), *text, special("output_end")]
        elif request.expression is not None:
            request.expression.append(token)
        return []

"""Generation: many conversations of different lengths in one batch, with the calculator, sampled per request.

A request waits until a slot of the cache is free, has its prompt read in chunks, and then gains one token per step
together with every other request in flight. The rows in flight always lie in slots 0 .. n-1 of the cache: first
those that decode, then those whose prompt is still being read; when one leaves, another is moved into its place,
so that a pass works on one contiguous slice and no finished row is ever computed again.
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

CHUNK = 512  # columns of a pass over prompts
FAILED = "error"  # what the calculator's output says when the call was no calculation

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Event:
    """A token of a reply. `forced` tokens were put in by the engine (the calculator's answer), not sampled."""

    request: int
    token: int
    logprob: float  # natural log of the token's probability at temperature 1 among all tokens; 0 if forced
    forced: bool
    finish: Finish | None  # set on the last token of a reply: its end mark ("stop") or no room for more ("length")


@dataclass
class Completion:
    """A whole reply, end mark included: what was sampled and what was forced, token by token."""

    tokens: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, event: Event) -> None:
        self.tokens.append(event.token)
        self.forced.append(event.forced)
        self.logprobs.append(event.logprob)
        self.finish = event.finish


@dataclass(eq=False)
class _Row:
    """A request: waiting, or in flight with its tokens in the cache."""

    request: int
    prompt: list[int]
    sampling: Sampling
    random: random.Random
    pending: list[int]  # decided tokens that the cache does not hold yet, never empty
    cached: int = 0  # tokens that the cache holds
    generated: int = 0
    expression: list[int] | None = None  # tokens of an open calculator call

    @property
    def reading(self) -> bool:
        """Whether the prompt is still being read; its last token is left to the first decoding pass."""
        return self.generated == 0 and len(self.pending) > 1


class Engine:
    """Runs a model for many requests at once. Not thread-safe: one thread calls it.

    `slots` requests run together, more wait; `length` bounds prompt and reply together (default and at most the
    model's context); between two decoding passes at most `prefill_tokens` of prompts are read; `pad` rounds the
    shapes of passes up to a few sizes (default: on accelerators, where a new shape costs a compilation).
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
                f"the model was made for {model.config.vocab_size} tokens, this tokenizer has {tokenizer.vocab_size}: "
                "they do not belong together. Load the tokenizer saved with the checkpoint."
            )
        self.length = context if length is None else length
        if slots < 1 or not 2 <= self.length <= context:
            raise UserError(
                f"an engine needs a slot and a length of 2 to {context} tokens (the model's context), "
                f"got {slots} slots and length {length}"
            )
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.prefill_tokens = prefill_tokens
        self.pad = model.operations.shape_grain > 1 if pad is None else pad
        self.passes = self.prompt_tokens_read = 0  # batches computed, and prompt tokens in them (copies do not count)
        self._cache = model.new_cache(slots, self.length, dtype)
        self._rows: list[_Row] = []  # row i is in slot i
        self._waiting: deque[_Row] = deque()
        self._next_request = 0
        self._stops = {tokenizer.special("assistant_end"), tokenizer.bos}
        # Only the calculator writes its output, so what is shown as its answer is its answer.
        banned = [tokenizer.special("output_start"), tokenizer.special("output_end")]
        self._banned = torch.tensor(banned, device=model.device)

    # --- requests --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._rows or self._waiting)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self._rows)

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Queue a prompt and return its request number; UserError if it is empty or leaves no room for a reply."""
        if not prompt:
            raise UserError("the prompt is empty: it must have at least one token")
        if len(prompt) >= self.length:
            raise UserError(
                f"the prompt is too long: it has {len(prompt)} tokens and the context holds {self.length}, of which "
                "the reply needs at least one. Shorten it or start a new chat."
            )
        request, self._next_request = self._next_request, self._next_request + 1
        self._waiting.append(_Row(request, list(prompt), sampling, random.Random(sampling.seed), pending=list(prompt)))
        return request

    @torch.inference_mode()
    def cancel(self, request: int) -> bool:
        """Drop a request, waiting or in flight; its slot is free at once. False if it was not there any more."""
        for row in self._waiting:
            if row.request == request:
                self._waiting.remove(row)
                return True
        slot = next((slot for slot, row in enumerate(self._rows) if row.request == request), None)
        if slot is not None:
            self._leave(slot)
        return slot is not None

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit waiting requests, read a part of their prompts, and decode one token of every row that is ready."""
        self._admit()
        self._read_prompts()
        return self._decode()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        done: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt `samples` times: all samples of the first prompt, then of the second, ...

        A sample's seed is made from the given seed, its number and its prompt, so that it is the same whatever
        else runs, on however many ranks. `done` is told each index that is complete. UserError as submit() says.
        """
        if self.busy:
            raise UserError("generate() needs an engine of its own, this one has requests in flight")
        completions = [Completion() for _ in range(len(prompts) * samples)]
        index: dict[int, int] = {}  # of a request's completion
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
            for request in index:  # after an error or Ctrl-C, leave nothing behind
                self.cancel(request)
        return completions

    # --- slots -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting requests: short prompts first, equal prompts last, to be copied."""
        arrived = [self._waiting.popleft() for _ in range(min(self.free_slots, len(self._waiting)))]
        originals: dict[tuple[int, ...], _Row] = {}
        for row in sorted(arrived, key=lambda row: len(row.prompt)):
            originals.setdefault(tuple(row.prompt), row)
        copies = [row for row in arrived if row is not originals[tuple(row.prompt)]]
        self._rows += [*originals.values(), *copies]

    def _ready(self) -> int:
        """How many rows, from slot 0 on, have their prompt read."""
        return next((slot for slot, row in enumerate(self._rows) if row.reading), len(self._rows))

    def _leave(self, slot: int) -> None:
        """Take a row out; the last ready row fills its slot, and rows that still read keep their order behind."""
        ready = self._ready()
        first = max(slot, ready - 1)  # the hole that the reading rows close up to
        for target, source in itertools.pairwise((slot, first, *range(first + 1, len(self._rows)))):
            if source != target:
                self._copy(source, target)
                self._rows[target] = self._rows[source]
        self._rows.pop()
        self._cache.clear(slice(len(self._rows), len(self._rows) + 1))

    def _copy(self, source: int, target: int) -> None:
        """Copy what the cache holds of a row to another slot."""
        cache, held = self._cache, self._rows[source].cached
        cache.k[:, target, :held] = cache.k[:, source, :held]
        cache.v[:, target, :held] = cache.v[:, source, :held]
        cache.positions[target] = cache.positions[source]
        cache.previous[target] = cache.previous[source]

    # --- passes ----------------------------------------------------------------------------------

    def _read_prompts(self) -> None:
        """Read prompts, all but their last token, in the order of slots until the budget is spent."""
        budget = self.prefill_tokens
        while budget > 0 and (first := self._ready()) < len(self._rows):
            count, columns = self._chunk(self._rows[first:], budget)
            rows = self._rows[first : first + count]
            parts = [row.pending[: min(columns, len(row.pending) - 1)] for row in rows]
            self._pass(first, parts)
            for row, part in zip(rows, parts, strict=True):
                self.prompt_tokens_read += len(part)
                row.cached += len(part)
                row.pending = row.pending[len(part) :]
            budget -= count * columns
            self._share(first)

    def _chunk(self, rows: Sequence[_Row], budget: int) -> tuple[int, int]:
        """How many rows and columns the next pass over prompts takes: within the budget, at most half padding."""
        columns = min(len(rows[0].pending) - 1, CHUNK, budget)
        count, real = 1, columns
        for row in rows[1:]:
            wanted = min(len(row.pending) - 1, CHUNK)
            wider = max(columns, wanted)
            area = (count + 1) * wider
            twin = any(row.prompt == other.prompt for other in rows[:count])  # will be copied, not read
            if wanted == 0 or twin or area > budget or area > 2 * (real + wanted):
                break
            count, columns, real = count + 1, wider, real + wanted
        # A padded row must not run past the end of the cache: it goes on in the next pass.
        return count, min(columns, *(self.length - row.cached for row in rows[:count]))

    def _share(self, first: int) -> None:
        """Copy prompts that were just read to the rows behind that have the same."""
        rows = list(enumerate(self._rows[first:], first))
        read = {tuple(row.prompt): slot for slot, row in rows if not row.reading}
        for slot, row in rows:
            if row.reading and row.cached == 0 and (source := read.get(tuple(row.prompt))) is not None:
                self._copy(source, slot)
                row.cached, row.pending = self._rows[source].cached, row.pending[-1:]

    def _pass(self, first: int, parts: Sequence[Sequence[int]]) -> Tensor:  # (B', T, C), B' >= B
        """Put new tokens of the rows from slot `first` on through the model; returns its activations."""
        B, T = len(parts), max(len(part) for part in parts)
        if self.pad:  # powers of two, as far as there are slots and places
            B = min(1 << (B - 1).bit_length(), self.slots - first)
        behind = self._rows[first : first + B]
        held = max(row.cached for row in behind)
        if self.pad and held + (wider := 1 << (T - 1).bit_length()) <= self.length:
            T = wider
        spare = B - len(parts)  # rows of padding claim a token each; what that changes is put back
        table = [[*part, *[0] * (T - len(part))] for part in parts] + [[0] * T] * spare
        idx = torch.tensor(table).to(self.model.device, non_blocking=True)
        lengths = torch.tensor([len(part) for part in parts] + [1] * spare).to(self.model.device, non_blocking=True)
        cache, borrowed = self._cache, slice(first + len(parts), first + B)
        kept = (cache.positions[borrowed].clone(), cache.previous[borrowed].clone()) if spare else None
        # Of the rows of padding some are slots that nobody is in.
        spans = Spans(
            [row.cached for row in behind] + [0] * (B - len(behind)), [len(part) for part in parts] + [1] * spare
        )
        hidden = self.model.hidden(idx, cache, slice(first, first + B), lengths, spans)
        if kept:
            cache.positions[borrowed], cache.previous[borrowed] = kept
        self.passes += 1
        return hidden

    def _decode(self) -> list[Event]:
        """One token for every ready row: feed the first pending token of each, sample where none is left."""
        ready = self._ready()
        if not ready:
            return []
        rows = self._rows[:ready]
        hidden = self._pass(0, [row.pending[:1] for row in rows])
        logits = self.model.logits(hidden[:ready, 0])
        # No random number is used up where a forced token follows and the choice is not looked at.
        uniforms = [uniform(row.random) if len(row.pending) == 1 else 0.0 for row in rows]
        tokens, logprobs = choose(logits, [row.sampling for row in rows], uniforms, self._banned)
        events, leaving = [], []
        for slot, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            row.cached += 1
            row.pending = row.pending[1:]
            if row.pending:
                continue  # a forced token is fed next
            events += self._accept(row, token, logprob)
            if events[-1].finish:
                leaving.append(slot)
        for slot in reversed(leaving):
            self._leave(slot)
        return events

    # --- tokens ----------------------------------------------------------------------------------

    def _accept(self, row: _Row, token: int, logprob: float) -> list[Event]:
        """Add a sampled token to a row, and after the end of a calculator call the answer."""
        answer = self._calculator(row, token)
        events = []
        for i, next_token in enumerate((token, *answer)):
            row.pending.append(next_token)
            row.generated += 1
            full = row.generated == row.sampling.max_tokens or row.cached + len(row.pending) == self.length
            finish: Finish | None = "stop" if next_token in self._stops else "length" if full else None
            events.append(Event(row.request, next_token, 0.0 if i else logprob, bool(i), finish))
            if finish:
                break
        return events

    def _calculator(self, row: _Row, token: int) -> list[int]:
        """Follow a calculator call; at its end the tokens of the answer, marks included.

        A call that is no calculation is answered by FAILED: left alone, the model would make an answer up.
        """
        special = self.tokenizer.special
        if token == special("python_start"):
            row.expression = []
        elif token == special("python_end") and row.expression is not None:
            answer = calculate(self.tokenizer.decode(row.expression))
            row.expression = None
            text = self.tokenizer.encode(FAILED if answer is None else answer)
            return [special("output_start"), *text, special("output_end")]
        elif row.expression is not None:
            row.expression.append(token)
        return []

"""Generates replies for many requests in one batch; each request has its own length, sampling settings and seed.

A request waits until the cache has a free slot. The engine then prefills the prompt in chunks, and from there on
every step adds one token to every request in flight. A prompt that begins like another request's is read from where the
two differ: generate/rows.py keeps what finished requests leave in the cache. When a reply closes a calculator call, the
engine writes the answer.
"""

import random
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from nanochat.common import UserError
from nanochat.generate.adapters import Adapters
from nanochat.generate.adjust import History, adjuster
from nanochat.generate.calls import FAILED as FAILED
from nanochat.generate.calls import Calls, answer_marks
from nanochat.generate.events import BROKEN
from nanochat.generate.events import Completion as Completion
from nanochat.generate.events import Event as Event
from nanochat.generate.events import Finish as Finish
from nanochat.generate.graphs import DecodeGraphs
from nanochat.generate.passes import Passes
from nanochat.generate.reply import TextStream as TextStream
from nanochat.generate.reply import reply_parts as reply_parts
from nanochat.generate.request import Request, check
from nanochat.generate.rows import BORDER, Rows
from nanochat.generate.sampling import Choice, Sampling, choose, uniform
from nanochat.generate.schema.grammar import TOO_COMPLEX, Schemas
from nanochat.generate.schema.mask_turns import MaskTurns
from nanochat.generate.stops import StoppedReply
from nanochat.model import Model
from nanochat.platforms.base import Platform
from nanochat.tokenizer import Tokenizer

CHUNK = 512  # most tokens of one prompt in a prefill pass
MOST_SAMPLES = 128  # replies to one prompt that submit_samples() takes


class Engine:
    """Runs a model for many requests at once. Not thread-safe: call one engine from one thread only.

    `slots` is the number of requests that run together; further requests wait. `length` is the limit for prompt and
    reply together, in tokens (default and maximum: the model's context). `prefill_tokens` is the most prompt tokens
    read between two decoding passes. `pad` rounds the shape of every pass up to one of a few sizes (default: only on
    accelerators, where every new shape costs a compilation). `kept` adds slots to the cache in which finished chats
    wait for their next turn; slots that no request occupies serve for that in any case. `adapters` are those of the
    model that requests may name. With `graphs`, the platform of a device that can capture, every decoding pass is
    replayed as one launch.
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
        kept: int = 0,
        adapters: Adapters | None = None,
        graphs: Platform | None = None,
    ):
        context = model.config.sequence_len
        if tokenizer.vocab_size != model.config.vocab_size:
            raise UserError(
                f"the model has a vocabulary of {model.config.vocab_size} tokens, the tokenizer "
                f"{tokenizer.vocab_size}: they do not belong together. Load the tokenizer saved with the checkpoint."
            )
        self.length = context if length is None else length
        if slots < 1 or kept < 0 or not 2 <= self.length <= context:
            raise UserError(
                f"an engine needs at least 1 slot and a length from 2 to {context} tokens (the model's context), got "
                f"{slots} slots, {kept} kept ones and length {length}. Pass other values for slots, kept and length."
            )
        self.model, self.tokenizer, self.slots = model, tokenizer, slots
        self.prefill_tokens = prefill_tokens
        self.prompt_tokens_read = self.prompt_tokens_reused = (
            0  # prefilled; taken over or copied from other requests
        )
        cache = model.new_cache(slots + kept, self.length, dtype)
        self._rows = Rows(cache, slots, slots + kept)
        pad = model.attention.grain > 1 if pad is None else pad
        self._adapters = adapters
        self.graphs = None if graphs is None else DecodeGraphs(model, cache, graphs, adapters)
        self._passes = Passes(model, cache, self.length, pad, adapters, self.graphs)
        self._waiting: deque[Request] = deque()
        self._next_request = 0
        self.schemas = Schemas(tokenizer)  # any thread may use them
        self._mask_turns = MaskTurns()
        self._banned = torch.tensor(answer_marks(tokenizer), dtype=torch.long, device=model.device)

    # --- requests --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is in flight or waiting."""
        return bool(self._rows.active or self._waiting)

    @property
    def free_slots(self) -> int:
        """How many slots no request occupies."""
        return self._rows.free

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def passes(self) -> int:
        """How many passes of the model there were."""
        return self._passes.count

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Queue a prompt and return its request number.

        UserError if the prompt is empty or leaves no room for a reply, if a token is not in the vocabulary, if there
        is no adapter of the name, or if the schema cannot be met. What is accepted here fails no step.
        """
        self.check(prompt, sampling)
        request = Request(
            self._next_request,
            list(prompt),
            len(prompt),
            sampling,
            random.Random(sampling.seed),
            Calls(self.tokenizer),
        )
        if sampling.schema is not None:
            request.grammar = self.schemas.grammar(sampling.schema)
        if sampling.stop:
            request.stops = StoppedReply(self.tokenizer, sampling.stop)
        if sampling.adjusts:
            ends = [
                *(
                    {*sampling.stop_tokens}
                    | (set() if sampling.ignore_eos else self.tokenizer.stops)
                )
            ]
            request.history = History(prompt, sampling, ends, self.length - len(prompt))
        self._next_request += 1
        self._waiting.append(request)
        return request.number

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise the UserError that submit() would raise, except for a new schema: `schemas.prepare` raises those, and
        what takes long, the automaton, is then ready for submit(), as long as the caller holds it. Any thread may call
        this while another uses the engine.
        """
        check(prompt, sampling, self.length, self.model.config.vocab_size)
        if sampling.schema is not None:
            self.schemas.check(sampling.schema)
        if self._adapters is not None:
            self._adapters.number(sampling.adapter)
        elif sampling.adapter:
            raise UserError(
                f"there is no adapter {sampling.adapter!r}: this engine has none. Ask for no adapter",
                2,
            )

    def submit_samples(self, prompt: Sequence[int], sampling: Sampling, samples: int) -> list[int]:
        """Queue `samples` requests with one prompt, which is read once, and return their numbers.

        The first reply is the one that submit() would give; the others have seeds of their own. UserError as submit()
        raises it.
        """
        if not 1 <= samples <= MOST_SAMPLES:
            raise UserError(
                f"a prompt can have from 1 to {MOST_SAMPLES} replies, got {samples:,}: ask for fewer"
            )
        first = self.submit(prompt, sampling)
        return [
            first,
            *(self.submit(prompt, sample_settings(sampling, prompt, i)) for i in range(1, samples)),
        ]

    @torch.inference_mode()
    def cancel(self, request: int) -> bool:
        """Drop a request, waiting or in flight; the slot is free at once. False if the request had already ended."""
        for waiting in self._waiting:
            if waiting.number == request:
                self._waiting.remove(waiting)
                return True
        slot = next(
            (slot for slot, active in enumerate(self._rows.running) if active.number == request),
            None,
        )
        if slot is not None:
            self._rows.leave(slot)
        return slot is not None

    @torch.inference_mode()
    def forget(self) -> None:
        """Forget the prompts and replies of finished requests. Call this after the model's weights have changed."""
        self._rows.forget()

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
        done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt `samples` times; return all samples of the first prompt, then of the second, ...

        The seed of a sample depends only on the given seed, the sample's number and the prompt, so a reply is the
        same whatever else runs, on any number of ranks. `done` is called with each finished completion and its index.
        Raises UserError like submit(), and if the model's weights give NaN, since no score of its replies would be one.
        """
        if self.busy:
            raise UserError(
                "generate() needs an idle engine, and this one has requests in flight: make another Engine"
            )
        completions = [Completion() for _ in range(len(prompts) * samples)]
        index: dict[int, int] = {}  # request number -> index of its completion
        try:
            for i, prompt in enumerate(prompts):
                for sample in range(samples):
                    index[self.submit(prompt, sample_settings(sampling, prompt, sample))] = (
                        i * samples + sample
                    )
            while self.busy:
                for event in self.step():
                    if event.broken:
                        raise UserError(BROKEN)
                    at = index[event.request]
                    completions[at].add(event)
                    if event.finish and done:
                        done(at, completions[at])
        finally:
            for request in index:  # after an error or Ctrl-C, leave no request behind
                self.cancel(request)
        return completions

    # --- steps -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting requests: short prompts first, repeated prompts last, since those are copied."""
        if not self._waiting or not self.free_slots:
            return
        arrived = [self._waiting.popleft() for _ in range(min(self.free_slots, len(self._waiting)))]
        originals: dict[tuple[str, tuple[int, ...]], Request] = {}

        def key(request: Request) -> tuple[str, tuple[int, ...]]:
            return request.sampling.adapter, tuple(request.tokens)

        for request in sorted(arrived, key=lambda request: request.prompt):
            originals.setdefault(key(request), request)
        copies = [request for request in arrived if request is not originals[key(request)]]
        self._rows.remember(originals.values())
        for request in [*originals.values(), *copies]:
            self._rows.take(request)
            self.prompt_tokens_reused += request.reused

    def _share(self, slot: int) -> None:
        """Spare a prefilling request what requests in flight have read since it came."""
        request = self._rows.running[slot]
        before = request.reused
        self._rows.share(slot)
        self.prompt_tokens_reused += request.reused - before

    def _prefill(self) -> None:
        """Prefill prompts, all but their last token, in the order of slots until the budget is spent."""
        budget = self.prefill_tokens
        while budget > 0 and (first := self._rows.ready()) < self._rows.active:
            self._share(first)
            if not self._rows.running[first].prefilling:
                continue
            count, columns = self._chunk(first, budget)
            requests = self._rows.running[first : first + count]
            pieces = [
                request.tokens[request.cached : min(request.cached + columns, self._until(request))]
                for request in requests
            ]
            hidden = self._passes.run(self._rows.held, first, pieces)
            self._passes.score(hidden, requests, pieces)
            for slot, (request, piece) in enumerate(zip(requests, pieces, strict=True), first):
                self.prompt_tokens_read += len(piece)
                request.cached += len(piece)
                self._rows.keep_states(slot)
            budget -= count * columns

    def _until(self, request: Request) -> int:
        """Where the request's next piece ends at the latest: states that cannot be cut are kept at borders."""
        border = (
            request.prompt
            if self._rows.cache.cuts_anywhere
            else (request.cached // BORDER + 1) * BORDER
        )
        return min(request.prompt - 1, border)

    def _chunk(self, first: int, budget: int) -> tuple[int, int]:
        """Rows and columns of the next prefill pass: within the budget, with at most half of the pass as padding."""
        requests = self._rows.running[first:]
        columns = min(self._until(requests[0]) - requests[0].cached, CHUNK, budget)
        count, real = 1, columns
        for slot, request in enumerate(requests[1:], first + 1):
            if (count + 1) * columns > budget:
                break
            self._share(slot)
            wanted = min(self._until(request) - request.cached, CHUNK)
            wider = max(columns, wanted)
            area = (count + 1) * wider
            twin = any(
                self._rows.promises(request, other) for other in requests[:count]
            )  # is copied, not computed
            if wanted == 0 or twin or area > budget or area > 2 * (real + wanted):
                break
            count, columns, real = count + 1, wider, real + wanted
        # A padded row must not run past the end of the cache: the rest of a long prompt waits for the next pass.
        return count, min(columns, *(self.length - request.cached for request in requests[:count]))

    def _decode(self) -> list[Event]:
        """Feed one pending token of every ready request; sample the next token where nothing more is pending."""
        ready = self._rows.ready()
        if not ready:
            return []
        requests = self._rows.running[:ready]
        masks = self._mask_turns.take([request.grammar for request in requests])
        waiting = [
            slot
            for slot, request in enumerate(requests)
            if request.grammar is not None and slot not in masks
        ]
        logits = self._passes.decode(self._rows.held, ready, waiting)
        # Draw random numbers only for requests that sample; where a forced token follows, the choice is dropped.
        uniforms = [
            uniform(request.random)
            if slot not in waiting and request.cached + 1 == len(request.tokens)
            else 0.0
            for slot, request in enumerate(requests)
        ]
        adjust = adjuster([request.history for request in requests], masks)
        choice = choose(
            logits,
            [request.sampling for request in requests],
            uniforms,
            self._banned,
            adjust,
            self.model.log_totals,
        )
        events, leaving = [], []
        for slot, request in enumerate(requests):
            if slot in waiting:
                continue  # for its mask: the next step feeds the same token
            request.cached += 1
            if request.cached < len(request.tokens):
                continue  # the next step feeds a forced token
            events += self._accept(request, choice, slot)
            if events[-1].finish:
                leaving.append(slot)
        for slot in reversed(leaving):
            self._rows.leave(slot)
        return events

    # --- tokens ----------------------------------------------------------------------------------

    def _accept(self, request: Request, choice: Choice, row: int) -> list[Event]:
        """Add a sampled token to a reply, and the calculator's answer if the token closes a call."""
        sampling, token = request.sampling, choice.tokens[row]
        alternatives = choice.alternatives[row][: sampling.logprobs]
        if request.generated == 0:
            head = Event(
                request.number,
                token,
                choice.logprobs[row],
                False,
                None,
                alternatives,
                request.reused,
                request.scores,
            )
        else:
            head = Event(request.number, token, choice.logprobs[row], False, None, alternatives)
        if head.broken:
            return [replace(head, finish="error")]
        if request.grammar is not None:
            request.grammar.accept(token)
        forced = (
            Event(request.number, next_token, 0.0, True, None)
            for next_token in request.calls.follow(token)
        )
        events = []
        for event in (head, *forced):
            events.append(self._followed(request, event))
            if events[-1].finish:
                break
        return events

    def _followed(self, request: Request, event: Event) -> Event:
        """Add an event's token to its request; return the event with what follows from the token."""
        sampling, token = request.sampling, event.token
        request.tokens.append(token)
        if request.history is not None:
            request.history.add(token)
        armed = request.generated >= sampling.min_tokens
        finish: Finish | None = None
        matched: str | int | None = None
        if request.grammar is not None and request.grammar.failed:
            finish = "error"  # first: an automaton that failed allows end marks only
            self.schemas.refuse(str(sampling.schema), TOO_COMPLEX)
        elif armed and token in sampling.stop_tokens:
            finish, matched = "stop", token
        elif armed and token in self.tokenizer.stops and not sampling.ignore_eos:
            finish = "stop"
        elif request.generated == sampling.max_tokens or len(request.tokens) == self.length:
            finish = "length"
        if request.stops is None:
            return event if finish is None else replace(event, finish=finish, matched=matched)
        parts, stop = request.stops.push(token, finish is not None, armed)
        if stop is not None:
            finish, matched = "stop", stop
        return replace(event, finish=finish, matched=matched, parts=parts)


def sample_settings(sampling: Sampling, prompt: Sequence[int], number: int) -> Sampling:
    """The settings of one sample of a prompt, with a seed that depends on nothing else."""
    return replace(sampling, seed=sample_seeds(sampling.seed, prompt, [number])[0])


def sample_seeds(seed: int, prompt: Sequence[int], numbers: Iterable[int]) -> list[int]:
    """The seeds of samples of a prompt, by their numbers."""
    mark = zlib.crc32(array("q", prompt).tobytes())
    return [random.Random(f"{seed}/{number}/{mark}").getrandbits(63) for number in numbers]

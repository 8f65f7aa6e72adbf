"""Generates replies to many requests in one batch, each with its own length, settings and seed.

The life of a request:

  1. submit() checks the request and queues it.
  2. _admit() gives it a slot of the key-value cache. If a slot already holds the beginning of its
     prompt, as it does after an earlier turn of the same chat, the model reads only the rest
     (generate/slots.py).
  3. _prefill() reads all but the last token of the prompt, in chunks (generate/passes.py).
  4. _decode() feeds one token of every ready request to the model in one pass, and samples the next
     tokens (generate/choice.py).
  5. _accept() adds a sampled token to the reply. If the token closes a calculator call, the engine
     writes the answer.
  6. _with_ending() ends the reply at an end mark, a stop string or a limit. The slot is then free
     for the next request.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanochat.common import UserError, appendix, required_appendix, tr
from nanochat.generate.adapters import Adapters
from nanochat.generate.adjust import History, adjuster
from nanochat.generate.budget import PromptBudget
from nanochat.generate.choice import Choice, choose, uniform
from nanochat.generate.drafts import Drafts
from nanochat.generate.graphs import DecodeGraphs
from nanochat.generate.passes import Passes
from nanochat.generate.reply import (
    Calls,
    Completion,
    Event,
    Finish,
    StoppedReply,
    answer_marks,
    broken_model,
)
from nanochat.generate.request import Request
from nanochat.generate.sampling import Sampling, check_request, sample_settings
from nanochat.generate.slots import CHUNK, Slots
from nanochat.model import Model
from nanochat.platforms.base import Platform
from nanochat.tokenizer import Tokenizer


class Engine:
    """Runs a model for many requests at once; call one engine from one thread only.

    At most `slots` requests run together; further requests wait. `length` is the limit for prompt
    and reply together, in tokens (default and maximum: the model's context). `prefill_tokens` is
    the maximum number of prompt tokens read between two decoding passes. `pad` rounds the shape of
    every pass up to one of a few sizes (default: only on devices where a new shape costs a
    compilation). `spare_slots` adds slots to the cache in which finished chats wait for their next
    turn, as they also do in any free slot. `adapters` are the adapters that requests may name.
    `graphs` is the platform of a device that can capture graphs; decoding passes are then replayed
    as one launch each where possible. `drafts` guesses tokens, so that one pass checks several.
    `most_seconds` is how long reading prompts may delay running replies in a step; see
    PromptBudget.
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
        spare_slots: int = 0,
        adapters: Adapters | None = None,
        graphs: Platform | None = None,
        drafts: Drafts | None = None,
        most_seconds: float | None = None,
    ):
        context = model.config.sequence_len
        if tokenizer.vocab_size != model.config.vocab_size:
            raise UserError(
                tr(
                    "the model has a vocabulary of {size} tokens, the tokenizer "
                    "{tokenizer_size}: they do not belong together. Load the "
                    "tokenizer saved with the checkpoint.",
                    size=model.config.vocab_size,
                    tokenizer_size=tokenizer.vocab_size,
                )
            )
        self.length = context if length is None else length
        if slots < 1 or spare_slots < 0 or not 2 <= self.length <= context:
            raise UserError(
                tr(
                    "an engine needs at least 1 slot and a length from 2 to {context} "
                    "tokens (the model's context), got {slots} slots, {spare_slots} spare "
                    "ones and length {length}. Pass other values for slots, spare_slots and "
                    "length.",
                    context=context,
                    slots=slots,
                    spare_slots=spare_slots,
                    length=length,
                )
            )
        self.model = model
        self.tokenizer = tokenizer
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.prompt_tokens_read = 0
        cache = model.new_cache(slots + spare_slots, self.length, dtype)
        self._slots = Slots(cache, slots, slots + spare_slots)
        pad = model.attention.grain > 1 if pad is None else pad
        self._adapters = adapters
        self.graphs = None if graphs is None else DecodeGraphs(model, cache, graphs, adapters)
        self._passes = Passes(model, cache, self.length, pad, adapters, self.graphs)
        self.drafts = drafts
        self._beside_replies = PromptBudget(prefill_tokens, most_seconds)
        self._waiting: deque[Request] = deque()
        self._suspended: dict[int, Request] = {}  # by number
        self._next_request = 0
        # None if this copy of nanochat lacks JSON schemas. Any thread may use `schemas`.
        self.schemas: Any = None
        self._mask_turns: Any = None
        if appendix("nanochat.generate.schema"):
            self.schemas = appendix("nanochat.generate.schema.grammar").Schemas(tokenizer)
            self._mask_turns = appendix("nanochat.generate.schema.mask_turns").MaskTurns()
        self._banned = torch.tensor(answer_marks(tokenizer), dtype=torch.long, device=model.device)

    # --- requests --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if any request is in flight or waiting."""
        return bool(self._slots.active or self._waiting)

    @property
    def free_slots(self) -> int:
        """The number of further requests that can run at present."""
        return self._slots.free

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def cuts_anywhere(self) -> bool:
        """Whether the cache can be shortened to any length; states of DeltaNets cannot be."""
        return self._slots.cache.cuts_anywhere

    @property
    def prompt_tokens_reused(self) -> int:
        """The number of prompt tokens that were reused from other requests so far."""
        return self._slots.reused_tokens

    @property
    def passes(self) -> int:
        """The number of forward passes so far."""
        return self._passes.count

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        generator: random.Random | None = None,
    ) -> int:
        """Queue a prompt, and return the ID of its request.

        `generator` gives the random numbers instead of the settings' seed. Raises UserError if the
        prompt is empty or leaves no room for a reply, if a token is not in the vocabulary, if the
        adapter is unknown, or if the schema is refused. A request that is accepted here makes no
        later step fail.
        """
        self.check(prompt, sampling)
        request = Request(
            number=self._next_request,
            tokens=list(prompt),
            prompt_length=len(prompt),
            sampling=sampling,
            random=generator or random.Random(sampling.seed),
            calls=Calls(self.tokenizer),
        )
        if sampling.schema is not None:
            request.grammar = self._grammars().grammar(sampling.schema)
        if sampling.stop:
            request.stops = StoppedReply(self.tokenizer, sampling.stop)
        if sampling.adjusts:
            ends = set(sampling.stop_tokens)
            if not sampling.ignore_eos:
                ends |= self.tokenizer.stops
            room = self.length - len(prompt)
            request.history = History(prompt, sampling, list(ends), room)
        self._next_request += 1
        self._waiting.append(request)
        return request.number

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise the UserError that submit() would raise, except for errors in a new schema.

        `schemas.prepare` raises those errors. It also builds the schema's automaton, which takes
        long; submit() reuses that automaton as long as the caller holds it. Any thread may call
        check() while another thread uses the engine.
        """
        check_request(prompt, sampling, self.length, self.model.config.vocab_size)
        if sampling.schema is not None:
            self._grammars().check(sampling.schema)
        if self._adapters is not None:
            self._adapters.number(sampling.adapter)
        elif sampling.adapter:
            raise UserError(
                tr(
                    "there is no adapter {adapter!r}: this engine has none. Ask for no adapter",
                    adapter=sampling.adapter,
                ),
                2,
            )

    def _grammars(self) -> Any:
        """Return `schemas`, which makes the automata of JSON schemas.

        Raises UserError (exit code 2) if their module is not in this copy of nanochat.
        """
        if self.schemas is None:
            required_appendix("nanochat.generate.schema.grammar", tr("a JSON schema"))
        return self.schemas

    @torch.inference_mode()
    def cancel(self, number: int) -> bool:
        """Drop a request, waiting or in flight, and return whether it was still there.

        The slot of a request in flight is free at once.
        """
        if self._suspended.pop(number, None) is not None:
            return True
        for request in self._waiting:
            if request.number == number:
                self._waiting.remove(request)
                return True
        for slot, request in enumerate(self._slots.running):
            if request.number == number:
                self._slots.leave(slot)
                return True
        return False

    @torch.inference_mode()
    def suspend(self, number: int) -> None:
        """Take away the slot of a request in flight, or its place in the queue, until resume().

        Its reply then continues with the same tokens as without the pause. What the slot holds is
        computed again only if other requests have needed the slot in the meantime.
        """
        for request in self._waiting:
            if request.number == number:
                self._waiting.remove(request)
                self._suspended[number] = request
                return
        for slot, request in enumerate(self._slots.running):
            if request.number == number:
                self._suspended[number] = request.again()
                self._slots.leave(slot)
                return

    def resume(self, number: int) -> None:
        """Queue a suspended request again."""
        self._waiting.append(self._suspended.pop(number))

    @torch.inference_mode()
    def forget(self) -> None:
        """Discard the cached tokens of finished requests.

        Call this after the model's weights have changed.
        """
        self._slots.forget()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt `samples` times, and return the completions in order.

        All samples of the first prompt come first, then all samples of the second, and so on. The
        seed of a sample depends only on the given seed, the sample's index and the prompt, not on
        other prompts or the number of ranks. `on_done` is called with the index of each finished
        completion and the completion itself. Raises UserError as complete() does.
        """
        requests = [
            (prompt, sample_settings(sampling, prompt, sample))
            for prompt in prompts
            for sample in range(samples)
        ]
        return self.complete(requests, on_done)

    def complete(
        self,
        requests: Sequence[tuple[Sequence[int], Sampling]],  # prompts with their settings
        on_done: Callable[[int, Completion], None] | None = None,
        on_token: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """Complete every request, and return the completions in order.

        `on_done` is as in generate(), and `on_token` is called after each token. Raises UserError
        if submit() would, if the engine is busy, or if the model gives NaN, because its replies
        would then have no score.
        """
        if self.busy:
            raise UserError(
                tr(
                    "generate() needs an idle engine, and this one has requests in flight: "
                    "make another Engine"
                )
            )
        completions = [Completion() for _ in requests]
        index: dict[int, int] = {}  # request number -> index of its completion
        try:
            for prompt, sampling in requests:
                index[self.submit(prompt, sampling)] = len(index)
            while self.busy:
                for event in self.step():
                    if event.broken:
                        raise UserError(broken_model())
                    completion = completions[index[event.request]]
                    completion.add(event)
                    if on_token:
                        on_token()
                    if event.finish and on_done:
                        on_done(index[event.request], completion)
        finally:
            for number in index:  # after an error or Ctrl-C, leave no request behind
                self.cancel(number)
        return completions

    # --- one step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run one step, and return the events of the tokens that it produced.

        A step admits waiting requests, prefills some of their prompts, and decodes the next token
        of each ready request. If it raises an exception, cancel the requests in flight.
        """
        start = time.perf_counter()
        try:
            self._admit()
            replies_run = self._slots.ready() > 0
            budget = self._beside_replies.tokens if replies_run else self.prefill_tokens
            prompts_read = self._prefill(budget)
            events = self._decode()
        except BaseException:  # such as a lack of memory, or Ctrl-C
            self._slots.spoil()
            raise
        if replies_run:
            self._beside_replies.note_step(time.perf_counter() - start, prompts_read)
        return events

    def _admit(self) -> None:
        """Give the free slots to the requests that have waited longest."""
        count = min(self.free_slots, len(self._waiting))
        if count:
            self._slots.admit([self._waiting.popleft() for _ in range(count)])

    def _prefill(self, budget: int) -> bool:
        """Read up to `budget` tokens of prompts in slot order, and return whether there were any.

        A prompt that is much shorter than the first one may pass it. The last token of a prompt is
        not read.
        """
        read_before = self.prompt_tokens_read
        while budget > 0:
            first = self._slots.ready()
            if first == self._slots.active:
                break
            self._slots.shortest_first(first)
            self._slots.share(first)
            if not self._slots.running[first].prefilling:
                continue
            count, columns = self._slots.prefill_shape(first, budget)
            requests = self._slots.running[first : first + count]
            chunks = []
            for request in requests:
                end = min(request.cached + columns, self._slots.chunk_end(request))
                chunks.append(request.tokens[request.cached : end])
            hidden = self._passes.run(self._slots.requests, first, chunks)
            self._passes.score(hidden, requests, chunks)
            for slot, (request, chunk) in enumerate(zip(requests, chunks, strict=True), first):
                self.prompt_tokens_read += len(chunk)
                request.cached += len(chunk)
                self._slots.save_states(slot)
            budget -= count * columns
        return self.prompt_tokens_read > read_before

    def _decode(self) -> list[Event]:
        """Feed one pending token of every ready request, and return the resulting events.

        The next token of a request is sampled once no forced token is pending. With drafts, all
        pending tokens and guessed ones are fed.
        """
        ready = self._slots.ready()
        if not ready:
            return []
        requests = self._slots.running[:ready]
        masks: dict[int, bytes] = {}
        grammars = [request.grammar for request in requests]
        if any(grammars):
            masks = self._mask_turns.take(grammars)
        # A request that waits for its mask feeds the same token again in the next step.
        without_mask = [
            slot
            for slot, request in enumerate(requests)
            if request.grammar is not None and slot not in masks
        ]
        chunks = None
        if self.drafts is not None:
            room = self.length - max(request.cached for request in requests)
            chunks = self.drafts.chunks(requests, room)
        if chunks is not None:
            events = self._check_guesses(requests, chunks)
        else:
            logits = self._passes.decode(self._slots.requests, ready, without_mask)
            events = self._advance(requests, logits, masks, without_mask)
        ended = {event.request for event in events if event.finish}
        for slot in reversed(range(ready)):
            if requests[slot].number in ended:
                self._slots.leave(slot)
        return events

    def _check_guesses(self, requests: Sequence[Request], chunks: list[list[int]]) -> list[Event]:
        """Feed pending and guessed tokens, and return the events up to the first wrong guess.

        chunks[i] are the tokens for requests[i]. Tokens that a row was fed after a wrong guess are
        dropped from its slot.
        """
        states = self._slots.states(len(requests))
        logits = self._passes.check(self._slots.requests, chunks)
        starts = [request.cached for request in requests]

        def advance(rows: list[int], column: int) -> list[Event]:
            return self._advance([requests[row] for row in rows], logits[rows, column])

        assert self.drafts is not None
        events = self.drafts.check(requests, chunks, advance)
        for row, chunk in enumerate(chunks):
            self._slots.take_back(row, starts[row], len(chunk), states)
        return events

    def _advance(
        self,
        requests: Sequence[Request],
        logits: Tensor,  # (B, V)
        masks: Mapping[int, bytes] | None = None,
        without_mask: Sequence[int] = (),
    ) -> list[Event]:
        """Count a fed token of each request, and sample the next ones from the logits.

        `masks` maps a row to its mask. The rows in `without_mask` wait for theirs, and do not
        change.
        """
        # Draw random numbers only for requests that sample; if a forced token follows, the choice
        # is dropped.
        sampled = [
            row not in without_mask and request.cached + 1 == len(request.tokens)
            for row, request in enumerate(requests)
        ]
        uniforms = [
            uniform(request.random) if samples else 0.0
            for request, samples in zip(requests, sampled, strict=True)
        ]
        histories = [request.history for request in requests]
        adjust = adjuster(histories, masks or {}) if masks or any(histories) else None
        choice = choose(
            logits,
            [request.sampling for request in requests],
            uniforms,
            self._banned,
            adjust,
            self.model.log_totals,
        )
        events: list[Event] = []
        for row, request in enumerate(requests):
            if row in without_mask:
                continue
            request.cached += 1
            if sampled[row]:  # otherwise, the next step feeds a forced token
                events += self._accept(request, choice, row)
        return events

    # --- tokens and endings ----------------------------------------------------------------------

    def _accept(
        self,
        request: Request,
        choice: Choice,
        row: int,
    ) -> list[Event]:
        """Add a sampled token to a reply, and return the resulting events.

        If the token closes a calculator call, the tokens of the answer are added as well. If the
        model gave NaN, nothing is added and the event ends the reply.
        """
        token = choice.tokens[row]
        alternatives = choice.alternatives[row][: request.sampling.logprobs]
        event = Event(request.number, token, choice.logprobs[row], False, None, alternatives)
        if request.generated == 0:
            event = replace(event, reused=request.reused, prompt_scores=request.prompt_scores)
        if event.broken:
            return [replace(event, finish="error")]
        if request.grammar is not None:
            request.grammar.accept(token)
        events = [self._with_ending(request, event)]
        for answer_token in request.calls.follow(token):
            if events[-1].finish:
                break
            forced = Event(request.number, answer_token, 0.0, True, None)
            events.append(self._with_ending(request, forced))
        return events

    def _with_ending(self, request: Request, event: Event) -> Event:
        """Add an event's token to its request, and return the event.

        The returned event says why the reply ends, if it does. If the request has stop strings, the
        event also carries the text to show.
        """
        sampling = request.sampling
        request.tokens.append(event.token)
        if request.history is not None:
            request.history.add(event.token)
        may_stop = request.generated >= sampling.min_tokens
        finish, matched = self._ending(request, event.token, may_stop)
        if request.stops is None:
            return event if finish is None else replace(event, finish=finish, matched=matched)
        parts, stop = request.stops.push(event.token, finish is not None, may_stop)
        if stop is not None:
            finish = "stop"
            matched = stop
        return replace(event, finish=finish, matched=matched, parts=parts)

    def _ending(
        self,
        request: Request,
        token: int,
        may_stop: bool,
    ) -> tuple[Finish | None, int | None]:
        """Return (reason, stop token) if `token` ends a reply, or (None, None) if it continues.

        The stop token is None unless one of the request's own stop tokens ended the reply.
        """
        sampling = request.sampling
        # This check comes first, because an automaton that failed allows only end marks.
        if request.grammar is not None and request.grammar.failed:
            self.schemas.give_up(sampling.schema)
            return "error", None
        if may_stop and token in sampling.stop_tokens:
            return "stop", token
        if may_stop and token in self.tokenizer.stops and not sampling.ignore_eos:
            return "stop", None
        if request.generated == sampling.max_tokens or len(request.tokens) == self.length:
            return "length", None
        return None, None

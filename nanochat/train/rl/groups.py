"""Samples several replies to each prompt as a tree: what replies have in common is computed once.

Replies to one prompt begin alike. Each distinct beginning holds one slot of the cache, whatever the number of replies
that share it, and gets another slot only where its replies choose different tokens. All prompts run together, and every
pass adds one token to every reply that has not ended. The replies are those of Engine.generate(), up to rounding.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.engine import Completion, sample_seeds
from nanochat.generate.reply import Calls, Finish, answer_marks
from nanochat.generate.sampling import Sampling, check_request, choose_among, uniform
from nanochat.model import Model
from nanochat.tokenizer import Tokenizer

PASS_TOKENS = 4096  # prompt tokens of a prefill pass, padding included
GRAIN = 16  # a pass has a multiple of this many rows: libraries prepare something for every shape that they meet

Done = Callable[[int, Completion], None]


@dataclass
class _Branch:
    """A beginning of replies, which holds one slot of the cache."""

    members: list[int]  # the replies that begin so
    reply: Completion
    calls: Calls
    length: int  # tokens of prompt and reply
    cached: int  # how many of these are in the cache
    pending: list[int] = field(
        default_factory=list
    )  # tokens of the reply that are not in the cache yet


class Groups:
    """Samples from a model whose weights change from step to step. Keeps the memory of its cache."""

    def __init__(self, model: Model, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self._cache: Cache | None = None
        self._banned = torch.tensor(answer_marks(tokenizer), dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        done: Done | None = None,
    ) -> list[Completion]:
        """Complete every prompt `samples` times; returns all samples of the first prompt, then of the second, ...

        Only temperature, top_k, max_tokens and seed of `sampling` are followed. Equal replies to a prompt are one
        object. `done` is called with each finished reply and its number. UserError as Engine.submit() raises it.
        """
        room = min(
            max(map(len, prompts), default=1) + sampling.max_tokens, self.model.config.sequence_len
        )
        for prompt in prompts:
            check_request(prompt, sampling, room, self.model.config.vocab_size)
        seeds = [
            seed
            for prompt in prompts
            for seed in sample_seeds(sampling.seed, prompt, range(samples))
        ]
        self._random = [random.Random(seed) for seed in seeds]
        self._replies = [Completion() for _ in seeds]
        self._sampling, self._room, self._done = sampling, room, done
        cache = self._cache_for(-(-max(len(seeds), 1) // GRAIN) * GRAIN, room)
        branches = [
            _Branch(
                list(range(at * samples, (at + 1) * samples)),
                Completion(),
                Calls(self.tokenizer),
                len(prompt),
                0,
            )
            for at, prompt in enumerate(prompts)
        ]
        logits = self._prefill(prompts, cache) if prompts else torch.empty(0)
        for branch in branches:
            branch.cached = branch.length
        while branches:
            branches = self._grow(branches, logits, cache)
            if branches:
                logits = self._feed(branches, cache)
        return self._replies

    def _cache_for(self, slots: int, length: int) -> Cache:
        """The cache of earlier calls, or a larger one."""
        cache = self._cache
        if cache is None or cache.positions.size(0) < slots or cache.length < length:
            old = (0, 0) if cache is None else (cache.positions.size(0), cache.length)
            self._cache = cache = None  # its memory is free before the new one is taken
            length = min(-(-max(length, old[1]) // GRAIN) * GRAIN, self.model.config.sequence_len)
            self._cache = cache = self.model.new_cache(max(slots, old[0]), length)
        return cache

    def _prefill(self, prompts: Sequence[Sequence[int]], cache: Cache) -> Tensor:  # (prompts, V)
        """Read the prompts into the first slots; returns the logits after their last tokens."""
        cache.clear(slice(0, len(prompts)))
        widest = max(map(len, prompts))
        rows = max(PASS_TOKENS // widest, 1)
        found = []
        for first in range(0, len(prompts), rows):
            part = prompts[first : first + rows]
            lengths = [len(prompt) for prompt in part]
            table = torch.tensor([[*prompt, *[0] * (widest - len(prompt))] for prompt in part]).to(
                self.model.device
            )
            count = torch.tensor(lengths).to(self.model.device)
            slots = slice(first, first + len(part))
            context = Cached(cache, table, slots, count, cached=[0] * len(part), new=lengths)
            hidden = self.model.hidden(table, context)
            found.append(hidden[torch.arange(len(part), device=hidden.device), count - 1])
        return self.model.logits(torch.cat(found))

    def _feed(self, branches: Sequence[_Branch], cache: Cache) -> Tensor:  # (branches, V)
        """Feed the next token of each branch; returns the logits after the tokens."""
        B = len(branches)
        padded = -(-B // GRAIN) * GRAIN
        cache.clear(slice(B, padded))
        held = [branch.cached for branch in branches] + [0] * (padded - B)
        tokens = [branch.pending.pop(0) for branch in branches] + [0] * (padded - B)
        idx = torch.tensor(tokens).to(self.model.device, non_blocking=True)[:, None]
        hidden = self.model.hidden(
            idx, Cached(cache, idx, slice(0, padded), cached=held, new=[1] * padded)
        )
        for branch in branches:
            branch.cached += 1
        return self.model.logits(hidden[:, 0])[:B]

    def _grow(self, branches: list[_Branch], logits: Tensor, cache: Cache) -> list[_Branch]:
        """Choose the next token of every reply, split branches whose replies differ, and end replies; returns the
        branches in flight, branch i in slot i."""
        ready = [slot for slot, branch in enumerate(branches) if not branch.pending]
        if len(ready) < len(branches) and ready:
            logits = logits[torch.tensor(ready, device=logits.device)]
        members = [
            (row, member) for row, slot in enumerate(ready) for member in branches[slot].members
        ]
        rows = [row for row, _ in members]
        uniforms = [uniform(self._random[member]) for _, member in members]
        tokens, logprobs = [], []
        if members:
            tokens, logprobs = choose_among(
                logits, rows, self._sampling, uniforms, self._banned, self.model.log_totals
            )
        chosen: list[dict[int, tuple[float, list[int]]]] = [
            {} for _ in ready
        ]  # token -> log-probability, replies
        for (row, member), token, logprob in zip(members, tokens, logprobs, strict=True):
            chosen[row].setdefault(token, (logprob, []))[1].append(member)
        stays = {slot: branch for slot, branch in enumerate(branches) if branch.pending}
        new: list[tuple[_Branch, int]] = []  # with the slots to copy from
        for slot, options in zip(ready, chosen, strict=True):
            branch, first = branches[slot], True
            for number, (token, (logprob, replies)) in enumerate(options.items()):
                child = branch if number == len(options) - 1 else self._twin(branch)
                child.members = replies
                if self._follow(child, token, logprob):
                    self._end(child)
                elif first:
                    stays[slot], first = child, False
                else:
                    new.append((child, slot))
        return self._settle(stays, new, cache)

    @staticmethod
    def _twin(branch: _Branch) -> _Branch:
        reply = branch.reply
        twin = Completion(list(reply.tokens), list(reply.forced), list(reply.logprobs))
        return _Branch([], twin, branch.calls.copy(), branch.length, branch.cached)

    def _follow(self, branch: _Branch, token: int, logprob: float) -> bool:
        """Add a chosen token, and the calculator's answer if the token closes a call; whether the reply has ended."""
        reply = branch.reply
        written = [
            (token, logprob, False),
            *((next_token, 0.0, True) for next_token in branch.calls.follow(token)),
        ]
        for next_token, likely, forced in written:
            reply.tokens.append(next_token)
            reply.logprobs.append(likely)
            reply.forced.append(forced)
            branch.pending.append(next_token)
            branch.length += 1
            finish: Finish | None = None
            if next_token in self.tokenizer.stops:
                finish = "stop"
            elif len(reply.tokens) == self._sampling.max_tokens or branch.length == self._room:
                finish = "length"
            reply.finish = finish
            if finish:
                return True
        return False

    def _end(self, branch: _Branch) -> None:
        for member in branch.members:
            self._replies[member] = branch.reply
            if self._done:
                self._done(member, branch.reply)

    @staticmethod
    def _settle(
        stays: dict[int, _Branch], new: list[tuple[_Branch, int]], cache: Cache
    ) -> list[_Branch]:
        """Bring all branches to the first slots: new ones, and those from behind, fill the slots that are free."""
        count = len(stays) + len(new)
        behind = [(branch, slot) for slot, branch in stays.items() if slot >= count]
        free = [slot for slot in range(count) if slot not in stays]
        moved = [*behind, *new]
        if moved:
            tokens = max(branch.cached for branch, _ in moved)
            cache.move([source for _, source in moved], free, tokens)
        kept = {slot: branch for slot, branch in stays.items() if slot < count}
        kept |= {slot: branch for slot, (branch, _) in zip(free, moved, strict=True)}
        return [kept[slot] for slot in range(count)]

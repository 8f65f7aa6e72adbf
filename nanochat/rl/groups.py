"""Samples several replies to each prompt as a tree, computing shared beginnings only once.

Replies to the same prompt often begin alike. Each distinct beginning takes one cache slot, however
many replies share it, and is split over more slots only when its replies choose different tokens.
All prompts run together, and every decoding pass reads one token of every reply that has not
ended. Up to rounding, the replies are the same as those of Engine.generate().
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.engine import Completion
from nanochat.generate.choice import choose_among, uniform
from nanochat.generate.reply import Calls, Finish, answer_marks
from nanochat.generate.sampling import Sampling, check_request, sample_seeds
from nanochat.model import Model
from nanochat.tokenizer import Tokenizer

PASS_TOKENS = 4096  # prompt tokens of a prefill pass, padding included
GRAIN = 16  # the rows of a pass are a multiple of this: libraries prepare kernels for each shape

Done = Callable[[int, Completion], None]


@dataclass
class _Branch:
    """The beginning that some replies share, which takes one cache slot."""

    members: list[int]  # indices of the replies that share this beginning
    reply: Completion
    calls: Calls
    length: int  # tokens of prompt and reply
    cached: int  # how many of these are in the cache
    pending: list[int] = field(default_factory=list)  # tokens of the reply that are not cached yet

    def copy(self) -> "_Branch":
        """Return a branch with the same tokens but no members, and without pending tokens."""
        reply = Completion(
            tokens=list(self.reply.tokens),
            forced=list(self.reply.forced),
            logprobs=list(self.reply.logprobs),
        )
        return _Branch([], reply, self.calls.copy(), self.length, self.cached)


@dataclass
class _Option:
    """A next token's log-probability, and the indices of the replies that have chosen it."""

    logprob: float
    members: list[int] = field(default_factory=list)


def _round_up(count: int) -> int:
    return -(-count // GRAIN) * GRAIN


class Groups:
    """Samples groups of replies from a model whose weights may change between calls.

    The cache is allocated on first use, and replaced only if a larger one is needed.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer):
        self.model = model
        self.tokenizer = tokenizer
        self._cache: Cache | None = None
        self._banned = torch.tensor(answer_marks(tokenizer), dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        on_done: Done | None = None,
    ) -> list[Completion]:
        """Return `samples` replies to every prompt, ordered by prompt.

        Of `sampling`, only temperature, top_k, max_tokens and seed are used. Equal replies to a
        prompt are the same object. `on_done` is called with the index of each finished reply and
        the reply itself. Raises UserError if check_request() does.
        """
        config = self.model.config
        longest = max(map(len, prompts), default=1)
        room = min(longest + sampling.max_tokens, config.sequence_len)
        for prompt in prompts:
            check_request(prompt, sampling, room, config.vocab_size)
        seeds: list[int] = []
        for prompt in prompts:
            seeds += sample_seeds(sampling.seed, prompt, range(samples))
        self._random = [random.Random(seed) for seed in seeds]
        self._replies = [Completion() for _ in seeds]
        self._sampling = sampling
        self._room = room
        self._done = on_done
        if not prompts:
            return self._replies
        cache = self._cache_for(_round_up(max(len(seeds), 1)), room)
        branches = []
        for number, prompt in enumerate(prompts):
            first_member = number * samples
            branch = _Branch(
                members=list(range(first_member, first_member + samples)),
                reply=Completion(),
                calls=Calls(self.tokenizer),
                length=len(prompt),
                cached=len(prompt),
            )
            branches.append(branch)
        logits = self._prefill(prompts, cache)
        while branches:
            branches = self._grow(branches, logits, cache)
            if branches:
                logits = self._feed(branches, cache)
        return self._replies

    def _cache_for(self, slots: int, length: int) -> Cache:
        """Return the cache of earlier calls if it is large enough, else a new, larger one."""
        cache = self._cache
        if cache is None:
            old_slots = 0
            old_length = 0
        else:
            old_slots = cache.positions.size(0)
            old_length = cache.length
            if old_slots >= slots and old_length >= length:
                return cache
        cache = self._cache = None  # frees its memory before the new one is allocated
        length = min(_round_up(max(length, old_length)), self.model.config.sequence_len)
        self._cache = self.model.new_cache(max(slots, old_slots), length)
        return self._cache

    def _prefill(self, prompts: Sequence[Sequence[int]], cache: Cache) -> Tensor:  # (prompts, V)
        """Read the prompts into the first slots, and return the logits after their last tokens."""
        cache.clear(slice(0, len(prompts)))
        widest = max(map(len, prompts))
        rows = max(PASS_TOKENS // widest, 1)
        last_hidden = []
        for first in range(0, len(prompts), rows):
            pass_prompts = prompts[first : first + rows]
            count = len(pass_prompts)
            padded = []
            for prompt in pass_prompts:
                padding = [0] * (widest - len(prompt))
                padded.append([*prompt, *padding])
            idx = torch.tensor(padded).to(self.model.device)
            new = [len(prompt) for prompt in pass_prompts]
            lengths = torch.tensor(new).to(self.model.device)
            slots = slice(first, first + count)
            context = Cached(cache, idx, slots, lengths, cached=[0] * count, new=new)
            hidden = self.model.hidden(idx, context)
            row = torch.arange(count, device=hidden.device)
            last_hidden.append(hidden[row, lengths - 1])
        return self.model.logits(torch.cat(last_hidden))

    def _feed(self, branches: Sequence[_Branch], cache: Cache) -> Tensor:  # (branches, V)
        """Feed the next token of each branch to the model, and return the logits that follow."""
        rows = _round_up(len(branches))
        padding = [0] * (rows - len(branches))
        cache.clear(slice(len(branches), rows))
        cached = [branch.cached for branch in branches] + padding
        tokens = [branch.pending.pop(0) for branch in branches] + padding
        idx = torch.tensor(tokens).to(self.model.device, non_blocking=True)[:, None]
        context = Cached(cache, idx, slice(0, rows), cached=cached, new=[1] * rows)
        hidden = self.model.hidden(idx, context)
        for branch in branches:
            branch.cached += 1
        return self.model.logits(hidden[:, 0])[: len(branches)]

    def _grow(self, branches: list[_Branch], logits: Tensor, cache: Cache) -> list[_Branch]:
        """Choose tokens for branches without pending ones, and return the branches that continue.

        A branch whose replies choose different tokens is split. Branch i is in slot i of the cache,
        both before and after.
        """
        stays = {slot: branch for slot, branch in enumerate(branches) if branch.pending}
        ready = [slot for slot in range(len(branches)) if slot not in stays]
        if stays and ready:
            logits = logits[torch.tensor(ready, device=logits.device)]
        groups = [branches[slot].members for slot in ready]
        chosen = self._choose(groups, logits)
        new: list[tuple[_Branch, int]] = []  # with the slots to copy from
        for slot, options in zip(ready, chosen, strict=True):
            branch = branches[slot]
            last = len(options) - 1
            for number, (token, option) in enumerate(options.items()):
                child = branch if number == last else branch.copy()
                child.members = option.members
                if self._follow(child, token, option.logprob):
                    self._end(child)
                elif slot not in stays:
                    stays[slot] = child
                else:
                    new.append((child, slot))
        return self._settle(stays, new, cache)

    def _choose(self, groups: Sequence[Sequence[int]], logits: Tensor) -> list[dict[int, _Option]]:
        """Choose a token for every reply, and return a dict from token to _Option for each group.

        Each entry of `groups` holds the indices of the replies that share a row of logits.
        """
        rows: list[int] = []  # for each of the members, its row of the logits
        members: list[int] = []
        for row, group in enumerate(groups):
            rows += [row] * len(group)
            members += group
        chosen: list[dict[int, _Option]] = [{} for _ in groups]
        if not members:
            return chosen
        uniforms = [uniform(self._random[member]) for member in members]
        tokens, logprobs = choose_among(
            logits, rows, self._sampling, uniforms, self._banned, self.model.log_totals
        )
        for row, member, token, logprob in zip(rows, members, tokens, logprobs, strict=True):
            option = chosen[row].setdefault(token, _Option(logprob))
            option.members.append(member)
        return chosen

    def _follow(self, branch: _Branch, token: int, logprob: float) -> bool:
        """Add a chosen token to a branch, and return whether its replies have ended.

        If the token closes a calculator call, the answer is added too, as far as there is room.
        """
        if self._append(branch, token, logprob, forced=False):
            return True
        answer = branch.calls.follow(token)
        return any(self._append(branch, answered, 0.0, forced=True) for answered in answer)

    def _append(self, branch: _Branch, token: int, logprob: float, forced: bool) -> bool:
        """Add a token to a branch, and return whether its replies have ended."""
        reply = branch.reply
        reply.tokens.append(token)
        reply.logprobs.append(logprob)
        reply.forced.append(forced)
        branch.pending.append(token)
        branch.length += 1
        reply.finish = self._finish(branch, token)
        return reply.finish is not None

    def _finish(self, branch: _Branch, token: int) -> Finish | None:
        """Return why the replies of a branch end with this token, or None if they continue."""
        if token in self.tokenizer.stops:
            return "stop"
        if len(branch.reply.tokens) == self._sampling.max_tokens or branch.length == self._room:
            return "length"
        return None

    def _end(self, branch: _Branch) -> None:
        for member in branch.members:
            self._replies[member] = branch.reply
            if self._done:
                self._done(member, branch.reply)

    @staticmethod
    def _settle(
        stays: dict[int, _Branch], new: list[tuple[_Branch, int]], cache: Cache
    ) -> list[_Branch]:
        """Move all branches to the first slots of the cache, and return them in slot order.

        Free slots are filled with branches from higher slots, then with those in `new`, which are
        copied from the given slots.
        """
        count = len(stays) + len(new)
        behind = [(branch, slot) for slot, branch in stays.items() if slot >= count]
        free = [slot for slot in range(count) if slot not in stays]
        moved = [*behind, *new]
        if moved:
            sources = [source for _, source in moved]
            tokens = max(branch.cached for branch, _ in moved)
            cache.move(sources, free, tokens)
        by_slot = dict(stays)
        for slot, (branch, _) in zip(free, moved, strict=True):
            by_slot[slot] = branch
        return [by_slot[slot] for slot in range(count)]

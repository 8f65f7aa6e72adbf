"""Rows of tokens in an order that is known beforehand, cut into steps, ranks and micro-batches."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from nanochat import device
from nanochat.common import UserError, base_dir
from nanochat.conversation import Conversation
from nanochat.device import Compute
from nanochat.prepare import Plan, plan, prepare_conversations
from nanochat.token_files import TokenSet
from nanochat.tokenizer import Tokenizer

IGNORED = -1  # the target of a position that is not trained


@lru_cache(maxsize=4)
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:  # (count,) int64
    """The order of rows in one epoch: a permutation that depends on nothing but these three numbers, int64.

    Rows are sorted by a hash (splitmix64 of seed, epoch and row), so that no library's generator can change it.
    """
    mixed = _splitmix(np.array([seed], np.uint64)) + np.uint64(epoch)
    hashes = _splitmix(_splitmix(mixed) + np.arange(count, dtype=np.uint64))
    return np.argsort(hashes, kind="stable")


def epoch_numbers(count: int, seed: int | None, first: int, size: int) -> np.ndarray:  # (size,) int64
    """Which of `count` items the places first .. first + size - 1 of the endless seeded sequence hold.

    Place n is item n % count of epoch n // count in that epoch's order, or in their own order without a seed.
    """
    if seed is None:
        return np.arange(first, first + size) % count
    parts = [np.zeros(0, np.int64)]
    while size > 0:
        epoch, offset = divmod(first, count)
        parts.append(epoch_order(count, seed, epoch)[offset : offset + size])
        first, size = first + len(parts[-1]), size - len(parts[-1])
    return np.concatenate(parts)


def _splitmix(x: np.ndarray) -> np.ndarray:
    """One output of splitmix64 for each state (Steele, Lea, Flood 2014); unsigned arithmetic wraps by design."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Rows:
    """The rows of a plan as an endless sequence, numbered from 0; row numbers are all there is to resume.

    Number n is row n % count of epoch n // count in that epoch's order, or in the plan's order without a seed.
    """

    def __init__(self, token_set: TokenSet, plan: Plan, bos: int, seed: int | None, masked: bool):
        """`masked` trains only what the mask marks; else every token and begin mark after the first is a target."""
        if masked and token_set.parts[0].mask is None:
            raise UserError(f"{token_set.folder} holds documents without a mask; only conversations have one")
        self._set, self._plan, self._bos, self._seed, self._masked = token_set, plan, bos, seed, masked
        self._first = plan.packing.first
        self._targets = plan.trained if masked else plan.used - 1
        self._part_starts = token_set.part_starts
        self.count = plan.rows
        self.row_tokens = plan.row_tokens
        self.key = plan.key

    def plan_rows(self, first: int, count: int) -> np.ndarray:
        """Which rows of the plan the numbers first .. first + count - 1 are, int64 (count,)."""
        return epoch_numbers(self.count, self._seed, first, count)

    def targets_in(self, first: int, count: int) -> int:
        """How many targets that are not ignored the rows first .. first + count - 1 hold."""
        return int(self._targets[self.plan_rows(first, count)].sum(dtype=np.int64))

    def row(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of one row, int64 (T,) each."""
        inputs, targets = self.batch(self.plan_rows(number, 1))
        return inputs[0], targets[0]

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of some rows of the plan, int64 (B, T) each."""
        size = self.row_tokens
        cells = np.full((len(plan_rows), size), self._bos, np.int64)
        targets = np.full((len(plan_rows), size - 1), IGNORED, np.int64)
        for b, row in enumerate(plan_rows.tolist()):
            self._fill(row, cells[b], targets[b])
        # A copy, since rows of `cells` are one cell longer than inputs.
        return torch.from_numpy(cells[:, :-1].copy()), torch.from_numpy(targets)

    def _fill(self, row: int, cells: np.ndarray, targets: np.ndarray) -> None:
        """Write one row: a begin mark (already there) before each piece, padding of begin marks at the end."""
        segments = slice(int(self._first[row]), int(self._first[row + 1]))
        packing = self._plan.packing
        at = 0
        for start, length in zip(packing.starts[segments].tolist(), packing.lengths[segments].tolist(), strict=True):
            if length:
                number = bisect_right(self._part_starts, start) - 1
                part, start = self._set.parts[number], start - self._part_starts[number]
                tokens = part.tokens[start : start + length]
                cells[at + 1 : at + 1 + length] = tokens
                if self._masked and part.mask is not None:
                    marked = part.mask[start : start + length] != 0
                    targets[at : at + length][marked] = tokens[marked]
            at += length + 1
        if not self._masked:
            targets[: at - 1] = cells[1:at]


class Blend:
    """Two sets of rows of one length as one sequence: every `every`-th row is of `second`, the others of `first`."""

    def __init__(self, first: Rows, second: Rows, every: int):
        if every < 2:
            raise UserError(f"one row in how many comes from the second set must be 2 or more, got {every}", 2)
        assert first.row_tokens == second.row_tokens, "rows of one length are blended"
        self._first, self._second, self._every = first, second, every
        self.count = first.count * every // (every - 1)  # an epoch is one of `first`
        self.row_tokens = first.row_tokens
        self.key = f"{first.key} {second.key} {every}"

    def _halves(self, first: int, count: int) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:
        """Which of these numbers are of the second set (bool), and (first, count) within each set."""
        of_second = np.arange(first, first + count) % self._every == self._every - 1
        before, within = first // self._every, int(of_second.sum())
        return of_second, (first - before, count - within), (before, within)

    def plan_rows(self, first: int, count: int) -> np.ndarray:
        """As Rows.plan_rows; rows of the second set come after those of the first."""
        of_second, in_first, in_second = self._halves(first, count)
        rows = np.empty(count, np.int64)
        rows[~of_second] = self._first.plan_rows(*in_first)
        rows[of_second] = self._second.plan_rows(*in_second) + self._first.count
        return rows

    def targets_in(self, first: int, count: int) -> int:
        """As Rows.targets_in."""
        _, in_first, in_second = self._halves(first, count)
        return self._first.targets_in(*in_first) + self._second.targets_in(*in_second)

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """As Rows.batch."""
        of_second = plan_rows >= self._first.count
        inputs = torch.empty(len(plan_rows), self.row_tokens - 1, dtype=torch.int64)
        targets = torch.empty_like(inputs)
        for rows, which, offset in ((self._first, ~of_second, 0), (self._second, of_second, self._first.count)):
            chosen = torch.from_numpy(which)
            inputs[chosen], targets[chosen] = rows.batch(plan_rows[which] - offset)
        return inputs, targets


@dataclass(frozen=True)
class Step:
    """What one rank computes for one optimizer update."""

    first_row: int
    num_targets: int  # over all ranks and micro-batches: what the sum of losses is divided by
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]]  # (inputs, targets), int64 (b, T) each


def steps(
    rows: Rows | Blend, first_row: int, rows_per_step: int, device_batch_size: int, compute: Compute
) -> Iterator[Step]:
    """Endless steps of `rows_per_step` rows over all ranks, from row number `first_row` on.

    Rank r takes the rows whose number leaves r when divided by the number of ranks, so a step holds the same rows on
    any number of ranks. The next step is made by a thread while this one is computed. Close the iterator to end it.
    """
    if rows_per_step <= 0 or rows_per_step % compute.world_size:
        raise UserError(
            f"a step must have a multiple of {compute.world_size} rows (one for each rank), got {rows_per_step}"
        )
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        coming = thread.submit(make_step, rows, first_row, rows_per_step, device_batch_size, compute)
        while True:
            step = coming.result()
            first_row += rows_per_step
            coming = thread.submit(make_step, rows, first_row, rows_per_step, device_batch_size, compute)
            yield step


def make_step(rows: Rows | Blend, first_row: int, rows_per_step: int, device_batch_size: int, compute: Compute) -> Step:
    """One step's micro-batches of at most `device_batch_size` rows for this rank, ready for the device."""
    numbers = np.arange(first_row, first_row + rows_per_step)
    all_rows = rows.plan_rows(first_row, rows_per_step)
    own = all_rows[numbers % compute.world_size == compute.rank]
    micro_batches = []
    for i in range(0, len(own), device_batch_size):
        inputs, targets = rows.batch(own[i : i + device_batch_size])
        micro_batches.append((device.pin(inputs, compute), device.pin(targets, compute)))
    return Step(first_row, rows.targets_in(first_row, rows_per_step), micro_batches)


def conversation_rows(
    name: str,
    conversations: Callable[[], Iterable[Conversation]],
    key: str,
    tokenizer: Tokenizer,
    length: int,
    seed: int | None,
    masked: bool,
) -> Rows:
    """Rows of `length` tokens of whole conversations, tokenised once under `chat_data/<name>`; see Rows for the rest.

    `key` names the content: `conversations` is only called where no tokens of that key are kept.
    """
    folder = base_dir() / "chat_data" / name
    token_set = prepare_conversations(folder, _Lazy(conversations), tokenizer, key)
    return Rows(token_set, plan(token_set, length + 1, cut=False), tokenizer.bos, seed, masked)


@dataclass(frozen=True)
class _Lazy:
    """An iterable made only when it is walked."""

    make: Callable[[], Iterable[Conversation]]

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.make())


def one_pass(rows: Rows, tokens: int, device_batch_size: int, compute: Compute) -> Iterator[Step]:
    """The first `tokens` tokens of rows, each at most once, as steps of one pass each: the same rows on any number
    of ranks. A rank that has no row in the last step gets one without targets, as sharded models need every rank."""
    wanted = max(min(tokens // (rows.row_tokens - 1), rows.count), 1)
    size = device_batch_size * compute.world_size
    for first in range(0, wanted, size):
        step = make_step(rows, first, min(size, wanted - first), device_batch_size, compute)
        if not step.micro_batches:
            inputs, targets = rows.batch(rows.plan_rows(first, 1))
            nothing = torch.full_like(targets, IGNORED)
            step.micro_batches.append((device.pin(inputs, compute), device.pin(nothing, compute)))
        yield step

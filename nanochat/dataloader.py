"""Turns the tokens of a corpus into the batches of training steps.

The tokens are already on disk: prepare/ has tokenised every document once, and has planned which
pieces of which documents make up each row. This file puts the rows in an order that is known in
advance (epoch_order), turns a row into inputs and targets (Rows), and divides the rows of a step
among ranks and micro-batches (steps). split_rows() opens the rows of a corpus, which
prepare/interleave.py mixes with others; train/chat_rows.py opens the rows of conversations.

A run resumes from a single integer: the index of the next row.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from nanochat import device
from nanochat.common import UserError, tr
from nanochat.data.corpora import Split
from nanochat.data.mixing import Data
from nanochat.device import Compute
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.interleave import MixedRows
from nanochat.prepare.plan import Plan, plan
from nanochat.prepare.token_files import TokenSet
from nanochat.tokenizer import Tokenizer

IGNORED = -1  # the target at a position that is not trained
SAMPLE_SEED = 0  # shuffles the rows of a split for evaluation


# --- the order of rows ---------------------------------------------------------------------------


@lru_cache(maxsize=4)
def epoch_order(
    count: int,
    seed: int,
    epoch: int,
) -> np.ndarray:  # (count,) int64
    """Return the order of `count` rows in one epoch, which depends only on the arguments.

    Rows are sorted by a hash of the seed, the epoch and their index, so no update of a library can
    change the order.
    """
    epoch_key = _splitmix(np.array([seed], np.uint64)) + np.uint64(epoch)
    row_hashes = _splitmix(_splitmix(epoch_key) + np.arange(count, dtype=np.uint64))
    return np.argsort(row_hashes, kind="stable")


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Return one output of splitmix64 for each state (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)  # unsigned arithmetic wraps, as intended
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def epoch_numbers(
    count: int,
    seed: int | None,
    first: int,
    size: int,
    order: Callable[[int, int, int], np.ndarray] = epoch_order,
) -> np.ndarray:  # (size,) int64
    """Return the indices of items first .. first + size - 1 of an endless sequence.

    There are `count` items. Item n of the sequence is item n % count of epoch n // count, in the
    order of that epoch, or in the items' own order if `seed` is None. `order` is epoch_order(), or
    the same function with a cache of its own.
    """
    if seed is None:
        return np.arange(first, first + size) % count
    numbers = np.empty(size, np.int64)
    filled = 0
    while filled < size:
        epoch, offset = divmod(first + filled, count)
        chunk = order(count, seed, epoch)[offset : offset + size - filled]
        numbers[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return numbers


# --- rows ----------------------------------------------------------------------------------------


class Rows:
    """The rows of a plan as an endless sequence, indexed from 0.

    Row n is row n % count of epoch n // count, in the order of that epoch, or in the plan's order
    if the seed is None.
    """

    extras: tuple[str, ...] = ()  # names of the tensors that follow inputs and targets in a batch

    def __init__(
        self,
        token_set: TokenSet,
        plan: Plan,
        bos: int,
        seed: int | None,
        masked: bool,
    ):
        """Open the rows of a plan over a set of tokens.

        If `masked`, only the tokens that the mask marks are targets. Otherwise every token and
        every begin mark is a target, except the begin mark that opens a row. Raises UserError if
        `masked` and the tokens have no mask.
        """
        if masked and token_set.parts[0].mask is None:
            raise UserError(
                tr(
                    "{folder} holds documents, which have no mask; only conversations have "
                    "one. Prepare conversations, or train without a mask.",
                    folder=token_set.folder,
                )
            )
        self._token_set = token_set
        self._plan = plan
        self._bos = bos
        self._seed = seed
        self._masked = masked
        self._part_starts = token_set.part_starts
        self._first_segments = plan.packing.first
        self._target_counts = plan.trained if masked else plan.used - 1
        # Each set has its own cache, because the sets of a mixture take turns.
        self._order = lru_cache(maxsize=2)(epoch_order.__wrapped__)
        self.count = plan.rows  # rows in an epoch
        self.size = plan.rows  # number of distinct rows
        self.conversations = int(self._first_segments[-1])  # or pieces of documents, in all rows
        self.row_tokens = plan.row_tokens  # T + 1
        self.key = plan.key

    @property
    def folder(self) -> Path:
        """The folder of the tokens."""
        return self._token_set.folder

    def plan_rows(self, first: int, count: int) -> np.ndarray:  # (count,) int64
        """Return the indices, in the plan, of rows first .. first + count - 1 of the sequence."""
        return epoch_numbers(self.count, self._seed, first, count, self._order)

    def targets_in(self, first: int, count: int) -> int:
        """Return the number of targets in rows first .. first + count - 1, without ignored ones."""
        plan_rows = self.plan_rows(first, count)
        return int(self._target_counts[plan_rows].sum(dtype=np.int64))

    def row(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, targets) of row `number`, int64 (T,) each."""
        inputs, targets, *_ = self.batch(self.plan_rows(number, 1))
        return inputs[0], targets[0]

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Return (inputs, targets, *extras) of rows of the plan; the first two are int64 (B, T)."""
        cells = np.full((len(plan_rows), self.row_tokens), self._bos, np.int64)
        targets = np.full((len(plan_rows), self.row_tokens - 1), IGNORED, np.int64)
        for b, row in enumerate(plan_rows.tolist()):
            self._fill(row, cells[b], targets[b])
        inputs = cells[:, :-1].copy()  # contiguous: `cells` is one column wider than the inputs
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _fill(
        self,
        row: int,
        cells: np.ndarray,  # (T + 1,) filled with begin marks, which also serve as padding
        targets: np.ndarray,  # (T,) filled with IGNORED
    ) -> None:
        """Write the tokens and the targets of one row of the plan."""
        for column, start, length in self._segments(row):
            if not length:
                continue
            # Tokens are numbered across all parts, so find the part that holds this segment.
            part_number = bisect_right(self._part_starts, start) - 1
            part = self._token_set.parts[part_number]
            start -= self._part_starts[part_number]
            end = start + length
            tokens = part.tokens[start:end]
            cells[column + 1 : column + 1 + length] = tokens
            if self._masked and part.mask is not None:
                is_target = part.mask[start:end] != 0
                targets[column : column + length][is_target] = tokens[is_target]
        if not self._masked:
            used = int(self._plan.used[row])
            targets[: used - 1] = cells[1:used]

    def _segments(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield (column, start, length) for each segment of a row of the plan.

        A segment is a begin mark in `column`, followed by `length` tokens of the set, the first of
        them at index `start`.
        """
        packing = self._plan.packing
        begin = int(self._first_segments[row])
        end = int(self._first_segments[row + 1])
        segments = slice(begin, end)
        starts = packing.starts[segments].tolist()
        lengths = packing.lengths[segments].tolist()
        column = 0
        for start, length in zip(starts, lengths, strict=True):
            yield column, start, length
            column += length + 1


Source = Rows | MixedRows


# --- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The data of one optimizer update for one rank."""

    first_row: int
    num_targets: int  # over all ranks and micro-batches; the sum of losses is divided by it
    micro_batches: list[tuple[torch.Tensor, ...]]  # (inputs, targets, *extras); see Rows.batch()
    extras: tuple[str, ...] = ()  # the names of the extras


def steps(
    rows: Source,
    first_row: int,
    rows_per_step: int,
    device_batch_size: int,
    compute: Compute,
) -> Iterator[Step]:
    """Yield the data of one step after another, without end, beginning with row `first_row`.

    A step has `rows_per_step` rows over all ranks. Rank r takes the rows whose index modulo the
    number of ranks is r, so a step holds the same rows on any number of ranks. A thread prepares
    the next step while the current one is computed; closing the iterator ends the thread. Raises
    UserError if `rows_per_step` is not a positive multiple of the number of ranks.
    """
    if rows_per_step <= 0 or rows_per_step % compute.world_size:
        raise UserError(
            tr(
                "a step must have a multiple of {world_size} rows (one for each rank), got "
                "{rows_per_step}; change --total_batch_size or the number of ranks",
                world_size=compute.world_size,
                rows_per_step=rows_per_step,
            )
        )
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as loader:
        sizes = (rows_per_step, device_batch_size)
        upcoming = loader.submit(make_step, rows, first_row, *sizes, compute)
        while True:
            step = upcoming.result()
            first_row += rows_per_step
            upcoming = loader.submit(make_step, rows, first_row, *sizes, compute)
            yield step


def make_step(
    rows: Source,
    first_row: int,
    rows_per_step: int,
    device_batch_size: int,
    compute: Compute,
) -> Step:
    """Return one step's data for this rank, pinned if the device has its own memory.

    Each micro-batch has at most `device_batch_size` rows.
    """
    numbers = np.arange(first_row, first_row + rows_per_step)
    plan_rows = rows.plan_rows(first_row, rows_per_step)
    rank_rows = plan_rows[numbers % compute.world_size == compute.rank]
    micro_batches = []
    for i in range(0, len(rank_rows), device_batch_size):
        tensors = rows.batch(rank_rows[i : i + device_batch_size])
        micro_batches.append(pinned(tensors, compute))
    num_targets = rows.targets_in(first_row, rows_per_step)
    return Step(first_row, num_targets, micro_batches, rows.extras)


def pinned(tensors: Iterable[torch.Tensor], compute: Compute) -> tuple[torch.Tensor, ...]:
    """Return host tensors in memory from which the device copies without waiting; see device.pin()."""
    return tuple(device.pin(tensor, compute) for tensor in tensors)


# --- the rows of corpora -------------------------------------------------------------------------


def split_rows(
    data: Data,
    tokenizer: Tokenizer,
    split: Split,
    length: int,
    seed: int = SAMPLE_SEED,
) -> Source:
    """Return the shuffled rows of a split, of `length` tokens each.

    The corpora of a mixture are mixed in proportion to their shares. Rows are shuffled because a
    plan puts long documents first: its first rows would not represent the split.
    """
    sources = []
    for corpus in data.corpora:
        token_set = prepare_documents(corpus, tokenizer, split)
        row_plan = plan(token_set, length + 1, cut=True)
        sources.append(Rows(token_set, row_plan, tokenizer.bos, seed, masked=False))
    return sources[0] if len(sources) == 1 else MixedRows(sources, data.shares)

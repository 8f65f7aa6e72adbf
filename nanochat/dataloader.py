"""Rows of tokens in an order that is known in advance, divided into steps, ranks and micro-batches."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from nanochat import device
from nanochat.common import UserError
from nanochat.data.conversation import Conversation
from nanochat.data.corpora import Split
from nanochat.data.mixing import Data
from nanochat.device import Compute
from nanochat.prepare.conversations import (
    ConversationSplits,
    Lazy,
    folder_of,
    prepare_conversations,
)
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.plan import Plan, TooLong, plan
from nanochat.prepare.token_files import TokenSet
from nanochat.tokenizer import Tokenizer

IGNORED = -1  # the target of a position that is not trained
SAMPLE_SEED = 0  # seed of the order in which rows of a split are evaluated


@lru_cache(maxsize=4)
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:  # (count,) int64
    """The order of rows in one epoch: a permutation that depends only on these three numbers.

    Rows are sorted by a hash (splitmix64 of seed, epoch and row), so that no update of a library can change the order.
    """
    mixed = _splitmix(np.array([seed], np.uint64)) + np.uint64(epoch)
    hashes = _splitmix(_splitmix(mixed) + np.arange(count, dtype=np.uint64))
    return np.argsort(hashes, kind="stable")


def epoch_numbers(
    count: int,
    seed: int | None,
    first: int,
    size: int,
    order: Callable[[int, int, int], np.ndarray] = epoch_order,
) -> np.ndarray:  # (size,) int64
    """Which of `count` items stand at the places first .. first + size - 1 of the endless seeded sequence.

    Place n holds item n % count of epoch n // count, in the order of that epoch; without a seed every epoch has the
    items' own order. `order` is epoch_order or the same function with a separate cache.
    """
    if seed is None:
        return np.arange(first, first + size) % count
    parts = [np.zeros(0, np.int64)]
    while size > 0:
        epoch, offset = divmod(first, count)
        parts.append(order(count, seed, epoch)[offset : offset + size])
        first, size = first + len(parts[-1]), size - len(parts[-1])
    return np.concatenate(parts)


def _splitmix(x: np.ndarray) -> np.ndarray:
    """One output of splitmix64 for each state (Steele, Lea, Flood 2014). Unsigned arithmetic wraps, as intended."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Rows:
    """The rows of a plan as an endless sequence, numbered from 0. To resume, a run needs only a row number.

    Number n is row n % count of epoch n // count, in the order of that epoch; without a seed, in the plan's order.
    """

    extras: tuple[str, ...] = ()  # what a batch holds after inputs and targets

    def __init__(self, token_set: TokenSet, plan: Plan, bos: int, seed: int | None, masked: bool):
        """With `masked`, only the tokens that the mask marks are targets; else every token and begin mark after the
        first one is a target."""
        if masked and token_set.parts[0].mask is None:
            raise UserError(
                f"{token_set.folder} holds documents, which have no mask; only conversations have one. "
                "Prepare conversations, or train without a mask."
            )
        self._set, self._plan, self._bos, self._seed, self._masked = (
            token_set,
            plan,
            bos,
            seed,
            masked,
        )
        self._first = plan.packing.first
        self._targets = plan.trained if masked else plan.used - 1
        self._part_starts = token_set.part_starts
        self._order = lru_cache(maxsize=2)(
            epoch_order.__wrapped__
        )  # a separate cache, as sets in a mixture take turns
        self.size = self.count = plan.rows
        self.conversations = int(
            self._first[-1]
        )  # in all rows together; of documents, their pieces
        self.row_tokens = plan.row_tokens
        self.key = plan.key

    def plan_rows(self, first: int, count: int) -> np.ndarray:
        """The rows of the plan that have the numbers first .. first + count - 1, int64 (count,)."""
        return epoch_numbers(self.count, self._seed, first, count, self._order)

    def targets_in(self, first: int, count: int) -> int:
        """How many targets the rows first .. first + count - 1 hold, without the ignored ones."""
        return int(self._targets[self.plan_rows(first, count)].sum(dtype=np.int64))

    def row(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of one row, int64 (T,) each."""
        inputs, targets, *_ = self.batch(self.plan_rows(number, 1))
        return inputs[0], targets[0]

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """(inputs, targets) and the extras of the given rows of the plan, int64 (B, T) each."""
        size = self.row_tokens
        cells = np.full((len(plan_rows), size), self._bos, np.int64)
        targets = np.full((len(plan_rows), size - 1), IGNORED, np.int64)
        for b, row in enumerate(plan_rows.tolist()):
            self._fill(row, cells[b], targets[b])
        # Copy, since the rows of `cells` are one cell longer than the inputs.
        return torch.from_numpy(cells[:, :-1].copy()), torch.from_numpy(targets)

    def _fill(self, row: int, cells: np.ndarray, targets: np.ndarray) -> None:
        """Write one row: each piece follows a begin mark, and begin marks pad the end. The begin marks are already in
        `cells`."""
        segments = slice(int(self._first[row]), int(self._first[row + 1]))
        packing = self._plan.packing
        at = 0
        for start, length in zip(
            packing.starts[segments].tolist(), packing.lengths[segments].tolist(), strict=True
        ):
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


class PackedRows(Rows):
    """Rows of conversations without begin marks, as published models know them: a conversation's own first token takes
    the place of the mark. A batch also says to which conversation of its row each token belongs."""

    extras = ("documents",)

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """(inputs, targets, documents) of the given rows of the plan, int64 (B, T) each. The padding at the end of a
        row is a document of its own."""
        inputs, targets = super().batch(plan_rows)
        documents = torch.zeros_like(inputs)
        first, lengths = self._first, self._plan.packing.lengths
        for b, row in enumerate(plan_rows.tolist()):
            ends = np.cumsum(lengths[int(first[row]) : int(first[row + 1])].astype(np.int64) + 1)
            documents[b] = torch.from_numpy(
                np.searchsorted(ends, np.arange(documents.size(1)), side="right")
            )
        return inputs, targets, documents

    def _fill(self, row: int, cells: np.ndarray, targets: np.ndarray) -> None:
        super()._fill(row, cells, targets)
        segments, packing = (
            slice(int(self._first[row]), int(self._first[row + 1])),
            self._plan.packing,
        )
        at, tokens = 0, self._set.parts[0].tokens
        for start, length in zip(
            packing.starts[segments].tolist(), packing.lengths[segments].tolist(), strict=True
        ):
            cells[at] = tokens[start - 1]
            at += length + 1


class PairRows(PackedRows):
    """Rows of whole pairs: a preferred answer, then the other one, each with its prompt, as documents 2n and 2n + 1 of
    the row. Targets are counted in pairs. `references` holds what a reference model says of the pairs of the plan, in
    their order, float32 (pairs, 2)."""

    extras = ("documents", "references")

    def __init__(self, token_set: TokenSet, plan: Plan, bos: int, seed: int | None, masked: bool):
        super().__init__(token_set, plan, bos, seed, masked)
        self._targets = np.diff(self._first) // 2
        self.folder, self.pair_starts = token_set.folder, self._first // 2
        self.conversations = int(self.pair_starts[-1])  # pairs
        self.references = np.zeros((int(self.pair_starts[-1]), 2), np.float32)

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """(inputs, targets, documents, references) of the given rows of the plan: three times int64 (B, T), and float32
        (B, P, 2), where P is the largest number of pairs in a row."""
        starts, counts = self.pair_starts[plan_rows], self._targets[plan_rows]
        references = torch.zeros(len(plan_rows), int(counts.max(initial=0)), 2)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            references[b, :count] = torch.from_numpy(self.references[start : start + count])
        return *super().batch(plan_rows), references


class MixedRows:
    """Several sets of rows as one endless sequence: of every sum(shares) rows, shares[k] come from set k.

    Row n depends only on n: of the n rows before it, n * share // sum come from the last set, and the sets before it
    divide the rest in the same way. So every stretch holds each set in its share, give or take one row per set, and
    the rows of each set come in their own order without a gap or a repetition. All sets must have rows of one length.
    """

    def __init__(
        self,
        sources: "Sequence[Source]",
        shares: Sequence[int],
        count: int | None = None,
        key: str = "",
    ):
        """`shares` are positive whole numbers. `count` is the length of an epoch; by default an epoch ends when the
        first of the sets has been read completely. `key` names the sequence; by default it lists sets and shares."""
        assert len(sources) == len(shares) and min(shares) > 0, "a share for each set"
        assert len({source.row_tokens for source in sources}) == 1, "rows of one length are mixed"
        self.sources, self.shares = tuple(sources), tuple(shares)
        self.row_tokens, self.extras = sources[0].row_tokens, sources[0].extras
        self.size = sum(source.size for source in sources)
        self._offsets = np.cumsum([0, *(source.size for source in sources)]).tolist()
        self.count = self._first_epoch() if count is None else count
        self.key = key or " ".join(
            [*(source.key for source in sources), ":".join(map(str, shares))]
        )

    def _before(self, numbers: np.ndarray) -> np.ndarray:  # (sets, numbers) int64
        """How many rows of each set come before each of the numbers."""
        left, counts = numbers.astype(np.int64), []
        for k in range(len(self.shares) - 1, -1, -1):
            counts.append(left * self.shares[k] // sum(self.shares[: k + 1]))
            left = left - counts[-1]
        return np.stack(counts[::-1])

    def seen(self, number: int) -> list[int]:
        """How many rows of each set come before row `number`."""
        return self._before(np.array([number]))[:, 0].tolist()

    def _first_epoch(self) -> int:
        low, high = (
            0,
            self.size + 1,
        )  # before `low` no set is in its second epoch, before `high` one is
        while high - low > 1:
            middle = (low + high) // 2
            over = any(
                n > source.count for n, source in zip(self.seen(middle), self.sources, strict=True)
            )
            low, high = (low, middle) if over else (middle, high)
        return low

    def plan_rows(self, first: int, count: int) -> np.ndarray:
        """Like Rows.plan_rows. The rows of all sets are numbered through: set 1 begins where set 0 ends."""
        before = self._before(np.arange(first, first + count + 1))
        rows = np.empty(count, np.int64)
        for source, offset, counts in zip(self.sources, self._offsets, before, strict=False):
            rows[np.diff(counts) == 1] = (
                source.plan_rows(int(counts[0]), int(counts[-1] - counts[0])) + offset
            )
        return rows

    def targets_in(self, first: int, count: int) -> int:
        """Like Rows.targets_in."""
        begin, end = self.seen(first), self.seen(first + count)
        return sum(s.targets_in(a, b - a) for s, a, b in zip(self.sources, begin, end, strict=True))

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Like Rows.batch."""
        shape = (len(plan_rows), self.row_tokens - 1)
        tensors = tuple(torch.empty(shape, dtype=torch.int64) for _ in range(2 + len(self.extras)))
        for source, offset in zip(self.sources, self._offsets, strict=False):
            which = (plan_rows >= offset) & (plan_rows < offset + source.size)
            chosen = torch.from_numpy(which)
            for whole, part in zip(tensors, source.batch(plan_rows[which] - offset), strict=True):
                whole[chosen] = part
        return tensors


Source = Rows | MixedRows


def mixture_table(data: Data, rows: Source, read: int) -> dict[str, Any]:
    """For the report, under "rows": how much of each corpus of a mixture the first `read` rows take. {} if `rows` are
    of a single corpus."""
    if not isinstance(rows, MixedRows):
        return {}
    table = []
    for corpus, share, source, seen in zip(
        data.corpora, data.shares, rows.sources, rows.seen(read), strict=True
    ):
        part = {
            "corpus": corpus.name,
            "share": f"{100 * share / sum(data.shares):.4g} %",
            "rows": source.size,
        }
        table.append({**part, "rows read": seen, "epochs": seen / source.count})
    return {"rows": table}


def blend(first: Source, second: Source, every: int) -> MixedRows:
    """One row in `every` comes from `second`, the others from `first`. An epoch is an epoch of `first`."""
    if every < 2:
        raise UserError(
            f"one row in N comes from the second set, so N must be 2 or more, got {every}", 2
        )
    key = f"{first.key} {second.key} {every}"  # checkpoints contain this key
    return MixedRows([first, second], [every - 1, 1], first.count * every // (every - 1), key)


@dataclass(frozen=True)
class Step:
    """The work of one rank for one optimizer update."""

    first_row: int
    num_targets: (
        int  # over all ranks and micro-batches; the sum of losses is divided by this number
    )
    micro_batches: list[
        tuple[torch.Tensor, ...]
    ]  # (inputs, targets) and the extras, int64 (b, T) each
    extras: tuple[str, ...] = ()  # what a micro-batch holds after inputs and targets


def steps(
    rows: Source, first_row: int, rows_per_step: int, device_batch_size: int, compute: Compute
) -> Iterator[Step]:
    """Endless steps of `rows_per_step` rows over all ranks, starting at row number `first_row`.

    Rank r takes the rows whose number modulo the number of ranks is r, so a step holds the same rows on any number of
    ranks. A thread makes the next step while the current one is computed; closing the iterator ends the thread.
    """
    if rows_per_step <= 0 or rows_per_step % compute.world_size:
        raise UserError(
            f"a step must have a multiple of {compute.world_size} rows (one for each rank), got {rows_per_step}; "
            "change --total_batch_size or the number of ranks"
        )
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        coming = thread.submit(
            make_step, rows, first_row, rows_per_step, device_batch_size, compute
        )
        while True:
            step = coming.result()
            first_row += rows_per_step
            coming = thread.submit(
                make_step, rows, first_row, rows_per_step, device_batch_size, compute
            )
            yield step


def make_step(
    rows: Source, first_row: int, rows_per_step: int, device_batch_size: int, compute: Compute
) -> Step:
    """The micro-batches of one step for this rank, of at most `device_batch_size` rows each, in pinned memory."""
    numbers = np.arange(first_row, first_row + rows_per_step)
    all_rows = rows.plan_rows(first_row, rows_per_step)
    own = all_rows[numbers % compute.world_size == compute.rank]
    micro_batches = []
    for i in range(0, len(own), device_batch_size):
        micro_batches.append(_pinned(rows.batch(own[i : i + device_batch_size]), compute))
    return Step(first_row, rows.targets_in(first_row, rows_per_step), micro_batches, rows.extras)


def _pinned(tensors: Iterable[torch.Tensor], compute: Compute) -> tuple[torch.Tensor, ...]:
    return tuple(device.pin(tensor, compute) for tensor in tensors)


def split_rows(
    data: Data, tokenizer: Tokenizer, split: Split, length: int, seed: int = SAMPLE_SEED
) -> Source:
    """The rows of a split, `length` tokens each, shuffled; a mixture is mixed by its shares.

    Rows are shuffled since a plan puts long documents first: the first rows in its own order would not represent the
    split.
    """
    sources = []
    for corpus in data.corpora:
        token_set = prepare_documents(corpus, tokenizer, split)
        packed = plan(token_set, length + 1, cut=True)
        sources.append(Rows(token_set, packed, tokenizer.bos, seed, masked=False))
    return sources[0] if len(sources) == 1 else MixedRows(sources, data.shares)


def conversation_rows(
    name: str,
    conversations: Callable[[], Iterable[Conversation]],
    key: str,
    tokenizer: Tokenizer,
    length: int,
    seed: int | None,
    masked: bool,
    too_long: TooLong | None = None,
    pairs: bool = False,
) -> Rows:
    """Rows of `length` tokens made of whole conversations; Rows describes `seed` and `masked`. With `too_long`, which
    plan() describes, they are PackedRows, and with `pairs` PairRows.

    The tokens are kept in `chat_data/<name>-<hash>`. `key` names the content: `conversations` is called only if there
    are no tokens with this key.
    """
    token_set = prepare_conversations(
        folder_of(name, tokenizer, key), Lazy(conversations), tokenizer, key
    )
    kind = PairRows if pairs else PackedRows if too_long else Rows
    return kind(
        token_set, plan(token_set, length + 1, False, too_long, pairs), tokenizer.bos, seed, masked
    )


def chat_rows(
    stage: str,
    conversations: ConversationSplits,
    tokenizer: Tokenizer,
    length: int,
    seed: int,
    masked: bool,
    too_long: TooLong | None = None,
    pairs: bool = False,
) -> tuple[Rows, Rows]:
    """The rows of a stage's conversations to train on and to validate on; see conversation_rows()."""
    parts = ((stage, conversations.train), (f"{stage}-val", conversations.val))
    train, val = (
        conversation_rows(
            name, part, conversations.key, tokenizer, length, seed, masked, too_long, pairs
        )
        for name, part in parts
    )
    return train, val


def one_pass(rows: Source, tokens: int, device_batch_size: int, compute: Compute) -> Iterator[Step]:
    """The first `tokens` tokens of the rows, at most one epoch, as steps with one micro-batch per rank.

    The rows are the same on any number of ranks. A rank without a row in the last step gets a row without targets,
    since a sharded model needs every rank.
    """
    wanted = max(min(tokens // (rows.row_tokens - 1), rows.count), 1)
    size = device_batch_size * compute.world_size
    for first in range(0, wanted, size):
        step = make_step(rows, first, min(size, wanted - first), device_batch_size, compute)
        if not step.micro_batches:
            inputs, targets, *more = rows.batch(rows.plan_rows(first, 1))
            step.micro_batches.append(
                _pinned((inputs, torch.full_like(targets, IGNORED), *more), compute)
            )
        yield step

"""Interleaves several sets of rows into one endless sequence: a mixture of corpora, for example."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from nanochat.common import UserError, tr


class RowSource(Protocol):
    """A set of rows in a known order: dataloader.Rows, or a mixture of such sets."""

    extras: tuple[str, ...]  # names of the tensors that follow inputs and targets in a batch
    row_tokens: int  # T + 1
    count: int  # rows in an epoch
    size: int  # number of distinct rows
    key: str  # the same for the same rows in the same order

    def plan_rows(self, first: int, count: int) -> np.ndarray:  # (count,) int64
        """Return the indices, in the plan, of rows first .. first + count - 1 of the sequence."""
        ...

    def targets_in(self, first: int, count: int) -> int:
        """Return the number of targets in rows first .. first + count - 1, without ignored ones."""
        ...

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Return (inputs, targets, *extras) of rows of the plan, int64 (B, T) each."""
        ...


class MixedRows:
    """Several sets of rows interleaved into one endless sequence.

    Of every sum(shares) rows, shares[k] come from set k. Row n depends only on n: of the n rows
    before it, n * share // sum come from the last set, and the sets before it divide the remaining
    rows in the same way. So in every stretch of rows each set has about its share, and the rows of
    each set come in their own order, none skipped or repeated. All sets must have rows of the same
    length.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        shares: Sequence[int],
        count: int | None = None,
        key: str = "",
    ):
        """Interleave `sources` in proportion to `shares`, which are positive integers.

        `count` is the length of an epoch in rows; by default an epoch ends before any set begins
        its second epoch. `key` names the sequence; by default it lists the keys of the sets and the
        shares.
        """
        assert len(sources) == len(shares) and min(shares) > 0, "a share for each set"
        assert len({source.row_tokens for source in sources}) == 1, "rows of one length are mixed"
        self.sources = tuple(sources)
        self.shares = tuple(shares)
        self.row_tokens = sources[0].row_tokens
        self.extras = sources[0].extras
        sizes = [source.size for source in sources]
        self.size = sum(sizes)
        self._offsets = np.cumsum([0, *sizes]).tolist()
        self.count = self._first_epoch() if count is None else count
        self.key = key or self._default_key()

    def _default_key(self) -> str:
        keys = [source.key for source in self.sources]
        shares = ":".join(map(str, self.shares))
        return " ".join([*keys, shares])

    def _rows_before_each(self, numbers: np.ndarray) -> np.ndarray:  # (sets, numbers) int64
        """Return how many rows of each set come before each of the rows in `numbers`."""
        remaining = numbers.astype(np.int64)
        counts = []
        for k in range(len(self.shares) - 1, -1, -1):
            count = remaining * self.shares[k] // sum(self.shares[: k + 1])
            counts.append(count)
            remaining = remaining - count
        return np.stack(counts[::-1])

    def rows_before(self, number: int) -> list[int]:
        """Return how many rows of each set come before row `number`."""
        return self._rows_before_each(np.array([number]))[:, 0].tolist()

    def _first_epoch(self) -> int:
        """Return how many rows can be read before any set begins its second epoch."""
        complete = 0  # this many rows all belong to first epochs
        too_many = self.size + 1
        while too_many - complete > 1:
            middle = (complete + too_many) // 2
            rows_read = zip(self.rows_before(middle), self.sources, strict=True)
            if any(count > source.count for count, source in rows_read):
                too_many = middle
            else:
                complete = middle
        return complete

    def plan_rows(self, first: int, count: int) -> np.ndarray:  # (count,) int64
        """Return the indices, in the plans, of rows first .. first + count - 1 of the sequence.

        The indices of set 1 continue after the last row of set 0, and so on; see Rows.plan_rows().
        """
        rows_before = self._rows_before_each(np.arange(first, first + count + 1))
        plan_rows = np.empty(count, np.int64)
        for source, offset, before in zip(self.sources, self._offsets, rows_before, strict=False):
            from_source = np.diff(before) == 1
            begin = int(before[0])
            end = int(before[-1])
            plan_rows[from_source] = source.plan_rows(begin, end - begin) + offset
        return plan_rows

    def targets_in(self, first: int, count: int) -> int:
        """Return the number of targets in rows first .. first + count - 1, without ignored ones."""
        begins = self.rows_before(first)
        ends = self.rows_before(first + count)
        targets = 0
        for source, begin, end in zip(self.sources, begins, ends, strict=True):
            targets += source.targets_in(begin, end - begin)
        return targets

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Return (inputs, targets, *extras) of rows of the plans, int64 (B, T) each."""
        shape = (len(plan_rows), self.row_tokens - 1)
        count = 2 + len(self.sources[0].extras)  # inputs, targets and the extras
        tensors = tuple(torch.empty(shape, dtype=torch.int64) for _ in range(count))
        for source, offset in zip(self.sources, self._offsets, strict=False):
            from_source = (plan_rows >= offset) & (plan_rows < offset + source.size)
            source_tensors = source.batch(plan_rows[from_source] - offset)
            positions = torch.from_numpy(from_source)
            for tensor, source_tensor in zip(tensors, source_tensors, strict=True):
                tensor[positions] = source_tensor
        return tensors


def rows_with(count: int, every: int) -> int:
    """Return the rows of an epoch of `count` rows when one row in `every` comes from a second set.

    If `every` is 0, there is no second set.
    """
    return count * every // (every - 1) if every else count


def blend(
    first: RowSource,
    second: RowSource,
    every: int,
) -> MixedRows:
    """Return a mixture in which one row in `every` comes from `second`, the others from `first`.

    An epoch of the mixture is an epoch of `first`. Raises UserError (exit code 2) if `every` is
    below 2.
    """
    if every < 2:
        raise UserError(
            tr(
                "one row in N comes from the second set, so N must be 2 or more, got {every}",
                every=every,
            ),
            2,
        )
    key = f"{first.key} {second.key} {every}"  # checkpoints contain this key
    return MixedRows([first, second], [every - 1, 1], rows_with(first.count, every), key)

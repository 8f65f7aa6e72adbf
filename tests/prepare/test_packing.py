"""Packing loses and repeats nothing, fills rows, keeps long pieces together and depends only on the lengths."""

from itertools import pairwise

import numpy as np
import pytest

from nanochat.prepare.packing import Packing, count_marked, cut_at, pack


def starts_of(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def random_lengths(seed: int, count: int, mean: float) -> np.ndarray:
    return np.maximum(1, np.random.default_rng(seed).exponential(mean, count)).astype(np.int64)


def rows_of(packing: Packing) -> list[list[tuple[int, int]]]:
    """Rows as lists of (start, length)."""
    pairs = list(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    first = packing.first.tolist()
    return [pairs[a:b] for a, b in pairwise(first)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("mean", "row_tokens"), [(50, 257), (600, 257), (5, 17), (3, 2), (1, 5)])
@pytest.mark.parametrize("window", [1, 10, 16_384])
def test_with_cuts_every_token_stands_in_exactly_one_place_and_rows_are_full(seed, mean, row_tokens, window):
    lengths = random_lengths(seed, 300, mean)
    packing = pack(starts_of(lengths), lengths, row_tokens, cut=True, window=window)
    seen = np.zeros(lengths.sum(), np.int64)
    for start, length in zip(packing.starts, packing.lengths, strict=True):
        seen[start : start + length] += 1
    assert (seen == 1).all()
    document = np.repeat(np.arange(300), lengths)
    ends = packing.starts + np.maximum(packing.lengths, 1) - 1
    assert (
        document[np.minimum(packing.starts, len(document) - 1)] == document[np.minimum(ends, len(document) - 1)]
    ).all()
    used = [sum(length + 1 for _, length in row) for row in rows_of(packing)]
    assert set(used[:-1]) <= {row_tokens} and 1 <= used[-1] <= row_tokens


def test_a_table_by_hand():
    # Rows of 10 cells. 21 gives two whole rows of 9 and leaves 3; then 5+1 and 3+1 fill a row; then 4+1, 4+1;
    # 2+1 is the last row.
    lengths = np.array([5, 21, 4, 4, 2])
    rows = rows_of(pack(starts_of(lengths), lengths, 10, cut=True))
    assert rows == [[(5, 9)], [(14, 9)], [(0, 5), (23, 3)], [(26, 4), (30, 4)], [(34, 2)]]


def test_of_equal_lengths_the_oldest_comes_first():
    rows = rows_of(pack(np.array([0, 4, 8, 12]), np.array([4, 4, 4, 4]), 10, cut=True))
    assert rows == [[(0, 4), (4, 4)], [(8, 4), (12, 4)]]


def test_a_begin_mark_alone_fills_a_last_cell():
    rows = rows_of(pack(np.array([0, 3]), np.array([3, 9]), 5, cut=True))
    assert rows == [[(3, 4)], [(7, 4)], [(0, 3), (0, 0)], [(11, 1)]]


def test_a_long_document_keeps_whole_rows():
    lengths = np.array([10, 20, 1_000, 30])
    rows = rows_of(pack(starts_of(lengths), lengths, 101, cut=True))
    assert rows[:9] == [[(30 + 100 * i, 100)] for i in range(9)]


def test_without_cuts_every_piece_stays_whole():
    lengths = random_lengths(2, 500, 40).clip(max=128)
    packing = pack(starts_of(lengths), lengths, 129, cut=False)
    pieces = sorted(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    assert pieces == list(zip(starts_of(lengths).tolist(), lengths.tolist(), strict=True))
    used = np.array([sum(length + 1 for _, length in row) for row in rows_of(packing)])
    assert used.max() <= 129 and used[:-5].mean() > 0.98 * 129


@pytest.mark.parametrize(
    ("borders", "end", "room", "expected"),
    [
        ([0], 5, 5, [(0, 5)]),
        ([0], 9, 5, [(0, 5)]),  # one exchange that is too long keeps its head
        ([0, 3, 6], 9, 6, [(0, 6), (6, 3)]),
        ([0, 4, 6, 20], 22, 6, [(0, 6), (6, 6), (20, 2)]),
        ([0, 1, 2, 3], 4, 1, [(0, 1), (1, 1), (2, 1), (3, 1)]),
    ],
)
def test_conversations_are_cut_at_borders(borders, end, room, expected):
    assert cut_at(borders, end, room) == expected


def test_marked_tokens_are_counted_per_piece():
    mask = np.array([1, 0, 1, 1, 0, 1], np.uint8)
    counts = count_marked(mask, np.array([0, 2, 5, 0]), np.array([2, 3, 1, 0], np.int32))
    assert counts.tolist() == [1, 2, 1, 0]

"""Pack pieces of documents into rows by best fit, which looks only at their lengths.

Best-fit packing of sequences: Ding et al. 2024, arXiv:2404.10830.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

WINDOW = 16_384  # pieces to choose from at a time; with more of them, fewer pieces are cut
SMALL = 64  # a gap smaller than a row divided by this is left only if nothing else is possible


@dataclass(frozen=True)
class Packing:
    """Rows of segments.

    Segment s is one begin mark, then the `lengths[s]` tokens that begin at index `starts[s]`.
    """

    first: np.ndarray  # (rows + 1,) int64: row r holds segments first[r] .. first[r + 1] - 1
    starts: np.ndarray  # (segments,) int64
    lengths: np.ndarray  # (segments,) int32, 0 for a begin mark alone


class _Pool:
    """A pool of up to `window` pieces, sorted by length and refilled as pieces are taken."""

    def __init__(self, pieces: Iterator[tuple[int, int]], window: int):
        self._pieces = pieces
        self._window = window
        self.lengths: list[int] = []  # ascending; among equal lengths the oldest comes last
        self._starts: list[int] = []
        self._refill()

    def _refill(self) -> None:
        while len(self.lengths) < self._window:
            piece = next(self._pieces, None)
            if piece is None:
                return
            self.put(*piece)

    def put(self, start: int, length: int) -> None:
        """Add a piece."""
        i = bisect_left(self.lengths, length)
        self.lengths.insert(i, length)
        self._starts.insert(i, start)

    def longest_up_to(self, length: int) -> int:
        """Return the index of the longest piece of at most `length` tokens; -1 if none fits."""
        return bisect_right(self.lengths, length) - 1

    def take(self, i: int) -> tuple[int, int]:
        """Remove piece `i`, refill the pool, and return the (start, length) of the piece."""
        piece = (self._starts.pop(i), self.lengths.pop(i))
        self._refill()
        return piece

    def take_head(self, length: int) -> int:
        """Remove the first `length` tokens of the longest piece, and return where they start.

        The rest of the piece goes back into the pool.
        """
        start = self._starts.pop()
        tail = self.lengths.pop() - length
        self.put(start + length, tail)
        return start


def pack(
    starts: np.ndarray,  # (pieces,) int64
    lengths: np.ndarray,  # (pieces,) int64, positive
    row_tokens: int,
    cut: bool,
    window: int = WINDOW,
) -> Packing:
    """Return a packing of pieces into rows of `row_tokens` cells.

    Each piece follows a begin mark of one cell. Among the next `window` pieces, a row takes the
    longest that fits (the oldest if several are equally long), and so on until none fits. With
    `cut`, the head of the longest piece then fills the rest of the row, and the tail is placed
    later; a piece that is longer than a row fills whole rows first, and a shorter piece may be
    chosen to avoid a tiny gap. So every row except the last is full, and each token is placed
    exactly once. Without `cut` a row may stay short, and no piece may be longer than
    `row_tokens - 1`.
    """
    assert row_tokens >= 2 and (cut or lengths.max(initial=0) < row_tokens)
    pool = _Pool(_pieces(starts, lengths), window)
    row_starts = array("q", [0])
    segment_starts = array("q")
    segment_lengths = array("i")
    while pool.lengths:
        room = row_tokens  # cells of this row that are still free
        while room and pool.lengths:
            i = _choose(pool, room, row_tokens) if cut else pool.longest_up_to(room - 1)
            if i >= 0:
                start, length = pool.take(i)
            elif not cut:
                break
            elif room == 1:  # a begin mark alone, which marks the end of the piece before it
                start, length = 0, 0
            else:
                length = room - 1
                start = pool.take_head(length)
            segment_starts.append(start)
            segment_lengths.append(length)
            room -= length + 1
        row_starts.append(len(segment_starts))
    return Packing(
        np.array(row_starts, np.int64),
        np.array(segment_starts, np.int64),
        np.array(segment_lengths, np.int32),
    )


def _choose(
    pool: _Pool,
    room: int,
    row_tokens: int,
) -> int:
    """Return the index in the pool of the next piece for a row with `room` free cells.

    Returns -1 if the head of the longest piece should fill the rest of the row.
    """
    i = pool.longest_up_to(room - 1)
    if pool.lengths[-1] < room:
        return i  # every piece fits
    if room == row_tokens:
        return -1  # a long document fills whole rows first, which keeps its context together
    smallest_gap = row_tokens // SMALL
    if i >= 0 and pool.lengths[i] != room - 1 and room > smallest_gap:
        # This piece may leave a gap that only a scrap of another piece can fill: choose a piece
        # that leaves a larger gap.
        return pool.longest_up_to(room - 1 - smallest_gap)
    return i


def _pieces(
    starts: np.ndarray,
    lengths: np.ndarray,
    size: int = 65_536,
) -> Iterator[tuple[int, int]]:
    """Yield the (start, length) of each piece as Python integers, converted in batches."""
    for i in range(0, len(starts), size):
        some_starts = starts[i : i + size].tolist()
        some_lengths = lengths[i : i + size].tolist()
        yield from zip(some_starts, some_lengths, strict=True)


def cut_at(
    borders: list[int],
    end: int,
    room: int,
) -> list[tuple[int, int]]:
    """Cut a conversation of `end` tokens, and return the (start, length) of each piece.

    A piece runs from one of `borders` (ascending, the first is 0) to the last border, or the end,
    within `room` tokens. If the next border is further away, the piece has only `room` tokens, and
    the tokens between its end and that border are dropped.
    """
    pieces = []
    edges = [*borders, end]
    i = 0
    while i < len(edges) - 1:
        last = bisect_right(edges, edges[i] + room) - 1
        if last > i:
            pieces.append((edges[i], edges[last] - edges[i]))
            i = last
        else:
            pieces.append((edges[i], room))
            i += 1
    return pieces


def count_marked(
    mask: np.ndarray,  # (tokens,) uint8
    starts: np.ndarray,  # (pieces,) int64
    lengths: np.ndarray,  # (pieces,) int32
) -> np.ndarray:
    """Return the number of tokens with a nonzero mask in each piece, int64 (pieces,)."""
    counts = np.empty(len(starts), np.int64)
    for number, (start, length) in enumerate(_pieces(starts, lengths)):
        counts[number] = np.count_nonzero(mask[start : start + length])
    return counts

"""Packs pieces of documents into rows by best fit; the result depends only on the lengths."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

WINDOW = 16_384  # pieces to choose from at a time; with more of them, fewer pieces are cut
SMALL = 64  # a gap smaller than a row divided by this is left only if nothing else is possible


@dataclass(frozen=True)
class Packing:
    """Rows of segments. Segment s is one begin mark, then `lengths[s]` tokens beginning at token `starts[s]`."""

    first: np.ndarray  # (rows + 1,) int64: row r holds segments first[r] .. first[r + 1] - 1
    starts: np.ndarray  # (segments,) int64
    lengths: np.ndarray  # (segments,) int32, 0 for a begin mark alone


def pack(
    starts: np.ndarray,  # (pieces,) int64
    lengths: np.ndarray,  # (pieces,) int64, positive
    row_tokens: int,
    cut: bool,
    window: int = WINDOW,
) -> Packing:
    """Put pieces into rows of `row_tokens` cells, each piece after a begin mark of one cell.

    A row takes the longest piece that fits, the oldest of several, until no piece fits. With `cut`, the head of the
    longest piece then fills the rest of the row, and the tail is placed later like any other piece; a piece that is
    longer than a row fills whole rows first. So every row except the last is full, and each token is placed exactly
    once. Without `cut` a row may stay short, and no piece may be longer than `row_tokens - 1`.
    """
    assert row_tokens >= 2 and (cut or lengths.max(initial=0) < row_tokens)
    pieces, small = _pieces(starts, lengths), row_tokens // SMALL
    pool_lengths: list[int] = []  # ascending; among equal lengths the oldest comes last
    pool_starts: list[int] = []
    first, out_starts, out_lengths = array("q", [0]), array("q"), array("i")

    def put_back(start: int, length: int) -> None:
        i = bisect_left(pool_lengths, length)
        pool_lengths.insert(i, length)
        pool_starts.insert(i, start)

    def refill() -> None:
        while len(pool_lengths) < window and (piece := next(pieces, None)):
            put_back(*piece)

    refill()
    while pool_lengths:
        room = row_tokens
        while room and pool_lengths:
            i = bisect_right(pool_lengths, room - 1) - 1
            if cut and pool_lengths[-1] >= room:
                if room == row_tokens:
                    i = (
                        -1
                    )  # a long document fills whole rows first, which keeps its context together
                elif i >= 0 and pool_lengths[i] != room - 1 and room > small:
                    # This piece would leave a gap that only a scrap of another piece can fill: leave a larger gap.
                    i = bisect_right(pool_lengths, room - 1 - small) - 1
            if i >= 0:
                length = pool_lengths.pop(i)
                out_starts.append(pool_starts.pop(i))
                out_lengths.append(length)
                room -= length + 1
                refill()
            elif not cut:
                break
            elif room == 1:  # a begin mark alone, which says that the piece before it ends here
                out_starts.append(0)
                out_lengths.append(0)
                room = 0
            else:
                length, start = pool_lengths.pop(), pool_starts.pop()
                out_starts.append(start)
                out_lengths.append(room - 1)
                put_back(start + room - 1, length - room + 1)
                room = 0
        first.append(len(out_starts))
    return Packing(
        np.array(first, np.int64), np.array(out_starts, np.int64), np.array(out_lengths, np.int32)
    )


def _pieces(
    starts: np.ndarray, lengths: np.ndarray, size: int = 65_536
) -> Iterator[tuple[int, int]]:
    """(start, length) as Python numbers, converted in batches so that memory does not grow with the corpus."""
    for i in range(0, len(starts), size):
        yield from zip(starts[i : i + size].tolist(), lengths[i : i + size].tolist(), strict=True)


def cut_at(borders: list[int], end: int, room: int) -> list[tuple[int, int]]:
    """Cut a conversation of `end` tokens into (start, length) pieces of at most `room`.

    A piece runs from one of `borders` (ascending, the first is 0) to the last border within `room` tokens. If the next
    border is further away, the piece keeps the first `room` tokens, and the tokens up to that border are dropped.
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
    """How many tokens of each piece have a nonzero mask, int64 (pieces,)."""
    counts = (
        np.count_nonzero(mask[start : start + length]) for start, length in _pieces(starts, lengths)
    )
    return np.fromiter(counts, np.int64, len(starts))

"""Finds near-duplicates: signatures of documents by MinHash over windows of characters, and who resembles whom.

A signature keeps the smallest hash in each of 128 bins (one permutation hashing, Li, Owen and Zhang 2012); an empty bin
borrows from the next full one (Shrivastava and Li 2014). The share of equal bins of two documents estimates the Jaccard
similarity of their windows. Documents with an equal band of eight bins are compared. Nothing here is random.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

WINDOW = 16  # bytes: about five Han characters, or three English words
BINS = 128
BANDS = 16  # of BINS // BANDS bins each: of pairs with similarity 0.8, about 95 % share a band
SIMILAR = 0.75  # the share of equal bins from which on documents count as near-duplicates
ENOUGH = (
    16 * BINS
)  # smallest hashes to look at; a longer document leaves out the windows that cannot be among them

NONE = (1 << 32) - 1  # where a bin has no hash


@cache
def _factors() -> np.ndarray:
    """Odd numbers that hashes multiply with, uint64: two for a window, one to mix, and one for each bin of a band."""
    return np.random.default_rng(0).integers(1, 1 << 63, 3 + BINS // BANDS, np.uint64) * np.uint64(
        2
    ) + np.uint64(1)


@cache
def _translation() -> tuple[bytes, bytes]:
    """The lower case of every byte, and the bytes to leave out."""
    return bytes(range(256)).lower(), bytes(byte for byte in range(128) if not chr(byte).isalnum())


@dataclass(frozen=True)
class Signatures:
    """What is kept of documents to compare them."""

    bands: (
        np.ndarray
    )  # (documents, BANDS) uint64: documents with an equal band may be near-duplicates
    bins: np.ndarray  # (documents, BINS) uint8: a byte of each bin's smallest hash

    @staticmethod
    def joined(parts: Sequence["Signatures"]) -> "Signatures":
        """The signatures of several lists of documents, one after the other."""
        return Signatures(
            np.concatenate([p.bands for p in parts]), np.concatenate([p.bins for p in parts])
        )


def signatures(texts: Sequence[str]) -> Signatures:
    """The signatures of documents. Case, spaces and ASCII punctuation do not count."""
    smallest = (
        np.stack([_smallest(text) for text in texts]) if texts else np.zeros((0, BINS), np.uint64)
    )
    full = np.where(smallest == NONE, 2 * BINS, np.arange(BINS))
    ahead = np.minimum.accumulate(np.concatenate([full, full + BINS], axis=1)[:, ::-1], axis=1)[
        :, ::-1
    ][:, :BINS]
    filled = np.take_along_axis(smallest, ahead % BINS, axis=1)
    banded = filled.reshape(len(texts), BANDS, BINS // BANDS)
    bands = _mixed((banded * _factors()[3:]).sum(axis=2, dtype=np.uint64))
    return Signatures(bands, filled.astype(np.uint8))


def _mixed(values: np.ndarray) -> np.ndarray:
    return (values ^ (values >> np.uint64(32))) * _factors()[2]


def _smallest(text: str) -> np.ndarray:
    """The smallest 32-bit hash of a text's windows in each bin, NONE where a bin has none; (BINS,) uint64."""
    kept = text.encode().translate(*_translation()).ljust(WINDOW, b"\0")
    count = len(kept) - WINDOW + 1
    eight = np.ndarray(
        (count + 8,), "<u8", kept, strides=(1,)
    )  # the eight bytes from each place on
    hashes = _mixed(eight[:count] * _factors()[0] + eight[8:] * _factors()[1])
    begins = (
        np.frombuffer(kept, np.uint8, count) & 0xC0
    ) != 0x80  # a window begins with a character
    if count > 2 * ENOUGH:
        found = _by_bin(hashes[begins & (hashes < np.uint64((ENOUGH << 64) // count))])
        if (
            np.count_nonzero(found != NONE) > BINS // 2
        ):  # a text that repeats itself has fewer different windows
            return found
    return _by_bin(hashes[begins])


def _by_bin(hashes: np.ndarray) -> np.ndarray:
    """The smallest upper half of the hashes in each bin."""
    found = np.full(BINS, NONE, np.uint64)
    np.minimum.at(
        found,
        (hashes >> np.uint64(25) & np.uint64(BINS - 1)).astype(np.intp),
        hashes >> np.uint64(32),
    )
    return found


def near_duplicates(found: Signatures) -> np.ndarray:
    """Which documents resemble an earlier one, bool (documents,): the first of a group is never among them."""
    again = np.zeros(len(found.bands), bool)
    if not len(again):
        return again
    for band in found.bands.T:
        order = np.argsort(band, kind="stable")
        first = np.concatenate([[True], band[order[1:]] != band[order[:-1]]])
        leader = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
        later, leader = order[~first], leader[~first]
        for start in range(0, len(later), 1 << 14):
            some, theirs = later[start : start + (1 << 14)], leader[start : start + (1 << 14)]
            alike = (found.bins[some] == found.bins[theirs]).mean(axis=1) >= SIMILAR
            again[some[alike]] = True
    return again

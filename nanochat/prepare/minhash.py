"""Find documents that nearly equal an earlier one, by comparing their MinHash signatures.

A signature holds the smallest hash in each of 128 bins over all 16-byte windows of a text that
begin at a character (one permutation hashing, Li, Owen and Zhang 2012). An empty bin borrows from
the next full one (Shrivastava and Li 2014). The share of bins in which two documents are equal
estimates the Jaccard similarity of their sets of windows. Among documents with an equal band of
eight bins, each is compared with the first. The factors of the hashes are constant, so the result
is always the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

WINDOW = 16  # bytes: about five Han characters, or three English words
BINS = 128
BANDS = 16  # of BINS // BANDS bins each: of pairs with similarity 0.8, about 95 % share a band
SIMILAR = 0.75  # documents with at least this share of equal bins count as near-duplicates
# For a long document, only about this many of its smallest hashes are sorted into bins, which
# usually fills most bins.
ENOUGH = 16 * BINS
COMPARED = 1 << 14  # documents to compare at a time

EMPTY = (1 << 32) - 1  # the value of a bin without a hash


@cache
def _factors() -> np.ndarray:
    """Return the odd multipliers of the hash functions, uint64 (3 + BINS // BANDS,).

    The first two are for the halves of a window, the third mixes bits, and each of the others is
    for one bin of a band.
    """
    count = 3 + BINS // BANDS
    numbers = np.random.default_rng(0).integers(1, 1 << 63, count, np.uint64)
    return numbers * np.uint64(2) + np.uint64(1)


@cache
def _translation() -> tuple[bytes, bytes]:
    """Return the arguments of bytes.translate: a table that lowercases, and the bytes to delete.

    ASCII characters other than letters and digits are deleted.
    """
    lower_case = bytes(range(256)).lower()
    left_out = bytes(byte for byte in range(128) if not chr(byte).isalnum())
    return lower_case, left_out


@dataclass(frozen=True)
class Signatures:
    """The MinHash signatures of documents."""

    # (documents, BANDS) uint64: documents with an equal band may be near-duplicates
    bands: np.ndarray
    bins: np.ndarray  # (documents, BINS) uint8: a byte of each bin's smallest hash

    @staticmethod
    def joined(batches: Sequence["Signatures"]) -> "Signatures":
        """Return one object that holds the signatures of all batches, in the same order."""
        bands = np.concatenate([batch.bands for batch in batches])
        bins = np.concatenate([batch.bins for batch in batches])
        return Signatures(bands, bins)


def signatures(texts: Sequence[str]) -> Signatures:
    """Return the signatures of documents, ignoring ASCII case, spaces and punctuation."""
    smallest = np.zeros((len(texts), BINS), np.uint64)
    for number, text in enumerate(texts):
        smallest[number] = _smallest_hashes(text)
    full_bins = _borrow(smallest)
    # The hash of a band is the mixed sum of its bins, each times a factor, modulo 2**64.
    bands = full_bins.reshape(len(texts), BANDS, BINS // BANDS)
    bin_factors = _factors()[3:]
    weighted_bins = bands * bin_factors
    band_hashes = weighted_bins.sum(axis=2, dtype=np.uint64)  # (documents, BANDS)
    return Signatures(_mixed(band_hashes), full_bins.astype(np.uint8))


def _borrow(smallest: np.ndarray) -> np.ndarray:  # (documents, BINS) uint64, both
    """Return the hashes with each empty bin filled from the next full bin.

    The first bin follows the last one.
    """
    is_empty = smallest == EMPTY
    # An empty bin gets a number above all others, so that the minimum below never picks it.
    bin_numbers = np.where(is_empty, 2 * BINS, np.arange(BINS))
    twice_around = np.concatenate([bin_numbers, bin_numbers + BINS], axis=1)
    # Going backwards from the end, the smallest bin number so far belongs to the next full bin.
    backwards = np.flip(twice_around, axis=1)
    smallest_so_far = np.minimum.accumulate(backwards, axis=1)
    next_full = np.flip(smallest_so_far, axis=1)
    lenders = next_full[:, :BINS] % BINS
    return np.take_along_axis(smallest, lenders, axis=1)


def _mixed(values: np.ndarray) -> np.ndarray:  # any shape, uint64, both
    """Return the values with the upper half of each mixed into the lower half, and multiplied."""
    mixing_factor = _factors()[2]
    upper_halves = values >> np.uint64(32)
    return (values ^ upper_halves) * mixing_factor


def _smallest_hashes(text: str) -> np.ndarray:
    """Return the smallest 32-bit hash in each bin over the windows of a text, uint64 (BINS,).

    A bin without a hash holds EMPTY. For a long text, only small hashes are sorted into bins if
    they fill more than half of the bins.
    """
    lower_case, left_out = _translation()
    letters = text.encode().translate(lower_case, left_out)
    letters = letters.ljust(WINDOW, b"\0")
    count = len(letters) - WINDOW + 1
    # The eight bytes that begin at each position; two of them make a window of 16 bytes.
    eight_bytes = np.ndarray((count + 8,), "<u8", letters, strides=(1,))
    # The hash of a window is its two halves, each times a factor, added and mixed modulo 2**64.
    first_factor, second_factor = _factors()[:2]
    first_half = eight_bytes[:count] * first_factor
    second_half = eight_bytes[8:] * second_factor
    hashes = _mixed(first_half + second_half)
    # Keep only windows that begin at the first byte of a UTF-8 character.
    first_bytes = np.frombuffer(letters, np.uint8, count)
    at_character = (first_bytes & 0xC0) != 0x80
    if count > 2 * ENOUGH:
        # Hashes are spread evenly below 2**64, so that about ENOUGH of them are below the limit.
        limit = np.uint64((ENOUGH << 64) // count)
        is_small = hashes < limit
        smallest = _by_bin(hashes[at_character & is_small])
        # A text that repeats itself has fewer different windows, so too many bins may be empty.
        full_bins = np.count_nonzero(smallest != EMPTY)
        if full_bins > BINS // 2:
            return smallest
    return _by_bin(hashes[at_character])


def _by_bin(hashes: np.ndarray) -> np.ndarray:
    """Sort 64-bit hashes into bins, and return the smallest upper half in each, uint64 (BINS,).

    A bin without a hash holds EMPTY.
    """
    smallest = np.full(BINS, EMPTY, np.uint64)
    upper_halves = hashes >> np.uint64(32)
    # The seven bits below the upper half choose one of the 128 bins.
    above_bins = hashes >> np.uint64(25)
    bins = above_bins & np.uint64(BINS - 1)
    np.minimum.at(smallest, bins.astype(np.intp), upper_halves)
    return smallest


def near_duplicates(documents: Signatures) -> np.ndarray:
    """Return a mask of the documents that nearly equal an earlier one, bool (documents,).

    For each of its bands, a document is compared only with the first document that has an equal
    band, so a few near-duplicates are not found.
    """
    is_duplicate = np.zeros(len(documents.bands), bool)
    for band in documents.bands.T:
        later, leaders = _with_leaders(band)
        for start in range(0, len(later), COMPARED):
            batch = later[start : start + COMPARED]
            batch_leaders = leaders[start : start + COMPARED]
            equal_bins = documents.bins[batch] == documents.bins[batch_leaders]
            is_similar = equal_bins.mean(axis=1) >= SIMILAR
            is_duplicate[batch[is_similar]] = True
    return is_duplicate


def _with_leaders(band: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents whose band an earlier one has, and for each the first such document.

    `band` holds one band of every document.
    """
    # Sort by band, so that documents with an equal band are adjacent. The first document of each
    # such group is its leader.
    order = np.argsort(band, kind="stable")
    sorted_band = band[order]
    is_leader = np.ones(len(order), bool)
    is_leader[1:] = sorted_band[1:] != sorted_band[:-1]
    leader_positions = np.where(is_leader, np.arange(len(order)), 0)
    last_leaders = np.maximum.accumulate(leader_positions)
    leaders = order[last_leaders]
    is_later = ~is_leader
    return order[is_later], leaders[is_later]

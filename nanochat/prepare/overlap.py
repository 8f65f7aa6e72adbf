"""Find documents that contain a passage of an evaluation.

A passage is 13 words in a row, or 50 characters of mostly Chinese text. The evaluations are copies
of data sets in a folder like the one that NANOCHAT_TASK_DIR names: a subfolder for each set, with
parquet, JSON, JSONL, CSV or TSV files. If the paths of some files of a set name a test or
validation split, only these files of the set are read. Texts that are shorter than a passage are
never found.
"""

import csv
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import UserError, parse_json, tr
from nanochat.data.library_words import in_words

WORDS = 13
CHARACTERS = 50  # at least half of them Han
ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
# The path of an evaluation file contains one of these; a set without such files is read completely.
SPLITS = ("test", "val", "dev", "eval")
MOST_CHARACTERS = 1 << 30  # in a field of a CSV file; the csv module's own limit is 131,072

_MAP_BITS = 20


@cache
def _factors() -> np.ndarray:
    """Return the odd multipliers of the hash functions, uint64 (WORDS,)."""
    numbers = np.random.default_rng(1).integers(1, 1 << 63, WORDS, np.uint64)
    return numbers * np.uint64(2) + np.uint64(1)


@cache
def _words_only() -> bytes:
    """Return a bytes.translate table that lowercases ASCII and turns punctuation into spaces."""
    lower_case = bytes(range(256)).lower()
    return bytes(byte if byte >= 128 or chr(byte).isalnum() else 32 for byte in lower_case)


@dataclass(frozen=True)
class Passages:
    """The hashed passages of evaluations."""

    names: tuple[str, ...]
    hashes: np.ndarray  # (passages,) uint64, sorted
    owners: np.ndarray  # (passages,) int64: the index in `names` of the set that each belongs to
    without: tuple[str, ...]  # the subfolders in which no passage was found

    @cached_property
    def key(self) -> str:
        """The SHA-256 of the names, hashes and owners."""
        content = str(self.names).encode() + self.hashes.tobytes() + self.owners.tobytes()
        return hashlib.sha256(content).hexdigest()

    @cached_property
    def _map(self) -> np.ndarray:
        """A table for a quick first check: which upper 20 bits occur in `hashes`, bool (2**20,)."""
        marked = np.zeros(1 << _MAP_BITS, bool)
        marked[self.hashes >> np.uint64(64 - _MAP_BITS)] = True
        return marked

    def sets_in(self, text: str) -> set[int]:
        """Return the indices in `names` of the sets that share a passage with `text`."""
        hashes = passages(text)
        hashes = hashes[self._map[hashes >> np.uint64(64 - _MAP_BITS)]]
        begins = np.searchsorted(self.hashes, hashes, "left")
        ends = np.searchsorted(self.hashes, hashes, "right")
        sets: set[int] = set()
        for begin, end in zip(begins, ends, strict=True):
            sets.update(self.owners[begin:end].tolist())
        return sets


def read_passages(folder: Path) -> Passages:
    """Return the passages of every evaluation in a folder.

    Raises UserError (exit code 2) if there are no passages or if a file cannot be read.
    """
    folder = folder.expanduser()
    subfolders = []
    if folder.is_dir():
        subfolders = sorted(
            path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    names = []
    without = []
    hashes = []
    owners = []
    for subfolder in subfolders:
        set_hashes = _hashes_of_set(subfolder)
        if len(set_hashes):
            hashes.append(set_hashes)
            owners.append(np.full(len(set_hashes), len(names)))
            names.append(subfolder.name)
        else:
            without.append(subfolder.name)
    if not names:
        raise UserError(
            tr(
                "--check_against names a folder with a subfolder for each evaluation, and "
                "{folder} has no evaluation with texts of {words} words or {characters} "
                "Chinese characters; docs/offline.md says how to fill it",
                folder=folder,
                words=WORDS,
                characters=CHARACTERS,
            ),
            2,
        )
    all_hashes = np.concatenate(hashes)
    all_owners = np.concatenate(owners)
    order = np.argsort(all_hashes, kind="stable")
    return Passages(tuple(names), all_hashes[order], all_owners[order], tuple(without))


def _hashes_of_set(folder: Path) -> np.ndarray:
    """Return the distinct hashes of all passages of one evaluation, sorted, uint64 (passages,)."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in ENDINGS)
    evaluation_files = []
    for file in files:
        inner_path = str(file.relative_to(folder)).lower()
        if any(split in inner_path for split in SPLITS):
            evaluation_files.append(file)
    hashes = [np.zeros(0, np.uint64)]
    for file in evaluation_files or files:
        hashes += map(passages, _texts(file))
    return np.unique(np.concatenate(hashes))


def passages(text: str) -> np.ndarray:
    """Return the hashes of all passages of a text, uint64 (passages,).

    ASCII case is ignored, and ASCII punctuation counts as spaces.
    """
    words = text.encode(errors="replace").translate(_words_only()).split()
    word_hashes = np.fromiter(map(crc32, words), np.uint64)
    count = max(len(word_hashes) - WORDS + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for offset, factor in enumerate(_factors()):
        hashes += word_hashes[offset : offset + count] * factor
    if text.isascii():
        return hashes
    return np.concatenate([hashes, _chinese_passages(text)])


def _chinese_passages(text: str) -> np.ndarray:
    """Return the hashes of all Chinese passages of a text, uint64 (passages,).

    Only Han characters, ASCII letters and digits are kept. A passage is a window of 50 of them, at
    least half of which are Han.
    """
    encoded = text.lower().encode("utf-32-le", "surrogatepass")
    points = np.frombuffer(encoded, np.uint32).astype(np.uint64)
    han = _between(points, 0x4E00, 0x9FFF) | _between(points, 0x3400, 0x4DBF)
    digits = _between(points, ord("0"), ord("9"))
    letters = _between(points, ord("a"), ord("z"))
    counted = han | digits | letters
    points = points[counted]
    han = han[counted]
    count = len(points) - CHARACTERS + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    hashes = _window_hashes(points, count) * _factors()[1]
    han_before = np.concatenate([[0], np.cumsum(han)])
    han_in_window = han_before[CHARACTERS:] - han_before[:count]
    return hashes[2 * han_in_window >= CHARACTERS]


def _between(points: np.ndarray, first: int, last: int) -> np.ndarray:
    return (points >= first) & (points <= last)


def _window_hashes(points: np.ndarray, count: int) -> np.ndarray:
    """Return a polynomial hash of each of the `count` windows of 50 code points, uint64 (count,).

    The hash of a window follows from the hashes of its two halves. So windows of 2, 4, 8, ...
    characters are hashed first, and their hashes are then combined, as 50 = 32 + 16 + 2.
    """
    size = 1
    windows = {1: points}  # size -> the hash of the window that begins at each position
    powers = {1: _factors()[:1]}  # size -> the factor of the characters before such a window
    while 2 * size <= CHARACTERS:
        half = windows[size]
        windows[2 * size] = half[: len(half) - size] * powers[size] + half[size:]
        powers[2 * size] = powers[size] * powers[size]
        size *= 2
    hashes = np.zeros(count, np.uint64)
    position = 0
    for size in sorted(windows, reverse=True):
        if position + size <= CHARACTERS:
            hashes = hashes * powers[size] + windows[size][position : position + count]
            position += size
    return hashes


# --- files ---------------------------------------------------------------------------------------


def _texts(path: Path) -> Iterator[str]:
    """Yield every text in an evaluation file.

    Raises UserError (exit code 2) if the file cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet_texts(path)
        elif path.suffix in (".csv", ".tsv"):
            yield from _csv_texts(path)
        elif path.suffix == ".jsonl":
            yield from _jsonl_texts(path)
        else:
            yield from _json_texts(path)
    except (OSError, ValueError, csv.Error, pa.ArrowException) as failure:
        raise UserError(
            tr(
                "the evaluation {path} cannot be read: {failure}. Get the file again.",
                path=path,
                failure=in_words(failure),
            ),
            2,
        ) from failure


def _parquet_texts(path: Path) -> Iterator[str]:
    for batch in pq.ParquetFile(path).iter_batches(batch_size=1_000):
        for row in batch.to_pylist():
            yield from _strings(row)


def _csv_texts(path: Path) -> Iterator[str]:
    csv.field_size_limit(MOST_CHARACTERS)
    delimiter = "," if path.suffix == ".csv" else "\t"
    with open(path, encoding="utf-8-sig", newline="") as file:
        for row in csv.reader(file, delimiter=delimiter):
            yield from row


def _json_texts(path: Path) -> Iterator[str]:
    try:
        value = parse_json(path.read_text("utf-8-sig"))
    except ValueError:  # many files with a value per line are called .json
        yield from _jsonl_texts(path)
        return
    yield from _strings(value)


def _jsonl_texts(path: Path) -> Iterator[str]:
    # Read the lines from the file, because splitlines() would split texts at U+2028 too.
    with open(path, encoding="utf-8-sig") as file:
        for line in file:
            if line.strip():
                yield from _strings(parse_json(line))


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, except the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)

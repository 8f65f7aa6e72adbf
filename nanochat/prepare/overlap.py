"""Finds documents that hold a passage of an evaluation: 13 words in a row, or 50 characters of Chinese.

The evaluations are copies of data sets in a folder, as NANOCHAT_TASK_DIR names one: a subfolder for each set, with
parquet, JSON, JSONL or CSV files. Files for training are left out. Texts that are shorter than a passage find nothing.
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

from nanochat.common import UserError, parse_json

WORDS = 13
CHARACTERS = 50  # of which at least half are Han
ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
SPLITS = (
    "test",
    "val",
    "dev",
    "eval",
)  # in the path of a file; a set without such files is read whole

MOST_CHARACTERS = 1 << 30  # of a field of a CSV file; the csv module's own limit is 131,072

_MAP_BITS = 20


@cache
def _factors() -> np.ndarray:
    """Odd numbers that hashes multiply with, uint64 (WORDS,)."""
    return np.random.default_rng(1).integers(1, 1 << 63, WORDS, np.uint64) * np.uint64(
        2
    ) + np.uint64(1)


@cache
def _words_only() -> bytes:
    """Every byte in lower case, and a space for every ASCII character that is no letter or digit."""
    return bytes(
        byte if byte >= 128 or chr(byte).isalnum() else 32 for byte in bytes(range(256)).lower()
    )


@dataclass(frozen=True)
class Passages:
    """The hashed passages of evaluations."""

    names: tuple[str, ...]
    hashes: np.ndarray  # (passages,) uint64, sorted
    owners: np.ndarray  # (passages,) int64: which name each belongs to

    @cached_property
    def key(self) -> str:
        """A name of the content."""
        return hashlib.sha256(
            str(self.names).encode() + self.hashes.tobytes() + self.owners.tobytes()
        ).hexdigest()

    @cached_property
    def _map(self) -> np.ndarray:
        marked = np.zeros(1 << _MAP_BITS, bool)
        marked[self.hashes >> np.uint64(64 - _MAP_BITS)] = True
        return marked

    def sets_in(self, text: str) -> set[int]:
        """The sets of which a text holds a passage, as numbers of `names`."""
        found = passages(text)
        found = found[self._map[found >> np.uint64(64 - _MAP_BITS)]]
        left, right = (np.searchsorted(self.hashes, found, side) for side in ("left", "right"))
        return {int(owner) for a, b in zip(left, right, strict=True) for owner in self.owners[a:b]}


def read_passages(folder: Path) -> Passages:
    """The passages of every evaluation in a folder. UserError (code 2) if the folder has none or a file is damaged."""
    folder = folder.expanduser()
    names, hashes, owners = [], [], []
    for place in (
        sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    ):
        files = sorted(path for path in place.rglob("*") if path.suffix in ENDINGS)
        files = [
            file for file in files if any(s in str(file.relative_to(place)).lower() for s in SPLITS)
        ] or files
        texts = (text for file in files for text in _texts(file))
        found = np.unique(np.concatenate([np.zeros(0, np.uint64), *map(passages, texts)]))
        if len(found):
            hashes.append(found)
            owners.append(np.full(len(found), len(names)))
            names.append(place.name)
    if not names:
        raise UserError(
            f"--check_against names a folder with a subfolder for each evaluation, and {folder} has no evaluation with "
            f"texts of {WORDS} words or {CHARACTERS} Chinese characters; docs/offline.md says how to fill it",
            2,
        )
    together, whose = np.concatenate(hashes), np.concatenate(owners)
    order = np.argsort(together, kind="stable")
    return Passages(tuple(names), together[order], whose[order])


def passages(text: str) -> np.ndarray:
    """The hashes of all passages of a text, uint64 (passages,). Case, spaces and ASCII punctuation do not count."""
    words = np.fromiter(
        map(crc32, text.encode(errors="replace").translate(_words_only()).split()), np.uint64
    )
    count = max(len(words) - WORDS + 1, 0)
    english = np.zeros(count, np.uint64)
    for number, factor in enumerate(_factors()):
        english += words[number : number + count] * factor
    if text.isascii():
        return english
    return np.concatenate([english, _of_characters(text)])


def _of_characters(text: str) -> np.ndarray:
    """The hashes of windows of CHARACTERS letters and digits, at least half of them Han."""
    points = np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), np.uint32).astype(
        np.uint64
    )
    han = ((points >= 0x4E00) & (points <= 0x9FFF)) | ((points >= 0x3400) & (points <= 0x4DBF))
    kept = han | ((points >= 48) & (points <= 57)) | ((points >= 97) & (points <= 122))
    points, han = points[kept], han[kept]
    count = len(points) - CHARACTERS + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    # The hash of a window is that of its halves, so windows of 2, 4, ... characters lead to 50 = 32 + 16 + 2.
    windows, size, powers = {1: points}, 1, {1: _factors()[:1]}
    while 2 * size <= CHARACTERS:
        half = windows[size]
        windows[2 * size] = half[: len(half) - size] * powers[size] + half[size:]
        powers[2 * size] = powers[size] * powers[size]
        size *= 2
    hashes, at = np.zeros(count, np.uint64), 0
    for part in sorted(windows, reverse=True):
        if at + part <= CHARACTERS:
            hashes = hashes * powers[part] + windows[part][at : at + count]
            at += part
    before = np.concatenate([[0], np.cumsum(han)])
    return hashes[2 * (before[CHARACTERS:] - before[:count]) >= CHARACTERS] * _factors()[1]


def _texts(path: Path) -> Iterator[str]:
    """Every text in a file of rows."""
    try:
        if path.suffix == ".parquet":
            for batch in pq.ParquetFile(path).iter_batches(batch_size=1_000):
                for row in batch.to_pylist():
                    yield from _strings(row)
        elif path.suffix in (".csv", ".tsv"):
            csv.field_size_limit(MOST_CHARACTERS)
            with open(path, encoding="utf-8-sig", newline="") as file:
                for row in csv.reader(file, delimiter="," if path.suffix == ".csv" else "\t"):
                    yield from row
        elif path.suffix == ".jsonl":
            with open(
                path, encoding="utf-8-sig"
            ) as file:  # splitlines() would split texts at U+2028 too
                for line in file:
                    yield from _strings(parse_json(line)) if line.strip() else ()
        else:
            yield from _strings(parse_json(path.read_text("utf-8-sig")))
    except (OSError, ValueError, csv.Error, pa.ArrowException) as failure:
        raise UserError(
            f"the evaluation {path} cannot be read: {failure}. Get the file again.", 2
        ) from failure


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)

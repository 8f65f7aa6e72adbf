"""Token files: documents as numbers, memory-mapped, with their sizes and SHA-256s in a description."""

import contextlib
import fcntl
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanochat.common import UserError, fsync_path, log, read_json, sha256_of, write_json
from nanochat.runtime.progress import Progress

FORMAT = 1
META = "meta.json"
SUFFIXES = {"tokens": ".bin", "offsets": ".idx", "mask": ".mask"}
SMALL_VOCABULARY = 65_536  # up to here a token fits into two bytes
CHECKED = "checked.json"  # file -> [SHA-256, bytes, time of change] when it was last found right
LONG = 1e9  # bytes; to hash so many takes long enough for a bar
THREADS = 8  # hashing leaves Python free, and disks like a few readers


@dataclass(frozen=True)
class TokenFile:
    """One token file and what belongs to it, memory-mapped."""

    tokens: np.ndarray  # (tokens,) uint16 or uint32: documents one after another, without begin marks
    offsets: np.ndarray  # (documents + 1,) int64: where in `tokens` each document begins
    mask: np.ndarray | None  # (tokens,) uint8: 1 where a model is to be trained


@dataclass(frozen=True)
class TokenSet:
    """Documents as tokens, in the files of a folder; tokens are numbered through all parts."""

    folder: Path
    meta: dict[str, Any]
    parts: tuple[TokenFile, ...]

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(part["tokens"] for part in self.meta["parts"])

    @property
    def documents(self) -> int:
        """How many documents or conversations there are."""
        return sum(part["documents"] for part in self.meta["parts"])

    @property
    def bytes(self) -> int:
        """The UTF-8 length of all text."""
        return sum(part["bytes"] for part in self.meta["parts"])

    @cached_property
    def key(self) -> str:
        """A name of the content: equal keys, equal tokens."""
        hashes = [sorted(part["sha256"].items()) for part in self.meta["parts"]]
        return hashlib.sha256(str(hashes).encode()).hexdigest()

    @cached_property
    def part_starts(self) -> list[int]:
        """The number of each part's first token."""
        return [0, *itertools.accumulate(part["tokens"] for part in self.meta["parts"])][:-1]

    def lengths(self) -> np.ndarray:
        """The length of every document in tokens, int64 (documents,)."""
        return np.concatenate([np.diff(part.offsets) for part in self.parts])


def part_files(part: dict[str, Any]) -> dict[str, str]:
    """The names of a part's files, by kind."""
    return {kind: f"{part['name']}{SUFFIXES[kind]}" for kind in part["sha256"]}


def is_there(folder: Path, part: dict[str, Any]) -> bool:
    """Whether all files of a part are there; their content is not looked at."""
    return all((folder / name).exists() for name in part_files(part).values())


PART = {"name", "tokens", "documents", "bytes", "sha256", "source"}


def read_meta(folder: Path, needs: Sequence[str] = ("dtype", "parts")) -> dict[str, Any] | None:
    """The description of a folder of token files, None if there is none. UserError if it cannot be read."""
    path = folder / META
    try:
        meta = read_json(path) if path.exists() else None
    except ValueError as failure:
        raise damage(path, f"it is no JSON ({failure})") from failure
    if meta is not None and not ({*needs} <= {*meta} and all({*part} == PART for part in meta.get("parts", []))):
        raise damage(path, "it lacks what it should say")
    return meta


def open_tokens(folder: Path, verify: bool = False) -> TokenSet:
    """Map the token files of a folder. Sizes are always checked; hashes once for each change, or with `verify`.

    UserError names the damaged file and the command that mends it.
    """
    meta = read_meta(folder)
    if meta is None:
        raise damage(folder / META, "it is missing")
    parts, expected = [], {}
    for about in meta["parts"]:
        arrays = {}
        for kind, name in part_files(about).items():
            path = folder / name
            dtype = {"tokens": meta["dtype"], "offsets": "int64", "mask": "uint8"}[kind]
            count = about["documents"] + 1 if kind == "offsets" else about["tokens"]
            size, right = path.stat().st_size if path.exists() else None, count * np.dtype(dtype).itemsize
            if size != right:
                raise damage(path, "it is missing" if size is None else f"it has {size:,} bytes, expected {right:,}")
            expected[name] = about["sha256"][kind]
            # An empty file cannot be mapped; asarray drops the memmap class, whose slices are slow to make.
            mapped = np.memmap(path, dtype, "r") if count else np.zeros(0, dtype)
            arrays[kind] = np.asarray(mapped)
        parts.append(TokenFile(arrays["tokens"], arrays["offsets"], arrays.get("mask")))
    for name, why in damaged(folder, expected, verify).items():
        raise damage(folder / name, why)
    return TokenSet(folder, meta, tuple(parts))


def damage(path: Path, why: str) -> UserError:
    """What is wrong with a file, and the command that mends it."""
    return UserError(
        f"the token file {path} is damaged: {why}. Mend it with: rm -f {path}\n"
        "and type the same command again; only what belongs to this file is then made anew."
    )


class TokenWriter:
    """Writes one part under temporary names, and at the end its description, which makes it count."""

    def __init__(self, folder: Path, name: str, dtype: str, masked: bool):
        self.folder, self.name, self.dtype = folder, name, dtype
        folder.mkdir(parents=True, exist_ok=True)
        self._open = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, Any] = {}
        for kind in ["tokens", "mask"] if masked else ["tokens"]:
            self._begin(kind)
        self._lengths: list[np.ndarray] = []
        self.tokens = self.bytes = 0

    def _path(self, kind: str, temporary: bool = False) -> Path:
        return self.folder / f"{'.tmp-' if temporary else ''}{self.name}{SUFFIXES[kind]}"

    def _begin(self, kind: str) -> None:
        file = open(self._path(kind, temporary=True), "wb")  # noqa: SIM115  # the stack closes it
        self._files[kind] = self._open.enter_context(file)
        self._digests[kind] = hashlib.sha256()

    def add(
        self,
        tokens: np.ndarray,  # of documents, one after another
        lengths: np.ndarray,  # (documents,) int64
        token_bytes: np.ndarray,  # (V,) each token's length in bytes
        mask: np.ndarray | None = None,  # (tokens,) uint8
    ) -> None:
        """Append documents."""
        tokens = tokens.astype(self.dtype, copy=False)
        self._write("tokens", tokens)
        if mask is not None:
            self._write("mask", mask)
        self._lengths.append(lengths)
        self.tokens += len(tokens)
        self.bytes += int(token_bytes[tokens].sum(dtype=np.int64))

    def _write(self, kind: str, values: np.ndarray) -> None:
        self._files[kind].write(values.data)
        self._digests[kind].update(values.data)

    def finish(self, source: dict[str, Any]) -> dict[str, Any]:
        """Write the offsets, give all files their names, and return the description, which has `source` in it."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        self._begin("offsets")
        self._write("offsets", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            os.replace(self._path(kind, temporary=True), self._path(kind))
        fsync_path(self.folder)
        return {
            "name": self.name,
            "tokens": self.tokens,
            "documents": len(lengths),
            "bytes": self.bytes,
            "sha256": {kind: digest.hexdigest() for kind, digest in self._digests.items()},
            "source": source,
        }

    def discard(self) -> None:
        """Close and remove what was not finished."""
        self._open.close()
        for kind in self._files:
            self._path(kind, temporary=True).unlink(missing_ok=True)


@contextlib.contextmanager
def token_writer(folder: Path, name: str, dtype: str, masked: bool) -> Iterator[TokenWriter]:
    """A writer that leaves nothing behind if it is not finished."""
    writer = TokenWriter(folder, name, dtype, masked)
    try:
        yield writer
    finally:
        writer.discard()


def dtype_for(vocab_size: int) -> str:
    """The narrowest type that holds every token of a vocabulary."""
    return "uint16" if vocab_size <= SMALL_VOCABULARY else "uint32"


# --- checks --------------------------------------------------------------------------------------


def damaged(folder: Path, expected: Mapping[str, str], again: bool = False) -> dict[str, str]:
    """Which of the files `expected` (name -> SHA-256) are not as they should be, and why.

    A file is read once, and again when its size or time of change is another than then, or with `again`. Safe to
    call from every rank at once: one reads, the others wait and take its word.
    """
    wrong = {name: "it is missing" for name in expected if not (folder / name).exists()}
    there = {name: digest for name, digest in expected.items() if name not in wrong}
    if not again and not _unknown(folder, there):
        return wrong
    if not os.access(folder, os.W_OK):
        log(f"{folder} cannot be written to, so its files are hashed at every start")
        return wrong | _hash(folder, there)[0]
    with locked(folder / f".{CHECKED}.lock"):
        unknown = there if again else _unknown(folder, there)
        found, right = _hash(folder, unknown)
        if right:
            kept = {name: known for name, known in _read(folder).items() if (folder / name).exists()}
            write_json(folder / CHECKED, kept | right)
    return wrong | found


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _read(folder: Path) -> dict[str, list]:
    try:
        return read_json(folder / CHECKED)
    except (OSError, ValueError):  # a note that cannot be read only means that everything is hashed again
        return {}


def _unknown(folder: Path, expected: Mapping[str, str]) -> dict[str, str]:
    """The files that have changed since they were found right, if ever they were."""
    known = _read(folder)
    return {name: digest for name, digest in expected.items() if known.get(name) != [digest, *_state(folder / name)]}


def _hash(folder: Path, expected: Mapping[str, str]) -> tuple[dict[str, str], dict[str, list]]:
    """What is wrong with files, and what to note of those that are right."""
    states = {name: _state(folder / name) for name in expected}
    size = sum(state[0] for state in states.values())
    bar = Progress(f"check {folder.parent.name} {folder.name}", size, "B") if size > LONG else None
    wrong: dict[str, str] = {}
    right: dict[str, list] = {}
    with bar or contextlib.nullcontext(), ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(lambda name: sha256_of(folder / name), expected)
        for name, digest in zip(expected, digests, strict=True):
            if digest == expected[name]:
                right[name] = [digest, *states[name]]
            else:
                wrong[name] = f"its SHA-256 is not {expected[name]}"
            if bar:
                bar.advance(states[name][0])
    return wrong, right


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """One process at a time; ranks that come second wait here and then find the work done.

    Yields the descriptor: a child that inherits it keeps the lock until it has ended too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that prepares {path.parent}")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield f.fileno()

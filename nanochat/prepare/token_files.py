"""Token files: documents as memory-mapped numbers, described by meta.json with their sizes and SHA-256s."""

import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

import numpy as np

from nanochat.common import UserError, fsync_path, log, read_json, sha256_of, write_json
from nanochat.data.sources.locks import held, open_known
from nanochat.runtime.progress import Progress

FORMAT = 1
META = "meta.json"
SUFFIXES = {"tokens": ".bin", "offsets": ".idx", "mask": ".mask"}
SMALL_VOCABULARY = 65_536  # up to this size a token fits into two bytes
CHECKED = "checked.json"  # file -> [SHA-256, bytes, time of change], as of the last check that found the file intact
LONG = 1e9  # bytes; hashing more than this takes long enough to show progress
THREADS = 8  # hashing releases the GIL, and disks are faster with a few readers
FIX = " Fix it with: "  # between what is wrong with a file and the command to type


@dataclass(frozen=True)
class TokenFile:
    """One token file with its offsets and mask, memory-mapped."""

    tokens: (
        np.ndarray
    )  # (tokens,) uint16 or uint32: the documents one after another, without begin marks
    offsets: (
        np.ndarray
    )  # (documents + 1,) int64: where in `tokens` each document begins, and the end
    mask: np.ndarray | None  # (tokens,) uint8: 1 for tokens that are trained


@dataclass(frozen=True)
class TokenSet:
    """The token files of a folder. Tokens are numbered from the first file through the last."""

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
        """A name of the content: sets with equal keys hold equal tokens."""
        hashes = [sorted(part["sha256"].items()) for part in self.meta["parts"]]
        return hashlib.sha256(str(hashes).encode()).hexdigest()

    @cached_property
    def part_starts(self) -> list[int]:
        """The number of the first token of each part."""
        return [0, *itertools.accumulate(part["tokens"] for part in self.meta["parts"])][:-1]

    def lengths(self) -> np.ndarray:
        """The length of every document in tokens, int64 (documents,)."""
        return np.concatenate([np.diff(part.offsets) for part in self.parts])


def part_files(part: dict[str, Any]) -> dict[str, str]:
    """The file names of a part, by kind."""
    return {kind: f"{part['name']}{SUFFIXES[kind]}" for kind in part["sha256"]}


def is_there(folder: Path, part: dict[str, Any]) -> bool:
    """Whether all files of a part exist; their content is not checked."""
    return all((folder / name).exists() for name in part_files(part).values())


PART = {"name", "tokens", "documents", "bytes", "sha256", "source"}


def read_meta(folder: Path, needs: Sequence[str] = ("dtype", "parts")) -> dict[str, Any] | None:
    """The meta.json of a folder of token files; None if there is none. UserError if it cannot be read."""
    path = folder / META
    try:
        meta = read_json(path) if path.exists() else None
    except ValueError as failure:
        raise damage(path, f"it is not JSON ({failure.__cause__})") from failure
    if meta is not None and not (
        {*needs} <= {*meta} and all({*part} == PART for part in meta.get("parts", []))
    ):
        raise damage(path, "it lacks required entries")
    return meta


def open_tokens(folder: Path, verify: bool = False) -> TokenSet:
    """Map the token files of a folder into memory, and check their sizes and hashes.

    Without `verify`, a file is hashed only if it has changed since its last check. UserError names the damaged file
    and the command that fixes it.
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
            size, right = (
                path.stat().st_size if path.exists() else None,
                count * np.dtype(dtype).itemsize,
            )
            if size != right:
                raise damage(
                    path,
                    "it is missing"
                    if size is None
                    else f"it has {size:,} bytes, expected {right:,}",
                )
            expected[name] = about["sha256"][kind]
            # An empty file cannot be mapped. asarray drops the memmap class, since slicing a memmap is slow.
            mapped = np.memmap(path, dtype, "r") if count else np.zeros(0, dtype)
            arrays[kind] = np.asarray(mapped)
        parts.append(TokenFile(arrays["tokens"], arrays["offsets"], arrays.get("mask")))
    for name, why in damaged(folder, expected, verify).items():
        raise damage(folder / name, why)
    return TokenSet(folder, meta, tuple(parts))


def damage(path: Path, why: str) -> UserError:
    """The error for a damaged file: what is wrong, and the command that fixes it."""
    return UserError(
        f"the token file {path} is damaged: {why}.{FIX}rm -f {quote(str(path))}\n"
        "and type the same command again, which makes only what belongs to this file."
    )


class TokenWriter:
    """Writes one part under temporary names. At the end it renames the files and returns the description of the part;
    a part without a description does not count."""

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
        path = self._path(kind, temporary=True)
        path.unlink(
            missing_ok=True
        )  # what a killed process left; "x" does not write through a link
        file = open(path, "xb")  # noqa: SIM115  # the stack closes it
        self._files[kind] = self._open.enter_context(file)
        self._digests[kind] = hashlib.sha256()

    def add(
        self,
        tokens: np.ndarray,  # (tokens,): the documents one after another
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
        """Write the offsets, give all files their final names, and return the description, which includes `source`."""
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
        """Close the files, and remove those that were not finished."""
        self._open.close()
        for kind in self._files:
            self._path(kind, temporary=True).unlink(missing_ok=True)


@contextlib.contextmanager
def token_writer(folder: Path, name: str, dtype: str, masked: bool) -> Iterator[TokenWriter]:
    """A TokenWriter that leaves no files behind unless `finish` was called."""
    writer = TokenWriter(folder, name, dtype, masked)
    try:
        yield writer
    finally:
        writer.discard()


def dtype_for(vocab_size: int) -> str:
    """The smallest type that holds every token of a vocabulary."""
    return "uint16" if vocab_size <= SMALL_VOCABULARY else "uint32"


# --- checks --------------------------------------------------------------------------------------


def damaged(folder: Path, expected: Mapping[str, str], again: bool = False) -> dict[str, str]:
    """Which of the files `expected` (name -> SHA-256) are damaged, and why.

    A file is hashed once, and hashed again if its size or its time of change is different, or with `again`. Safe to
    call from every rank at once: one rank hashes, the others wait and use its result.
    """
    wrong = {name: "it is missing" for name in expected if not (folder / name).exists()}
    there = {name: digest for name, digest in expected.items() if name not in wrong}
    if not again and not _unknown(folder, there):
        return wrong
    if not os.access(folder, os.W_OK):
        log(f"{folder} is read-only, so its files are hashed at every start")
        return wrong | _hash(folder, there)[0]
    with locked(folder / f".{CHECKED}.lock"):
        unknown = there if again else _unknown(folder, there)
        found, right = _hash(folder, unknown)
        if right:
            kept = {
                name: known for name, known in _read(folder).items() if (folder / name).exists()
            }
            write_json(folder / CHECKED, kept | right)
    return wrong | found


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _read(folder: Path) -> dict[str, list]:
    try:
        return read_json(folder / CHECKED)
    except (
        OSError,
        ValueError,
    ):  # without a readable note all files are hashed again, which is safe
        return {}


def _unknown(folder: Path, expected: Mapping[str, str]) -> dict[str, str]:
    """The files that have changed since their last check, or were never checked."""
    known = _read(folder)
    return {
        name: digest
        for name, digest in expected.items()
        if known.get(name) != [digest, *_state(folder / name)]
    }


def _hash(folder: Path, expected: Mapping[str, str]) -> tuple[dict[str, str], dict[str, list]]:
    """Hash files: (name -> what is wrong, name -> the note for checked.json of an intact file)."""
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
    """Let one process in at a time. Ranks that come later wait here, and then find the work done.

    Yields the file descriptor of the lock. A child process that inherits it holds the lock until the child has ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    waiting = functools.partial(log, f"waiting for another process that prepares {path.parent}")
    with open_known(path, owned=False) as file, held(file, waiting) as lock:
        yield lock

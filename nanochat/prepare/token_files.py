"""Token files, which hold the tokens of documents as memory-mapped arrays.

A folder of token files has one part per shard, or a single part for conversations. NAME.bin holds
the tokens of all documents of the part one after another, NAME.idx the positions at which the
documents begin, and NAME.mask, for conversations, a mask that marks the trained tokens. meta.json
lists the parts with their sizes and SHA-256s. checked.json records which files were intact when
they were last hashed.
"""

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

from nanochat.common import UserError, fsync_path, log, read_json, sha256_of, tr, write_json
from nanochat.data.locks import hold_lock, open_regular
from nanochat.runtime.progress import Progress

FORMAT = 1
META = "meta.json"
SUFFIXES = {"tokens": ".bin", "offsets": ".idx", "mask": ".mask"}
PART_ENTRIES = {"name", "tokens", "documents", "bytes", "sha256", "source"}
SMALL_VOCABULARY = 65_536  # up to this size a token fits into two bytes
# file -> [SHA-256, bytes, modification time] of the last check that the file passed
CHECKED = "checked.json"
LONG = 1e9  # bytes; hashing more than this takes long enough to show progress
THREADS = 8  # hashing releases the GIL, and disks are faster with a few readers


@dataclass(frozen=True)
class TokenFile:
    """The memory-mapped arrays of one part: its tokens, offsets and, for conversations, mask."""

    tokens: np.ndarray  # (tokens,) uint16 or uint32: all documents, without begin marks
    offsets: np.ndarray  # (documents + 1,) int64: the beginning of each document, and the end
    mask: np.ndarray | None  # (tokens,) uint8: 1 for trained tokens


@dataclass(frozen=True)
class TokenSet:
    """The token files of a folder, whose tokens are indexed as one sequence across all parts."""

    folder: Path
    meta: dict[str, Any]
    parts: tuple[TokenFile, ...]

    @property
    def tokens(self) -> int:
        """The total number of tokens."""
        return sum(entry["tokens"] for entry in self.meta["parts"])

    @property
    def documents(self) -> int:
        """The total number of documents or conversations."""
        return sum(entry["documents"] for entry in self.meta["parts"])

    @property
    def bytes(self) -> int:
        """The total length of the text in UTF-8 bytes."""
        return sum(entry["bytes"] for entry in self.meta["parts"])

    @cached_property
    def key(self) -> str:
        """A hash of the content: sets with equal keys hold equal tokens, offsets and masks."""
        hashes = [sorted(entry["sha256"].items()) for entry in self.meta["parts"]]
        return hashlib.sha256(str(hashes).encode()).hexdigest()

    @cached_property
    def part_starts(self) -> list[int]:
        """The index of each part's first token, counted across all parts."""
        ends = itertools.accumulate(entry["tokens"] for entry in self.meta["parts"])
        return [0, *ends][:-1]

    def lengths(self) -> np.ndarray:
        """Return the length of every document in tokens, int64 (documents,)."""
        return np.concatenate([np.diff(file.offsets) for file in self.parts])


def dtype_for(vocab_size: int) -> str:
    """Return "uint16" if it can hold every token ID of a vocabulary, else "uint32"."""
    return "uint16" if vocab_size <= SMALL_VOCABULARY else "uint32"


# --- reading -------------------------------------------------------------------------------------


def part_files(entry: dict[str, Any]) -> dict[str, str]:
    """Return a dict from kind ("tokens", "offsets" and perhaps "mask") to a part's file name."""
    return {kind: f"{entry['name']}{SUFFIXES[kind]}" for kind in entry["sha256"]}


def files_exist(folder: Path, entry: dict[str, Any]) -> bool:
    """Return whether all files of a part exist; their content is not checked."""
    return all((folder / name).exists() for name in part_files(entry).values())


def read_meta(folder: Path, needs: Sequence[str] = ("dtype", "parts")) -> dict[str, Any] | None:
    """Return the content of a folder's meta.json, or None if the folder has none.

    Raises UserError if the file is not JSON, lacks a key in `needs`, or has a part with missing or
    unknown keys.
    """
    path = folder / META
    try:
        meta = read_json(path) if path.exists() else None
    except ValueError as failure:
        raise TokensDamaged(
            path, tr("it is not JSON ({cause})", cause=failure.__cause__)
        ) from failure
    if meta is None:
        return None
    has_entries = set(needs) <= set(meta)
    if not has_entries or any(set(entry) != PART_ENTRIES for entry in meta.get("parts", [])):
        raise TokensDamaged(path, tr("it lacks required entries"))
    return meta


def open_tokens(folder: Path, verify: bool = False) -> TokenSet:
    """Memory-map the token files of a folder, check their sizes and hashes, and return them.

    With `verify`, files are hashed even if they are unchanged since their last check. Raises
    UserError, with the command to type, if a file is missing or damaged.
    """
    meta = read_meta(folder)
    if meta is None:
        raise TokensDamaged(folder / META, tr("it is missing"))
    parts = []
    hashes = {}
    for about in meta["parts"]:
        arrays = {}
        for kind, name in part_files(about).items():
            dtype = {"tokens": meta["dtype"], "offsets": "int64", "mask": "uint8"}[kind]
            count = about["documents"] + 1 if kind == "offsets" else about["tokens"]
            arrays[kind] = _map_file(folder / name, dtype, count)
            hashes[name] = about["sha256"][kind]
        parts.append(TokenFile(arrays["tokens"], arrays["offsets"], arrays.get("mask")))
    for name, why in damaged(folder, hashes, verify).items():
        raise TokensDamaged(folder / name, why)
    return TokenSet(folder, meta, tuple(parts))


def _map_file(
    path: Path,
    dtype: str,
    count: int,
) -> np.ndarray:
    """Memory-map a file, and return its `count` values.

    Raises UserError if the file is missing or has another size.
    """
    if not path.exists():
        raise TokensDamaged(path, tr("it is missing"))
    size = path.stat().st_size
    expected_size = count * np.dtype(dtype).itemsize
    if size != expected_size:
        raise TokensDamaged(
            path,
            tr("it has {size:,} bytes, expected {expected:,}", size=size, expected=expected_size),
        )
    if not count:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    # asarray drops the memmap class, since slicing a memmap is slow.
    return np.asarray(np.memmap(path, dtype, "r"))


class TokensDamaged(UserError):
    """Says why a token file is damaged, and which command fixes it."""

    def __init__(self, path: Path, why: str):
        """Keep in `problem` what is wrong, without the command."""
        self.problem = tr("the token file {path} is damaged: {why}.", path=path, why=why)
        fix = tr(
            " Fix it with: {command}\n"
            "and type the same command again, which makes only what belongs to this file.",
            command=f"rm -f {quote(str(path))}",
        )
        super().__init__(self.problem + fix)


# --- writing -------------------------------------------------------------------------------------


class TokenWriter:
    """Writes the files of one part under temporary names, until finish() renames them.

    The caller then saves the description that finish() returns, which makes the part valid.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: str,
        masked: bool,
    ):
        self.folder = folder
        self.name = name
        self.dtype = dtype
        self.tokens = 0
        self.bytes = 0
        self._lengths: list[np.ndarray] = []
        self._open = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._create("tokens")
        if masked:
            self._create("mask")

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self.name}{SUFFIXES[kind]}"

    def _temporary_path(self, kind: str) -> Path:
        return self.folder / f".tmp-{self.name}{SUFFIXES[kind]}"

    def _create(self, kind: str) -> None:
        path = self._temporary_path(kind)
        path.unlink(missing_ok=True)  # what a killed process left
        # "x" does not write through a link that somebody planted.
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
        """Append documents, given as tokens and lengths, to the part."""
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
        """Write the offsets, rename all files into place, and return the part's description.

        The description is an entry of meta.json, and includes `source`.
        """
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._create("offsets")
        self._write("offsets", offsets)
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            os.replace(self._temporary_path(kind), self._path(kind))
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
        """Close the files, and remove them unless finish() has renamed them."""
        self._open.close()
        for kind in self._files:
            self._temporary_path(kind).unlink(missing_ok=True)


@contextlib.contextmanager
def token_writer(
    folder: Path,
    name: str,
    dtype: str,
    masked: bool,
) -> Iterator[TokenWriter]:
    """Yield a TokenWriter, and finally remove the files that finish() has not renamed."""
    writer = TokenWriter(folder, name, dtype, masked)
    try:
        yield writer
    finally:
        writer.discard()


# --- checks --------------------------------------------------------------------------------------


def damaged(
    folder: Path,
    hashes: Mapping[str, str],
    again: bool = False,
) -> dict[str, str]:
    """Check files, and return a dict from the name of each missing or damaged file to the reason.

    `hashes` maps the names of the files to their SHA-256s. Unless `again` is set, files that have
    passed a check and kept their size and modification time are not hashed again. A read-only
    folder cannot record checks, so all these files are hashed if one has no record. This is safe to
    call from every rank at once.
    """
    existing: dict[str, str] = {}
    problems: dict[str, str] = {}
    for name, digest in hashes.items():
        if (folder / name).exists():
            existing[name] = digest
        else:
            problems[name] = tr("it is missing")
    if not again and not _unchecked(folder, existing):
        return problems
    if not os.access(folder, os.W_OK):
        log(tr("{folder} is read-only, so its files are hashed at every start", folder=folder))
        wrong, _ = _hash(folder, existing)
        return problems | wrong
    with locked(folder / f".{CHECKED}.lock"):
        wrong, intact = _hash(folder, existing if again else _unchecked(folder, existing))
        if intact:
            notes = _read_notes(folder)
            for name in list(notes):
                if not (folder / name).exists():
                    del notes[name]
            write_json(folder / CHECKED, notes | intact)
    return problems | wrong


def _state(path: Path) -> list[int]:
    """Return the size in bytes and the modification time in nanoseconds of a file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read_notes(folder: Path) -> dict[str, list]:
    """Return the content of checked.json, or {} if it is missing or cannot be read."""
    try:
        return read_json(folder / CHECKED)
    except (OSError, ValueError):
        return {}


def _unchecked(folder: Path, hashes: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `hashes` whose files have not passed a check in their current state."""
    notes = _read_notes(folder)
    unchecked = {}
    for name, digest in hashes.items():
        if notes.get(name) != [digest, *_state(folder / name)]:
            unchecked[name] = digest
    return unchecked


def _hash(folder: Path, hashes: Mapping[str, str]) -> tuple[dict[str, str], dict[str, list]]:
    """Hash files, and return two dicts by file name, one for damaged and one for intact files.

    The first says why each file is damaged, and the second holds the entries for checked.json.
    """
    states = {name: _state(folder / name) for name in hashes}
    size = sum(state[0] for state in states.values())
    bar = None
    if size > LONG:
        bar = Progress(
            tr("check {corpus} {split}", corpus=folder.parent.name, split=folder.name), size, "B"
        )
    wrong: dict[str, str] = {}
    intact: dict[str, list] = {}
    with bar or contextlib.nullcontext(), ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(sha256_of, [folder / name for name in hashes])
        for name, digest in zip(hashes, digests, strict=True):
            if digest == hashes[name]:
                intact[name] = [digest, *states[name]]
            else:
                wrong[name] = tr("its SHA-256 is not {expected}", expected=hashes[name])
            if bar:
                bar.advance(states[name][0])
    return wrong, intact


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Lock the file `path` against other processes, and yield its file descriptor.

    A child process that inherits the descriptor keeps the lock until the child has ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    notice = tr("waiting for another process that prepares {folder}", folder=path.parent)
    waiting = functools.partial(log, notice)
    with open_regular(path, owned=False) as file, hold_lock(file, waiting) as lock:
        yield lock

"""The packing plan of a token set: it says which pieces of which documents make up each row."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from nanochat.common import UserError, fsync_path, log, sha256_of, warn, write_json
from nanochat.prepare.packing import Packing, count_marked, cut_at, pack
from nanochat.prepare.token_files import (
    FIX,
    FORMAT,
    META,
    TokenSet,
    damage,
    damaged,
    locked,
    read_meta,
)

TooLong = Literal["cut", "drop"]


@dataclass(frozen=True)
class Plan:
    """The segments of each row, memory-mapped, and how much had to be cut or dropped."""

    row_tokens: int
    packing: Packing
    used: np.ndarray  # (rows,) int32: cells of each row that are not padding
    trained: (
        np.ndarray
    )  # (rows,) int32: tokens of each row with mask 1; without a mask, all tokens but begin marks
    key: str
    cut_conversations: int  # those that were longer than a row
    dropped_tokens: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.used)


def plan(
    token_set: TokenSet,
    row_tokens: int,
    cut: bool,
    too_long: TooLong | None = None,
    pairs: bool = False,
) -> Plan:
    """The rows of a token set, made once and kept beside it; safe to call from every rank at once.

    Use `cut` for documents: then every token is placed. Without `cut`, for conversations, each conversation stays
    whole; one that is longer than a row is cut before a user turn, and a single exchange that is longer than a row
    loses its end. `too_long` is for conversations without begin marks, whose own first token takes the place of the
    mark: one that is longer than a row is cut to its beginning, or dropped. With `pairs`, which needs `too_long`, the
    conversations 2n and 2n + 1 stand side by side in a row. If both together are longer than a row, each may keep half
    a row, or what the other one leaves. Pairs are left out of which an answer has nothing left. UserError if no row is
    left.
    """
    assert too_long or not pairs
    words = [
        "plan",
        str(row_tokens),
        "cut" if cut else "whole",
        *([too_long] if too_long else []),
        *["pairs"] * pairs,
    ]
    folder = token_set.folder / "-".join(words)
    key = f"{token_set.key[:16]}-{folder.name}-{FORMAT}"
    made = _load_plan(folder, key, row_tokens)
    if made is None:
        with locked(token_set.folder / f".{folder.name}.lock"):
            made = _load_plan(folder, key, row_tokens)
            if made is None:
                _make_plan(token_set, folder, row_tokens, cut, too_long, pairs, key)
                made = _load_plan(folder, key, row_tokens)
    assert made is not None
    if made.cut_conversations:
        items = (
            f"{token_set.documents // 2:,} pairs"
            if pairs
            else f"{token_set.documents:,} conversations"
        )
        log(
            f"{made.cut_conversations:,} of {items} were longer than a row of {row_tokens - 1:,} tokens and were "
            f"{'dropped' if too_long == 'drop' else 'cut'}; {made.dropped_tokens:,} of {token_set.tokens:,} tokens "
            "were left out"
        )
    return made


def _load_plan(folder: Path, key: str, row_tokens: int) -> Plan | None:
    """The kept plan with this key; None if there is none, or if it is damaged, which also prints a warning."""
    try:
        meta = read_meta(folder, ("key", "arrays", "cut_conversations", "dropped_tokens"))
        if meta is None or meta["key"] != key:
            return None
        # Plans of older versions have no hashes, so damage that changes no length cannot be found in them.
        for name, why in damaged(folder, meta.get("sha256", {})).items():
            raise damage(folder / name, why)
        arrays = {
            name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
            for name in meta["arrays"]
        }
        packing = Packing(arrays["first"], arrays["starts"], arrays["lengths"])
        cut, dropped = meta["cut_conversations"], meta["dropped_tokens"]
        return Plan(row_tokens, packing, arrays["used"], arrays["trained"], key, cut, dropped)
    except (
        ValueError,
        OSError,
        EOFError,
        KeyError,
    ) as failure:  # UserError is a ValueError; all else is numpy's
        why = str(failure).partition(FIX)[0]
        warn(f"the packing plan {folder} cannot be used and is made again: {why}")
        return None


def _make_plan(
    token_set: TokenSet,
    folder: Path,
    row_tokens: int,
    cut: bool,
    too_long: TooLong | None,
    pairs: bool,
    key: str,
) -> None:
    lengths = token_set.lengths()
    starts = np.cumsum(lengths) - lengths
    cut_conversations = dropped = 0
    if pairs:
        pair_starts, pair_lengths, cut_conversations = _cut_pairs(
            token_set, starts, lengths, row_tokens, too_long
        )
        dropped = token_set.tokens - int(pair_lengths.sum())
        starts, lengths = np.arange(len(pair_starts)), pair_lengths.sum(axis=1) - 1
    elif not cut:
        room = row_tokens if too_long else row_tokens - 1
        starts, lengths, cut_conversations = _cut_conversations(
            token_set, starts, lengths, room, too_long
        )
        dropped = token_set.tokens - int(lengths.sum())
        if too_long:
            starts, lengths = starts[lengths > 1] + 1, lengths[lengths > 1] - 1
    if not len(starts):
        raise UserError(
            f"{token_set.folder} holds nothing to train on that fits into rows of {row_tokens - 1} tokens; use longer "
            "rows or more data"
        )
    packing = pack(starts, lengths, row_tokens, cut)
    if pairs:  # the packing has placed pairs by their numbers: put the two conversations of each into its place
        placed = packing.starts
        halves = (
            (pair_starts[placed] + 1).ravel(),
            (pair_lengths[placed] - 1).ravel().astype(np.int32),
        )
        packing = Packing(2 * packing.first, *halves)
    mask = token_set.parts[0].mask
    marked = (
        packing.lengths if mask is None else count_marked(mask, packing.starts, packing.lengths)
    )
    arrays = {
        "first": packing.first,
        "starts": packing.starts,
        "lengths": packing.lengths,
        "used": np.add.reduceat(packing.lengths + 1, packing.first[:-1]).astype(np.int32),
        "trained": np.add.reduceat(marked, packing.first[:-1]).astype(np.int32),
    }
    temporary = folder.with_name(
        f".{folder.name}.tmp"
    )  # this process holds the lock, so no other uses the name
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for name, values in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as f:
                np.save(f, values)
                f.flush()
                os.fsync(f.fileno())
        about = {"cut_conversations": cut_conversations, "dropped_tokens": dropped}
        digests = {f"{name}.npy": sha256_of(temporary / f"{name}.npy") for name in arrays}
        write_json(
            temporary / META, {"key": key, "arrays": sorted(arrays), "sha256": digests, **about}
        )
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        fsync_path(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cut_pairs(
    token_set: TokenSet,
    starts: np.ndarray,
    lengths: np.ndarray,
    room: int,
    too_long: TooLong | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """The starts and lengths of the conversations of each pair, int64 (pairs, 2), of which `room` tokens hold both, and
    how many pairs were cut. Pairs in which a conversation has no trained token are left out."""
    starts, lengths = starts.reshape(-1, 2), lengths.reshape(-1, 2)
    kept = np.minimum(lengths, np.maximum(room // 2, room - lengths[:, ::-1]))
    cut = (kept < lengths).any(axis=1)
    mask = token_set.parts[0].mask
    assert mask is not None, "pairs are conversations"
    marked = count_marked(mask, (starts + 1).ravel(), (kept - 1).ravel()).reshape(
        -1, 2
    )  # the first token is no target
    left = (marked > 0).all(axis=1) & ~(cut & (too_long == "drop"))
    return starts[left], kept[left], int(cut.sum())


def _cut_conversations(
    token_set: TokenSet,
    starts: np.ndarray,
    lengths: np.ndarray,
    room: int,
    too_long: TooLong | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """The starts and lengths of pieces of at most `room` tokens, in order, and how many conversations were cut. Pieces
    without a trained token are dropped."""
    part, border = token_set.parts[0], token_set.meta.get("border")
    out_starts, out_lengths, cut = [], [], 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length <= room:
            out_starts.append(start)
            out_lengths.append(length)
            continue
        cut += 1
        if too_long == "drop":
            continue
        borders = (
            [0]
            if too_long
            else np.flatnonzero(part.tokens[start : start + length] == border).tolist()
        )
        for first, size in cut_at(borders, length, room):
            if part.mask is None or part.mask[start + first : start + first + size].any():
                out_starts.append(start + first)
                out_lengths.append(size)
    return np.array(out_starts, np.int64), np.array(out_lengths, np.int64), cut

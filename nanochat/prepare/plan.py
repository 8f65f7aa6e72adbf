"""Plan which pieces of which documents make up each row, and save the plan beside the tokens."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from nanochat.common import UserError, fsync_path, log, sha256_of, tr, warn, write_json
from nanochat.prepare.packing import Packing, count_marked, cut_at, pack
from nanochat.prepare.token_files import (
    FORMAT,
    META,
    TokensDamaged,
    TokenSet,
    damaged,
    locked,
    read_meta,
)

TooLong = Literal["cut", "drop"]


@dataclass(frozen=True)
class Plan:
    """A packing plan: the memory-mapped segments of each row, and how much was cut or dropped."""

    row_tokens: int
    packing: Packing
    used: np.ndarray  # (rows,) int32: tokens of each row that are not padding
    # (rows,) int32: tokens of each row with mask 1; without a mask, all tokens but begin marks
    trained: np.ndarray
    key: str
    cut_conversations: int  # number of conversations, or pairs, that were longer than a row
    dropped_tokens: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.used)


def plan(
    token_set: TokenSet,
    row_tokens: int,
    cut: bool,
    too_long: TooLong | None = None,
    pairs: bool = False,
    title: str | None = None,
) -> Plan:
    """Return the packing plan of a token set, making and saving it on first use.

    This is safe to call from every rank at once. Use `cut` for documents: then every token is
    placed. Without `cut`, each conversation stays whole if it fits into a row. Without `too_long`,
    a longer one is cut before user turns, and a single exchange that is longer than a row loses its
    end. Cut pieces without trained tokens are left out.

    `too_long` is for conversations without begin marks, whose own first token takes the place of
    the mark, and says whether a conversation that is longer than a row is cut to its beginning or
    dropped.

    With `pairs`, which needs `too_long`, the conversations 2n and 2n + 1 are adjacent in a row. If
    both together are longer than a row, they are dropped if `too_long` says so; else each may fill
    half a row, or the space that the other one leaves. A pair is left out if one of its
    conversations has no trained token left.

    Raises UserError if nothing is left to put into rows. It names the texts as `title` or, without
    it, by their folder.
    """
    assert too_long or not pairs
    words = ["plan", str(row_tokens), "cut" if cut else "whole"]
    if too_long:
        words.append(too_long)
    if pairs:
        words.append("pairs")
    folder = token_set.folder / "-".join(words)
    key = f"{token_set.key[:16]}-{folder.name}-{FORMAT}"
    saved = _load_plan(folder, key, row_tokens)
    if saved is None:
        with locked(token_set.folder / f".{folder.name}.lock"):
            saved = _load_plan(folder, key, row_tokens)  # another process may have planned it
            if saved is None:
                title = title or str(token_set.folder)
                _make_plan(token_set, folder, row_tokens, cut, too_long, pairs, key, title)
                saved = _load_plan(folder, key, row_tokens)
    assert saved is not None
    if saved.cut_conversations:
        _log_cut(saved, token_set, too_long, pairs)
    return saved


def _log_cut(
    plan: Plan,
    token_set: TokenSet,
    too_long: TooLong | None,
    pairs: bool,
) -> None:
    """Log how many conversations or pairs were too long, and how many tokens were left out."""
    items = tr("{count:,} conversations", count=token_set.documents)
    if pairs:
        items = tr("{count:,} pairs", count=token_set.documents // 2)
    fate = tr("dropped") if too_long == "drop" else tr("cut")
    log(
        tr(
            "{count:,} of {items} were longer than a row of {row_tokens:,} tokens and were {fate}; "
            "{dropped:,} of {tokens:,} tokens were left out",
            count=plan.cut_conversations,
            items=items,
            row_tokens=plan.row_tokens - 1,
            fate=fate,
            dropped=plan.dropped_tokens,
            tokens=token_set.tokens,
        )
    )


# --- on disk -------------------------------------------------------------------------------------


def _load_plan(
    folder: Path,
    key: str,
    row_tokens: int,
) -> Plan | None:
    """Return the saved plan with this key, or None if there is none.

    If the plan is damaged, logs a warning and returns None.
    """
    try:
        meta = read_meta(folder, ("key", "arrays", "cut_conversations", "dropped_tokens"))
        if meta is None or meta["key"] != key:
            return None
        # Plans of older versions have no hashes, so damage that changes no length cannot be found
        # in them.
        for name, why in damaged(folder, meta.get("sha256", {})).items():
            raise TokensDamaged(folder / name, why)
        arrays = {}
        for name in meta["arrays"]:
            arrays[name] = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
        return Plan(
            row_tokens,
            Packing(arrays["first"], arrays["starts"], arrays["lengths"]),
            arrays["used"],
            arrays["trained"],
            key,
            meta["cut_conversations"],
            meta["dropped_tokens"],
        )
    # UserError is a ValueError; all other errors are numpy's.
    except (ValueError, OSError, EOFError, KeyError) as failure:
        problem = failure.problem if isinstance(failure, TokensDamaged) else failure
        warn(
            tr(
                "the packing plan {folder} cannot be used and is made again: {problem}",
                folder=folder,
                problem=problem,
            )
        )
        return None


def _save_plan(
    folder: Path,
    arrays: dict[str, np.ndarray],
    key: str,
    cut_conversations: int,
    dropped: int,
) -> None:
    """Write the arrays of a plan and its meta.json into a folder, replacing an earlier plan.

    The folder gets its name only once everything is written.
    """
    # This process holds the lock, so no other process uses the temporary name.
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        hashes = {}
        for name, values in arrays.items():
            path = temporary / f"{name}.npy"
            with open(path, "wb") as file:
                np.save(file, values)
                file.flush()
                os.fsync(file.fileno())
            hashes[path.name] = sha256_of(path)
        meta = {
            "key": key,
            "arrays": sorted(arrays),
            "sha256": hashes,
            "cut_conversations": cut_conversations,
            "dropped_tokens": dropped,
        }
        write_json(temporary / META, meta)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        fsync_path(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# --- planning ------------------------------------------------------------------------------------


def _make_plan(
    token_set: TokenSet,
    folder: Path,
    row_tokens: int,
    cut: bool,
    too_long: TooLong | None,
    pairs: bool,
    key: str,
    title: str,
) -> None:
    """Pack the documents of a token set into rows, and save the plan.

    Raises UserError if there is nothing left to pack.
    """
    lengths = token_set.lengths()
    starts = np.cumsum(lengths) - lengths
    cut_conversations = 0
    if pairs:
        pair_starts, pair_lengths, cut_conversations = _cut_pairs(
            token_set,
            starts,
            lengths,
            row_tokens,
            too_long,
        )
        placed_tokens = int(pair_lengths.sum())
        # A pair is packed as one piece, whose start is the index of the pair. The first token of
        # the first conversation takes the place of the begin mark.
        starts = np.arange(len(pair_starts))
        lengths = pair_lengths.sum(axis=1) - 1
    elif cut:
        placed_tokens = token_set.tokens
    else:
        room = row_tokens if too_long else row_tokens - 1
        starts, lengths, cut_conversations = _cut_conversations(
            token_set,
            starts,
            lengths,
            room,
            too_long,
        )
        placed_tokens = int(lengths.sum())
        if too_long:  # the first token of a conversation takes the place of the begin mark
            has_targets = lengths > 1
            starts = starts[has_targets] + 1
            lengths = lengths[has_targets] - 1
    if not len(starts):
        reason = tr("what is trained of them lies beyond the end of a row")
        if too_long == "drop":
            reason = tr("they are dropped")
        raise UserError(
            tr(
                "nothing to train on fits into rows of {row_tokens} tokens in {title}: all are "
                "longer, and {reason}. Use longer rows, or more or shorter conversations",
                row_tokens=row_tokens - 1,
                title=title,
                reason=reason,
            )
        )
    packing = pack(starts, lengths, row_tokens, cut)
    if pairs:
        packing = _unfold_pairs(packing, pair_starts, pair_lengths)
    mask = token_set.parts[0].mask
    trained = packing.lengths
    if mask is not None:
        trained = count_marked(mask, packing.starts, packing.lengths)
    row_starts = packing.first[:-1]
    arrays = {
        "first": packing.first,
        "starts": packing.starts,
        "lengths": packing.lengths,
        "used": np.add.reduceat(packing.lengths + 1, row_starts).astype(np.int32),
        "trained": np.add.reduceat(trained, row_starts).astype(np.int32),
    }
    _save_plan(folder, arrays, key, cut_conversations, token_set.tokens - placed_tokens)


def _unfold_pairs(
    packing: Packing,
    pair_starts: np.ndarray,  # (pairs, 2) int64
    pair_lengths: np.ndarray,  # (pairs, 2) int64
) -> Packing:
    """Return the packing of the conversations, given the packing of their pairs.

    In `packing`, each segment is one pair, and its start is the index of the pair.
    """
    numbers = packing.starts
    starts = pair_starts[numbers] + 1
    lengths = pair_lengths[numbers] - 1
    return Packing(2 * packing.first, starts.ravel(), lengths.ravel().astype(np.int32))


def _cut_pairs(
    token_set: TokenSet,
    starts: np.ndarray,  # (2 * pairs,) int64
    lengths: np.ndarray,  # (2 * pairs,) int64
    room: int,
    too_long: TooLong | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Cut pairs to `room` tokens; return their starts and lengths, and how many were too long.

    Both arrays are int64 (pairs, 2), for the two conversations of each pair. A pair is left out
    if one of its conversations has no trained token after the cut, or if the pair is too long and
    `too_long` is "drop".
    """
    starts = starts.reshape(-1, 2)
    lengths = lengths.reshape(-1, 2)
    left_by_other = room - lengths[:, ::-1]
    cut_lengths = np.minimum(lengths, np.maximum(room // 2, left_by_other))
    is_cut = (cut_lengths < lengths).any(axis=1)
    mask = token_set.parts[0].mask
    assert mask is not None, "pairs are conversations"
    # The first token of a conversation is not a target.
    targets = count_marked(mask, (starts + 1).ravel(), (cut_lengths - 1).ravel())
    usable = (targets.reshape(-1, 2) > 0).all(axis=1)
    if too_long == "drop":
        usable &= ~is_cut
    return starts[usable], cut_lengths[usable], int(is_cut.sum())


def _cut_conversations(
    token_set: TokenSet,
    starts: np.ndarray,  # (conversations,) int64
    lengths: np.ndarray,  # (conversations,) int64
    room: int,
    too_long: TooLong | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the starts and lengths of the pieces, and how many conversations were too long.

    A conversation of at most `room` tokens is one piece. A longer one is dropped if `too_long` is
    "drop", cut to its first `room` tokens if it is "cut", and cut before user turns if it is None;
    cut pieces without trained tokens are dropped. Pieces are in the order of the conversations.
    """
    token_file = token_set.parts[0]
    border = token_set.meta.get("border")
    piece_starts = []
    piece_lengths = []
    cut_conversations = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length <= room:
            piece_starts.append(start)
            piece_lengths.append(length)
            continue
        cut_conversations += 1
        if too_long == "drop":
            continue
        borders = [0]
        if too_long is None:
            borders = np.flatnonzero(token_file.tokens[start : start + length] == border).tolist()
        for offset, size in cut_at(borders, length, room):
            begin = start + offset
            if token_file.mask is None or token_file.mask[begin : begin + size].any():
                piece_starts.append(begin)
                piece_lengths.append(size)
    return (
        np.array(piece_starts, np.int64),
        np.array(piece_lengths, np.int64),
        cut_conversations,
    )

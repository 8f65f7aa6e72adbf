"""Shards and conversations to token files, tokenised once, and the plan of which piece stands in which row.

python -m nanochat.prepare --data NAME            # ahead of training, which otherwise does it first
python -m nanochat.prepare --data NAME --verify   # read every token file again and compare its SHA-256
"""

import itertools
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nanochat.common import UserError, fsync_dir, log, read_json, run, write_json
from nanochat.conversation import Conversation
from nanochat.dataset import Corpus, resolve, shards
from nanochat.packing import Packing, count_marked, cut_at, pack
from nanochat.progress import Progress
from nanochat.shards import batches, check_sha256, count_rows, read_about
from nanochat.token_files import META, TokenSet, dtype_for, locked, open_tokens, part_writer
from nanochat.tokenizer import Tokenizer, tokenizer_dir

FORMAT = 1


# --- documents -----------------------------------------------------------------------------------


def prepare_documents(corpus: Corpus, tokenizer: Tokenizer, split: Literal["train", "val"]) -> TokenSet:
    """The tokens of a corpus, made on the first call and kept; safe to call from every rank at once.

    One part per shard: stopped and called again it goes on with the shard it was at, and after a larger download
    only new shards are tokenised. UserError if a shard is damaged or missing.
    """
    folder = corpus.folder / f"tokens-{tokenizer.hash[:8]}" / split
    paths = shards(corpus, split)
    known = read_about(corpus.folder).get("shards", {})
    sources = [{"bytes": path.stat().st_size, "sha256": known.get(path.name, {}).get("sha256")} for path in paths]
    wanted = {path.stem: source for path, source in zip(paths, sources, strict=True)}

    def is_done() -> bool:
        if not (folder / META).exists():
            return False
        return {part["name"]: part["source"] for part in read_json(folder / META)["parts"]} == wanted

    if not is_done():
        with locked(corpus.folder / f".{folder.parent.name}-{split}.lock"):
            if not is_done():
                _tokenise_shards(folder, paths, sources, tokenizer)
    return open_tokens(folder)


def _tokenise_shards(folder: Path, paths: list[Path], sources: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
    parts = []
    title = f"tokenise {folder.parent.parent.name} {folder.name}"
    start, fresh = time.monotonic(), 0
    with Progress(title, sum(map(count_rows, paths)), "documents") as progress:
        for path, source in zip(paths, sources, strict=True):
            note = folder / f"{path.stem}.json"
            part = read_json(note) if note.exists() else None
            if part is None or part["source"] != source:
                note.unlink(missing_ok=True)  # from now on the part does not count, until it is whole
                part = _tokenise_shard(folder, path, source, tokenizer, progress)
                write_json(note, part)
                fresh += part["tokens"]
            else:
                progress.advance(part["documents"], skipped=True)
            parts.append(part)
    if fresh:
        print(f"{fresh:,} tokens, {fresh / (time.monotonic() - start):,.0f} tokens/s", flush=True)
    write_json(
        folder / META,
        {"format": FORMAT, "tokenizer": tokenizer.hash, "dtype": dtype_for(tokenizer.vocab_size), "parts": parts},
    )


def _tokenise_shard(
    folder: Path, path: Path, source: dict[str, Any], tokenizer: Tokenizer, progress: Progress
) -> dict[str, Any]:
    check_sha256(path)
    token_bytes = tokenizer.token_bytes()
    with part_writer(folder, path.stem, dtype_for(tokenizer.vocab_size), masked=False) as writer:
        for texts in batches(path):
            writer.add(tokenizer.encode_batch(texts), token_bytes)
            progress.advance(len(texts))
        return writer.finish(source)


# --- conversations -------------------------------------------------------------------------------


def prepare_conversations(
    folder: Path, conversations: Iterable[Conversation], tokenizer: Tokenizer, key: str
) -> TokenSet:
    """Conversations as tokens with the mask of what is trained; safe to call from every rank at once.

    `key` names the content: with an equal key and tokenizer the files that are there are used, and
    `conversations` is not looked at.
    """
    wanted = {"format": FORMAT, "tokenizer": tokenizer.hash, "key": key}

    def is_done() -> bool:
        if not (folder / META).exists():
            return False
        meta = read_json(folder / META)
        return {name: meta.get(name) for name in wanted} == wanted

    if not is_done():
        with locked(folder.parent / f".{folder.name}.lock"):
            if not is_done():
                _render(folder, conversations, tokenizer, wanted)
    return open_tokens(folder)


def _render(folder: Path, conversations: Iterable[Conversation], tokenizer: Tokenizer, about: dict[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    token_bytes = tokenizer.token_bytes()
    conversations = iter(conversations)
    with (
        part_writer(folder, "conversations", dtype_for(tokenizer.vocab_size), masked=True) as writer,
        Progress(f"tokenise {folder.name}", None, "conversations") as progress,
    ):
        while some := list(itertools.islice(conversations, 1_000)):
            # Without the begin mark, which the loader puts before every piece.
            rendered = [tokenizer.render(conversation) for conversation in some]
            writer.add([r.ids[1:] for r in rendered], token_bytes, [r.mask[1:] for r in rendered])
            progress.advance(len(some))
        part = writer.finish({})
    if not part["documents"]:
        raise UserError(f"there are no conversations to prepare for {folder}; check the data of this stage")
    border = tokenizer.special("user_start")
    write_json(folder / META, {**about, "dtype": dtype_for(tokenizer.vocab_size), "border": border, "parts": [part]})


# --- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which segments stand in which row, memory-mapped, and what was lost on the way."""

    row_tokens: int
    packing: Packing
    used: np.ndarray  # (rows,) int32: cells of each row that are not padding
    trained: np.ndarray  # (rows,) int32: tokens of each row with mask 1; all but begin marks where there is no mask
    key: str
    cut_conversations: int
    dropped_tokens: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.used)


def plan(token_set: TokenSet, row_tokens: int, cut: bool) -> Plan:
    """The rows of a token set, made once and kept beside it; safe to call from every rank at once.

    With `cut`, for documents: no token is left out. Without, for conversations: each stays whole; one that is
    longer than a row is cut before a user turn, and of a single exchange that is longer the end is left out.
    """
    folder = token_set.folder / f"plan-{row_tokens}-{'cut' if cut else 'whole'}"
    key = f"{token_set.key[:16]}-{folder.name}-{FORMAT}"

    def is_done() -> bool:
        return (folder / META).exists() and read_json(folder / META)["key"] == key

    if not is_done():
        with locked(token_set.folder / f".{folder.name}.lock"):
            if not is_done():
                _make_plan(token_set, folder, row_tokens, cut, key)
    meta = read_json(folder / META)
    arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in meta["arrays"]}
    if meta["cut_conversations"]:
        log(
            f"{meta['cut_conversations']:,} of {token_set.documents:,} conversations were longer than a row of "
            f"{row_tokens - 1:,} tokens and were cut; {meta['dropped_tokens']:,} of {token_set.tokens:,} tokens were "
            "left out"
        )
    return Plan(
        row_tokens,
        Packing(arrays["first"], arrays["starts"], arrays["lengths"]),
        arrays["used"],
        arrays["trained"],
        key,
        meta["cut_conversations"],
        meta["dropped_tokens"],
    )


def _make_plan(token_set: TokenSet, folder: Path, row_tokens: int, cut: bool, key: str) -> None:
    lengths = token_set.lengths()
    starts = np.cumsum(lengths) - lengths
    cut_conversations = dropped = 0
    if not cut:
        starts, lengths, cut_conversations = _cut_conversations(token_set, starts, lengths, row_tokens - 1)
        dropped = token_set.tokens - int(lengths.sum())
    if not len(starts):
        raise UserError(f"{token_set.folder} holds nothing that fits into rows of {row_tokens - 1} tokens")
    packing = pack(starts, lengths, row_tokens, cut)
    mask = token_set.parts[0].mask
    marked = packing.lengths if mask is None else count_marked(mask, packing.starts, packing.lengths)
    arrays = {
        "first": packing.first,
        "starts": packing.starts,
        "lengths": packing.lengths,
        "used": np.add.reduceat(packing.lengths + 1, packing.first[:-1]).astype(np.int32),
        "trained": np.add.reduceat(marked, packing.first[:-1]).astype(np.int32),
    }
    temporary = folder.with_name(f".{folder.name}.tmp")  # the lock is held, so the name is ours
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for name, values in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as f:
                np.save(f, values)
                f.flush()
                os.fsync(f.fileno())
        about = {"cut_conversations": cut_conversations, "dropped_tokens": dropped}
        write_json(temporary / META, {"key": key, "arrays": sorted(arrays), **about})
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        fsync_dir(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _cut_conversations(
    token_set: TokenSet, starts: np.ndarray, lengths: np.ndarray, room: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Pieces of at most `room` tokens, in order, those without anything to train left out, and how many were cut."""
    part = token_set.parts[0]
    out_starts, out_lengths, cut = [], [], 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length <= room:
            out_starts.append(start)
            out_lengths.append(length)
            continue
        cut += 1
        borders = np.flatnonzero(part.tokens[start : start + length] == token_set.meta["border"]).tolist()
        for first, size in cut_at(borders, length, room):
            if part.mask is None or part.mask[start + first : start + first + size].any():
                out_starts.append(start + first)
                out_lengths.append(size)
    return np.array(out_starts, np.int64), np.array(out_lengths, np.int64), cut


# --- command line --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Tokenise a corpus ahead of training, or check its tokens."""

    data: str | None = None
    """The corpus; by default the only one there is."""
    verify: bool = False
    """Read every token file again and compare its SHA-256."""


def main(cfg: Config) -> None:
    """Make or check both splits of a corpus."""
    corpus = resolve(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(corpus.name))
    for split in ("train", "val"):
        tokens = prepare_documents(corpus, tokenizer, split)
        if cfg.verify:
            open_tokens(tokens.folder, verify=True)
        checked = ", as they should be" if cfg.verify else ""
        log(f"{corpus.name} {split}: {tokens.documents:,} documents, {tokens.tokens:,} tokens{checked}")


if __name__ == "__main__":
    run(main, Config, __doc__)

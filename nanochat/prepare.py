"""Shards and conversations to token files, tokenised once, and the plan of which piece stands in which row.

python -m nanochat.prepare --data NAME            # ahead of training, which otherwise does it first
python -m nanochat.prepare --data NAME --verify   # read every token file again and compare its SHA-256
"""

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from nanochat import tokenise
from nanochat.bpe import joined
from nanochat.common import UserError, fsync_path, log, read_json, run, sha256_of, warn, write_json
from nanochat.conversation import Conversation
from nanochat.dataset import Corpus, shards
from nanochat.mixing import resolve_data
from nanochat.packing import Packing, count_marked, cut_at, pack
from nanochat.progress import Progress
from nanochat.shards import count_rows, read_about
from nanochat.token_files import (
    META,
    TokenSet,
    damage,
    damaged,
    dtype_for,
    locked,
    open_tokens,
    part_files,
    part_writer,
    read_meta,
)
from nanochat.tokenizer import Tokenizer, cores, tokenizer_dir
from nanochat.workers import work

FORMAT = 1
MOST_PROCESSES = 32  # unless more are asked for: each holds a few hundred MB
BYTES_THAT_PAY = 8_000_000  # of shards, for each process


# --- documents -----------------------------------------------------------------------------------


def prepare_documents(
    corpus: Corpus, tokenizer: Tokenizer, split: Literal["train", "val"], processes: int | None = None
) -> TokenSet:
    """The tokens of a corpus, made on the first call and kept; safe to call from every rank at once.

    One part per shard, each by one of `processes` (by default as many as pay): stopped and called again it goes on
    with the shards that are not done, and after a larger download only new shards are tokenised. UserError if a
    shard or a token file is damaged or a shard is missing; a missing token file is made anew.
    """
    folder = (corpus.folder / f"tokens-{tokenizer.hash[:8]}" / split).absolute()
    paths = [path.absolute() for path in shards(corpus, split)]
    known = read_about(corpus.folder).get("shards", {})
    sources = [{"bytes": path.stat().st_size, "sha256": known.get(path.name, {}).get("sha256")} for path in paths]
    wanted = {path.stem: source for path, source in zip(paths, sources, strict=True)}

    def is_done() -> bool:
        meta = read_meta(folder)
        if meta is None or {part["name"]: part["source"] for part in meta["parts"]} != wanted:
            return False
        return all(_is_there(folder, part) for part in meta["parts"])

    if not is_done():
        with locked(corpus.folder / f".{folder.parent.name}-{split}.lock") as lock:
            if not is_done():
                _tokenise_shards(folder, paths, sources, tokenizer, processes, lock)
    return open_tokens(folder)


def _is_there(folder: Path, part: dict[str, Any]) -> bool:
    return all((folder / name).exists() for name in part_files(part).values())


def _read_note(path: Path) -> dict[str, Any] | None:
    """What a finished part left, None if it is not finished, or has to be made anew."""
    try:
        part = read_json(path) if path.exists() else None
    except ValueError as failure:
        warn(f"{path} is damaged ({failure}): this shard is tokenised anew")
        return None
    return part if part and _is_there(path.parent, part) else None


def _tokenise_shards(
    folder: Path,
    paths: list[Path],
    sources: list[dict[str, Any]],
    tokenizer: Tokenizer,
    processes: int | None,
    lock: int,
) -> None:
    title = f"tokenise {folder.parent.parent.name} {folder.name}"
    start, parts, missing = time.monotonic(), {}, []
    with Progress(title, sum(map(count_rows, paths)), "documents") as progress:
        for path, source in zip(paths, sources, strict=True):
            note = folder / f"{path.stem}.json"
            part = _read_note(note)
            if part is None or part["source"] != source:
                note.unlink(missing_ok=True)  # from now on the part does not count, until it is whole
                missing.append((path, source))
            else:
                progress.advance(part["documents"], skipped=True)
                parts[path.stem] = part
        fresh = 0
        for part in _tokenised(folder, missing, tokenizer, processes, lock, progress):
            write_json(folder / f"{part['name']}.json", part)
            parts[part["name"]] = part
            fresh += part["tokens"]
    if fresh:
        print(f"{fresh:,} tokens, {fresh / (time.monotonic() - start):,.0f} tokens/s", flush=True)
    about = {"format": FORMAT, "tokenizer": tokenizer.hash, "dtype": dtype_for(tokenizer.vocab_size)}
    write_json(folder / META, {**about, "parts": [parts[path.stem] for path in paths]})


def _tokenised(
    folder: Path,
    shards: list[tuple[Path, dict[str, Any]]],
    tokenizer: Tokenizer,
    processes: int | None,
    lock: int,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """The parts of shards, as they are finished, in any order."""
    if processes is None:  # a process takes about as long to start as to tokenise this much
        processes = min(cores(), MOST_PROCESSES, sum(source["bytes"] for _, source in shards) // BYTES_THAT_PAY)
    processes = min(processes, len(shards))
    if processes < 2:
        for path, source in shards:
            yield tokenise.tokenise_shard(path, folder, source, tokenizer, None, progress.advance)
        return
    progress.say(f"{progress.title}: {processes} processes for {len(shards)} shards")
    with tempfile.TemporaryDirectory() as own:
        tokenizer.save(Path(own))
        setup = {"tokenizer": own, "threads": max(cores() // processes, 1)}
        tasks = [{"name": str(path), "folder": str(folder), "source": source} for path, source in shards]
        # They hold the lock too, so that after a kill nobody begins before the last of them has ended.
        with contextlib.closing(work("nanochat.tokenise", setup, tasks, processes, keep=[lock])) as messages:
            for _, message in messages:
                progress.advance(message.get("documents", 0))
                if "result" in message:
                    yield message["result"]


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
        meta = read_meta(folder)
        if meta is None or {name: meta.get(name) for name in wanted} != wanted:
            return False
        return all(_is_there(folder, part) for part in meta["parts"])

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
            lengths = np.array([len(r.ids) - 1 for r in rendered], np.int64)
            tokens = joined([r.ids[1:] for r in rendered], writer.dtype)
            writer.add(tokens, lengths, token_bytes, joined([r.mask[1:] for r in rendered], "uint8"))
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
    made = _load_plan(folder, key, row_tokens)
    if made is None:
        with locked(token_set.folder / f".{folder.name}.lock"):
            made = _load_plan(folder, key, row_tokens)
            if made is None:
                _make_plan(token_set, folder, row_tokens, cut, key)
                made = _load_plan(folder, key, row_tokens)
    assert made is not None
    if made.cut_conversations:
        log(
            f"{made.cut_conversations:,} of {token_set.documents:,} conversations were longer than a row of "
            f"{row_tokens - 1:,} tokens and were cut; {made.dropped_tokens:,} of {token_set.tokens:,} tokens were "
            "left out"
        )
    return made


def _load_plan(folder: Path, key: str, row_tokens: int) -> Plan | None:
    """A plan that was kept; None where there is none of this key, or, with a warning, none that is whole."""
    try:
        meta = read_meta(folder, ("key", "arrays", "cut_conversations", "dropped_tokens"))
        if meta is None or meta["key"] != key:
            return None
        # Plans of older versions name no hashes; damage that changes no length shows nowhere in them.
        for name, why in damaged(folder, meta.get("sha256", {})).items():
            raise damage(folder / name, why)
        arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in meta["arrays"]}
        packing = Packing(arrays["first"], arrays["starts"], arrays["lengths"])
        cut, dropped = meta["cut_conversations"], meta["dropped_tokens"]
        return Plan(row_tokens, packing, arrays["used"], arrays["trained"], key, cut, dropped)
    except (ValueError, OSError, EOFError, KeyError) as failure:  # UserError is a ValueError; all else is numpy's
        why = str(failure).partition(" Mend it")[0]
        warn(f"the packing plan {folder} cannot be used and is made anew: {why}")
        return None


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
        digests = {f"{name}.npy": sha256_of(temporary / f"{name}.npy") for name in arrays}
        write_json(temporary / META, {"key": key, "arrays": sorted(arrays), "sha256": digests, **about})
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        fsync_path(folder.parent)
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
    """The corpus, or a mixture such as web:0.7,books:0.3, all of whose corpora are tokenised. Unset: the only one."""
    num_workers: Annotated[int | None, tyro.conf.arg(aliases=("-w",))] = None
    """Processes, at most one for each shard. Unset: as many as there are cores, fewer where that is not worth it."""
    verify: bool = False
    """Read every token file again and compare its SHA-256."""


def main(cfg: Config) -> None:
    """Make or check both splits of a corpus."""
    if cfg.num_workers is not None and cfg.num_workers < 1:
        raise UserError(f"--num_workers must be at least 1, got {cfg.num_workers}", exit_code=2)
    data = resolve_data(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(data.vocabulary))
    for corpus in data.corpora:
        for split in ("train", "val"):
            tokens = prepare_documents(corpus, tokenizer, split, cfg.num_workers)
            if cfg.verify:
                open_tokens(tokens.folder, verify=True)
            checked = ", as they should be" if cfg.verify else ""
            log(f"{corpus.name} {split}: {tokens.documents:,} documents, {tokens.tokens:,} tokens{checked}")


if __name__ == "__main__":
    run(main, Config, __doc__)

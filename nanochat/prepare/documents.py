"""Turn a corpus into token files, tokenising every shard once.

If the corpus is large, several processes do this by running `python -m nanochat.prepare.documents`.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanochat.common import read_json, tr, warn, write_json
from nanochat.data.corpora import DROPPED, Corpus, dropped_documents, dropped_entry, shards
from nanochat.data.limits import cores
from nanochat.data.shards import batches, check_sha256, count_rows, read_about
from nanochat.prepare.token_files import (
    FORMAT,
    META,
    TokenSet,
    dtype_for,
    files_exist,
    locked,
    open_tokens,
    read_meta,
    token_writer,
)
from nanochat.prepare.workers import Message, Say, processes_for, serve, work
from nanochat.runtime.progress import Progress
from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shard:
    """A shard to tokenise.

    `source` identifies the shard's content and the documents to skip. If the saved tokens have
    another source, the shard is tokenised again.
    """

    path: Path
    source: dict[str, Any]


def prepare_documents(
    corpus: Corpus,
    tokenizer: Tokenizer,
    split: Literal["train", "val"],
    processes: int | None = None,
) -> TokenSet:
    """Return the tokens of a split of a corpus, making and saving them on first use.

    This is safe to call from every rank at once. Each shard becomes one part of the TokenSet. At
    most `processes` processes share the work (default: as many as save time). Only shards that are
    new, changed or unfinished are tokenised, so an interrupted call can be resumed. Raises
    UserError if a shard or a token file is damaged, or if a shard is missing.
    """
    folder = (corpus.folder / f"tokens-{tokenizer.hash[:8]}" / split).absolute()
    split_shards = _shards_to_tokenise(corpus, split)
    sources = {shard.path.stem: shard.source for shard in split_shards}

    def is_done() -> bool:
        meta = read_meta(folder)
        if meta is None or {entry["name"]: entry["source"] for entry in meta["parts"]} != sources:
            return False
        return all(files_exist(folder, entry) for entry in meta["parts"])

    if not is_done():
        with locked(corpus.folder / f".{folder.parent.name}-{split}.lock") as lock:
            if not is_done():  # another process may have made the files meanwhile
                _tokenise_shards(folder, split_shards, tokenizer, processes, lock)
    return open_tokens(folder)


def _shards_to_tokenise(corpus: Corpus, split: Literal["train", "val"]) -> list[Shard]:
    """Return the shards of a split, and warn about those added after the corpus was screened."""
    about = read_about(corpus.folder)
    recorded = about.get("shards", {})
    split_shards = []
    for path in (path.absolute() for path in shards(corpus, split)):
        sha256 = recorded.get(path.name, {}).get("sha256")
        source = {"bytes": path.stat().st_size, "sha256": sha256}
        dropped = dropped_entry(path)
        if dropped:
            source["dropped"] = dropped["sha256"]
        split_shards.append(Shard(path, source))
    screened = about.get(DROPPED)
    if screened:
        names = [shard.path.name for shard in split_shards]
        unscreened = [name for name in names if name not in screened["shards"]]
        if unscreened:
            warn(
                tr(
                    "{count} shards of {corpus} came after its documents were screened, "
                    "the first is {first}: all of their documents are kept. Screen them "
                    "too: {command}",
                    count=len(unscreened),
                    corpus=corpus.name,
                    first=unscreened[0],
                    command=screened["make"],
                )
            )
    return split_shards


def _tokenise_shards(
    folder: Path,
    shards: list[Shard],
    tokenizer: Tokenizer,
    processes: int | None,
    lock: int,
) -> None:
    """Tokenise the shards that are not done yet, and write the folder's meta.json."""
    title = tr("tokenise {corpus} {split}", corpus=folder.parent.parent.name, split=folder.name)
    start = time.monotonic()
    parts: dict[str, dict[str, Any]] = {}
    unfinished: list[Shard] = []
    new_tokens = 0
    total = sum(count_rows(shard.path) for shard in shards)
    with Progress(title, total, tr("documents")) as progress:
        for shard in shards:
            note = _note_path(folder, shard.path.stem)
            entry = _read_note(note)
            if entry is not None and entry["source"] == shard.source:
                progress.advance(entry["documents"], skipped=True)
                parts[shard.path.stem] = entry
            else:
                note.unlink(missing_ok=True)  # now the part does not count until it is complete
                unfinished.append(shard)
        for entry in _tokenised(folder, unfinished, tokenizer, processes, lock, progress):
            write_json(_note_path(folder, entry["name"]), entry)
            parts[entry["name"]] = entry
            new_tokens += entry["tokens"]
    if new_tokens:
        speed = new_tokens / (time.monotonic() - start)
        print(
            tr("{new_tokens:,} tokens, {speed:,.0f} tokens/s", new_tokens=new_tokens, speed=speed),
            flush=True,
        )
    meta = {
        "format": FORMAT,
        "tokenizer": tokenizer.hash,
        "dtype": dtype_for(tokenizer.vocab_size),
        "parts": [parts[shard.path.stem] for shard in shards],
    }
    write_json(folder / META, meta)


def _note_path(folder: Path, name: str) -> Path:
    """Return the path of the file that describes a finished part."""
    return folder / f"{name}.json"


def _read_note(path: Path) -> dict[str, Any] | None:
    """Return the description of a finished part, or None if the part must be made.

    Warns if the description is damaged.
    """
    try:
        entry = read_json(path) if path.exists() else None
    except ValueError as failure:
        warn(
            tr(
                "{path} is damaged ({cause}): this shard is tokenised again",
                path=path,
                cause=failure.__cause__,
            )
        )
        return None
    return entry if entry and files_exist(path.parent, entry) else None


def _tokenised(
    folder: Path,
    shards: list[Shard],
    tokenizer: Tokenizer,
    processes: int | None,
    lock: int,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Tokenise shards, yielding the description of each part once it is finished, in any order."""
    total_bytes = sum(shard.source["bytes"] for shard in shards)
    processes = processes_for(total_bytes, len(shards), processes)
    # The tokenizer of a published model uses all cores by itself, and workers cannot load it.
    if processes < 2 or not isinstance(tokenizer, Tokenizer):
        for shard in shards:
            yield tokenise_shard(
                shard.path,
                folder,
                shard.source,
                tokenizer,
                None,
                progress.advance,
            )
        return
    progress.say(
        tr(
            "{title}: {processes} processes for {shards} shards",
            title=progress.title,
            processes=processes,
            shards=len(shards),
        )
    )
    with tempfile.TemporaryDirectory() as tokenizer_folder:
        tokenizer.save(Path(tokenizer_folder))
        setup = {"tokenizer": tokenizer_folder, "threads": max(cores() // processes, 1)}
        tasks = []
        for shard in shards:
            task = {"name": str(shard.path), "folder": str(folder), "source": shard.source}
            tasks.append(task)
        # The processes hold the lock too. If this process is killed, no other run begins before the
        # last of them has ended.
        messages = work("nanochat.prepare.documents", setup, tasks, processes, keep=[lock])
        with contextlib.closing(messages):
            for _, message in messages:
                progress.advance(message.get("documents", 0))
                if "result" in message:
                    yield message["result"]


def tokenise_shard(
    path: Path,
    folder: Path,
    source: dict[str, Any],
    tokenizer: Tokenizer,
    threads: int | None,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Check a shard, write its tokens to a folder, and return the part's entry for meta.json.

    Documents that clean.py left out are skipped. `advance` is called after every batch with the
    number of documents in it. Raises UserError, and leaves the part's files as they are, if the
    shard is damaged.
    """
    check_sha256(path)
    token_bytes = tokenizer.token_bytes()
    dtype = dtype_for(tokenizer.vocab_size)
    with token_writer(folder, path.stem, dtype, masked=False) as writer:
        dropped = dropped_documents(path)
        documents_read = 0
        for texts in batches(path):
            remaining = texts
            if dropped:
                numbered = enumerate(texts, documents_read)
                remaining = [text for number, text in numbered if number not in dropped]
            tokens, lengths = tokenizer.encode_joined(remaining, threads)
            writer.add(tokens, lengths, token_bytes)
            documents_read += len(texts)
            advance(len(texts))
        return writer.finish(source)


def _begin_work(setup: Message) -> Callable[[Message, Say], Message]:
    """Load the tokenizer, and return the function with which a worker tokenises a shard."""
    tokenizer = Tokenizer.load(Path(setup["tokenizer"]))

    def tokenise(task: Message, say: Say) -> Message:
        def advance(documents: int) -> None:
            say({"documents": documents})

        path = Path(task["name"])
        folder = Path(task["folder"])
        return tokenise_shard(path, folder, task["source"], tokenizer, setup["threads"], advance)

    return tokenise


if __name__ == "__main__":
    serve(_begin_work)

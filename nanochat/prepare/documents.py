"""A corpus as token files: every shard is tokenised once, by several processes if the corpus is large."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from nanochat.common import read_json, warn, write_json
from nanochat.data.corpora import DROPPED, Corpus, dropped_of, shards
from nanochat.data.shards import count_rows, read_about
from nanochat.prepare import tokenise
from nanochat.prepare.token_files import (
    FORMAT,
    META,
    TokenSet,
    dtype_for,
    is_there,
    locked,
    open_tokens,
    read_meta,
)
from nanochat.prepare.workers import processes_for, work
from nanochat.runtime.progress import Progress
from nanochat.tokenizer import Tokenizer, cores


def prepare_documents(
    corpus: Corpus,
    tokenizer: Tokenizer,
    split: Literal["train", "val"],
    processes: int | None = None,
) -> TokenSet:
    """The tokens of a corpus, made on the first call and kept; safe to call from every rank at once.

    There is one part per shard, made by one of `processes` (default: as many as save time). A call after an
    interruption resumes with the shards that are not done, and after a larger download only new shards are tokenised.
    UserError if a shard or a token file is damaged, or if a shard is missing. A missing token file is made again.
    """
    folder = (corpus.folder / f"tokens-{tokenizer.hash[:8]}" / split).absolute()
    paths = [path.absolute() for path in shards(corpus, split)]
    known = read_about(corpus.folder).get("shards", {})
    sources = [
        {"bytes": path.stat().st_size, "sha256": known.get(path.name, {}).get("sha256")}
        | ({"dropped": dropped["sha256"]} if (dropped := dropped_of(path)) else {})
        for path in paths
    ]
    screened = read_about(corpus.folder).get(DROPPED)
    if screened and (fresh := [path.name for path in paths if path.name not in screened["shards"]]):
        warn(
            f"{len(fresh)} shards of {corpus.name} came after its documents were screened, the first is {fresh[0]}: "
            f"all of their documents are kept. Screen them too: {screened['make']}"
        )
    wanted = {path.stem: source for path, source in zip(paths, sources, strict=True)}

    def is_done() -> bool:
        meta = read_meta(folder)
        if meta is None or {part["name"]: part["source"] for part in meta["parts"]} != wanted:
            return False
        return all(is_there(folder, part) for part in meta["parts"])

    if not is_done():
        with locked(corpus.folder / f".{folder.parent.name}-{split}.lock") as lock:
            if not is_done():
                _tokenise_shards(folder, paths, sources, tokenizer, processes, lock)
    return open_tokens(folder)


def _read_note(path: Path) -> dict[str, Any] | None:
    """The description of a finished part; None if the part is not finished or must be made again."""
    try:
        part = read_json(path) if path.exists() else None
    except ValueError as failure:
        warn(f"{path} is damaged ({failure.__cause__}): this shard is tokenised again")
        return None
    return part if part and is_there(path.parent, part) else None


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
                note.unlink(
                    missing_ok=True
                )  # from now on the part does not count until it is complete
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
    about = {
        "format": FORMAT,
        "tokenizer": tokenizer.hash,
        "dtype": dtype_for(tokenizer.vocab_size),
    }
    write_json(folder / META, {**about, "parts": [parts[path.stem] for path in paths]})


def _tokenised(
    folder: Path,
    shards: list[tuple[Path, dict[str, Any]]],
    tokenizer: Tokenizer,
    processes: int | None,
    lock: int,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Yield the description of each part when it is finished, in any order."""
    processes = processes_for(sum(source["bytes"] for _, source in shards), len(shards), processes)
    if processes < 2:
        for path, source in shards:
            yield tokenise.tokenise_shard(path, folder, source, tokenizer, None, progress.advance)
        return
    progress.say(f"{progress.title}: {processes} processes for {len(shards)} shards")
    with tempfile.TemporaryDirectory() as own:
        tokenizer.save(Path(own))
        setup = {"tokenizer": own, "threads": max(cores() // processes, 1)}
        tasks = [
            {"name": str(path), "folder": str(folder), "source": source} for path, source in shards
        ]
        # The processes hold the lock too, so that after a kill no other run begins before the last of them has ended.
        with contextlib.closing(
            work("nanochat.prepare.tokenise", setup, tasks, processes, keep=[lock])
        ) as messages:
            for _, message in messages:
                progress.advance(message.get("documents", 0))
                if "result" in message:
                    yield message["result"]

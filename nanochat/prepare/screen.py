"""Screens one shard for near-duplicates and passages of evaluations. clean.py starts this module as its workers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import atomic_path
from nanochat.data.shards import batches, check_sha256
from nanochat.prepare.minhash import Signatures, signatures
from nanochat.prepare.overlap import Passages, read_passages
from nanochat.prepare.workers import Message, Say, serve


def screen_shard(
    path: Path, out: Path, dedup: bool, against: Passages | None, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Read a shard and write what was found to `out`: bands and bins of its documents, and pairs (document, set).

    Documents are counted as `batches` gives them. `advance` gets their number after every batch. UserError if the
    shard is damaged.
    """
    check_sha256(path)
    parts, hits, seen = [], [], 0
    for texts in batches(path):
        if dedup:
            parts.append(signatures(texts))
        if against is not None:
            hits += [
                (seen + number, one)
                for number, text in enumerate(texts)
                for one in against.sets_in(text)
            ]
        seen += len(texts)
        advance(len(texts))
    found = Signatures.joined(parts or [signatures([])])
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out) as temporary, open(temporary, "wb") as file:
        np.savez(
            file,
            bands=found.bands,
            bins=found.bins,
            hits=np.array(hits, np.int64).reshape(-1, 2),
            seen=seen,
        )
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "documents": seen}


def _begin(setup: Message) -> Callable[[Message, Say], Message]:
    against = read_passages(Path(setup["against"])) if setup["against"] else None

    def do(task: Message, say: Say) -> Message:
        return screen_shard(
            Path(task["name"]),
            Path(task["out"]),
            setup["dedup"],
            against,
            lambda count: say({"documents": count}),
        )

    return do


if __name__ == "__main__":
    serve(_begin)

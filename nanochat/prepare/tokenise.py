"""Turns one shard into one token file. documents.py starts `python -m nanochat.prepare.tokenise` as its workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanochat.data.corpora import dropped_documents
from nanochat.data.shards import batches, check_sha256
from nanochat.prepare.token_files import dtype_for, token_writer
from nanochat.prepare.workers import Message, Say, serve
from nanochat.tokenizer import Tokenizer


def tokenise_shard(
    path: Path,
    folder: Path,
    source: dict[str, Any],
    tokenizer: Tokenizer,
    threads: int | None,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Check a shard, write its tokens into a folder and return their description. Documents that clean.py left out
    are skipped.

    `advance` is called with the number of documents after every batch. UserError if the shard is damaged; then no
    token file appears.
    """
    check_sha256(path)
    token_bytes = tokenizer.token_bytes()
    with token_writer(folder, path.stem, dtype_for(tokenizer.vocab_size), masked=False) as writer:
        dropped, seen = dropped_documents(path), 0
        for texts in batches(path):
            kept = (
                [text for number, text in enumerate(texts, seen) if number not in dropped]
                if dropped
                else texts
            )
            writer.add(*tokenizer.encode_joined(kept, threads), token_bytes)
            seen += len(texts)
            advance(len(texts))
        return writer.finish(source)


def _begin(setup: Message) -> Callable[[Message, Say], Message]:
    tokenizer = Tokenizer.load(Path(setup["tokenizer"]))

    def do(task: Message, say: Say) -> Message:
        return tokenise_shard(
            Path(task["name"]),
            Path(task["folder"]),
            task["source"],
            tokenizer,
            setup["threads"],
            lambda count: say({"documents": count}),
        )

    return do


if __name__ == "__main__":
    serve(_begin)

"""Conversations as token files, with a mask of the tokens that are trained."""

import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import UserError, write_json
from nanochat.data.bpe import joined
from nanochat.data.conversation import Conversation
from nanochat.prepare.token_files import (
    FORMAT,
    META,
    TokenSet,
    dtype_for,
    is_there,
    locked,
    open_tokens,
    read_meta,
    token_writer,
)
from nanochat.runtime.progress import Progress
from nanochat.tokenizer import Tokenizer


def prepare_conversations(
    folder: Path, conversations: Iterable[Conversation], tokenizer: Tokenizer, key: str
) -> TokenSet:
    """Conversations as tokens, with a mask of the tokens that are trained; safe to call from every rank at once.

    `key` names the content. If the folder holds files with the same key and tokenizer, they are used, and
    `conversations` is not read.
    """
    wanted = {"format": FORMAT, "tokenizer": tokenizer.hash, "key": key}

    def is_done() -> bool:
        meta = read_meta(folder)
        if meta is None or {name: meta.get(name) for name in wanted} != wanted:
            return False
        return all(is_there(folder, part) for part in meta["parts"])

    if not is_done():
        with locked(folder.parent / f".{folder.name}.lock"):
            if not is_done():
                _render(folder, conversations, tokenizer, wanted)
    return open_tokens(folder)


def _render(folder: Path, conversations: Iterable[Conversation], tokenizer: Tokenizer, about: dict[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    token_bytes, dropped = tokenizer.token_bytes(), int(tokenizer.marks_begin)
    conversations = iter(conversations)
    with (
        token_writer(folder, "conversations", dtype_for(tokenizer.vocab_size), masked=True) as writer,
        Progress(f"tokenise {folder.name}", None, "conversations") as progress,
    ):
        while some := list(itertools.islice(conversations, 1_000)):
            # A begin mark is dropped, since the loader puts one before every piece.
            rendered = [tokenizer.render(conversation) for conversation in some]
            lengths = np.array([len(r.ids) - dropped for r in rendered], np.int64)
            tokens = joined([r.ids[dropped:] for r in rendered], writer.dtype)
            writer.add(tokens, lengths, token_bytes, joined([r.mask[dropped:] for r in rendered], "uint8"))
            progress.advance(len(some))
        part = writer.finish({})
    if not part["documents"]:
        raise UserError(f"there are no conversations to tokenise for {folder}; check the data of this stage")
    dtype, border = dtype_for(tokenizer.vocab_size), tokenizer.border
    write_json(folder / META, {**about, "dtype": dtype, "border": border, "parts": [part]})

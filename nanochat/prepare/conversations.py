"""Conversations as token files, with a mask of the tokens that are trained."""

import hashlib
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nanochat.common import UserError, base_dir, write_json
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

KEPT = 8  # folders of one name: the newest of them are never removed
UNUSED_SECONDS = 14 * 86_400  # younger folders are never removed, since runs may still read them


class ConversationSplits(Protocol):
    """Conversations to train and to validate on; `key` names their content."""

    @property
    def key(self) -> str: ...

    def train(self) -> Iterable[Conversation]: ...

    def val(self) -> Iterable[Conversation]: ...


@dataclass(frozen=True)
class Lazy:
    """An iterable that is made only when somebody iterates over it."""

    make: Callable[[], Iterable[Conversation]]

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.make())


def folder_of(name: str, tokenizer: Tokenizer, key: str) -> Path:
    """The folder for conversations of a stage; other conversations and other tokenizers get other folders, so two runs
    in one base folder do not overwrite each other's tokens."""
    return (
        base_dir()
        / "chat_data"
        / f"{name}-{hashlib.sha256(f'{tokenizer.hash} {key}'.encode()).hexdigest()[:12]}"
    )


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
                _remove_old(folder)
    return open_tokens(folder)


def conversation_lengths(
    stage: str, conversations: ConversationSplits, tokenizer: Tokenizer, together: int = 1
) -> np.ndarray:  # int64
    """The tokens of every conversation of a stage, to train and to validate on, or of each `together` in a row: the two
    of a pair. What is tokenised here is not tokenised again by dataloader.chat_rows()."""
    parts = ((stage, conversations.train), (f"{stage}-val", conversations.val))
    key = conversations.key
    lengths = [
        prepare_conversations(folder_of(name, tokenizer, key), Lazy(part), tokenizer, key).lengths()
        for name, part in parts
    ]
    return np.concatenate(lengths).reshape(-1, together).sum(axis=1)


def _remove_old(folder: Path) -> None:
    """Remove folders that the same stage filled long ago; a run that resumes with one of them tokenises again."""
    name = folder.name.rpartition("-")[0]
    alike = [
        path
        for path in folder.parent.glob(f"{name}*")
        if re.fullmatch(f"{name}(-[0-9a-f]{{12}})?", path.name)
    ]
    made = {path: (path / META).stat().st_mtime for path in alike if (path / META).exists()}
    for path in sorted(made, key=lambda path: -made[path])[KEPT:]:
        if time.time() - made[path] > UNUSED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _render(
    folder: Path, conversations: Iterable[Conversation], tokenizer: Tokenizer, about: dict[str, Any]
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    token_bytes, dropped = tokenizer.token_bytes(), int(tokenizer.marks_begin)
    conversations = iter(conversations)
    with (
        token_writer(
            folder, "conversations", dtype_for(tokenizer.vocab_size), masked=True
        ) as writer,
        Progress(f"tokenise {folder.name}", None, "conversations") as progress,
    ):
        while some := list(itertools.islice(conversations, 1_000)):
            # A begin mark is dropped, since the loader puts one before every piece.
            rendered = [tokenizer.render(conversation) for conversation in some]
            lengths = np.array([len(r.ids) - dropped for r in rendered], np.int64)
            tokens = joined([r.ids[dropped:] for r in rendered], writer.dtype)
            writer.add(
                tokens, lengths, token_bytes, joined([r.mask[dropped:] for r in rendered], "uint8")
            )
            progress.advance(len(some))
        part = writer.finish({})
    if not part["documents"]:
        raise UserError(
            f"there are no conversations to tokenise for {folder}; check the data of this stage"
        )
    dtype, border = dtype_for(tokenizer.vocab_size), tokenizer.border
    write_json(folder / META, {**about, "dtype": dtype, "border": border, "parts": [part]})

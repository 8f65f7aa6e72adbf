"""Turn conversations into token files, with a mask that marks the tokens that are trained."""

import hashlib
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nanochat.common import UserError, base_dir, tr, write_json
from nanochat.data.bpe import joined
from nanochat.data.conversation import Conversation
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
from nanochat.runtime.progress import Progress
from nanochat.tokenizer import Rendered, Tokenizer

NEWEST_FOLDERS = 8  # the number of newest folders of a stage that are never removed
UNUSED_SECONDS = 14 * 86_400  # younger folders are never removed, since runs may still read them
BATCH = 1_000  # conversations to render at a time
RENDERING = 5  # part of a folder's hash; raise it when conversations become other tokens or masks


class ConversationSplits(Protocol):
    """Conversations to train and validate on, with a name and a key that identifies their content."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    def train(self) -> Iterable[Conversation]: ...

    def val(self) -> Iterable[Conversation]: ...


def conversation_folder(
    name: str,
    tokenizer: Tokenizer,
    key: str,
) -> Path:
    """Return the folder for the tokens of the conversations called `name`.

    The path has a hash of the tokenizer, of RENDERING and of `key`, which identifies the
    conversations, so runs that differ in one of these do not use or overwrite each other's tokens.
    """
    content = f"{tokenizer.chat_hash} {RENDERING} {key}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return base_dir() / "chat_data" / f"{name}-{digest}"


def prepare_conversations(
    folder: Path,
    conversations: Iterable[Conversation] | Callable[[], Iterable[Conversation]],
    tokenizer: Tokenizer,
    key: str,
) -> TokenSet:
    """Return the tokens of conversations with their mask, making and saving them on first use.

    The mask marks the trained tokens. This is safe to call from every rank at once. `key`
    identifies the conversations. If the folder holds all token files for the same key and
    tokenizer, they are used, and `conversations` is neither called nor read. Raises UserError if
    there are no conversations, or if a token file is damaged.
    """

    def rendered() -> Iterator[Rendered]:
        items = conversations() if callable(conversations) else conversations
        return (_rendered(conversation, tokenizer) for conversation in items)

    return prepare_rendered(folder, rendered, tokenizer, key)


def prepare_rendered(
    folder: Path,
    rendered: Callable[[], Iterable[Rendered]],
    tokenizer: Tokenizer,
    key: str,
) -> TokenSet:
    """Return the token files of texts that are tokens already, as prepare_conversations() does."""
    identity = {"format": FORMAT, "tokenizer": tokenizer.chat_hash, "key": key}

    def is_done() -> bool:
        meta = read_meta(folder)
        if meta is None or {name: meta.get(name) for name in identity} != identity:
            return False
        return all(files_exist(folder, entry) for entry in meta["parts"])

    if not is_done():
        with locked(folder.parent / f".{folder.name}.lock"):
            if not is_done():  # another process may have made the files meanwhile
                _write(folder, rendered(), tokenizer, identity)
                _remove_old_folders(folder)
    return open_tokens(folder)


def conversation_lengths(
    stage: str,
    conversations: ConversationSplits,
    tokenizer: Tokenizer,
    together: int = 1,
) -> np.ndarray:  # int64
    """Return the length in tokens of every training and validation conversation of a stage.

    Begin marks are not counted. If `together` is above 1, each entry is the total length of that
    many consecutive conversations, such as the two of a pair. The tokens are saved, so
    chat_rows() in train/chat_rows.py does not tokenise the conversations again.
    """
    key = conversations.key
    lengths = []
    for name, split in ((stage, conversations.train), (f"{stage}-val", conversations.val)):
        folder = conversation_folder(name, tokenizer, key)
        lengths.append(prepare_conversations(folder, split, tokenizer, key).lengths())
    return np.concatenate(lengths).reshape(-1, together).sum(axis=1)


def _write(
    folder: Path,
    rendered: Iterable[Rendered],
    tokenizer: Tokenizer,
    identity: dict[str, Any],
) -> None:
    """Write the token files and the meta.json of rendered conversations.

    Raises UserError if there are no conversations.
    """
    shutil.rmtree(folder, ignore_errors=True)
    token_bytes = tokenizer.token_bytes()
    dtype = dtype_for(tokenizer.vocab_size)
    # A begin mark is not written, since the loader puts one before every piece.
    skipped = int(tokenizer.marks_begin)
    with (
        token_writer(folder, "conversations", dtype, masked=True) as writer,
        Progress(
            tr("tokenise {folder}", folder=folder.name), None, tr("conversations")
        ) as progress,
    ):
        for batch in _batches(rendered):
            ids = [item.ids[skipped:] for item in batch]
            masks = [item.mask[skipped:] for item in batch]
            lengths = np.array([len(tokens) for tokens in ids], np.int64)
            writer.add(joined(ids, dtype), lengths, token_bytes, joined(masks, "uint8"))
            progress.advance(len(batch))
        entry = writer.finish({})
    if not entry["documents"]:
        raise UserError(
            tr(
                "there are no conversations to tokenise for {folder}; check the data of this stage",
                folder=folder,
            )
        )
    meta = {**identity, "dtype": dtype, "border": tokenizer.border, "parts": [entry]}
    write_json(folder / META, meta)


def _rendered(conversation: Conversation, tokenizer: Tokenizer) -> Rendered:
    """Return a conversation as tokens. Raises UserError, naming where it was read, if it fails."""
    try:
        return tokenizer.render(conversation)
    except UserError as failure:
        if not conversation.origin:
            raise
        raise UserError(
            tr("{origin}: {failure}", origin=conversation.origin, failure=failure)
        ) from failure


def _batches(rendered: Iterable[Rendered]) -> Iterator[list[Rendered]]:
    iterator = iter(rendered)
    while batch := list(itertools.islice(iterator, BATCH)):
        yield batch


def _remove_old_folders(folder: Path) -> None:
    """Remove the old token folders of the stage to which `folder` belongs, except the newest ones.

    A resumed run whose folder was removed tokenises its conversations again.
    """
    name = folder.name.rpartition("-")[0]
    times = {}
    for path in folder.parent.glob(f"{name}*"):
        same_stage = re.fullmatch(f"{name}(-[0-9a-f]{{12}})?", path.name)
        if same_stage and (path / META).exists():
            times[path] = (path / META).stat().st_mtime
    newest_first = sorted(times, key=lambda path: -times[path])
    for path in newest_first[NEWEST_FOLDERS:]:
        if time.time() - times[path] > UNUSED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)

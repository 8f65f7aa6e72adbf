"""The text that benchmarks read, and rows of its tokens: Python's standard library.

Every host has it, nothing is downloaded, and a version of Python always gives the same rows.
"""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import UserError, atomic_path, read_json, sha256_of, write_json
from nanochat.dataloader import epoch_order
from nanochat.tokenizer import Tokenizer

# Folders that are skipped: packages that are not Python's own, tests, and tables of numbers.
SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests __pycache__ encodings pydoc_data idlelib".split()
)
ROWS = "rows.npy"
TOKEN_BYTES = "token_bytes.npy"
ABOUT = "rows.json"
SEED = 42


@dataclass(frozen=True)
class Text:
    """Documents, and a description of them in words."""

    documents: list[str]
    about: str

    @property
    def sha256(self) -> str:
        """A hash of all documents, in their order."""
        return hashlib.sha256("\0".join(self.documents).encode()).hexdigest()


def standard_library(limit: int | None = None) -> Text:
    """Return the source files of Python's standard library, in the order of their paths.

    With a limit, return only the first files that together have at least `limit` characters.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    documents: list[str] = []
    size = 0
    for name in sorted(paths):
        if limit is not None and size >= limit:
            break
        if SKIPPED_FOLDERS.isdisjoint(name.split("/")):
            document = paths[name].read_text(encoding="utf-8", errors="replace")
            documents.append(document)
            size += len(document)
    about = f"the sources of the standard library of Python {platform.python_version()}"
    if limit is not None:
        about += f" (the first {len(documents)} files)"
    return Text(documents, about)


def make_rows(folder: Path, vocab_size: int, length: int, text: Text) -> dict[str, Any]:
    """Write rows of `length` + 1 tokens, uint16, shuffled by a fixed seed; return what they are.

    A folder that has its rows stays as it is. The folder also gets the number of bytes of each
    token. Documents follow one another without padding, each after a begin-of-sequence token.
    Raises UserError if the text is too small for one row.
    """
    if (folder / ABOUT).exists():
        return read_json(folder / ABOUT)
    tokenizer = Tokenizer.train(text.documents, vocab_size)
    encoded = tokenizer.encode_batch(text.documents)
    stream = np.concatenate([np.array([tokenizer.bos, *ids], np.uint16) for ids in encoded])
    row_tokens = length + 1
    count = len(stream) // row_tokens
    if not count:
        raise UserError(
            f"the text has {len(stream):,} tokens, fewer than one row of {row_tokens:,}; "
            "give more text"
        )
    rows = stream[: count * row_tokens].reshape(count, row_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / ROWS, rows[epoch_order(count, SEED, 0)])
    # A process of upstream has no tokenizer of ours, and needs the bytes for bits per byte.
    _save(folder / TOKEN_BYTES, tokenizer.token_bytes())
    about = {"text": text.about, "rows": count, "sha256": sha256_of(folder / ROWS)}
    write_json(folder / ABOUT, about)
    return about


def _save(path: Path, array: np.ndarray) -> None:
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array)

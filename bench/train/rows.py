"""Makes the rows that bench.train trains on: Python's standard library, tokenised with a vocabulary trained on it.

Every machine that can run the benchmark has this text, so nothing is downloaded. A version of Python always gives the
same rows.
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

# Folders that are left out: packages that are not Python's own, tests, and tables of numbers or long strings.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "__pycache__",
    "encodings",
    "pydoc_data",
    "idlelib",
}
ROWS, TOKEN_BYTES, ABOUT, SEED = "rows.npy", "token_bytes.npy", "rows.json", 42


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
    """The source files of Python's standard library, docstrings included, in the order of their paths.

    With a limit, only the first files that together have at least `limit` characters.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents, size = [], 0
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        if limit is not None and size >= limit:
            break
        if not LEFT_OUT & set(path.relative_to(folder).parts):
            documents.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(documents[-1])
    part = "" if limit is None else f" (the first {len(documents)} files)"
    return Text(
        documents,
        f"the sources of the standard library of Python {platform.python_version()}{part}",
    )


def make_rows(folder: Path, vocab_size: int, length: int, text: Text) -> dict[str, Any]:
    """Write rows of `length` + 1 tokens, uint16 (rows, length + 1), in an order shuffled by a fixed seed.

    The folder also gets a description of the rows, the tokenizer, and the number of bytes of each token. The documents
    follow one another without padding, each after a begin-of-sequence token; the last, partial row is dropped.
    UserError if the text is too small for the vocabulary or for one row.
    """
    tokenizer = Tokenizer.train(text.documents, vocab_size)
    encoded = tokenizer.encode_batch(text.documents)
    stream = np.concatenate([np.array([tokenizer.bos, *ids], np.uint16) for ids in encoded])
    count = len(stream) // (length + 1)
    if not count:
        raise UserError(
            f"the text has {len(stream):,} tokens, fewer than one row of {length + 1:,}; give more text"
        )
    rows = stream[: count * (length + 1)].reshape(count, length + 1)[epoch_order(count, SEED, 0)]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    with atomic_path(folder / ROWS) as temporary, open(temporary, "wb") as file:
        np.save(file, rows)
    with atomic_path(folder / TOKEN_BYTES) as temporary, open(temporary, "wb") as file:
        np.save(
            file, tokenizer.token_bytes()
        )  # upstream's process has no tokenizer of ours, and needs these for bits per byte
    about = {
        "text": text.about,
        "text_sha256": text.sha256,
        "characters": sum(map(len, text.documents)),
        "rows": count,
        "row_tokens": length + 1,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer.hash,
        "sha256": sha256_of(folder / ROWS),
    }
    write_json(folder / ABOUT, about)
    return about


def check_rows(folder: Path, vocab_size: int, length: int) -> dict[str, Any]:
    """The description of a folder's rows; UserError (code 2) if they are missing, damaged, or of another shape."""
    make = "make them with --make-rows DIR"
    if not all((folder / name).exists() for name in (ABOUT, ROWS, TOKEN_BYTES)):
        raise UserError(f"there are no rows in {folder}; {make}", exit_code=2)
    about = read_json(folder / ABOUT)
    given, wanted = (about["row_tokens"], about["vocab_size"]), (length + 1, vocab_size)
    if given != wanted:
        raise UserError(
            f"the rows in {folder} must have {wanted[0]} tokens of a vocabulary of {wanted[1]:,}, got {given[0]} of "
            f"{given[1]:,}; {make}",
            exit_code=2,
        )
    if sha256_of(folder / ROWS) != about["sha256"]:
        raise UserError(
            f"{folder / ROWS} does not match its checksum in {ABOUT}; {make}", exit_code=2
        )
    return about

"""Byte pair encoding with whichever rustbpe is installed, and vocabularies in the formats of other libraries.

This repository's rustbpe both trains and encodes. The published rustbpe only trains; then tiktoken encodes. Both give
the same tokens.
"""

import base64
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import tiktoken

from nanochat.common import UserError, log

BYTES = 256


class Encoder(Protocol):
    """Turns text into tokens. A special token that is spelled out in a text is encoded as ordinary text."""

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]: ...
    def encode_joined(self, texts: Sequence[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
        """All tokens in one array of an unsigned type, text after text, and the number of tokens of each text, int64
        (texts,)."""
        ...


def rustbpe() -> Any:
    """The installed rustbpe module. UserError if none is installed."""
    try:
        import rustbpe

        rustbpe.Tokenizer  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018  # no stubs in 0.1.0
        return rustbpe
    except (
        ImportError,
        AttributeError,
    ) as missing:  # AttributeError: in a checkout, `import` finds the source folder
        raise UserError(
            f"rustbpe, which trains tokenizers, is not installed for {sys.executable}. Install everything with "
            "`bash setup_env.sh` and `source .venv/bin/activate`, then type the same command again."
        ) from missing


@cache
def own() -> Any | None:
    """The installed rustbpe if it is this repository's, which can encode; otherwise None."""
    try:
        module = rustbpe()
    except UserError:
        return None  # `train` reports this; encoding needs only tiktoken
    return module if hasattr(module.Tokenizer, "from_ranks") else None


def train(
    texts: Iterable[str],
    tokens: int,
    regex: str,
    progress: Callable[[str, int], None] | None = None,
) -> list[bytes]:
    """Learn up to `tokens` tokens, including the 256 single bytes, and return their bytes in the order learned."""
    trainer = rustbpe().Tokenizer()
    if own() is None:  # said here, once in a run, and not by every stage that encodes
        log(
            "the published rustbpe is installed: training takes about ten times as long, and tiktoken encodes"
        )
    more = {"progress": progress} if progress is not None and own() is not None else {}
    trainer.train_from_iterator(texts, tokens, pattern=regex, **more)
    ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    return [bytes(token) for token, _ in ranks]


def encoder(ranks: Sequence[bytes], regex: str) -> Encoder:
    """An encoder for a vocabulary: `ranks[i]` holds the bytes of token i. ValueError if merging pairs of bytes cannot
    produce these tokens."""
    module = own()
    return Tiktoken(ranks, regex) if module is None else Own(module, ranks, regex)


class Own:
    """Encodes with this repository's rustbpe."""

    def __init__(self, module: Any, ranks: Sequence[bytes], regex: str):
        self._tokenizer = module.Tokenizer.from_ranks(list(ranks), regex)

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except UnicodeEncodeError:
            return self._tokenizer.encode(whole(text))

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        return self._batch(self._tokenizer.batch_encode, texts, threads)

    def encode_joined(self, texts: Sequence[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, ends = self._batch(self._tokenizer.batch_encode_numpy, texts, threads)
        return tokens, np.diff(ends.astype(np.int64), prepend=0)

    def _batch(
        self, encode: Callable[[Sequence[str], int], Any], texts: Sequence[str], threads: int
    ) -> Any:
        try:
            return encode(texts, threads)
        except UnicodeEncodeError:
            return encode([whole(text) for text in texts], threads)


class Tiktoken:
    """Encodes with tiktoken."""

    def __init__(self, ranks: Sequence[bytes], regex: str):
        self._encoding = tiktoken.Encoding("nanochat", **for_tiktoken(ranks, regex, {}))

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)

    def encode_joined(self, texts: Sequence[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
        lists = self.encode_batch(texts, threads)
        return joined(lists, "uint32"), np.fromiter(map(len, lists), np.int64, len(lists))


def joined(lists: Sequence[Sequence[int]], dtype: str) -> np.ndarray:
    """Lists of numbers joined into one array."""
    return np.fromiter(itertools.chain.from_iterable(lists), dtype, sum(map(len, lists)))


def whole(text: str) -> str:
    """A text in which U+FFFD replaces each half of a surrogate pair, as in tiktoken."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- formats of other libraries ------------------------------------------------------------------------


def for_tiktoken(ranks: Sequence[bytes], regex: str, specials: dict[str, int]) -> dict[str, Any]:
    """The arguments of tiktoken.Encoding, other than the name."""
    numbers = {token: rank for rank, token in enumerate(ranks)}
    return {"pat_str": regex, "mergeable_ranks": numbers, "special_tokens": specials}


def tiktoken_file(ranks: Sequence[bytes]) -> str:
    """The content of a tiktoken file: one line per token, with its bytes in base64 and its number."""
    return "".join(
        f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)
    )


def merges(ranks: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair of tokens that was merged into each token after the first 256. ValueError if there is no such pair."""
    numbers = {token: rank for rank, token in enumerate(ranks)}
    found = []
    for rank, token in enumerate(ranks):
        if rank < BYTES:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:  # apply the earlier merges
            pairs = [(numbers.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
            earliest, i = min(pairs)
            if earliest >= rank:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) != 2 or not all(part in numbers for part in parts):
            raise ValueError(
                f"token {rank} is not made of two earlier tokens: the vocabulary is damaged"
            )
        found.append((parts[0], parts[1]))
    return found


def letters_for_bytes() -> list[str]:
    """The letter for each byte in Hugging Face's byte-level vocabularies: printable bytes stand for themselves, other
    bytes get letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def huggingface_json(ranks: Sequence[bytes], regex: str, specials: dict[str, int]) -> str:
    """The content of a tokenizer.json for the tokenizers library; `specials` maps spellings to token numbers."""
    letters = letters_for_bytes()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    def byte_level(**more: bool) -> dict[str, Any]:
        return {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
            **more,
        }

    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, **flags} for text, number in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level()]},
        "post_processor": None,
        "decoder": byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled(token): rank for rank, token in enumerate(ranks)},
            "merges": [[spelled(left), spelled(right)] for left, right in merges(ranks)],
        },
    }
    return json.dumps(content, ensure_ascii=False)

"""Byte pair encoding by whichever rustbpe is installed, and the forms in which others take a vocabulary.

This repository's rustbpe trains and encodes; the published one trains, and tiktoken encodes. The tokens are the same.
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
    """Text to tokens. Spellings of special tokens are text like any other."""

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]: ...
    def encode_joined(self, texts: Sequence[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all texts one after another, of an unsigned type, and how many each has, int64 (texts,)."""
        ...


def rustbpe() -> Any:
    """The installed module. UserError where there is none."""
    try:
        import rustbpe

        rustbpe.Tokenizer  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018  # no stubs in 0.1.0
        return rustbpe
    except (ImportError, AttributeError) as missing:  # without it, `import` in a checkout finds its source folder
        raise UserError(
            f"rustbpe, which trains tokenizers, is not installed for {sys.executable}. Set everything up with "
            "`bash setup_env.sh` and `source .venv/bin/activate`, then type the same command again."
        ) from missing


@cache
def own() -> Any | None:
    """The installed rustbpe if it is this repository's, which encodes too. The one place that decides; told once."""
    try:
        module = rustbpe()
    except UserError:
        return None  # whoever trains is told
    if hasattr(module.Tokenizer, "from_ranks"):
        return module
    log("rustbpe is the published one: training takes some ten times as long, and tiktoken encodes")
    return None


def train(
    texts: Iterable[str], tokens: int, regex: str, progress: Callable[[str, int], None] | None = None
) -> list[bytes]:
    """Learn up to `tokens` tokens, the 256 bytes included; their bytes in the order learned."""
    trainer = rustbpe().Tokenizer()
    more = {"progress": progress} if progress is not None and own() is not None else {}
    trainer.train_from_iterator(texts, tokens, pattern=regex, **more)
    ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    return [bytes(token) for token, _ in ranks]


def encoder(ranks: Sequence[bytes], regex: str) -> Encoder:
    """An encoder of the tokens `ranks`, by number. ValueError if no byte pair encoding gives them."""
    module = own()
    return Tiktoken(ranks, regex) if module is None else Own(module, ranks, regex)


class Own:
    """By this repository's rustbpe."""

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

    def _batch(self, encode: Callable[[Sequence[str], int], Any], texts: Sequence[str], threads: int) -> Any:
        try:
            return encode(texts, threads)
        except UnicodeEncodeError:
            return encode([whole(text) for text in texts], threads)


class Tiktoken:
    """By tiktoken."""

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
    """Lists of numbers, one after another."""
    return np.fromiter(itertools.chain.from_iterable(lists), dtype, sum(map(len, lists)))


def whole(text: str) -> str:
    """A text with U+FFFD for each half of a surrogate pair, as tiktoken does it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- forms for others -----------------------------------------------------------------------------------


def for_tiktoken(ranks: Sequence[bytes], regex: str, specials: dict[str, int]) -> dict[str, Any]:
    """What tiktoken.Encoding takes beside a name."""
    numbers = {token: rank for rank, token in enumerate(ranks)}
    return {"pat_str": regex, "mergeable_ranks": numbers, "special_tokens": specials}


def tiktoken_file(ranks: Sequence[bytes]) -> str:
    """The tokens as tiktoken keeps them in files: a line with base64 and number for each."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))


def merges(ranks: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The two tokens that each token beyond the bytes is made of. ValueError if no byte pair encoding gives them."""
    numbers = {token: rank for rank, token in enumerate(ranks)}
    found = []
    for rank, token in enumerate(ranks):
        if rank < BYTES:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:  # merge what was learned before
            pairs = [(numbers.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
            earliest, i = min(pairs)
            if earliest >= rank:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) != 2 or not all(part in numbers for part in parts):
            raise ValueError(f"token {rank} is not made of two earlier ones: the vocabulary is damaged")
        found.append((parts[0], parts[1]))
    return found


def letters_for_bytes() -> list[str]:
    """How Hugging Face's byte-level vocabularies spell bytes: printable ones as themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def huggingface_json(ranks: Sequence[bytes], regex: str, specials: dict[str, int]) -> str:
    """The content of a tokenizer.json for the tokenizers library; `specials` maps spellings to numbers."""
    letters = letters_for_bytes()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    def byte_level(**more: bool) -> dict[str, Any]:
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False, **more}

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **flags} for text, number in specials.items()],
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

"""Byte pair encoding with the installed rustbpe, and vocabularies in other libraries' formats.

This repository's rustbpe both trains and encodes. The published rustbpe only trains, and tiktoken
then encodes. The tokens are the same either way.
"""

import base64
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import tiktoken

from nanochat.common import UserError, log, tr

BYTES = 256


class Encoder(Protocol):
    """Turns text into tokens.

    Text that spells out a special token is encoded as ordinary text.
    """

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]: ...
    def encode_joined(self, texts: Sequence[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all texts in one array, and the number of tokens of each text.

        The tokens are uint16 or uint32. The counts are int64 (texts,).
        """
        ...


def installed_rustbpe() -> Any:
    """Return the installed rustbpe module, or raise UserError if there is none."""
    try:
        import rustbpe

        # In a checkout, `import` finds the source folder, which raises AttributeError here.
        rustbpe.Tokenizer  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018  # no stubs
        return rustbpe
    except (ImportError, AttributeError) as missing:
        raise UserError(
            tr(
                "rustbpe, which trains tokenizers, is not installed for {executable}. "
                "Install everything with `bash setup_env.sh` and `source "
                ".venv/bin/activate`, then type the same command again.",
                executable=sys.executable,
            )
        ) from missing


@cache
def encoding_rustbpe() -> Any | None:
    """Return this repository's rustbpe, which can encode, or None if it is not installed."""
    try:
        module = installed_rustbpe()
    except UserError:
        return None  # `train` reports this; encoding needs only tiktoken
    return module if hasattr(module.Tokenizer, "from_ranks") else None


def checked(texts: Iterable[str]) -> Iterator[str]:
    """Yield training texts unchanged, after checking each of them.

    Raises UserError if one is not a string or not valid Unicode.
    """
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(
                tr(
                    "training texts must be strings, but document {number} is {kind}. "
                    "Convert or remove it.",
                    number=number,
                    kind=type(text).__name__,
                )
            )
        _check_unicode(text, f"document {number}")
        yield text


def _check_unicode(text: str, name: str) -> None:
    """Raise UserError if a training text holds half of a surrogate pair."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        raise UserError(
            tr(
                "training text must be valid Unicode, but {name} has half of a surrogate "
                "pair (U+{code:04X}) at character {start}. Remove that character and try "
                "again.",
                name=name,
                code=ord(text[failure.start]),
                start=failure.start,
            )
        ) from None


def train(
    texts: Iterable[str],
    tokens: int,
    regex: str,
    progress: Callable[[str, int], None] | None = None,
) -> list[bytes]:
    """Train a vocabulary on `texts`, and return the bytes of its tokens, in order of token ID.

    The vocabulary has at most `tokens` tokens, beginning with the 256 single bytes. Raises
    UserError if no rustbpe is installed.
    """
    trainer = installed_rustbpe().Tokenizer()
    options: dict[str, Any] = {}
    if encoding_rustbpe() is None:  # logged once in a run, not by every stage that encodes
        log(
            tr(
                "the published rustbpe is installed: training takes about ten times as long, "
                "and tiktoken encodes"
            )
        )
    elif progress is not None:
        options["progress"] = progress
    trainer.train_from_iterator(texts, tokens, pattern=regex, **options)
    ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    return [bytes(token) for token, _ in ranks]


def encoder(ranks: Sequence[bytes], regex: str) -> Encoder:
    """Return an encoder for the vocabulary in which `ranks[i]` holds the bytes of token i.

    This repository's rustbpe raises ValueError if merging pairs of bytes cannot produce these
    tokens; tiktoken does not check that.
    """
    module = encoding_rustbpe()
    if module is None:
        return TiktokenEncoder(ranks, regex)
    return RustEncoder(module, ranks, regex)


class RustEncoder:
    """Encodes text with this repository's rustbpe."""

    def __init__(
        self,
        module: Any,
        ranks: Sequence[bytes],
        regex: str,
    ):
        self._tokenizer = module.Tokenizer.from_ranks(list(ranks), regex)

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except UnicodeEncodeError:
            return self._tokenizer.encode(replace_surrogates(text))

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        return self._batch(self._tokenizer.batch_encode, texts, threads)

    def encode_joined(self, texts: Sequence[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, ends = self._batch(self._tokenizer.batch_encode_numpy, texts, threads)
        return tokens, np.diff(ends.astype(np.int64), prepend=0)

    def _batch(
        self,
        encode: Callable[[Sequence[str], int], Any],
        texts: Sequence[str],
        threads: int,
    ) -> Any:
        try:
            return encode(texts, threads)
        except UnicodeEncodeError:
            return encode([replace_surrogates(text) for text in texts], threads)


class TiktokenEncoder:
    """Encodes text with tiktoken."""

    def __init__(self, ranks: Sequence[bytes], regex: str):
        self._encoding = tiktoken.Encoding("nanochat", **tiktoken_arguments(ranks, regex, {}))

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)

    def encode_joined(self, texts: Sequence[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
        lists = self.encode_batch(texts, threads)
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return joined(lists, "uint32"), lengths


def joined(lists: Sequence[Sequence[int]], dtype: str) -> np.ndarray:
    """Return the integers of all lists in one array, one list after another."""
    total = sum(map(len, lists))
    return np.fromiter(itertools.chain.from_iterable(lists), dtype, total)


def replace_surrogates(text: str) -> str:
    """Return a text with each unpaired surrogate replaced by U+FFFD, as tiktoken does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- formats of other libraries ------------------------------------------------------------------


def tiktoken_arguments(
    ranks: Sequence[bytes],
    regex: str,
    specials: dict[str, int],
) -> dict[str, Any]:
    """Return the keyword arguments for tiktoken.Encoding, except for `name`."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    return {"pat_str": regex, "mergeable_ranks": rank_of, "special_tokens": specials}


def tiktoken_file(ranks: Sequence[bytes]) -> str:
    """Return the content of a tiktoken file: a line per token, with its base64 bytes and its ID."""
    lines = []
    for rank, token in enumerate(ranks):
        lines.append(f"{base64.b64encode(token).decode()} {rank}\n")
    return "".join(lines)


def merges(ranks: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Return, for each token after the first 256, the two tokens whose merge produces it.

    Raises ValueError if merging earlier tokens does not produce a token.
    """
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    pairs = []
    for rank, token in enumerate(ranks[BYTES:], start=BYTES):
        parts = _apply_merges_before(rank, token, rank_of)
        if len(parts) != 2 or not all(half in rank_of for half in parts):
            raise ValueError(
                tr(
                    "token {rank} is not made of two earlier tokens: the vocabulary is damaged",
                    rank=rank,
                )
            )
        pairs.append((parts[0], parts[1]))
    return pairs


def _apply_merges_before(
    rank: int,
    token: bytes,
    rank_of: dict[bytes, int],
) -> list[bytes]:
    """Apply the merges before `rank` to the bytes of `token`, and return the remaining parts.

    Merging stops when two parts remain or no such merge applies.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        candidates = []
        for i in range(len(parts) - 1):
            candidates.append((rank_of.get(parts[i] + parts[i + 1], rank), i))
        earliest, i = min(candidates)
        if earliest >= rank:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def letters_for_bytes() -> list[str]:
    """Return the characters that stand for bytes 0 to 255 in Hugging Face's byte-level BPE.

    Visible Latin-1 characters stand for themselves, and other bytes get characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare_letters = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare_letters)) for byte in range(BYTES)]


def huggingface_json(
    ranks: Sequence[bytes],
    regex: str,
    specials: dict[str, int],
) -> str:
    """Return the content of a tokenizer.json for Hugging Face's tokenizers library.

    `specials` maps each special token to its ID.
    """
    letters = letters_for_bytes()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    added_tokens = [{"id": number, "content": text, **flags} for text, number in specials.items()]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
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
            "merges": [[spelled(first), spelled(second)] for first, second in merges(ranks)],
        },
    }
    return json.dumps(content, ensure_ascii=False)

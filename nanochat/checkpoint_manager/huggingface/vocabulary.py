"""Reads tokenizer.json: its vocabulary, its special tokens, and which of the known kinds it is."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.huggingface.spm import (
    SentencePieces,
    is_sentence_pieces,
    open_tokenizer,
    unknown_step,
)
from nanochat.common import UserError, read_json, tr, warn

# How many times as long a normalizer may make a text: at some length, the library ends the process.
MOST_GROWTH = 1000
# By kind of normalizer; NFKC makes 18 letters of one.
GROWTH = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "Strip": 1,
    "StripAccents": 1,
    "Nmt": 1,
    "BertNormalizer": 4,
    "ByteLevel": 4,
    "Precompiled": 18,
}


@dataclass(frozen=True)
class Vocabulary:
    """What tokenizer.json says: the library's tokenizer, and the added and the special tokens.

    Both dicts go from spelling to ID. `sentence_pieces` is None for a byte-level vocabulary. `last`
    is the largest ID.
    """

    tokenizer: Any
    added: dict[str, int]
    specials: dict[str, int]
    sentence_pieces: SentencePieces | None
    last: int


def read_vocabulary(path: Path, rows: int, chats: str, ends: Collection[str | int]) -> Vocabulary:
    """Return the vocabulary in a tokenizer.json, for an embedding with `rows` rows.

    A special token that is spelled out in a text is ordinary text for its tokenizer. The added
    tokens among `ends`, spellings and IDs, are special even if the file says otherwise. Some models
    have added tokens without a row, such as one for padding in copies of Llama 2. They are left out
    with a warning, unless `chats`, what makes chats of texts, spells them. Raises UserError if the
    file is damaged or of an unknown kind, or if a token lacks a row.
    """
    content = read_json(path)
    tokenizer: Any = None
    pieces = None
    left_out: list[str] = []
    try:
        content = {**content, "added_tokens": _with_special_ends(content["added_tokens"], ends)}
        left_out = [token["content"] for token in content["added_tokens"] if token["id"] >= rows]
        if not any(text in chats for text in left_out):
            content = {**content, "added_tokens": added_with_rows(content, rows)}
        added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        special_texts = {token["content"] for token in content["added_tokens"] if token["special"]}
        growth = _growth(content.get("normalizer"))
        unknown = _unknown_kind(content)
        if not unknown and is_sentence_pieces(content):
            pieces = SentencePieces(content)
            tokenizer = pieces.tokenizer
        elif not unknown:
            tokenizer = open_tokenizer(content)
    except Exception as failure:  # the library raises Exception itself
        raise UserError(
            tr(
                "{path} is damaged: {failure}. Copy the model again from its source",
                path=path,
                failure=failure,
            )
        ) from failure
    if unknown:
        raise UserError(
            tr(
                "{path} is a vocabulary of kind {kind}; only byte-level ones and those of "
                "SentencePiece with byte fallback are known. Use another model",
                path=path,
                kind=unknown,
            )
        )
    if growth > MOST_GROWTH:
        raise UserError(
            tr(
                "{path} has a normalizer that makes a text up to {growth:.3g} times as "
                "long; at most {most_growth} times is accepted. Use another model",
                path=path,
                growth=growth,
                most_growth=MOST_GROWTH,
            )
        )
    last = max(tokenizer.get_vocab().values())  # slow, since it copies the vocabulary
    if last >= rows:
        raise UserError(
            tr(
                "{path} has a token {last:,}, and the embedding of the model has only "
                "{vocab_size:,} rows: they do not belong together. Copy the model "
                "again from its source",
                path=path,
                last=last,
                vocab_size=rows,
            )
        )
    if left_out:
        warn(
            tr(
                "{path} has tokens without a row in the model's embedding, which are left out: "
                "{tokens}",
                path=path,
                tokens=", ".join(left_out),
            )
        )
    specials = {text: added[text] for text in special_texts}
    return Vocabulary(tokenizer, added, specials, pieces, last)


def _with_special_ends(
    tokens: Sequence[Mapping[str, Any]], ends: Collection[str | int]
) -> list[dict[str, Any]]:
    """Return the added tokens of a tokenizer.json, of which those among `ends` are special."""
    return [
        {**token, "special": token["special"] or token["content"] in ends or token["id"] in ends}
        for token in tokens
    ]


def added_with_rows(content: Mapping[str, Any], rows: int) -> list[Mapping[str, Any]]:
    """Return the added tokens of a tokenizer.json that have one of the rows of an embedding."""
    return [token for token in content["added_tokens"] if token["id"] < rows]


def _unknown_kind(content: Mapping[str, Any]) -> str:
    """Return what is unknown about a vocabulary, or an empty text."""
    kind = content["decoder"]["type"]
    if is_sentence_pieces(content):
        step = unknown_step(content)
        return "" if step is None else f"{kind}, {step}"
    return "" if kind == "ByteLevel" else kind


def _growth(normalizer: Any) -> float:
    """Return how many times as long a normalizer of tokenizer.json makes a text at most.

    Raises KeyError if its kind is unknown.
    """
    if normalizer is None:
        return 1.0
    kind = normalizer["type"]
    if kind == "Sequence":
        return math.prod(map(_growth, normalizer["normalizers"]))
    if kind == "Prepend":
        return 1.0 + len(normalizer["prepend"])
    if kind == "Replace":
        # A regular expression may match nothing, between any two letters.
        replaced = len(normalizer["pattern"].get("String", ""))
        return max(
            1.0,
            len(normalizer["content"]) / replaced if replaced else 1.0 + len(normalizer["content"]),
        )
    return float(GROWTH[kind])

"""Describes vocabularies of SentencePiece to llama.cpp.

llama.cpp joins the two neighbours whose joined piece has the highest score. A tokenizer.json lists
pairs instead, the first one first. Both orders are the same if the list has every pair of pieces
that are a third piece together, and the pairs of a piece next to each other. Where the same piece
could be joined at overlapping places, as in "aaa", llama.cpp takes the leftmost; the tests compare
the tokens of many texts.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from nanochat.checkpoint_manager.huggingface.spm import BYTE, SPACE
from nanochat.common import UserError, log, tr
from nanochat.export.gguf import Value

# llama.cpp's codes for the kinds of tokens, beside those in llama_vocabulary.py.
UNKNOWN = 2
SINGLE_BYTE = 6
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def pieces(content: Mapping[str, Any], kinds: list[int], advice: str) -> dict[str, Value]:
    """Return the GGUF metadata of the content of a tokenizer.json, and set `kinds` of its tokens.

    `kinds` holds llama.cpp's code of each token, in which those of bytes and of the unknown token
    are set here. Raises UserError (exit code 2), with `advice`, if llama.cpp would make other tokens.
    """
    model = content["model"]
    values: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": _scores(content, len(kinds), advice),
        "tokenizer.ggml.add_space_prefix": _puts_space_in_front(content, advice),
    }
    for spelling, token_id in model["vocab"].items():
        if BYTE.fullmatch(spelling):
            kinds[token_id] = SINGLE_BYTE
    if model.get("unk_token") is not None:
        unknown_id = model["vocab"][model["unk_token"]]
        kinds[unknown_id] = UNKNOWN
        values["tokenizer.ggml.unknown_token_id"] = unknown_id
    return values


def refusal(why: str, advice: str) -> UserError:
    """Return the error (exit code 2) that llama.cpp would make other tokens, and why."""
    return UserError(
        tr(
            "llama.cpp would split texts into other tokens than this model was trained on: {why}. "
            "{advice}",
            why=why,
            advice=advice,
        ),
        exit_code=2,
    )


def _scores(content: Mapping[str, Any], row_count: int, advice: str) -> list[float]:
    """Return the score of each token: 0 for tokens that are never joined, then -1, -2 and so on."""
    vocab = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    ordinary = {text for text in vocab if text not in special and not BYTE.fullmatch(text)}
    pairs = {
        tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair): None
        for pair in content["model"]["merges"]
    }
    scores = [0.0] * row_count
    joined = [left + right for left, right in pairs]
    ranked = list(dict.fromkeys(joined))
    changes = sum(text != following for text, following in itertools.pairwise(joined))
    if changes > len(ranked) - 1:
        raise refusal(tr("the merges of some piece are not next to each other"), advice)
    for rank, text in enumerate(ranked, start=1):
        scores[vocab[text]] = -float(rank)
    for text in ordinary:
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if ordinary.issuperset(pair) and pair not in pairs:
                why = tr("its merges lack {left!r} with {right!r}", left=pair[0], right=pair[1])
                raise refusal(why, advice)
    return scores


def _puts_space_in_front(content: Mapping[str, Any], advice: str) -> bool:
    """Return whether llama.cpp should put a space in front of every text after a special token."""
    normalizer = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    for step in steps:
        if step not in (PREPEND, REPLACE):
            raise refusal(tr("it normalises texts by {normalizer}", normalizer=step), advice)
    splits = content.get("pre_tokenizer")
    if not splits:
        return PREPEND in steps
    if splits["type"] != "Metaspace" or splits.get("split", True):
        raise refusal(tr("it knows no such split as {split}", split=splits), advice)
    if splits.get("prepend_scheme") == "first":
        log(
            tr(
                "llama.cpp puts a space in front of every text or of none, and this model only of "
                "the first one: chats get the right tokens, and a text without a special token in "
                "front lacks its space"
            )
        )
    return splits.get("prepend_scheme", "always") == "always"

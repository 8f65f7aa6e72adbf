"""Bounds how much longer the normalizer of a published tokenizer makes a text."""

import math
from typing import Any

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


def growth_of(normalizer: Any) -> float:
    """Return how many times as long a normalizer of tokenizer.json makes a text at most.

    Raises KeyError if its kind is unknown.
    """
    if normalizer is None:
        return 1.0
    kind = normalizer["type"]
    if kind == "Sequence":
        return math.prod(map(growth_of, normalizer["normalizers"]))
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

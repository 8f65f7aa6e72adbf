"""Vocabularies in the manner of SentencePiece, as of Llama 2, TinyLlama and Mistral 7B.

A mark stands for each space, and a character that the vocabulary lacks becomes its bytes in UTF-8. Texts
may get a space in front, so that a word has the same tokens at the beginning of a text as later. The
library `tokenizers` applies the merges; this file knows where a text gets that space.
"""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from nanochat.checkpoint_manager.huggingface.segments import Segment

SPACE = "▁"  # stands for a space in the spelling of a token
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # the spelling of a token that is one byte
SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BYTES = {"type": "ByteFallback"}
DECODERS = (SPACES, BYTES, {"type": "Fuse"}, FIRST_SPACE)
PRE_TOKENIZERS = ("Metaspace", "Split")


class SentencePieces:
    """A vocabulary in the manner of SentencePiece, read from the content of tokenizer.json.

    `strips_space` says whether decoding leaves out a space at the beginning of a text.
    """

    def __init__(self, content: Mapping[str, Any]):
        """Prepare two tokenizers: with the space in front of texts, and without.

        All steps of the file must be known, see unknown_step(). Raises Exception, as the library
        does, if the file is damaged.
        """
        safe = {**content, "model": _without_special_merges(content)}
        pre_tokenizer = content.get("pre_tokenizer") or {}
        self.strips_space = FIRST_SPACE in content["decoder"]["decoders"]
        self._begins_texts = open_tokenizer(safe)
        self._continues = open_tokenizer(_without_space_in_front(safe))
        only_first = pre_tokenizer.get("prepend_scheme") == "first"
        self._follows_marks = self._continues if only_first else self._begins_texts

    @property
    def tokenizer(self) -> Any:
        """The library's tokenizer of whole texts."""
        return self._begins_texts

    @staticmethod
    def spelled(text: str) -> bytes:
        """Return the bytes of a token, given its spelling in the vocabulary."""
        byte = BYTE.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace(SPACE, " ").encode()

    def encode_after(self, text: str, mark: bool) -> list[int]:
        """Return the tokens of a text that follows a special token if `mark`, else other text."""
        tokenizer = self._follows_marks if mark else self._continues
        return _encoded(tokenizer, text).ids

    def rendered(self, segments: Iterable[Segment]) -> tuple[list[int], list[int]]:
        """Return the tokens of a rendered conversation, and a mask of those that are trained.

        The text between two special tokens is encoded as a whole. A token is trained if any of its
        characters is: the first one of a reply often begins with a space of the template.
        """
        ids: list[int] = []
        mask: list[int] = []
        tokenizer = self._begins_texts
        for is_text, run in groupby(segments, lambda segment: segment.token is None):
            if is_text:
                text = ""
                trained: list[bool] = []  # for each character of the text
                for segment in run:
                    text += segment.text
                    trained += [segment.trained] * len(segment.text)
                encoding = _encoded(tokenizer, text)
                ids += encoding.ids
                mask += [int(any(trained[start:end])) for start, end in encoding.offsets]
            else:
                for segment in run:
                    assert segment.token is not None
                    ids.append(segment.token)
                    mask.append(int(segment.trained))
            tokenizer = self._follows_marks
        return ids, mask


def is_sentence_pieces(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json is in the manner of SentencePiece."""
    return BYTES in content["decoder"].get("decoders", ())


def unknown_step(content: Mapping[str, Any]) -> Any:
    """Return the first part of such a tokenizer.json that is not known, or None if all are."""
    model = content["model"]
    if model["type"] != "BPE" or not model["byte_fallback"]:
        return model["type"]
    pre_tokenizer = content.get("pre_tokenizer")
    if pre_tokenizer and pre_tokenizer["type"] not in PRE_TOKENIZERS:
        return pre_tokenizer
    return next((step for step in content["decoder"]["decoders"] if step not in DECODERS), None)


def _without_special_merges(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model without merges that would make a special token of what a user spells."""
    special = {token["content"] for token in content["added_tokens"] if token["special"]}

    def merged(pair: Any) -> str:
        return pair.replace(" ", "") if isinstance(pair, str) else "".join(pair)

    model = content["model"]
    merges = [pair for pair in model["merges"] if merged(pair) not in special]
    return {**model, "merges": merges}


def _without_space_in_front(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer.json that never puts a space in front of a text."""
    normalizer = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    steps = [step for step in steps if step["type"] != "Prepend"]
    pre_tokenizer = content.get("pre_tokenizer")
    if pre_tokenizer and pre_tokenizer["type"] == "Metaspace":
        pre_tokenizer = {**pre_tokenizer, "prepend_scheme": "never"}
        pre_tokenizer.pop("add_prefix_space", None)  # the name of older files for `prepend_scheme`
    return {
        **content,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": pre_tokenizer,
    }


def open_tokenizer(content: Mapping[str, Any]) -> Any:
    """Return the library's tokenizer, for which spelled special tokens are ordinary text."""
    import tokenizers  # not at the top: only published models need it

    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encoded(tokenizer: Any, text: str) -> Any:
    """Return the library's encoding of a text, with "?" for half of a surrogate pair."""
    valid_text = text.encode("utf-8", "replace").decode()
    return tokenizer.encode(valid_text, add_special_tokens=False)

"""Every bad input to rustbpe raises a clear exception, and leaves the tokenizer unchanged."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rustbpe

from tests.support.rustbpe_texts import GPT4, trained

SPACES_MANY = " " * 2_000_000 + "x"  # more than the regular expression engine can backtrack over


def interrupted() -> Iterator[str]:
    yield "abab"
    raise KeyError("mine")


BAD_TRAINING: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "uncovered": (lambda: ["ab", "汉字 cd"], {"pattern": r"\w+"}, ValueError, r"item 1 .*character 2 \(\" cd\"\)"),
    "empty pattern": (lambda: ["ab"], {"pattern": ""}, ValueError, "does not cover the text.*character 0"),
    "broken pattern": (lambda: ["ab"], {"pattern": "(a"}, ValueError, "valid regular expression.*parenthesis"),
    "hopeless pattern": (lambda: [SPACES_MANY], {"pattern": r"\s+(?!\S)|\s+|\S"}, ValueError, "item 0 .*could not be"),
    "pattern bytes": (lambda: ["ab"], {"pattern": b"a"}, TypeError, "str"),
    "pattern surrogate": (lambda: ["ab"], {"pattern": "\ud800"}, UnicodeEncodeError, "position 0"),
    "small vocabulary": (lambda: ["ab"], {"vocab_size": 255}, ValueError, "vocab_size .*from 256 .*got 255"),
    "negative vocabulary": (lambda: ["ab"], {"vocab_size": -1}, ValueError, "got -1"),
    "huge vocabulary": (lambda: ["ab"], {"vocab_size": 2**70}, ValueError, f"got {2**70}"),
    "vocabulary text": (lambda: ["ab"], {"vocab_size": "300"}, TypeError, "vocab_size .*int, got str"),
    "no buffer": (lambda: ["ab"], {"buffer_size": 0}, ValueError, "buffer_size must be at least 1, got 0"),
    "negative buffer": (lambda: ["ab"], {"buffer_size": -5}, ValueError, "got -5"),
    "bytes": (lambda: ["ab", b"ab"], {}, TypeError, "item 1 of iterator must be str, got bytes"),
    "None": (lambda: ["ab", "c", None], {"buffer_size": 1}, TypeError, "item 2 .*got NoneType"),
    "one text": (lambda: "abab", {}, TypeError, r"iterable of str, got one str: give \[text\]"),
    "no iterable": (lambda: 5, {}, TypeError, "not iterable"),
    "surrogate": (lambda: ["ab", "汉\udc80"], {}, UnicodeEncodeError, r"position 1: .*\(item 1 of iterator\)"),
    "its own exception": (interrupted, {}, KeyError, "mine"),
}


@pytest.mark.parametrize("name", BAD_TRAINING)
def test_bad_training_input_raises_and_changes_nothing(name: str) -> None:
    texts, options, error, message = BAD_TRAINING[name]
    tokenizer = trained(["hello hello"], 258)
    ranks = tokenizer.get_mergeable_ranks()
    with pytest.raises(error, match=message):
        tokenizer.train_from_iterator(texts(), **{"vocab_size": 300, **options})
    assert tokenizer.get_mergeable_ranks() == ranks
    assert tokenizer.get_pattern() == GPT4


BAD_CALLS: dict[str, tuple[str, Any, type[Exception], str]] = {
    "encode None": ("encode", None, TypeError, "text must be str, got NoneType"),
    "encode bytes": ("encode", b"ab", TypeError, "text must be str, got bytes"),
    "encode surrogate": ("encode", "ab\udfff", UnicodeEncodeError, "position 2"),
    "encode uncovered": ("encode", "ab cd", ValueError, r"character 2 \(\" cd\"\)"),
    "batch None": ("batch_encode", ["ab", None], TypeError, "item 1 of texts must be str, got NoneType"),
    "batch text": ("batch_encode", "ab", TypeError, r"give \[text\]"),
    "batch surrogate": ("batch_encode", ["ab", "\ud800"], UnicodeEncodeError, "item 1 of texts"),
    "batch uncovered": ("batch_encode", ["ab", "ab", "a-"], ValueError, "item 2 of texts: .*character 1"),
    "no threads": ("batch_encode_numpy", (["ab"], 0), ValueError, "threads must be at least 1, got 0"),
    "threads text": ("batch_encode", (["ab"], "2"), TypeError, "threads must be int, got str"),
    "numpy None": ("encode_numpy", None, TypeError, "text must be str, got NoneType"),
    "unknown id": ("decode", [97, 258], ValueError, "unknown token id 258 at index 1: ids run from 0 to 257"),
    "negative id": ("decode", [-1], ValueError, "unknown token id -1 at index 0"),
    "huge id": ("decode", [2**70], ValueError, f"unknown token id {2**70} at index 0"),
    "id text": ("decode", "ab", TypeError, "item 0 of ids must be int, got str"),
    "id float": ("decode", [97, 1.5], TypeError, "item 1 of ids must be int, got float"),
    "no ids": ("decode", None, TypeError, "not iterable"),
    "half a character": ("decode", [97, 228, 189], UnicodeDecodeError, "position 1-2"),
    "a surrogate's bytes": ("decode", [237, 160, 128], UnicodeDecodeError, "position 0"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_raises(name: str) -> None:
    method, argument, error, message = BAD_CALLS[name]
    tokenizer = trained(["abab"], 258, r"\w+")
    with pytest.raises(error, match=message):
        getattr(tokenizer, method)(*(argument if isinstance(argument, tuple) else [argument]))


BAD_TOKENS: dict[str, tuple[Any, str]] = {
    "too few": ([bytes([i]) for i in range(255)], "token 255 is not"),
    "another order": ([bytes([255 - i]) for i in range(256)], "token 0 is not"),
    "no merge": ([*(bytes([i]) for i in range(256)), b"abc"], "token 256 must be made of two earlier tokens"),
    "twice": ([*(bytes([i]) for i in range(256)), b"ab", b"ab"], "token 257 must be made of two"),
    "empty": ([*(bytes([i]) for i in range(256)), b""], "token 256 must be made of two"),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_bad_tokens_are_refused(name: str) -> None:
    tokens, message = BAD_TOKENS[name]
    with pytest.raises(ValueError, match=message):
        rustbpe.Tokenizer.from_ranks(tokens, GPT4)


def test_a_damaged_pickle_is_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes each, got 7"):
        rustbpe.Tokenizer._restore(GPT4, b"1234567")
    with pytest.raises(ValueError, match="before it exists"):
        rustbpe.Tokenizer._restore(GPT4, b"\xff" * 8)

"""Replies as text: whole characters while the reply streams, whole tool calls, and no special tokens."""

from nanochat.data.conversation import Part
from nanochat.generate.reply import TextStream, reply_parts
from tests.support.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
mark = TOKENIZER.special


def call(expression: str, answer: str) -> list[int]:
    inside = [mark("output_start"), *TOKENIZER.encode(answer), mark("output_end")]
    return [mark("python_start"), *TOKENIZER.encode(expression), mark("python_end"), *inside]


def test_streamed_words_are_whole_characters_and_add_up():
    text = "the cat 猫坐在垫子上 😀 e\u0301 end"
    singles = {TOKENIZER.decode_bytes([i]): i for i in range(256)}
    tokens = [singles[bytes([byte])] for byte in text.encode()]
    stream = TextStream(TOKENIZER)
    pushed = [stream.push(token) for token in tokens]
    assert stream.flush() == []
    words = [part.text for parts in pushed for part in parts]
    assert all(part.kind == "text" for parts in pushed for part in parts)
    assert "".join(words) == text and words == list(text)


def test_half_a_character_at_the_end_or_before_a_mark_is_replaced():
    singles = {TOKENIZER.decode_bytes([i]): i for i in range(256)}
    half = [singles[bytes([byte])] for byte in "猫".encode()[:2]]
    assert reply_parts(half, TOKENIZER) == [Part("text", "\ufffd")]
    parts = reply_parts([*half, *call("1+1", "2"), *half, mark("assistant_end")], TOKENIZER)
    assert parts == [Part("text", "\ufffd"), Part("python", "1+1"), Part("python_output", "2"), Part("text", "\ufffd")]


def test_a_call_is_given_whole_and_an_unfinished_one_at_the_end():
    stream = TextStream(TOKENIZER)
    pushed = [stream.push(token) for token in call("12+34", "46")]
    assert [part for parts in pushed for part in parts] == [Part("python", "12+34"), Part("python_output", "46")]
    assert reply_parts(call("12+34", "46")[:3], TOKENIZER) == [
        Part("python", TOKENIZER.decode(call("12+34", "46")[1:3]))
    ]


def test_marks_are_never_shown():
    tokens = [TOKENIZER.special(role) for role in ("bos", "user_start", "user_end", "assistant_start", "assistant_end")]
    assert reply_parts([*tokens, *TOKENIZER.encode("cat"), *tokens], TOKENIZER) == [Part("text", "cat")]

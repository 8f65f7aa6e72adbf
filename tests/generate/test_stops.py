"""Stop strings are found over the borders of tokens, and nothing of them is ever shown."""

import random

import pytest

from nanochat.data.conversation import Part
from nanochat.generate.reply import StoppedReply, StopText
from tests.support.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("stops", [("ab",), ("aab", "ba"), ("bbbb", "b\nb"), ("a猫", "猫a猫")])
def test_text_before_the_first_stop_equals_a_search_of_the_whole(stops):
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab\n猫") for _ in range(rng.randrange(1, 14)))
        ends = [place for stop in stops if (place := text.find(stop)) >= 0]
        filtered, shown, found = StopText(stops), "", None
        for piece in pieces(text, rng):
            more, found = filtered.push(piece)
            shown += more
            if found is not None:
                break
        shown += "" if found else filtered.flush()
        # The first stop to be complete ends the reply; another may begin before it and end after it.
        assert (found is None) == (not ends)
        assert text.startswith(shown)
        assert shown == text if found is None else text[len(shown) :].startswith(found)
        assert all(stop not in shown for stop in stops)


def test_what_may_begin_a_stop_is_held_back_and_nothing_else():
    text = StopText(["###", "\nUser:"])
    assert text.push("hello #") == ("hello ", None)
    assert text.push("x\nUs") == ("#x", None)
    assert text.push("ing") == ("\nUsing", None)
    assert text.push("\n") == ("", None)
    assert text.flush() == "\n"
    assert text.push("a##") == ("a", None)
    assert text.push("#b") == ("", "###")


def test_a_stop_inside_split_characters_is_found_and_a_call_ends_the_text_before_it():
    single = {TOKENIZER.decode_bytes([i]): i for i in range(256)}
    reply = StoppedReply(TOKENIZER, ["停止", "4"])
    got: list[Part] = []
    stopped = None
    for byte in "好，停下 停止吧".encode():
        parts, stopped = reply.push(single[bytes([byte])], last=False)
        got += parts
        if stopped:
            break
    assert "".join(part.text for part in got) == "好，停下 " and stopped == "停止"
    mark = TOKENIZER.special
    called = [mark("python_start"), *TOKENIZER.encode("2+2"), mark("python_end")]
    answer = [mark("output_start"), *TOKENIZER.encode("4"), mark("output_end")]
    reply = StoppedReply(TOKENIZER, ["44"])
    shown = [part for token in [*TOKENIZER.encode("x4"), *called, *answer] for part in reply.push(token, False)[0]]
    assert shown == [Part("text", "x"), Part("text", "4"), Part("python", "2+2"), Part("python_output", "4")]

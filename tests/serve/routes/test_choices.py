"""A reply while it grows: words, calculator calls and calls of a client's tools become pieces, and a message."""

import json

import pytest

from nanochat.data.conversation import Part, assistant
from nanochat.generate.reply import Event, StoppedReply
from nanochat.serve.formats.pieces import Calculation, Words
from nanochat.serve.routes.answers import Choice
from nanochat.serve.routes.messages import as_request, read_conversation
from nanochat.serve.routes.reply import Form, Reply
from nanochat.serve.routes.tools import read_tools
from tests.support.fake_engine import ByteTokenizer

HELLO = {"role": "user", "content": "hello"}
CALL, RESULT = Part("python", "37*48"), Part("python_output", "1776")


def test_words_and_calculations_become_pieces_in_order():
    reply = Reply()
    parts = (Part("text", "It is "), CALL, RESULT, Part("text", "1776."))
    pieces = [piece for part in parts for piece in reply.add([part])]
    assert pieces == [Words("It is "), Calculation("37*48", "1776"), Words("1776.")]
    assert reply.text == "It is 1776."
    assert reply.add([], last=True) == []


CLOCK = read_tools({"tools": [{"type": "function", "function": {"name": "clock"}}]})
BEGUN = '<tool_call>{"name": "clock", "arguments": {"day": '


@pytest.mark.parametrize("calls", [None, "xml", "list", "args", "bare"])
@pytest.mark.parametrize("before", ["2 <", "2 [TOOL", "2 "])
def test_a_calculation_comes_after_the_words_before_it_where_there_are_tools(before: str, calls: str | None) -> None:
    reply = Reply(Form(CLOCK, calls))
    pieces = [piece for part in (Part("text", before), CALL, RESULT, Part("text", " 3")) for piece in reply.add([part])]
    words = "".join(piece.text for piece in pieces[:-2] if isinstance(piece, Words))
    assert (words, pieces[-2:]) == (before, [Calculation("37*48", "1776"), Words(" 3")])
    assert [part["type"] for part in reply.parts] == ["text", "tool", "text"]


def test_a_call_whose_arguments_are_calculated_stays_whole() -> None:
    reply = Reply(Form(CLOCK))
    for part in (Part("text", BEGUN), CALL, RESULT, Part("text", "1776}}</tool_call>")):
        reply.add([part])
    assert [call["function"]["arguments"] for call in reply.calls] == ['{"day": 1776}']


def test_words_that_come_together_are_one_piece():
    assert Reply().add([Part("text", "你"), Part("text", "好")]) == [Words("你好")]


@pytest.mark.parametrize("after", [[Part("text", "x")], [CALL, RESULT]])
def test_calculation_without_a_result_is_shown_when_the_reply_goes_on(after):
    pieces = Reply().add([Part("python", "1+"), *after])
    assert pieces[0] == Calculation("1+", None)
    assert len(pieces) == 2


def test_calculation_without_a_result_is_shown_at_the_end():
    reply = Reply()
    assert reply.add([CALL]) == []
    assert reply.add([], last=True) == [Calculation("37*48", None)]


def test_calculator_calls_can_be_sent_back_as_they_came():
    reply = Reply()
    reply.add([Part("text", "It "), Part("text", "is "), CALL, RESULT, Part("text", "1776.")])
    message = json.loads(json.dumps(reply.message))
    conversation = read_conversation([HELLO, message, HELLO])
    assert conversation.messages[1] == assistant("It is ", CALL, RESULT, "1776.")
    assert as_request(conversation.messages[1]) == {"role": "assistant", "parts": message["parts"]}


def test_scores_end_where_a_stop_string_does_also_after_invalid_bytes():
    """An invalid byte is shown as U+FFFD, which has three bytes."""
    choice = Choice(ByteTokenizer(), "text")  # type: ignore[arg-type]
    stops = StoppedReply(ByteTokenizer(), ("STOP",))  # type: ignore[arg-type]
    scores = []
    for token in (*b"a\xff\xff", *b"STOP"):
        parts, stop = stops.push(token, last=False)
        event = Event(0, token, -1.0, False, "stop" if stop else None, parts=parts, matched=stop)
        choice.add(event)
        scores += choice.scores()
    assert bytes(score.token for score in scores) == b"a\xff\xff"

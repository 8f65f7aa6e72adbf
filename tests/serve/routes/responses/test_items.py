"""The items of an input become the messages of a chat: texts, calls of a client's tools, and their results."""

import re

import pytest

from nanochat.data.conversation import Conversation, Part, assistant, system, user
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.fitted import written
from nanochat.serve.routes.responses.request import read_input

QUESTION = {"role": "user", "content": "Rain?"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "北京"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
WRITTEN = '<tool_call>{"name": "weather", "arguments": {"city": "北京"}}</tool_call>'


def message(role: str, text: str) -> dict:
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "type": "message",
        "role": role,
        "id": "x",
        "status": "completed",
        "content": [{"type": kind, "text": text}],
    }


def test_a_text_is_a_question() -> None:
    assert read_input("Rain?", []) == Conversation((user("Rain?"),))


def test_calls_join_what_was_said_before_them_and_results_are_the_users() -> None:
    second = {**CALL, "call_id": "c2"}
    parts = {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "dry"}]}
    items = [message("developer", "Be brief."), message("user", "Rain?"), message("assistant", "Let me see."), CALL,
             second, RESULT, parts, message("user", "So?")]  # fmt: skip
    assert written(read_input(items, [])).messages == (
        system("Be brief."), user("Rain?"), assistant(f"Let me see.{WRITTEN}{WRITTEN}"),
        user("<tool_response>rain</tool_response>\n<tool_response>dry</tool_response>\nSo?"),
    )  # fmt: skip
    said = read_input([QUESTION, CALL, message("assistant", "Soon."), QUESTION], [])
    assert written(said).messages[1] == assistant(f"Soon.{WRITTEN}")


def test_a_thought_belongs_to_the_reply_after_it() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    for items in ([QUESTION, thought, message("assistant", "Yes"), QUESTION], [QUESTION, thought, CALL, RESULT]):
        assert read_input(items, []).messages[1].fields["reasoning_content"] == "hm"
    bare = [QUESTION, {"type": "reasoning", "content": 5}, thought, QUESTION]
    assert [turn.fields for turn in read_input(bare, []).messages] == [{}, {}]


def test_calculator_calls_are_read_as_they_were_sent() -> None:
    parts = [{"type": "tool", "expression": "37*48", "result": "1776"}, {"type": "text", "text": "1776."}]
    said = {**message("assistant", "1776."), "parts": parts}
    calculated = (Part("python", "37*48"), Part("python_output", "1776"), "1776.")
    assert read_input([QUESTION, said, QUESTION], []).messages[1] == assistant(*calculated)
    called = written(read_input([QUESTION, said, CALL, RESULT], [])).messages[1]
    assert called == assistant(*calculated[:2], f"1776.{WRITTEN}")


def test_a_result_may_belong_to_a_call_of_the_earlier_response() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    earlier = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert written(read_input([RESULT], earlier)).messages[-1] == user("<tool_response>rain</tool_response>")
    with pytest.raises(ApiError, match=r"input\[0\].call_id"):
        read_input([{**RESULT, "call_id": "c2"}], earlier)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"), (5, "input"), ([], "input"), ([5], "input[0]"),
        ([{"type": "reasoning"}], "input"), ([{"type": "mcp_call"}], "input[0].type"), ([{"type": "reasoning"}, 5], "input[1]"),
        ([{"type": ["message"]}], "input[0].type"), ([{**QUESTION, "content": 5}], "input[0].content"),
        ([QUESTION, {"role": "tool", "content": "rain"}], "input[1].role"), ([RESULT], "input[0].call_id"),
        ([QUESTION, {**CALL, "arguments": {}}], "input[1]"), ([QUESTION, {**CALL, "call_id": None}], "input[1]"),
        ([QUESTION, CALL, {**RESULT, "output": 5}], "input[2].output"), ([QUESTION, CALL], "input[1].role"),
        ([QUESTION] * 1001, "input"),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_refused_where_it_is_wrong(given: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_input(given, [])
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "messages[" not in str(caught.value)


def test_places_count_from_the_first_item_of_the_request() -> None:
    earlier = [QUESTION, {"role": "assistant", "content": "Yes."}]
    with pytest.raises(ApiError, match=r"input\[0\] is empty") as caught:
        read_input([message("user", "")], earlier)
    assert caught.value.param == "input[0].content"
    with pytest.raises(ApiError, match="previous_response_id is empty") as caught:
        read_input("More?", [{**QUESTION, "content": ""}])
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("words", ["messages[99]", "messages[0]", "messages"])
def test_the_words_of_a_client_stay_as_they_are_in_a_refusal(words: str) -> None:
    for wrong, param in (({"role": words}, "input[0].role"), ({"content": [{"type": words}]}, "input[0].content[0]")):
        with pytest.raises(ApiError, match=re.escape(repr(words))) as caught:
            read_input([{**QUESTION, **wrong}], [])
        assert caught.value.param == param and str(caught.value).startswith(param)


@pytest.mark.parametrize("silence", [{"content": ""}, {"parts": []}])
def test_a_chat_goes_on_after_a_response_that_says_nothing(silence: dict[str, object]) -> None:
    read = read_input("More?", [QUESTION, {"role": "assistant", **silence}])
    assert [(said.role, said.text) for said in read.messages[1:]] == [("assistant", ""), ("user", "More?")]

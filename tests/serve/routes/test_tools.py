"""A client's tools: what the model reads of them, and which parts of its text go back as calls."""

import json

import pytest

from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.tools import CLOSE, OPEN, CallText, Tools, read_tools
from tests.support.served import serving

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "北京"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = OPEN + '{"name": "weather", "arguments": {"city": "北京"}}' + CLOSE


def tools(choice: object = "auto") -> Tools:
    return read_tools({"tools": [WEATHER, CLOCK], "tool_choice": choice})


def pieces(text: str, size: int) -> list[str | dict]:
    stream, found = CallText(tools()), []
    for start in range(0, len(text), size):
        found += stream.push(text[start : start + size])
    return found + stream.push("", last=True)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_call_is_found_in_a_text_of_any_pieces(size):
    found = pieces(f"Let me see. {CALL} and < <tool {CALL}.", size)
    calls = [item for item in found if isinstance(item, dict)]
    assert "".join(item for item in found if isinstance(item, str)) == "Let me see.  and < <tool ."
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "北京"}] * 2
    assert {call["function"]["name"] for call in calls} == {"weather"}
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize(
    "text",
    [
        OPEN, OPEN + "no json" + CLOSE, OPEN + "[" * 5000 + CLOSE, OPEN + '{"name": "weather"}' + CLOSE,
        OPEN + '{"name": "other", "arguments": {}}' + CLOSE, OPEN + '{"name": ["weather"], "arguments": {}}' + CLOSE,
        OPEN + OPEN, CLOSE, "a<tool", OPEN + '{"name": "weather", "arguments": {}}',
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(text):
    assert "".join(map(str, pieces(text, 3))) == text


def test_model_reads_of_the_tools_it_may_call():
    assert "The weather of a city" in tools().instructions
    assert tools("none") == read_tools({}) == Tools({}, "", ())
    assert tools("required").forced == ("weather", "clock")
    assert tools({"type": "function", "function": {"name": "clock"}}).forced == ("clock",)


@pytest.mark.parametrize(
    "tool",
    [5, {}, {"type": "web_search"}, {"type": "function"}, {"type": "function", "function": {"name": "a b"}},
     {"type": "function", "function": {"name": "x" * 65}},
     {"type": "function", "function": {"name": "x", "parameters": 5}}],
)  # fmt: skip
def test_what_is_no_function_is_refused(tool):
    with pytest.raises(ApiError, match=r"tools\[0\]"):
        read_tools({"tools": [tool]})


def test_reply_that_must_be_a_call_is_one_and_its_result_can_follow():
    question = {"role": "user", "content": "How is the weather in Paris?"}
    choice = {"type": "function", "function": {"name": "weather"}}
    with serving(length=700) as served:
        fields = {"messages": [question], "tools": [WEATHER], "tool_choice": choice, "max_tokens": 100}
        body = served.ok(CHAT, **fields)
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        message = body["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (message["content"], call["function"]["name"]) == (None, "weather")
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "北京")

        lines = served.post(CHAT, **fields, stream=True).text.split("\n\n")
        deltas = [json.loads(line[6:])["choices"][0] for line in lines if line and "DONE" not in line]
        (streamed,) = [delta["delta"]["tool_calls"] for delta in deltas if "tool_calls" in delta["delta"]]
        assert (streamed[0]["index"], streamed[0]["function"]["name"]) == (0, "weather")
        assert deltas[-1]["finish_reason"] == "tool_calls"

        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        follow = {"messages": [question, message, result], "tools": [WEATHER], "max_tokens": 5}
        prompt = served.ok("/tokenize", messages=follow["messages"])["tokens"]
        text = served.tokenizer.decode(prompt)
        assert "<tool_response>rain</tool_response>" in text and call["function"]["arguments"] in text
        assert served.ok(CHAT, **follow)["choices"][0]["message"]["role"] == "assistant"
        error = served.refused(CHAT, **fields, response_format={"type": "json_object"})
        assert error["param"] == "tool_choice"

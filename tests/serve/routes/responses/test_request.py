"""/v1/responses: the same replies as the chat route, whole and as events."""

import json
from collections.abc import Iterator

import pytest

from tests.support.served import Served, serving

PATH = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 12}
CLOCK = {"type": "function", "name": "clock", "parameters": {"properties": {"zone": {"enum": ["UTC"]}}}}
OBJECT = {"format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(length=700) as one:
        yield one


def chat(served: Served, *messages: dict[str, str]) -> dict:
    return served.ok("/v1/chat/completions", messages=[*messages], temperature=0, max_tokens=12)


def text(body: dict) -> str:
    return body["output"][0]["content"][0]["text"]


def test_reply_is_the_one_of_the_chat_route(served):
    question = {"role": "user", "content": "the cat"}
    expected = chat(served, question)
    body = served.ok(PATH, input="the cat", **GREEDY)
    assert text(body) == expected["choices"][0]["message"]["content"]
    assert (body["object"], body["status"], body["model"]) == ("response", "incomplete", "nanochat-sft-d4")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert body["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the cat"}]}]
    assert text(served.ok(PATH, input=parts, **GREEDY)) == text(body)
    *_, last = served.post(PATH, input="the cat", stream=True, **GREEDY).text.strip().split("\n\n")
    name, data = last.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name.removeprefix("event: ") == event["type"] == "response.incomplete"
    assert text(event["response"]) == text(body)


@pytest.mark.parametrize("times", [2, 8])  # the second does not fit into the context
def test_a_response_to_messages_in_any_order_can_be_continued(served, times):
    given = [{"role": role, "content": "the cat " * 9} for role in ("assistant", "user", "system", "user")]
    first = served.ok(PATH, input=given * times, truncation="auto", **GREEDY)
    assert served.post(PATH, input=given * times, **GREEDY).status_code == (200 if times == 2 else 400)
    more = {"previous_response_id": first["id"], "truncation": "auto", **GREEDY}
    assert served.ok(PATH, input="12", **more)["usage"]["output_tokens"] > 0


def test_instructions_are_a_system_message(served):
    expected = chat(served, {"role": "system", "content": "be brief"}, {"role": "user", "content": "12"})
    body = served.ok(PATH, input="12", instructions="be brief", **GREEDY)
    assert text(body) == expected["choices"][0]["message"]["content"]
    assert body["instructions"] == "be brief"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x" * 3000}, "input"),
        ({"input": "x", "instructions": 5}, "instructions"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "previous_response_id": 5}, "previous_response_id"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "store": "yes"}, "store"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "x", "include": "reasoning.encrypted_content"}, "include"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"input": "x", "max_output_tokens": -2}, "max_output_tokens"),
        ({"input": "x", "truncation": "x"}, "truncation"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(served, fields, param):
    assert served.refused(PATH, **fields)["param"] == param

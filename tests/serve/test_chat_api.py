"""The chat format: which requests are refused and why, and how a reply with tool calls becomes deltas."""

import json

import pytest

from nanochat.data.conversation import Part, assistant, system, user
from nanochat.serve import chat_api
from nanochat.serve.chat_api import ApiError, Envelope, Limits, Reply, read_request

LIMITS = Limits(model="nanochat-sft-d4", context=256, vocabulary=2048)
HELLO = [{"role": "user", "content": "hello"}]


def refusal(body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_request(body, LIMITS)
    return caught.value


def test_too_many_messages_or_parts_are_refused_before_they_are_read():
    crowd = refusal({"messages": [None] * 1001})  # what is no message would be refused for that, were it read
    assert (crowd.code, crowd.param) == ("too_many_messages", "messages") and "1,001" in str(crowd)
    parts = refusal({"messages": [{"role": "user", "content": [None] * 2000}, {"parts": [None] * 2001}]})
    assert parts.code == "too_many_messages" and "4,001" in str(parts)
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(999)]
    assert len(read_request({"messages": turns}, LIMITS).conversation.messages) == 999


def test_plain_request_leaves_the_rest_to_the_server():
    asked = read_request({"messages": HELLO}, LIMITS)
    assert asked.conversation.messages == (user("hello"),)
    assert (asked.temperature, asked.top_k, asked.max_tokens, asked.seed) == (None, None, None, None)
    assert not (asked.stream or asked.truncate or asked.include_usage or asked.continuous_usage)


def test_everything_that_can_be_asked_is_read():
    body = {
        "model": "nanochat-sft-d4",
        "messages": [{"role": "system", "content": "Be brief."}, *HELLO],
        "temperature": 0,
        "top_k": 5,
        "max_completion_tokens": 10,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "truncation": "auto",
        "user": "someone",
        "n": 1,
        "top_p": 1.0,
        "stop": None,
    }
    asked = read_request(body, LIMITS)
    assert asked.conversation.messages == (system("Be brief."), user("hello"))
    assert (asked.temperature, asked.top_k, asked.max_tokens, asked.seed) == (0.0, 5, 10, 7)
    assert asked.stream and asked.truncate and asked.include_usage and asked.continuous_usage


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2049),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 257),
        ("max_tokens", 10**400),
        ("max_completion_tokens", 257),
        ("seed", -1),
        ("seed", 2**63),
        ("stream", "yes"),
        ("stream_options", []),
        ("truncation", "newest"),
    ],
)
def test_value_out_of_range_is_refused_by_name(field, value):
    failure = refusal({"messages": HELLO, field: value})
    assert (failure.status, failure.param, failure.code) == (400, field, "invalid_value")
    assert field in str(failure)
    json.dumps(failure.body, allow_nan=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("top_p", 0.9), ("stop", ["\n"]), ("tools", [{}]), ("logprobs", True), ("presence_penalty", 1)],
)
def test_what_cannot_be_done_is_refused_not_ignored(field, value):
    failure = refusal({"messages": HELLO, field: value})
    assert (failure.status, failure.param, failure.code) == (400, field, "unsupported_parameter")


def test_misspelt_field_is_named():
    failure = refusal({"messages": HELLO, "temprature": 1})
    assert (failure.code, failure.param) == ("unknown_parameter", "temprature")


def test_another_model_is_not_found():
    failure = refusal({"messages": HELLO, "model": "gpt-x"})
    assert (failure.status, failure.code) == (404, "model_not_found")
    assert "nanochat-sft-d4" in str(failure)


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        (None, "missing_required_parameter", "messages"),
        ("hello", "invalid_value", "messages"),
        ([], "empty_prompt", "messages"),
        (["hello"], "invalid_value", "messages[0]"),
        ([{"content": "hello"}], "invalid_value", "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "invalid_value", "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "invalid_value", "messages[0].role"),
        ([{"role": "user"}], "invalid_value", "messages[0].content"),
        ([{"role": "user", "content": ""}], "empty_prompt", "messages[0].content"),
        ([{"role": "user", "content": " \n"}], "empty_prompt", "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "invalid_value", "messages[0].content"),
        ([{"role": "assistant", "content": "hi"}], "invalid_value", "messages[0].role"),
        ([{"role": "system", "content": "x"}], "invalid_value", "messages[0].role"),
        ([*HELLO, *HELLO], "invalid_value", "messages[1].role"),
        ([*HELLO, {"role": "system", "content": "x"}, *HELLO], "invalid_value", "messages[1].role"),
        ([*HELLO, {"role": "assistant", "content": "hi"}], "invalid_value", "messages[1].role"),
        ([*HELLO, {"role": "assistant", "parts": [{"type": "x"}]}, *HELLO], "invalid_value", "messages[1].parts"),
        ([*HELLO, {"role": "assistant", "parts": "hi"}, *HELLO], "invalid_value", "messages[1].parts"),
    ],
)
def test_bad_conversation_is_refused_where_it_is_bad(messages, code, param):
    failure = refusal({"messages": messages})
    assert (failure.status, failure.code, failure.param) == (400, code, param)


def test_body_that_is_no_object_is_refused():
    assert refusal([1]).status == 400


def test_content_may_be_a_list_of_texts():
    content = [{"type": "text", "text": "你"}, {"type": "text", "text": "好"}]
    asked = read_request({"messages": [{"role": "user", "content": content}]}, LIMITS)
    assert asked.conversation.messages == (user("你好"),)


def test_refusal_does_not_repeat_what_was_said():
    secret = "my secret"
    for message in ({"role": "user", "content": {"x": secret}}, {"role": "user", "content": "", "name": secret}):
        assert secret not in json.dumps(refusal({"messages": [message]}).body)


def test_errors_have_openais_shape():
    error = ApiError(429, "queue_full", "too many", retry_after=2)
    assert error.body == {
        "error": {"message": "too many", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    }
    assert error.headers == {"Retry-After": "2"}
    assert ApiError(500, "x", "y").body["error"]["type"] == "server_error"
    assert ApiError(413, "x", "y").body["error"]["type"] == "invalid_request_error"


# --- replies -------------------------------------------------------------------------------------

CALL, RESULT = Part("python", "37*48"), Part("python_output", "1776")


def test_words_and_tool_calls_become_deltas_in_order():
    reply = Reply()
    deltas = [
        delta for part in (Part("text", "It is "), CALL, RESULT, Part("text", "1776.")) for delta in reply.add([part])
    ]
    assert deltas == [{"content": "It is "}, {"tool": {"expression": "37*48", "result": "1776"}}, {"content": "1776."}]
    assert reply.text == "It is 1776."
    assert reply.end() == []


def test_words_that_come_together_are_one_delta():
    assert Reply().add([Part("text", "你"), Part("text", "好")]) == [{"content": "你好"}]


@pytest.mark.parametrize("after", [[Part("text", "x")], [CALL, RESULT]])
def test_call_without_a_result_is_shown_when_the_reply_goes_on(after):
    reply = Reply()
    deltas = reply.add([Part("python", "1+"), *after])
    assert deltas[0] == {"tool": {"expression": "1+", "result": None}}
    assert len(deltas) == 2


def test_call_without_a_result_is_shown_at_the_end():
    reply = Reply()
    assert reply.add([CALL]) == []
    assert reply.end() == [{"tool": {"expression": "37*48", "result": None}}]


def test_tool_calls_can_be_sent_back_as_they_came():
    reply = Reply()
    reply.add([Part("text", "It "), Part("text", "is "), CALL, RESULT, Part("text", "1776.")])
    completion = Envelope("id", 0, "m").completion(reply, "stop", chat_api.usage(3, 4))
    message = json.loads(json.dumps(completion))["choices"][0]["message"]
    assert message["content"] == "It is 1776."
    asked = read_request({"messages": [*HELLO, message, *HELLO]}, LIMITS)
    assert asked.conversation.messages[1] == assistant("It is ", CALL, RESULT, "1776.")


def test_reply_without_tools_has_no_parts():
    reply = Reply()
    reply.add([Part("text", "hi")])
    completion = Envelope("id", 0, "m").completion(reply, "stop", chat_api.usage(3, 4))
    assert completion["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert "truncated_messages" not in completion


def test_event_is_one_line_whatever_the_text_holds():
    data = chat_api.event({"content": "a\nb\r\u2028中"})
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data.removeprefix(b"data: "))["content"] == "a\nb\r\u2028中"

"""The chat format: which requests are refused and why, and how a reply with tool calls becomes deltas."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from nanochat.data.conversation import system, user
from nanochat.generate.sampling import Sampling
from nanochat.serve.routes.answers import event
from nanochat.serve.routes.chat import ChatRequest, read_chat
from nanochat.serve.routes.completions import read_completion
from nanochat.serve.routes.fields import ApiError, Defaults, Limits
from tests.support.fake_engine import ByteTokenizer

LIMITS = Limits(model="nanochat-sft-d4", context=256, vocabulary=2048)
HELLO = [{"role": "user", "content": "hello"}]


def read_request(body: object) -> ChatRequest:
    return read_chat(body, LIMITS, Defaults(temperature=0.6, min_p=0.0, top_k=50, max_tokens=100))


def refusal(body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_request(body)
    return caught.value


def test_too_many_messages_or_parts_are_refused_before_they_are_read():
    crowd = refusal({"messages": [None] * 1001})  # what is no message would be refused for that, were it read
    assert (crowd.code, crowd.param) == ("too_many_messages", "messages") and "1,001" in str(crowd)
    parts = refusal({"messages": [{"role": "user", "content": [None] * 2000}, {"parts": [None] * 2001}]})
    assert parts.code == "too_many_messages" and "4,001" in str(parts)
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(999)]
    assert len(read_request({"messages": turns}).conversation.messages) == 999


def test_plain_request_leaves_the_rest_to_the_server():
    asked = read_request({"messages": HELLO})
    assert asked.conversation.messages == (user("hello"),)
    wanted, sampling = asked.settings, asked.settings.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, wanted.max_tokens) == (0.6, 50, 100, None)
    assert wanted.n == 1 and sampling.logprobs == 0 and sampling.schema is None
    assert not (wanted.stream or asked.truncate or wanted.include_usage or wanted.continuous_usage or asked.logprobs)


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
        "n": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "stop": "\n",
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "6": 1.5},
        "logprobs": True,
        "top_logprobs": 4,
        "stop_token_ids": [7],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}},
    }
    asked = read_request(body)
    assert asked.conversation.messages == (system("Be brief."), user("hello"))
    wanted = asked.settings
    assert wanted.sampling == Sampling(
        0.0, 5, 10, 7, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=1.0, frequency_penalty=-1.0,
        logit_bias=((5, -100.0), (6, 1.5)), stop=("\n",), stop_tokens=(7,), logprobs=4, schema='{"type": "array"}',
    )  # fmt: skip
    assert wanted.stream and asked.truncate and wanted.include_usage and wanted.continuous_usage and asked.logprobs
    assert (wanted.n, wanted.max_tokens) == (3, 10)


@pytest.mark.parametrize(
    ("field", "value", "setting", "read"),
    [
        ("top_k", -1, "top_k", 2048),
        ("top_k", 50_000, "top_k", 2048),
        ("top_k", 40.0, "top_k", 40),
        ("top_p", 0, "top_p", 1e-6),
        ("max_tokens", -1, "max_tokens", 256),
        ("max_tokens", 100_000, "max_tokens", 256),
        ("max_completion_tokens", -1, "max_tokens", 256),
        ("seed", 7.0, "seed", 7),
        ("stop", "", "stop", ()),
        ("stop", ["a", "", "b", "a"], "stop", ("a", "b")),
        ("stop", [f"{i}" for i in range(64)], "stop", tuple(map(str, range(64)))),
    ],
)
def test_values_that_other_servers_take_are_read_as_they_read_them(field, value, setting, read):
    assert getattr(read_request({"messages": HELLO, field: value}).settings.sampling, setting) == read


def test_a_seed_of_minus_one_is_none():
    seeds = {read_request({"messages": HELLO, "seed": -1}).settings.sampling.seed for _ in range(9)}
    assert len(seeds) > 1


def test_formats_that_the_grammar_does_not_know_are_notes():
    properties = {"a": {"type": "string", "format": "path"}, "b": {"type": "string", "format": "date"}}
    schema = {"properties": {**properties, "c": {"const": {"format": "path"}}}}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    sampling = read_request({"messages": HELLO, "response_format": asked}).settings.sampling
    read = json.loads(str(sampling.schema))["properties"]
    assert read["a"] == {"type": "string"} and read["b"]["format"] == "date"
    assert read["c"] == schema["properties"]["c"] and schema["properties"]["a"]["format"] == "path"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 10**400),
        ("max_tokens", -2),
        ("max_completion_tokens", 1.5),
        ("seed", 2**63),
        ("seed", -2),
        ("stream", "yes"),
        ("stream_options", []),
        ("truncation", "newest"),
        ("n", 0),
        ("n", 10**9),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("stop", 5),
        ("stop", [str(i) for i in range(65)]),
        ("stop", [f"{i:255}" for i in range(17)]),
        ("stop", ["x" * 257]),
        ("stop", [None]),
        ("stop_token_ids", [2048]),
        ("stop_token_ids", ["1"]),
        ("logit_bias", []),
        ("logit_bias", {"2048": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": None}),
        ("logprobs", 5),
        ("top_logprobs", 10**9),
        ("top_logprobs", 5),
        ("response_format", "json"),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": "x"}}),
        ("tools", {}),
        ("tools", [{}] * 1000),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "x"}}),
    ],
)
def test_value_out_of_range_is_refused_by_name(field, value):
    failure = refusal({"messages": HELLO, field: value})
    assert (failure.status, failure.code) == (400, "invalid_value")
    assert failure.param is not None and failure.param.startswith(field) and failure.param in str(failure)
    json.dumps(failure.body, allow_nan=False)


LONG = Limits(model="nanochat-sft-d4", context=8192, vocabulary=2048)


def prompts(read: Callable[[Any, Limits, Defaults], Any], **fields: Any) -> int:
    """How many requests to the engine a body becomes."""
    asked = read(fields, LONG, Defaults(temperature=0.6, min_p=0.0, top_k=50, max_tokens=512))
    return len(asked.work(ByteTokenizer(), LONG).requests)


@pytest.mark.parametrize(
    ("n", "tokens", "top", "scores"),
    [
        (1, 4096, 20, 0), (128, 100, 10, 0), (128, 2000, 0, 0), (1, 8000, 20, 0),
        (128, 4000, 20, 10_752_000), (4, 4000, 20, 336_000), (128, None, 20, 1_376_256), (128, 4000, 0, 512_000),
    ],
)  # fmt: skip
def test_an_answer_of_too_many_log_probabilities_is_refused_before_it_starts(n, tokens, top, scores):
    fields = {"n": n} | ({"max_tokens": tokens} if tokens else {})
    chat = functools.partial(prompts, read_chat, messages=HELLO, logprobs=True, top_logprobs=top, **fields)
    text = functools.partial(prompts, read_completion, prompt="hello", logprobs=top, **({"max_tokens": 512} | fields))
    for ask in (chat, text):
        if not scores:
            assert ask() == n
            continue
        with pytest.raises(ApiError, match=f"262,144.*{scores:,}.*max_tokens") as caught:
            ask()
        assert (caught.value.status, caught.value.param) == (400, "logprobs")
    without = prompts(read_chat, messages=HELLO, **fields)
    assert without == n


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({"echo": True, "logprobs": 1}, 0),
        ({"echo": True, "logprobs": 20}, 0),
        ({"echo": True, "logprobs": 1, "n": 128}, 128 * 4002 * 2),
        ({"prompt_logprobs": 20, "n": 4}, 4 * 4001 * 21),
        ({"echo": True, "prompt_logprobs": 20, "logprobs": 20, "n": 2}, 2 * 4002 * 21 + 2 * 4001 * 21),
        ({"echo": True, "logprobs": 20, "prompt": ["x" * 4000] * 4}, 4 * 4002 * 21),
    ],
)
def test_log_probabilities_of_prompts_count_too(fields, scores):
    ask = functools.partial(prompts, read_completion, **{"prompt": "x" * 4000, "max_tokens": 1} | fields)
    if scores:
        with pytest.raises(ApiError, match=f"{scores:,}"):
            ask()
    else:
        assert ask() == 1


def test_a_field_that_is_misspelt_or_not_supported_is_named():
    for field, code in (("temprature", "unknown_parameter"), ("modalities", "unsupported_parameter")):
        failure = refusal({"messages": HELLO, field: ["audio"]})
        assert (failure.status, failure.param, failure.code) == (400, field, code)


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        (None, "missing_required_parameter", "messages"),
        ("hello", "invalid_value", "messages"),
        ([], "empty_prompt", "messages"),
        (["hello"], "invalid_value", "messages[0]"),
        ([{"content": "hello"}], "invalid_value", "messages[0].role"),
        ([*HELLO, {"role": "tool", "content": "x"}], "invalid_value", "messages[1].role"),
        ([*HELLO, {"role": "assistant", "tool_calls": 1}], "invalid_value", "messages[1].tool_calls"),
        ([*HELLO, {"role": "assistant", "tool_calls": [{}]}], "invalid_value", "messages[1].tool_calls[0]"),
        ([{"role": ["user"], "content": "x"}], "invalid_value", "messages[0].role"),
        ([{"role": "user"}], "invalid_value", "messages[0].content"),
        ([{"role": "user", "content": " \n"}], "empty_prompt", "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "unsupported_content", "messages[0].content[0]"),
        ([*HELLO, {"role": "assistant", "parts": [{"type": "x"}]}, *HELLO], "invalid_value", "messages[1].parts"),
        ([*HELLO, {"role": "assistant", "parts": "hi"}, *HELLO], "invalid_value", "messages[1].parts"),
    ],
)
def test_bad_conversation_is_refused_where_it_is_bad(messages, code, param):
    failure = refusal({"messages": messages})
    assert (failure.status, failure.code, failure.param) == (400, code, param)


def test_content_may_be_a_list_of_texts():
    content = [{"type": "text", "text": "你"}, {"type": "text", "text": "好"}]
    asked = read_request({"messages": [{"role": "user", "content": content}]})
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


def test_event_is_one_line_whatever_the_text_holds():
    data = event({"content": "a\nb\r\u2028中"})
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data.removeprefix(b"data: "))["content"] == "a\nb\r\u2028中"

"""/v1/messages and /v1/messages/count_tokens: what Anthropic's format asks, and what it answers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from nanochat.data.conversation import Part
from nanochat.engine import Event
from nanochat.serve.routes.anthropic.request import read_messages
from nanochat.serve.routes.anthropic.writer import MessageWriter
from nanochat.serve.routes.fields import ApiError, Defaults, Limits
from nanochat.serve.routes.fitted import written
from nanochat.serve.routes.reply import Form
from nanochat.serve.routes.tools import read_tools
from nanochat.serve.server import BODY_BYTES, LARGE_BYTES
from tests.support.fake_engine import CHAT, SETTINGS, ByteTokenizer, FakeEngine, running
from tests.support.served import Served, serving

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
CLOCK = {"name": "clock", "description": "The time.", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC", "day": 1}}</tool_call>'
USE = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"zone": "UTC"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}
NO_CALL = {"type": "none"}
REPLIES = {
    "hello": ["Good day"],
    "time": ["Let me see. ", CALL, CALL],
    "sum": ["37 × 48 = ", Part("python", "37*48"), Part("python_output", "1776"), "1776"],
    "broken": [CALL[:40]],
    "odd": ['<tool_call>{"name": "clock", "arguments": {"zone": "UTC", "day": NaN}</tool_call>'],
}


def asked(question: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 200, "messages": [{"role": "user", "content": question}], **fields}


def read(**fields: Any) -> Any:
    """The conversation that a request asks about, as (role, text) pairs."""
    chat = read_messages({"max_tokens": 9, **fields}, Limits("m", 900, 500), Defaults(1.0, 0.0, 0, 20)).chat
    return [(message.role, message.text) for message in written(chat.conversation).messages]


# --- answers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted() -> Iterator[httpx.Client]:
    """A client of a server whose replies are REPLIES."""
    with running(FakeEngine(REPLIES)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which has the name that its data says."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for chunk in response.text.strip().split("\n\n"):
        name, data = chunk.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to, after checking their order."""
    assert [event["type"] for event in stream[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    message = stream[0]["message"]
    texts: list[str] = []
    for event in stream[2:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts = []
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            texts += [value for key, value in event["delta"].items() if key != "type"]
        else:
            block = message["content"][-1]
            text = "".join(texts)
            block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {"text": text}
    return {**message, **stream[-2]["delta"], "usage": stream[-2]["usage"]}


@pytest.mark.parametrize("question", ["hello", "time", "sum"])
def test_stream_adds_up_to_the_whole_answer(scripted: httpx.Client, question: str) -> None:
    body = asked(question, tools=[CLOCK])
    whole = scripted.post(MESSAGES, json=body).json()
    message = assembled(events(scripted.post(MESSAGES, json={**body, "stream": True})))
    for answer in (whole, message):
        answer["id"] = ""
        for block in answer["content"]:
            block.pop("id", None)
    assert message == whole
    assert {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"} == set(whole)


def test_words_calls_and_calculations_become_blocks(scripted: httpx.Client) -> None:
    call = {"type": "tool_use", "name": "clock", "input": {"zone": "UTC", "day": 1}}
    content = {
        "hello": [{"type": "text", "text": "Good day"}],
        "time": [{"type": "text", "text": "Let me see. "}, call, call],
        "sum": [{"type": "text", "text": "37 × 48 = 1776"}],
    }
    for question, blocks in content.items():
        answer = scripted.post(MESSAGES, json=asked(question, tools=[CLOCK])).json()
        ids = {block.pop("id", "") for block in answer["content"]}
        assert answer["content"] == blocks and len(ids) == (3 if question == "time" else 1)
        assert answer["stop_reason"] == ("tool_use" if question == "time" else "end_turn")


def test_arguments_that_are_no_json_are_handed_on_under_a_key(scripted: httpx.Client) -> None:
    answer = scripted.post(MESSAGES, json=asked("odd", tools=[CLOCK])).json()
    assert answer["content"][0]["input"] == {"INVALID_JSON": '{"zone": "UTC", "day": NaN}'}


def test_a_reply_with_one_call_ends_after_it_if_the_client_says_so(scripted: httpx.Client) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = scripted.post(MESSAGES, json=asked("time", tools=[CLOCK], tool_choice=choice)).json()
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]


def test_stop_reasons(served: Served) -> None:
    answer = served.ok(MESSAGES, **asked(max_tokens=3, temperature=0))
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 3)
    text = served.ok(MESSAGES, **asked(max_tokens=12, temperature=0))["content"][0]["text"]
    stop = text[4:6]
    stopped = served.ok(MESSAGES, **asked(max_tokens=12, temperature=0, stop_sequences=["zzz", stop]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == text[: text.index(stop)]


def test_a_stop_sequence_after_a_call_is_not_the_reason() -> None:
    """The engine reports the string; the reply ends for its call."""
    form = Form(read_tools({"tools": [{"type": "function", "function": {"name": "clock"}}]}), "json")
    writer = MessageWriter("1", "m", 1, ByteTokenizer(), form, False, True)  # type: ignore[arg-type]
    text = Part("text", CALL)
    writer.add([(0, Event(0, 120, 0.0, False, "stop", matched="zzz", parts=(text,)))])
    ending = writer.body()
    assert (ending["stop_reason"], ending["stop_sequence"]) == ("tool_use", None)


# --- requests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(length=900) as served:
        yield served


def test_blocks_are_read_as_the_chat_route_reads_messages() -> None:
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    assert read(system="Be brief.", messages=HELLO) == [("system", "Be brief."), ("user", "hello")]
    assert read(system=[cached, cached], messages=HELLO)[0] == ("system", "Be brief.\n\nBe brief.")
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(messages=[{"role": "user", "content": two}]) == [("user", "a\n\nb")]
    assert read(messages=[*HELLO, {"role": "assistant", "content": two}]) == [("user", "hello"), ("assistant", "ab")]
    assert read(messages=[*HELLO, {"role": "system", "content": two}, *HELLO])[1] == ("system", "a\n\nb")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False), ({"thinking": {"type": "disabled"}}, False), ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True), ({"output_config": {"effort": "high"}}, False),
    ],
)  # fmt: skip
def test_a_model_thinks_only_for_clients_that_ask_for_it(fields: dict[str, Any], thinks: bool) -> None:
    chat = read_messages(asked(**fields), Limits("m", 900, 500), Defaults(1.0, 0.0, 0, 20)).chat
    assert chat.options["enable_thinking"] is thinks


@pytest.mark.parametrize("content", ["noon", [{"type": "text", "text": "noon"}], None])
@pytest.mark.parametrize("is_first", [True, False])
def test_results_come_right_after_their_calls(content: Any, is_first: bool) -> None:
    text = {"type": "text", "text": "And now?"}
    result = {**RESULT, "content": content}
    after = [result, text] if is_first else [text, result]
    failed = {**RESULT, "is_error": True}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    use = [thought, {"type": "redacted_thinking", "data": "x"}, USE]
    _, call, answer = read(messages=[*HELLO, {"role": "assistant", "content": use}, {"role": "user", "content": after}])
    assert json.loads(call[1].removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"] == USE["input"]
    assert answer == ("user", f"<tool_response>{'noon' if content else ''}</tool_response>\nAnd now?")
    broken = read(messages=[*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [failed]}])
    assert broken[-1][1] == "<tool_response>Error: noon</tool_response>"


def test_a_last_assistant_message_is_continued(served: Served) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    answer = served.ok(MESSAGES, max_tokens=9, temperature=0, messages=begun)
    chat = served.ok(CHAT, max_tokens=9, temperature=0, messages=begun, continue_final_message=True)
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"clock", "calendar"}), ({"type": "tool", "name": "calendar"}, {"calendar"})],
)
def test_a_call_that_is_demanded_comes(served: Served, choice: dict[str, Any], names: set[str]) -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False,
              "properties": {"day": {"enum": [1, 2]}}, "required": ["day"]}  # fmt: skip
    tools = [{**CLOCK, "input_schema": schema}, {"type": "custom", "name": "calendar", "input_schema": schema}]
    answer = served.ok(MESSAGES, **asked(tools=tools, tool_choice=choice))
    (use,) = answer["content"]
    assert (use["type"], use["name"] in names, use["input"]["day"] in (1, 2)) == ("tool_use", True, True)
    assert answer["stop_reason"] == "tool_use"
    free, full = (
        served.ok(COUNT, messages=HELLO, tools=tools, tool_choice=c)["input_tokens"] for c in (NO_CALL, choice)
    )
    assert free < full


def test_tools_of_anthropics_servers_are_skipped_and_named(served: Served) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    response = served.post(MESSAGES, **asked(tools=[search, CLOCK]))
    assert (response.status_code, response.headers["x-skipped-tools"]) == (200, "web_search_20250305")


def test_output_follows_a_schema(served: Served) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert json.loads(served.ok(MESSAGES, **asked(**fields))["content"][0]["text"]) in ("yes", "no")


def test_count_is_that_of_the_prompt_however_long(served: Served) -> None:
    body = {"system": "Be brief.", "messages": HELLO, "tools": [CLOCK]}
    usage = served.ok(MESSAGES, **body, max_tokens=1)["usage"]
    count = served.ok(COUNT, **body)["input_tokens"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert served.ok(COUNT, messages=[{"role": "user", "content": "cat " * 5000}])["input_tokens"] > 900


def test_cached_tokens_are_counted_apart(served: Served) -> None:
    body = asked("the cat sat on the mat, " * 5)
    first, second = (served.ok(MESSAGES, **body)["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > 0
    assert sum(first[key] for key in first if key.endswith("input_tokens")) == sum(
        second[key] for key in second if key.endswith("input_tokens")
    )


# --- refusals ------------------------------------------------------------------------------------


def block(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, **fields}]}]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "hello"}, "messages"),
        ({"messages": [5]}, "messages[0]"), ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [*HELLO, {"role": "user", "content": " "}], "system": "x"}, "messages[1]"),
        ({"messages": block("image", source={"type": "base64", "data": "x"})}, "messages[0].content[1]"),
        ({"messages": block("document", source={})}, "messages[0].content[1]"),
        ({"messages": block("search_result")}, "search_result"), ({"messages": block("text")}, "messages[0].content[1].text"),
        ({"messages": block("tool_use", **USE)}, "messages[0].content[1].type"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "messages[1].content[0].input"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "messages[1]"),
        ({"messages": block("tool_result", tool_use_id="toolu_9")}, "messages[0].content[1].tool_use_id"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]},
                       {"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]},
         "messages[2].content[0].content[0]"),
        ({"system": 5}, "system"), ({"system": [{"type": "image"}]}, "system[0]"), ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 3}, "temperature"), ({"stop_sequences": [5]}, "stop_sequences"),
        ({"thinking": {"type": "deep"}}, "thinking.type"), ({"thinking": "on"}, "thinking"),
        ({"thinking": {"type": ["enabled"]}}, "thinking.type"), ({"tool_choice": {"type": ["any"]}}, "tool_choice.type"),
        ({"thinking": {"display": "omitted"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "budget_tokens"),
        ({"tools": {}}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": ["x"]}]}, "tools[0]"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"), ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "every"}}, "tool_choice.type"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"), ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_bad_field_is_refused_by_its_name(fields: dict[str, Any], name: str) -> None:
    body = {name: value for name, value in {**asked(), **fields}.items() if value is not None}
    with pytest.raises(ApiError) as caught:
        read_messages(body, Limits("m", 900, 500), Defaults(1.0, 0.0, 0, 20))
    assert caught.value.status == 400
    assert name in str(caught.value) or name == caught.value.param


def test_errors_have_anthropics_form(served: Served) -> None:
    too_long = asked("cat " * 2000)
    cases = [
        (served.post(MESSAGES, **too_long), 400, "invalid_request_error"),
        (served.post(MESSAGES, **asked(model="another")), 404, "not_found_error"),
        (served.post(f"{MESSAGES}/batches"), 404, "not_found_error"),
        (served.client.post(MESSAGES, content=b"{}"), 415, "invalid_request_error"),
        (served.client.post(MESSAGES, json={}, headers={"host": "evil.example"}), 403, "permission_error"),
    ]
    for response, status, kind in cases:
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert set(body["error"]) == {"type", "message", "details"}
    assert "prompt is too long" in cases[0][0].text and "900 maximum" in cases[0][0].text
    assert (ApiError(503, "x", "").status_for(MESSAGES), ApiError(503, "x", "").status_for(CHAT)) == (529, 503)


def test_a_thread_is_begun_and_never_continued(served: Served) -> None:
    assert served.ok(MESSAGES, **asked(thread={"type": "create"}))["type"] == "message"
    refused = served.post(MESSAGES, **asked(thread={"type": "continue", "previous_message_id": "msg_1"}))
    assert (refused.status_code, refused.json()["error"]["details"]) == (404, {"error_code": "thread_not_found"})


def test_a_failed_stream_ends_with_an_error_event() -> None:
    engine = FakeEngine(REPLIES, fail=True)
    with running(engine) as url:
        response = httpx.post(url + MESSAGES, json=asked(stream=True), timeout=60)
    last = events(response)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_either_header_may_carry_the_key() -> None:
    with running(FakeEngine(REPLIES), settings=replace(SETTINGS, api_key="k")) as url:
        for headers, status in [
            ({"x-api-key": "k"}, 200), ({"authorization": "Bearer k"}, 200),
            ({"x-api-key": "k", "authorization": "Bearer -"}, 200),
            ({"x-api-key": "K"}, 401), ({"x-api-key": ""}, 401), ({}, 401), ({"authorization": "Basic k"}, 401),
        ]:  # fmt: skip
            response = httpx.post(url + MESSAGES, json=asked(), headers=headers, timeout=60)
            assert response.status_code == status
        assert response.json()["error"]["type"] == "authentication_error"


# --- large bodies --------------------------------------------------------------------------------


def test_a_body_of_eight_megabytes_is_read_and_refused_as_a_prompt(served: Served) -> None:
    large = asked("the cat sat. " * 600_000)
    refused = served.post(MESSAGES, **large)
    assert (refused.status_code, refused.json()["error"]["details"]["error_code"]) == (400, "context_length_exceeded")
    assert served.post(CHAT, **large).json()["error"]["code"] == "context_length_exceeded"
    assert served.ok(COUNT, messages=large["messages"])["input_tokens"] > 600_000
    too_large = served.post(MESSAGES, **asked("x" * LARGE_BYTES))
    assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "request_too_large")
    assert served.post("/tokenize", prompt="x" * BODY_BYTES).status_code == 413


@pytest.mark.parametrize(
    ("host", "headers", "api_key", "status"),
    [
        ("192.0.2.1", {}, "", 413), ("192.0.2.1", {}, "k", 200), ("127.0.0.1", {}, "", 200), ("::1", {}, "", 200),
        ("127.0.0.1", {"x-forwarded-for": "192.0.2.1"}, "", 413), ("127.0.0.1", {"via": "1.1 proxy"}, "k", 200),
        ("127.0.0.1", {"host": "192.0.2.9"}, "", 413),
    ],
)  # fmt: skip
def test_large_bodies_are_for_this_machine_and_the_key(
    host: str, headers: dict[str, str], api_key: str, status: int
) -> None:
    """The part of the body that makes it large is a record of the client. A proxy here is not this machine."""

    def elsewhere(app: ASGIApp) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "client": (host, 1)} if scope["type"] == "http" else scope, receive, send)

        return call

    with running(FakeEngine(REPLIES), settings=replace(SETTINGS, api_key=api_key), wrap=elsewhere) as url:
        body = asked(metadata={"record": "x" * (1 << 20)})
        response = httpx.post(url + MESSAGES, json=body, headers={"x-api-key": api_key, **headers}, timeout=60)
    assert response.status_code == status

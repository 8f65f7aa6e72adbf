"""A model that writes calls as Llama 3.1 does, behind all routes: its calls, whole and streamed, and JSON that is none."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_engine import ByteTokenizer, FakeEngine, running

CALL = '{"name": "clock", "parameters": {"zone": "CET", "day": 1}}'
JSON = '{"name": "Ann", "parameters": {"age": 5}}'
REPLIES = {"time": [CALL], "tagged": ["<|python_tag|>", CALL], "twice": [f"{CALL}; {CALL}"], "json": [JSON]}
ARGUMENTS = {"zone": "CET", "day": 1}
FUNCTION = {"name": "clock", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    engine = FakeEngine(REPLIES, length=2000, tokenizer=ByteTokenizer(call_format="bare"))
    with running(engine) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def posted(client: httpx.Client, route: str, text: str, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], **fields}
    if route == "/v1/responses":
        body["input"] = body.pop("messages")
    tool: dict[str, Any] = {"type": "function", "function": FUNCTION}
    if route == "/v1/messages":
        tool = {"name": "clock", "input_schema": FUNCTION["parameters"]}
        body["max_tokens"] = 500
    answer = client.post(route, json={**body, "tools": [tool]})
    assert answer.status_code == 200, answer.text
    return answer


def whole(client: httpx.Client, route: str, text: str) -> tuple[str, list[Any]]:
    """The text of an answer, and the arguments of its calls."""
    answer = posted(client, route, text).json()
    if route == "/v1/chat/completions":
        (choice,) = answer["choices"]
        calls = choice["message"].get("tool_calls", [])
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        return choice["message"]["content"] or "", [json.loads(call["function"]["arguments"]) for call in calls]
    if route == "/v1/responses":
        texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
        calls = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
        return "".join(texts), list(map(json.loads, calls))
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    return "".join(texts), [block["input"] for block in answer["content"] if block["type"] == "tool_use"]


def streamed(client: httpx.Client, route: str, text: str) -> tuple[str, str]:
    """The text of a streamed answer, and the arguments of its calls, one after the other."""
    words = arguments = ""
    for line in posted(client, route, text, stream=True).text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        delta = event["choices"][0]["delta"] if event.get("choices") else event.get("delta", {})
        if isinstance(delta, str):  # of a response
            words += delta if event["type"] == "response.output_text.delta" else ""
            arguments += delta if event["type"] == "response.function_call_arguments.delta" else ""
            continue
        words += delta.get("content") or delta.get("text", "")
        arguments += delta.get("partial_json", "")
        arguments += "".join(call["function"].get("arguments", "") for call in delta.get("tool_calls", ()))
    return words, arguments


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_calls_are_read_on_all_routes_and_other_json_is_text(client: httpx.Client, route: str) -> None:
    for text, count in (("time", 1), ("tagged", 1), ("twice", 2)):
        assert whole(client, route, text) == ("", [ARGUMENTS] * count)
        assert streamed(client, route, text) == ("", json.dumps(ARGUMENTS) * count)
    assert whole(client, route, "json") == (JSON, [])
    assert streamed(client, route, "json") == (JSON, "")

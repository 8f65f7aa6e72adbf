"""A thinking model behind the routes: its thoughts stand apart from its answer, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_engine import ByteTokenizer, FakeEngine, running

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET", "day": 1}}\n</tool_call>'
REPLIES = {
    "think": ["<think>\nhm", " well\n</think>\n\n", "Yes"],
    "forever": ["<think>\nhm"],
    "call": ["<think>\nhm\n</think>\n\n", CALL, "\n", CALL],
    "mixed": ["Both:\n", CALL],
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    tokenizer = ByteTokenizer(thought_marks=("<think>", "</think>"), call_format="json")
    engine = FakeEngine(REPLIES, length=2000, tokenizer=tokenizer)
    with running(engine) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def body(client: httpx.Client, path: str, text: str, **fields: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"input": text}
    answer = client.post(path, json={**said, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, path: str, text: str, **fields: Any) -> list[dict[str, Any]]:
    said = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"input": text}
    blocks = client.post(path, json={**said, "stream": True, **fields}).text.split("\n\n")
    lines = [block.partition("data: ")[2] for block in blocks]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def test_a_chat_has_its_thought_apart_and_counts_its_tokens(client: httpx.Client) -> None:
    answer = body(client, CHAT, "think")
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes", "hm well", "hm well")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>\nhm well\n</think>") - 6
    deltas = [event["choices"][0]["delta"] for event in events(client, CHAT, "think")]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm well"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes"
    first = next(delta for delta in deltas[1:] if delta)
    assert first["reasoning_content"] == first["reasoning"]


def test_a_thought_that_is_not_closed_is_no_answer(client: httpx.Client) -> None:
    choice = body(client, CHAT, "forever", max_tokens=9)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"] == "h"


def test_calls_stream_argument_by_argument(client: httpx.Client) -> None:
    choice = body(client, CHAT, "call", tools=[CLOCK])["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"zone": "CET", "day": 1}'] * 2
    streamed = [event["choices"][0] for event in events(client, CHAT, "call", tools=[CLOCK])]
    deltas = [call for choice in streamed for call in choice["delta"].get("tool_calls", ())]
    assert [delta["index"] for delta in deltas if "id" in delta] == [0, 1]
    for index in (0, 1):
        pieces = [delta["function"]["arguments"] for delta in deltas if delta["index"] == index]
        assert "".join(pieces) == '{"zone": "CET", "day": 1}'
    assert streamed[-1]["finish_reason"] == "tool_calls"
    one = body(client, CHAT, "call", tools=[CLOCK], parallel_tool_calls=False)["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    assert body(client, CHAT, "mixed")["choices"][0]["message"]["content"] == f"Both:\n{CALL}"  # no tools
    cut = body(client, CHAT, "mixed", tools=[CLOCK], max_tokens=70)["choices"][0]
    assert (cut["finish_reason"], cut["message"]["tool_calls"][0]["function"]["name"]) == ("length", "clock")


def test_a_response_has_an_item_for_its_thought(client: httpx.Client) -> None:
    answer = body(client, RESPONSES, "think")
    thought, message = answer["output"]
    assert (thought["type"], thought["content"][0]["text"], thought["status"]) == ("reasoning", "hm well", "completed")
    assert message["content"][0]["text"] == "Yes"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>\nhm well\n</think>") - 6
    kinds = [event["type"].removeprefix("response.") for event in events(client, RESPONSES, "think")]
    assert kinds.index("reasoning_text.delta") < kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
    follow = body(client, RESPONSES, "think", previous_response_id=answer["id"])
    assert follow["usage"]["input_tokens"] > answer["usage"]["input_tokens"]
    called = events(client, RESPONSES, "call", tools=[CLOCK["function"] | {"type": "function"}])
    pieces = [event["delta"] for event in called if event["type"].endswith("arguments.delta")]
    done = [event["arguments"] for event in called if event["type"].endswith("arguments.done")]
    assert "".join(pieces) == "".join(done) == '{"zone": "CET", "day": 1}' * 2

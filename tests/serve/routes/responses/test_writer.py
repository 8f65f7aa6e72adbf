"""A reply as a response: its items, the events of a stream in OpenAI's order, and what is kept of it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nanochat.data.conversation import Part
from tests.support.fake_engine import FakeEngine, eventually, running

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
RESULT = "<tool_response>rain</tool_response>"
SUM = ["37 × 48 = ", Part("python", "37*48"), Part("python_output", "1776"), "1776"]
REPLIES = {
    "sum": SUM,
    "silence": [],
    "one": [CALL % "北京"],
    "two": ["Let me see.\n", CALL % "Paris", "\n", CALL % "Rome", "\n"],
    "after": [CALL % "Paris", "\nSoon."],
    RESULT: ["It rains."],
    "spaces": ["  "],
}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(REPLIES, length=2000)


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with running(engine) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def made(client: httpx.Client, text: Any, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"input": text, "tools": [WEATHER], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client: httpx.Client, text: Any, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(PATH, json={"input": text, "tools": [WEATHER], "stream": True, **fields})
    events = [json.loads(block.split("\ndata: ")[1]) for block in response.text.split("\n\n") if block]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, those of the growing text once."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(found) if i == 0 or kind != "output_text.delta" or found[i - 1] != kind]


def alike(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without their ids, which are new each time."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


MESSAGE = [
    "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
    "output_item.done",
]  # fmt: skip
FUNCTION = [
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "items"),
    [("hello", [MESSAGE]), ("one", [FUNCTION]), ("two", [MESSAGE, FUNCTION, FUNCTION]), ("after", [FUNCTION, MESSAGE]),
     ("sum", [MESSAGE]), ("spaces", [MESSAGE]), ("silence", [[kind for kind in MESSAGE if "delta" not in kind]])],
)  # fmt: skip
def test_each_item_begins_and_ends_in_a_stream_before_the_next(client, asked, items):
    whole, events = made(client, asked), streamed(client, asked)
    expected = ["created", "in_progress", *(kind for some in items for kind in some), "completed"]
    assert kinds(events) == expected
    response = events[-1]["response"]
    assert alike(response["output"]) == alike(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"] and len({item["id"] for item in done}) == len(items)
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [*range(len(items))]
    for event in events:
        if "output_index" in event:
            item = response["output"][event["output_index"]]
            assert event.get("item_id", item["id"]) == item["id"] == event.get("item", item)["id"]
    for place, item in enumerate(response["output"]):
        deltas = [e["delta"] for e in events if "delta" in e and e["output_index"] == place]
        assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


def test_calls_are_items_and_what_only_separates_them_is_none(client):
    text, first, second = made(client, "two")["output"]
    assert text["content"][0]["text"] == "Let me see.\n"
    assert [json.loads(call["arguments"]) for call in (first, second)] == [{"city": "Paris"}, {"city": "Rome"}]
    assert (first["type"], first["name"], first["status"]) == ("function_call", "weather", "completed")
    assert first["call_id"] != second["call_id"]


def test_response_repeats_what_was_asked(client):
    body = made(client, "one", tool_choice="auto", instructions="be brief", store=False)
    assert (body["tools"], body["tool_choice"], body["store"]) == ([WEATHER], "auto", False)
    assert body["instructions"] == "be brief"
    plain = client.post(PATH, json={"input": "one", "tool_choice": "auto"}).json()  # no tools: no calls
    assert (plain["tools"], plain["output"][0]["content"][0]["text"]) == ([], CALL % "北京")


def test_calculator_calls_are_beside_the_text(client, engine):
    call = {"expression": "37*48", "result": "1776"}
    (item,) = made(client, "sum")["output"]
    assert item["content"][0]["text"] == "37 × 48 = 1776"
    texts = [{"type": "text", "text": text} for text in ("37 × 48 = ", "1776")]
    assert item["parts"] == [texts[0], {"type": "tool", **call}, texts[1]]
    events = streamed(client, "sum")
    assert [event["tool"] for event in events if "tool" in event] == [call]
    made(client, [{"role": "user", "content": "sum"}, item, {"role": "user", "content": "hello"}])
    marked = [*engine.tokenizer.marked("python", "37*48"), *engine.tokenizer.marked("output", "1776")]
    prompt = engine.seen[-1].prompt
    assert any(prompt[i : i + len(marked)] == marked for i in range(len(prompt)))


def test_results_continue_a_response_by_its_id_or_with_its_items(client, engine):
    asked = {"role": "user", "content": "two"}
    first = made(client, [asked], instructions="be brief")
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
        for item in first["output"] if item["type"] == "function_call"
    ]  # fmt: skip
    again = [asked, *first["output"], *outputs]
    assert made(client, again)["output"][0]["content"][0]["text"].endswith("rain</tool_response>")
    prompt = bytes(token for token in engine.seen[-1].prompt if token < 256).decode()
    assert f"{CALL % 'Paris'}{CALL % 'Rome'}{RESULT}\n{RESULT}" in prompt
    second = made(client, outputs, previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    prompt = bytes(token for token in engine.seen[-1].prompt if token < 256).decode()
    assert "be brief" not in prompt  # instructions hold for one response
    third = made(client, "hello", previous_response_id=second["id"], store=False)
    prompt = bytes(token for token in engine.seen[-1].prompt if token < 256).decode()
    assert prompt.index("two") < prompt.index(CALL % "Rome") < prompt.index(RESULT) < prompt.rindex("hello")
    assert third["output"][0]["content"][0]["text"] == "hello"


def test_stored_response_is_fetched_and_deleted_and_one_that_is_not_stored_is_unknown(client):
    for body in (made(client, "two"), streamed(client, "two")[-1]["response"]):
        address = f"{PATH}/{body['id']}"
        assert client.get(address).json() == body and body["store"]
        other = client.get(address, headers={"Authorization": "Bearer other"})
        assert (other.status_code, other.json()["error"]["param"]) == (404, "response_id")
        assert client.get(address, params={"stream": True}).json()["error"]["param"] == "stream"
        assert client.delete(address).json() == {"id": body["id"], "object": "response", "deleted": True}
        assert client.get(address).status_code == client.delete(address).status_code == 404
    body = made(client, "two", store=False)
    assert client.get(f"{PATH}/{body['id']}").status_code == 404
    refused = client.post(PATH, json={"input": "x", "previous_response_id": body["id"]})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "previous_response_not_found")


def test_response_that_failed_or_was_left_is_not_stored(client, engine):
    engine.fail = True
    events = streamed(client, "hello")
    assert events[-1]["type"] == "response.failed"
    assert client.get(f"{PATH}/{events[-1]['response']['id']}").status_code == 404
    engine.gated = True
    seen = len(engine.seen)  # the request that failed is the last of them, and cancelled too
    try:
        with client.stream("POST", PATH, json={"input": "hello", "stream": True}) as stream:
            first = json.loads(next(line for line in stream.iter_lines() if line.startswith("data: "))[6:])
        eventually(lambda: len(engine.seen) > seen and engine.seen[-1].cancelled)
    finally:
        engine.gated = False
    assert client.get(f"{PATH}/{first['response']['id']}").status_code == 404


def test_what_did_not_fit_is_not_kept_so_a_chat_never_outgrows_the_context(client, engine):
    number, texts = None, [f"{place}{'x' * 500}" for place in range(8)]
    for text in texts:
        fields = {"truncation": "auto", "max_output_tokens": 20, "tools": []}
        number = made(client, text, previous_response_id=number, **fields)["id"]
    prompt = bytes(token for token in engine.seen[-1].prompt if token < 256).decode()
    assert texts[-1] in prompt and texts[0] not in prompt
    held = engine.seen[-1].prompt
    made(client, "hello", previous_response_id=number, tools=[], truncation="auto", max_output_tokens=600)
    assert len(engine.seen[-1].prompt) < len(held)

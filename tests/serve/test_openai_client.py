"""OpenAI's own client drives every route that it knows, with a key, whole and streamed."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_engine import SETTINGS
from tests.support.served import serving

KEY = "sk-test"
MODEL = SETTINGS.model
QUESTION = [{"role": "user", "content": "the cat sat on the mat, " * 3}]
TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"zone": {"enum": ["UTC", "CST"]}},
        },
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(length=700, settings=replace(SETTINGS, api_key=KEY)) as served:
        yield served.url


@pytest.fixture(scope="module")
def openai() -> Any:
    """The library, whose import takes seconds."""
    return importlib.import_module("openai")


@pytest.fixture
def client(url: str, openai: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_models(client, openai):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "nanochat"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_chat_whole_and_streamed(client):
    fields = {
        "model": MODEL, "messages": QUESTION, "n": 2, "seed": 1, "temperature": 0.8, "top_p": 0.9, "logprobs": True,
        "top_logprobs": 2, "max_completion_tokens": 15, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "logit_bias": {"40": -5}, "stop": ["zzz"], "extra_body": {"min_p": 0.01, "top_k": 40},
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    assert len(whole.choices) == 2 and len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    alone = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    texts = ["", ""]
    usage = None
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_tools_and_schemas(client):
    forced = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="required", max_tokens=99
    )
    (call,) = forced.choices[0].message.tool_calls
    assert (call.function.name, forced.choices[0].finish_reason) == ("clock", "tool_calls")
    assert json.loads(call.function.arguments).get("zone", "UTC") in ("UTC", "CST")
    schema = {"name": "x", "schema": {"enum": ["yes", "no"]}, "strict": True}
    format_ = {"type": "json_schema", "json_schema": schema}
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=format_, max_tokens=99)
    assert json.loads(reply.choices[0].message.content) in ("yes", "no")


def test_completions_whole_and_streamed(client):
    fields = {
        "model": MODEL,
        "prompt": ["the cat", "12"],
        "max_tokens": 8,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    whole = client.completions.create(**fields)
    assert [choice.text[:2] for choice in whole.choices] == ["th", "12"]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    texts = ["", ""]
    for chunk in client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    tokens = client.completions.create(model=MODEL, prompt=[[1, 2, 3], [4]], max_tokens=2)
    assert tokens.usage.prompt_tokens == 4


def test_responses_whole_and_streamed(client):
    fields = {"model": MODEL, "input": "the cat", "instructions": "be brief", "temperature": 0, "max_output_tokens": 9}
    whole = client.responses.create(**fields)
    assert whole.usage.output_tokens == 9 or whole.status == "completed"
    text = ""
    for event in client.responses.create(**fields, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == whole.output_text == event.response.output_text


def test_responses_with_tools_and_a_chat_that_the_server_keeps(client, openai):
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    fields = {"model": MODEL, "input": "What time is it?", "tools": [tool], "tool_choice": "required",
              "max_output_tokens": 99}  # fmt: skip
    first = client.responses.create(**fields)
    (call,) = first.output
    assert (call.type, call.name, first.tools[0].name) == ("function_call", "clock", "clock")
    with client.responses.stream(**fields) as stream:  # the client itself puts the events together
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert json.loads(streamed.arguments).get("zone", "UTC") in ("UTC", "CST")
    assert kinds[2:6] == [
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
    ]  # fmt: skip
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    more = {"model": MODEL, "tools": [tool], "max_output_tokens": 9, "temperature": 0}
    by_id = client.responses.create(input=[result], previous_response_id=first.id, **more)
    whole = [{"role": "user", "content": fields["input"]}, call, result]
    by_items = client.responses.create(input=whole, store=False, **more)
    assert by_id.output_text == by_items.output_text
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    assert by_items.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(by_id.id) == by_id
    client.responses.delete(by_id.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(by_id.id)
    format_ = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}, "strict": True}
    fields = {"model": MODEL, "input": [result], "text": {"format": format_}, "max_output_tokens": 99}
    with client.responses.stream(previous_response_id=first.id, **fields) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text


def test_refusals_are_the_clients_own_exceptions(client, openai, url):
    with pytest.raises(openai.AuthenticationError, match="needs its key"):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, stop=["x" * 10_000])
    assert (caught.value.param, caught.value.code) == ("stop", "invalid_value")

"""Fields of request bodies: no value in any place of a body makes the server fail."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.serve.routes.anthropic.request import read_messages
from nanochat.serve.routes.chat import read_chat
from nanochat.serve.routes.fields import ApiError, Defaults, Limits
from nanochat.serve.routes.responses.request import read_response
from nanochat.serve.routes.responses.store import ResponseStore
from nanochat.serve.routes.tokens import tokenize
from tests.serve.routes.test_messages import CODER
from tests.support.qwens import VOCABULARY, write_folder

LIMITS, DEFAULTS = Limits("m", 4000, VOCABULARY), Defaults(1.0, 0.0, 0, 20)
ODD: tuple[Any, ...] = (-1, "x", [[]], {"type": []})
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 1, "maxLength": 9, "enum": ["a"]}, "b": {"anyOf": [{}]}},
    "required": ["a"],
    "$defs": {"A": {"const": 5}},
    "$id": "x",
}
FUNCTION = {"name": "a", "description": "b", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"enum": [5]}}}
CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"a": "b"}'}}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}, "max_reasoning_tokens": 5}
REPLY = {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [CALL]}
TEXTS = [{"type": "text", "text": "x"}]
CHAT_BODY = {
    "messages": [
        {"role": "user", "content": TEXTS},
        REPLY,
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "assistant", "parts": [{"type": "tool", "expression": "1", "result": "1"}]},
        {"role": "user", "content": "x"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "a"}},
    "response_format": FORMAT,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "stream_options": {"include_usage": True},
    "reasoning": {"effort": "low"},
    "truncation": "auto",
    **THINKS,
}
USE = {"type": "tool_use", "id": "1", "name": "a", "input": {"a": "b"}}
MESSAGES_BODY = {
    "max_tokens": 5,
    "system": TEXTS,
    "messages": [
        {"role": "user", "content": TEXTS},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}, *TEXTS, USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": TEXTS, "is_error": True}]},
    ],
    "tools": [{"name": "a", "type": "custom", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "a", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"format": {"type": "json_schema", "schema": {"enum": [5]}}, "effort": "low"},
    "stop_sequences": ["x"],
    "thread": {"type": "create"},
}
RESPONSE_BODY = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "a"}]},
    "text": {"format": {"type": "json_schema", "schema": {"enum": [5]}}},
    "include": ["x"],
    "previous_response_id": None,
    **THINKS,
}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A template that writes calls in tags, thoughts and tools: the one that reads most."""
    folder: Path = tmp_path_factory.mktemp("coder")
    (write_folder(folder, "qwen3") / "chat_template.jinja").write_text(CODER)
    return FolderTokenizer(folder, VOCABULARY)


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """The places in a JSON value, each as the keys that lead to it."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (key,)
        yield from ((key, *path) for path in paths(value[key]))


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy of a JSON value with another one at a place."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return copy


@pytest.mark.parametrize("route", ["chat", "messages", "responses", "tokenize"])
def test_no_value_in_any_place_makes_the_server_fail(route: str, coder: Any) -> None:
    shelf = ResponseStore().of("", "")
    readers: dict[str, tuple[Any, Any]] = {
        "chat": (CHAT_BODY, lambda body: read_chat(body, LIMITS, DEFAULTS)),
        "messages": (MESSAGES_BODY, lambda body: read_messages(body, LIMITS, DEFAULTS)),
        "responses": (RESPONSE_BODY, lambda body: read_response(body, LIMITS, DEFAULTS, shelf)),
        "tokenize": (
            {key: CHAT_BODY[key] for key in ("messages", "tools", "tool_choice", "chat_template_kwargs")},
            lambda body: tokenize(body, coder, LIMITS),
        ),
    }
    body, read = readers[route]
    refused = []

    def answer(asked: Any) -> None:
        request = read(asked)
        if hasattr(request, "work"):
            request.work(coder, LIMITS)

    answer(body)
    for path in paths(body):
        for odd in ODD:
            try:
                answer(changed(body, path, odd))
            except ApiError as refusal:
                assert refusal.status in (400, 404), (path, odd)
                refused.append(refusal)
            except Exception as failure:
                raise AssertionError(f"{path} = {odd!r}") from failure
    assert refused


@pytest.mark.parametrize("name", ["reply", "self", "messages", "tools", "add_generation_prompt", "range", "loop", "x"])
def test_variables_of_the_template_may_have_any_name_or_are_refused_by_it(name: str, coder: Any) -> None:
    body = {"messages": CHAT_BODY["messages"], "chat_template_kwargs": {name: "x"}}
    try:
        read_chat(body, LIMITS, DEFAULTS).work(coder, LIMITS)
    except ApiError as refusal:
        assert (refusal.status, refusal.param) == (400, f"chat_template_kwargs.{name}")
        assert name not in ("x", "range", "loop")
    else:
        assert name in ("x", "range", "loop")

"""Bodies as common programs send them, which no client library of the tests sends, are answered."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_engine import CHAT
from tests.support.served import Served, serving

HELLO = {"role": "user", "content": "hello"}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search_files",
        "description": "Search the files of the chat.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string", "format": "path"}}},
    },
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "n8n, chat model": (CHAT, {
        "model": "nanochat-sft-d4", "temperature": 0.7, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0,
        "n": 1, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": -1, "stop": None,
        "logit_bias": None, "response_format": {"type": "text"}, "user": "n8n", "messages": [HELLO],
    }),
    "n8n, agent": (CHAT, {
        "model": "nanochat-sft-d4", "temperature": 0.7, "reasoning_effort": "medium", "tools": [SEARCH],
        "tool_choice": "auto", "parallel_tool_calls": True, "service_tier": "auto", "store": False,
        "prompt_cache_key": "chat-1", "safety_identifier": "user-1", "metadata": {"workflow": "1"}, "verbosity": "low",
        "messages": [{"role": "system", "content": "You are a helpful assistant"}, HELLO,
                     {"role": "assistant", "content": None, "tool_calls": [
                         {"id": "call_1", "type": "function",
                          "function": {"name": "search_files", "arguments": '{"path": "/"}'}}]},
                     {"role": "tool", "tool_call_id": "call_1", "name": "search_files", "content": "[]"}],
    }),
    "n8n, responses": ("/v1/responses", {
        "model": "nanochat-sft-d4", "temperature": 1, "top_p": 1, "store": False, "stream": False, "service_tier": "flex",
        "include": ["web_search_call.action.sources", "reasoning.encrypted_content"], "text": {"format": {"type": "text"},
        "verbosity": "medium"}, "reasoning": {"effort": "low", "summary": None}, "truncation": "auto", "max_tool_calls": 15,
        "tools": [{"type": "web_search", "search_context_size": "medium"}, {"type": "code_interpreter",
                  "container": {"type": "auto"}}], "tool_choice": "auto", "prompt_cache_key": "a", "background": False,
        "input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "input_text", "text": "hello"}]}, {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                {"type": "output_text", "text": "Hi!", "annotations": []}]}, HELLO],
    }),
    "Open WebUI": (CHAT, {
        "stream": True, "model": "nanochat-sft-d4", "stream_options": {"include_usage": True}, "top_k": -1, "seed": -1,
        "messages": [HELLO, {"role": "assistant", "content": "Hi!"}, {"role": "system", "content": "Context: none."},
                     {"role": "user", "content": [{"type": "text", "text": "and now?"}]}],
        "files": [{"type": "file", "id": "1"}], "features": {"web_search": False, "memory": False},
        "variables": {"{{USER_NAME}}": "A"}, "model_item": {"id": "x"}, "session_id": "s", "chat_id": "c", "id": "m",
        "background_tasks": {"title_generation": True}, "tool_ids": ["t"], "tool_servers": [],
        "user": {"name": "A", "id": "1", "email": "a@example.org", "role": "admin"}, "metadata": {"task": "chat"},
    }),
    "Open WebUI, title": (CHAT, {
        "model": "nanochat-sft-d4", "stream": False, "max_completion_tokens": 1000, "metadata": {"task": "title_generation"},
        "messages": [{"role": "user", "content": "### Task:\nGenerate a title."}], "stop": [""],
    }),
    "Cline": (CHAT, {
        "model": "nanochat-sft-d4", "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": 128_000,
        "messages": [{"role": "system", "content": "You are Cline"}, {"role": "user", "content": [
            {"type": "text", "text": "<task>x</task>"}, {"type": "text", "text": "<environment_details/>"}]}],
    }),
    "SillyTavern": ("/v1/completions", {
        "model": "nanochat-sft-d4", "prompt": "A:", "max_tokens": 99_999, "temperature": 1, "top_k": -1, "seed": -1,
        "stop": [f"\n{name}:" for name in range(20)], "best_of": 1, "include_stop_str_in_output": False, "user": "x",
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "ignore_eos": False, "length_penalty": 1,
    }),
    "a last assistant message": (CHAT, {"messages": [{"role": "assistant", "content": "Once upon"}]}),
    "Codex": ("/v1/responses", {
        "model": "nanochat-sft-d4", "instructions": "You are a coding agent.", "store": False, "stream": True,
        "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
                  {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, {"type": "local_shell"}],
        "tool_choice": "auto", "parallel_tool_calls": False, "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"}, "prompt_cache_key": "1", "text": {"verbosity": "low"},
        "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
                  {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(length=900) as served:
        yield served


@pytest.mark.parametrize("program", BODIES)
def test_body_is_answered(served: Served, program: str) -> None:
    path, body = BODIES[program]
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    assert 'data: {"error"' not in response.text and "event: response.failed" not in response.text
    skipped = {"n8n, responses": "web_search, code_interpreter", "Codex": "custom, local_shell"}
    assert response.headers.get("x-skipped-tools") == skipped.get(program)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/", "/assets/app.js", "/metrics"])
def test_head_is_answered_like_get_but_without_a_body(served: Served, path: str) -> None:
    head, get = served.client.head(path), served.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert served.client.head("/v1/nothing").status_code == 404


def test_slashes_at_the_end_of_a_path_change_nothing(served: Served) -> None:
    assert served.ok(f"{CHAT}/", messages=[HELLO], max_tokens=2)["object"] == "chat.completion"
    for path in ("/v1/models/", "/health//", "//"):
        assert served.client.get(path).status_code == 200
    assert served.client.get("/assets/").status_code == 404

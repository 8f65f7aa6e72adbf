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
    "Claude Code": ("/v1/messages?beta=true", {
        "model": "nanochat-sft-d4", "max_tokens": 32_000, "stream": True, "temperature": 1,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
                   {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>\nx\n</system-reminder>\n"},
            {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "A file.", "signature": "c2ln"}, {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_01", "name": "Read", "input": {"file_path": "/a", "limit": 9}},
                {"type": "tool_use", "id": "toolu_02", "name": "Bash", "input": {"command": "ls"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_02", "content": "<tool_use_error>no</tool_use_error>",
                 "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": [{"type": "text", "text": "1 x"}],
                 "cache_control": {"type": "ephemeral"}}]}],
        "tools": [{"name": name, "description": "It reads.", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False,
            "properties": {"file_path": {"type": "string"}, "limit": {"type": "integer", "exclusiveMinimum": 0}},
            "required": ["file_path"]}} for name in ("Read", "Bash")],
        "metadata": {"user_id": "user_x_account__session_y"}, "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }),
    "Claude Code, a title": ("/v1/messages?beta=true", {
        "model": "nanochat-sft-d4", "max_tokens": 32_000, "stream": True, "temperature": 1, "tools": [],
        "system": [{"type": "text", "text": "Write a title."}], "metadata": {"user_id": "x"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "thinking": {"type": "disabled"}, "output_config": {"format": {"type": "json_schema", "schema": {
            "type": "object", "properties": {"title": {"enum": ["x", "y"]}}, "required": ["title"],
            "additionalProperties": False}}},
    }),
    "Claude Code, a count": ("/v1/messages/count_tokens?beta=true", {
        "model": "nanochat-sft-d4", "messages": [HELLO], "tools": [{"name": "Read", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(length=1300) as served:
        yield served


@pytest.mark.parametrize("program", BODIES)
def test_body_is_answered(served: Served, program: str) -> None:
    path, body = BODIES[program]
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    assert 'data: {"error"' not in response.text and "event: response.failed" not in response.text
    assert "event: error" not in response.text
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

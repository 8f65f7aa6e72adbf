"""Libraries that speak OpenAI's or Anthropic's format drive the server, unmodified, by the calls that their guides show.

They are in an environment of their own, .venv/clients, which setup_env.sh makes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import SETTINGS
from tests.support.served import serving

SCRIPTS = Path(__file__).parents[1] / "support" / "clients"
PYTHON = Path(sys.prefix) / "clients" / "bin" / "python"
KEY = "sk-test"
# No library may reach anything but the server.
OFFLINE = {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "NO_PROXY": "127.0.0.1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(length=3000, settings=replace(SETTINGS, api_key=KEY)) as served:
        yield f"{served.url}/v1"


@pytest.fixture
def busy_url() -> Iterator[str]:
    """A server that takes few requests at once."""
    with serving(length=3000, settings=replace(SETTINGS, api_key=KEY, waiting=2)) as served:
        yield f"{served.url}/v1"


def answers(url: str, name: str, home: Path) -> dict[str, Any]:
    """What a client's script printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_API_KEY": KEY, **OFFLINE}
    command = [str(PYTHON), str(SCRIPTS / f"with_{name}.py"), url, SETTINGS.model]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_pydantic_ai(url: str, tmp_path: Path) -> None:
    found = answers(url, "pydantic_ai", tmp_path)
    for route in ("chat", "responses"):
        assert found[f"{route} messages"] == 4 and found[f"{route} streamed as whole"]
        assert {found[f"{route} {name}"] for name in ("tool", "native", "beside a tool")} == {"Cat"}


def test_langchain(url: str, tmp_path: Path) -> None:
    found = answers(url, "langchain", tmp_path)
    for route in ("chat", "responses"):
        assert found[f"{route} streamed as whole"] and found[f"{route} after the call"]
        assert (found[f"{route} batch"], found[f"{route} call"]) == (3, "clock")
        shaped = [found[f"{route} {method}"] for method in ("json_schema None", "json_schema True")]
        shaped += [found[f"{route} {method}"] for method in ("function_calling None", "function_calling True")]
        assert shaped == ["Cat"] * 4


def test_litellm(url: str, tmp_path: Path) -> None:
    assert answers(url, "litellm", tmp_path) == {
        "streamed as whole": True,
        "call": "clock",
        "cat": "Cat",
        "response": "response",
        "anthropic": "message",
        "anthropic call": "clock",
        "anthropic after the call": "message",
        "embeddings": True,
    }


def test_openai_agents(url: str, tmp_path: Path) -> None:
    found = answers(url, "agents", tmp_path)
    for route in ("chat", "responses"):
        assert found[f"{route} items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        assert found[f"{route} streamed"] and found[f"{route} cat"] == "Cat"
    assert found["beside a hosted tool"] == "str"


def test_instructor(url: str, tmp_path: Path) -> None:
    assert answers(url, "instructor", tmp_path) == {
        "TOOLS": "Cat",
        "TOOLS_STRICT": "Cat",
        "JSON_SCHEMA": "Cat",
        "RESPONSES_TOOLS": "Cat",
        "JSON": "Guess",
    }


def test_anthropic(busy_url: str, tmp_path: Path) -> None:
    found = answers(busy_url, "anthropic", tmp_path)
    assert found.pop("message")[:2] == ["message", "assistant"]
    assert found.pop("thinking") == ["text"]
    delta = ["content_block_delta", "content_block_start", "content_block_stop"]
    assert found.pop("events") == [*delta, "message_delta", "message_start", "message_stop"]  # not the pings
    assert found == {
        "streamed as whole": True,
        "last event": "message_stop",
        "usage": True,
        "count": True,
        "call": ["tool_use", "clock", True],
        "after the call": "message",
        "tool runner": "message",
        "parsed": "Cat",
        "too long": [400, "BadRequestError", "invalid_request_error"],
        "image": [400, "BadRequestError", "invalid_request_error"],
        "wrong key": [401, "AuthenticationError", "authentication_error"],
        "no model": [404, "NotFoundError", "not_found_error"],
        "token": "message",
        "models": True,
        "batch": True,
        "tried again": True,
        "litellm": True,
        "litellm call": "clock",
        "litellm messages": "message",
    }

"""An agent as a client: conversations with tools and their results, over Anthropic's Messages."""

import http.client
import json
import random
from typing import Any

from bench.serve.streams import SECONDS, WORDS, StatusError
from nanochat.common import UserError

MESSAGES = "/v1/messages"
HEADERS = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
RESULT_WORDS = 600  # of each result of a tool
CALLS = 4  # in the longest conversation
TOOLS = [
    {
        "name": "read_file",
        "description": "Read a text file.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
    {
        "name": "run_command",
        "description": "Run a command in a shell.",
        "input_schema": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "seconds": {"type": "integer"}},
            "required": ["command"],
        },
    },
]


def conversation(draw: random.Random, calls: int) -> list[dict[str, Any]]:
    """Return the messages of an agent that has called a tool `calls` times."""
    task = " ".join(draw.choices(WORDS, k=20))
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    for number in range(calls):
        call = {
            "type": "tool_use",
            "id": f"call_{number}",
            "name": "read_file",
            "input": {"path": f"{draw.choice(WORDS)}.txt"},
        }
        result = {
            "type": "tool_result",
            "tool_use_id": f"call_{number}",
            "content": " ".join(draw.choices(WORDS, k=RESULT_WORDS)),
        }
        messages.append({"role": "assistant", "content": [call]})
        messages.append({"role": "user", "content": [result]})
    return messages


def body(draw: random.Random, calls: int, tokens: int) -> bytes:
    """Return the body of an agent's next request after `calls` calls, which streams."""
    request = {
        "max_tokens": tokens,
        "stream": True,
        "system": [{"type": "text", "text": "You are an agent that works on files."}],
        "tools": TOOLS,
        "messages": conversation(draw, calls),
    }
    return json.dumps(request).encode()


def ask(port: int, request: bytes) -> None:
    """Stream one message to its end.

    Raises StatusError if the server refuses, and UserError if the message breaks off.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("POST", MESSAGES, request, HEADERS)
    with connection.getresponse() as response:
        if response.status != 200:
            words = response.read(500).decode(errors="replace")
            raise StatusError(response.status, words)
        events = [line.split()[1] for line in response if line.startswith(b"event:")]
    if not events or events[-1] != b"message_stop":
        raise UserError("a server broke off a message")

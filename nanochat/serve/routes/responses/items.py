"""Reads the items of an input as messages of the chat format, so that both routes share what
follows."""

import re
from collections.abc import Sequence
from typing import Any

from nanochat.data.conversation import Conversation
from nanochat.serve.routes.fields import ApiError, invalid, kind, missing
from nanochat.serve.routes.messages import read_conversation, text_of

KINDS = "message, function_call or function_call_output"


def read_input(given: Any, earlier: Sequence[dict[str, Any]]) -> Conversation:
    """The conversation of an input that follows the messages of an earlier response. ApiError 400.

    The result of a call must name a call of the earlier response or one that stands before the
    result.
    """
    if given is None:
        raise missing("input", "a text or a list of items")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid(f"input must be a text or a list of items, got {kind(given)}", "input")
    calls = {call["id"] for message in earlier[-1:] for call in message.get("tool_calls", ())}
    own = [
        _message(item, f"input[{i}]", calls) if isinstance(item, dict) else item
        for i, item in enumerate(given)
    ]
    try:
        return read_conversation([*earlier, *own])
    except ApiError as refusal:  # the field has another name on this route

        def renamed(text: str) -> str:
            text = re.sub(
                r"messages\[(\d+)\](\.\w+)?",
                lambda found: place(int(found[1]), found[2] or ""),
                text,
            )
            return text.replace("messages", "input")

        def place(number: int, field: str) -> str:
            if number < len(earlier):
                return "previous_response_id"
            return f"input[{number - len(earlier)}]{field}"

        param = refusal.param and renamed(refusal.param)
        raise ApiError(refusal.status, refusal.code, renamed(str(refusal)), param) from None


def _message(item: dict[str, Any], name: str, calls: set[str]) -> dict[str, Any]:
    """The message of an item. The ids of calls join `calls`."""
    what = item.get("type", "message")
    if what == "function_call":
        called, arguments, number = (item.get(key) for key in ("name", "arguments", "call_id"))
        if not (isinstance(called, str) and isinstance(arguments, str) and isinstance(number, str)):
            raise invalid(
                f"{name} must be a call: {{type: function_call, call_id, name, arguments}}, all "
                "texts",
                name,
            )
        calls.add(number)
        call = {
            "id": number,
            "type": "function",
            "function": {"name": called, "arguments": arguments},
        }
        return {"role": "assistant", "tool_calls": [call]}
    if what == "function_call_output":
        number = item.get("call_id")
        if not isinstance(number, str) or number not in calls:
            raise invalid(
                f"{name}.call_id must be the call_id of a function_call before it",
                f"{name}.call_id",
            )
        return {
            "role": "tool",
            "tool_call_id": number,
            "content": text_of(item.get("output"), f"{name}.output"),
        }
    if what != "message":
        raise invalid(f"{name}.type must be {KINDS}", f"{name}.type")
    if item.get("role") == "tool":
        raise invalid(
            f"{name} is a result without its call: send it as a function_call_output",
            f"{name}.role",
        )
    return {key: item[key] for key in ("role", "content", "parts") if key in item}

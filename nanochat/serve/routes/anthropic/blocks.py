"""Reads messages made of Anthropic's blocks, as messages of the chat route."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanochat.serve.routes.fields import flag, invalid, kind


class Messages:
    """Turns messages made of blocks into messages of the chat route, and notes their names."""

    def __init__(self, names: list[str]):
        self._names = names
        self._call_ids: set[str] = set()

    def read(self, fields: Mapping[str, Any]) -> Any:
        """Return the messages of a request; `system` comes first.

        Raises ApiError (400) for a message or a block that is malformed or unknown.
        """
        items = fields.get("messages")
        if not isinstance(items, list):
            return items  # the chat route says what is wrong with it
        messages = []
        system = fields.get("system")
        if system:
            messages.append({"role": "system", "content": _text(system, "system")})
            self._names.append("system")
        for i, item in enumerate(items):
            name = f"messages[{i}]"
            chat_messages = self._message(item, name)
            messages += chat_messages
            self._names += [name] * len(chat_messages)
        if messages and messages[-1].get("tool_calls"):
            name = self._names[-1]
            raise invalid(f"{name} calls a tool: send the tool_result after it", name)
        return messages

    def _message(self, item: Any, name: str) -> list[Any]:
        """Return a message as messages of the chat route: one, and one for each tool result."""
        if not isinstance(item, dict):
            raise invalid(f"{name} must be an object {{role, content}}, got {kind(item)}", name)
        role = item.get("role")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{name}.role must be user, assistant or system", f"{name}.role")
        content = item.get("content")
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        blocks = _blocks(content, f"{name}.content")
        if role == "assistant":
            return [self._reply(blocks)]
        results = []
        texts = []
        for block, block_name in blocks:
            if block.get("type") == "tool_result" and role == "user":
                results.append(self._result(block, block_name))
            else:
                texts.append(_block_text(block, block_name, "text or tool_result"))
        if texts or not results:
            results.append({"role": role, "content": "\n\n".join(texts)})
        return results

    def _reply(self, blocks: Sequence[tuple[dict[str, Any], str]]) -> dict[str, Any]:
        """Return the blocks of an assistant message as one message of the chat route."""
        texts = []
        thoughts = []
        calls = []
        for block, name in blocks:
            if block.get("type") == "tool_use":
                calls.append(self._call(block, name))
            elif block.get("type") == "thinking":
                thoughts.append(_string(block, "thinking", name))
            elif block.get("type") != "redacted_thinking":
                texts.append(_block_text(block, name, "text, thinking or tool_use"))
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _call(self, block: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a tool_use block as a call, whose ID a result may name from now on."""
        call_id = _string(block, "id", name)
        if not isinstance(block.get("input"), dict):
            text = f"{name}.input must be an object, got {kind(block.get('input'))}"
            raise invalid(text, f"{name}.input")
        self._call_ids.add(call_id)
        arguments = json.dumps(block["input"], ensure_ascii=False)
        function = {"name": _string(block, "name", name), "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _result(self, block: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a tool_result block as a message of the chat route."""
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str) or call_id not in self._call_ids:
            text = f"{name}.tool_use_id must be the id of a tool_use before it"
            raise invalid(text, f"{name}.tool_use_id")
        text = _text(block.get("content") or "", f"{name}.content")
        if flag(block, "is_error"):
            text = f"Error: {text}"
        return {"role": "tool", "tool_call_id": call_id, "content": text}


def _blocks(content: Any, name: str) -> list[tuple[dict[str, Any], str]]:
    """Return the blocks of a message with their names, or raise ApiError (400) for other things."""
    if not isinstance(content, list):
        text = f"{name} must be a string or a list of blocks, got {kind(content)}"
        raise invalid(text, name)
    blocks = []
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise invalid(f"{name}[{i}] must be a block, got {kind(block)}", f"{name}[{i}]")
        blocks.append((block, f"{name}[{i}]"))
    return blocks


def _text(content: Any, name: str) -> str:
    """Return the text of a string or of a list of text blocks, which become paragraphs."""
    if isinstance(content, str):
        return content
    texts = [_block_text(block, block_name, "text") for block, block_name in _blocks(content, name)]
    return "\n\n".join(texts)


def _block_text(block: Mapping[str, Any], name: str, types: str) -> str:
    """Return the text of a text block, or raise ApiError (400) for a block of another type.

    `types` are those that may stand in its place.
    """
    block_type = block.get("type")
    if block_type == "text":
        return _string(block, "text", name)
    if block_type in ("image", "document"):
        text = f"{name} is of the type {block_type}, and the model reads only text: leave it out"
        raise invalid(text, name)
    type_text = repr(block_type[:80]) if isinstance(block_type, str) else kind(block_type)
    raise invalid(f"{name}.type must be {types}, got {type_text}", f"{name}.type")


def _string(block: Mapping[str, Any], key: str, name: str) -> str:
    """Return a text of a block, or raise ApiError (400) if it is missing or no text."""
    value = block.get(key)
    if not isinstance(value, str):
        raise invalid(f"{name}.{key} must be a string, got {kind(value)}", f"{name}.{key}")
    return value

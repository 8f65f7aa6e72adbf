"""Reads the messages of a request into a conversation, and puts their turns in order.

A message may hold texts, calls of our calculator, and calls of a client's tools. prompts.py turns
the conversation into tokens.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanochat.data.conversation import (
    Conversation,
    Message,
    Part,
    Role,
    assistant,
    merge_texts,
    system,
    user,
)
from nanochat.serve.formats.pieces import parts_as_request
from nanochat.serve.routes.fields import ApiError, invalid, kind, missing
from nanochat.serve.routes.tools import read_calls

MOST_MESSAGES = 1000  # a chat of 500 questions; checking more would keep other clients waiting
MOST_PARTS = 4000  # parts of all messages together
# The role that the model sees for a message, by the role that the client gives.
SPEAKERS: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# The names under which clients send the thought of an earlier reply.
THOUGHTS = ("reasoning_content", "reasoning")
# Types of parts that are text. The last two belong to the responses format.
TEXTS = ("text", "input_text", "output_text")


# --- reading -------------------------------------------------------------------------------------


def read_conversation(items: Any, continued: bool = False) -> Conversation:
    """Check a request's list of messages, and return it as a conversation.

    Roles may come in any order. The results of calls are put after their calls, in the order of
    the calls; a result that names no call must follow an assistant message or another result. Empty
    system messages are left out. If `continued` is true, the last message must be a reply without
    calls for the model to continue.

    Raises ApiError (400) if the messages are invalid or too many.
    """
    items = _checked_items(items)
    as_sent = [_message(item, f"messages[{i}]") for i, item in enumerate(items)]
    messages = [
        message
        for message in _results_after_calls(as_sent)
        if message.role != "system" or message.text.strip()
    ]
    if not messages:
        raise _no_messages()
    last = f"messages[{len(items) - 1}].role"
    if continued and messages[-1].role != "assistant":
        text = (
            "continue_final_message needs a reply to continue: the last message must have the role "
            "assistant"
        )
        raise invalid(text, last)
    if continued and messages[-1].fields.get("tool_calls"):
        text = (
            "a reply with calls cannot be continued: send the results of the calls after it, or "
            "leave the calls out"
        )
        raise invalid(text, last)
    if not continued and items[-1].get("tool_calls"):
        text = "calls need their results: the last message must have the role user or tool"
        raise invalid(text, last)
    return Conversation(tuple(messages))


def _checked_items(items: Any) -> list[Any]:
    """Return `items`, the messages of a request, after checking only how many there are.

    Raises ApiError (400) if `items` is not a list, is empty, or has too many messages or parts.
    """
    if items is None:
        raise missing("messages", "a list of {role, content}")
    if not isinstance(items, list):
        raise invalid("messages must be a list of {role, content}, got " + kind(items), "messages")
    if not items:
        raise _no_messages()
    if len(items) > MOST_MESSAGES:
        text = (
            f"there may be at most {MOST_MESSAGES:,} messages, got {len(items):,}: leave out the "
            "oldest"
        )
        raise ApiError(400, "too_many_messages", text, "messages")
    parts = sum(map(_part_count, items))
    if parts > MOST_PARTS:
        text = (
            f"all messages together may have at most {MOST_PARTS:,} parts, got {parts:,}: leave "
            "out the oldest messages"
        )
        raise ApiError(400, "too_many_messages", text, "messages")
    return items


def _no_messages() -> ApiError:
    """Return the refusal of a request without messages."""
    text = "messages must hold at least one user message, got none"
    return ApiError(400, "empty_prompt", text, "messages")


def _part_count(item: Any) -> int:
    """Return how many parts an unchecked message has, in `content` and `parts`."""
    if not isinstance(item, dict):
        return 0
    lists = (item.get("content"), item.get("parts"))
    return sum(len(parts) for parts in lists if isinstance(parts, list))


def _results_after_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a request, with the result of each call after the call.

    Neighbouring messages of the assistant are joined if either has calls. Raises ApiError (400) for
    a result that names no call and follows neither a call nor another result.
    """
    joined: list[tuple[int, Message]] = []  # (index in the request, message)
    for i, message in enumerate(messages):
        if joined and joined[-1][1].role == "assistant" == message.role:
            index, earlier = joined[-1]
            if "tool_calls" in {**earlier.fields, **message.fields}:
                joined[-1] = index, _joined(earlier, message)
                continue
        joined.append((i, message))
    place_of_result: dict[str, tuple[int, int]] = {}  # ID of a call -> where its result belongs
    sort_keys = []
    for i, (_, message) in enumerate(joined):
        place = (i, 0)
        call_id = message.fields.get("tool_call_id")
        if call_id:
            place = place_of_result.get(call_id, place)
        sort_keys.append((*place, i))
        for number, call in enumerate(message.fields.get("tool_calls", ()), start=1):
            if call.get("id"):
                place_of_result[call["id"]] = (i, number)
    ordered = [joined[i] for *_, i in sorted(sort_keys)]
    for previous, (i, message) in itertools.pairwise([(-1, user("")), *ordered]):
        if message.role == "tool" and previous[1].role not in ("assistant", "tool"):
            text = f"messages[{i}] is the result of a tool: put it after the call"
            raise invalid(text, f"messages[{i}].role")
    return [message for _, message in ordered]


def _joined(first: Message, second: Message) -> Message:
    """Return two messages of one speaker as one, with the thoughts and the calls of both.

    A blank line separates their words, if both have some.
    """
    fields = {**first.fields, **second.fields}
    thoughts = []
    calls = []
    for message in (first, second):
        if "reasoning_content" in message.fields:
            thoughts.append(message.fields["reasoning_content"])
        calls += message.fields.get("tool_calls", ())
    if thoughts:
        fields["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        fields["tool_calls"] = calls
    both_speak = any(part.text for part in first.parts) and any(part.text for part in second.parts)
    blank_line = (Part("text", "\n\n"),) if both_speak else ()
    parts = merge_texts(*first.parts, *blank_line, *second.parts)
    return Message(first.role, parts, fields=fields)


def _message(item: Any, name: str) -> Message:
    """Check one message of a request, and return it as a Message.

    Raises ApiError (400) if the message is malformed. The error calls it `name`, such as
    messages[0].
    """
    if not isinstance(item, dict):
        raise invalid(f"{name} must be an object {{role, content}}, got {kind(item)}", name)
    role = item.get("role")
    if not isinstance(role, str) or role not in SPEAKERS:
        role_text = repr(role[:80]) if isinstance(role, str) else kind(role)
        text = f"{name}.role must be system, user, assistant or tool, got {role_text}"
        raise invalid(text, f"{name}.role")
    if role == "assistant":
        return Message("assistant", _assistant_parts(item, name), fields=_fields(item, name))
    text = text_of(item.get("content"), f"{name}.content")
    if role == "user" and not text.strip():
        refusal = f"{name} is empty: every message of the user must hold some text"
        raise ApiError(400, "empty_prompt", refusal, f"{name}.content")
    fields = {}
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        fields["tool_call_id"] = item["tool_call_id"]
    return Message(SPEAKERS[role], (Part("text", text),), fields=fields)


def _fields(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the thought and the calls of an assistant message.

    Raises ApiError (400) if one of them is malformed.
    """
    fields: dict[str, Any] = {}
    for key in THOUGHTS:
        thought = item.get(key)
        if isinstance(thought, str) and thought:
            fields["reasoning_content"] = thought
            break
        if thought is not None and not isinstance(thought, str):
            raise invalid(f"{name}.{key} must be a text, got {kind(thought)}", f"{name}.{key}")
    if item.get("tool_calls"):
        fields["tool_calls"] = read_calls(item["tool_calls"], f"{name}.tool_calls")
    return fields


def _assistant_parts(item: dict[str, Any], name: str) -> tuple[Part, ...]:
    """Return the parts of an assistant message: its `parts`, or else its text."""
    content = item.get("content")
    if item.get("parts") is not None:
        return _reply_parts(item["parts"], f"{name}.parts")
    if content is None:
        return (Part("text", ""),)
    return (Part("text", text_of(content, f"{name}.content")),)


def text_of(content: Any, name: str) -> str:
    """Return the text of a message's `content`, which is a string or a list of text parts.

    Raises ApiError (400) for anything else.
    """
    if isinstance(content, list):
        for i, content_part in enumerate(content):
            if not _is_text(content_part):
                raise _refused_part(content_part, f"{name}[{i}]")
        return "".join(content_part["text"] for content_part in content)
    if not isinstance(content, str):
        raise invalid(f"{name} must be a string or a list of text parts, got {kind(content)}", name)
    return content


def _refused_part(content_part: Any, name: str) -> ApiError:
    """Return the refusal of a part that is not text, such as an image."""
    part_type = content_part.get("type") if isinstance(content_part, dict) else None
    if isinstance(part_type, str) and part_type not in TEXTS:
        text = f"{name} is of type {part_type[:80]!r}, and the model reads only text: leave it out"
        return ApiError(400, "unsupported_content", text, name)
    return invalid(f"{name} must be a text part, {{type: text, text}}", name)


def _is_text(content_part: Any) -> bool:
    """Return whether a part of a message is a valid text part."""
    if not isinstance(content_part, dict):
        return False
    return content_part.get("type") in TEXTS and isinstance(content_part.get("text"), str)


def _reply_parts(items: Any, name: str) -> tuple[Part, ...]:
    """Return the parts of a reply that a client sends back in the format of Reply.parts.

    Raises ApiError (400) if a part has any other format.
    """
    parts: list[Part] = []
    for reply_part in items if isinstance(items, list) else [items]:
        fields = reply_part if isinstance(reply_part, dict) else {}
        expression = fields.get("expression")
        text = fields.get("text")
        if isinstance(expression, str) and fields.get("type") == "tool":
            parts.append(Part("python", expression))
            if isinstance(fields.get("result"), str):
                parts.append(Part("python_output", fields["result"]))
        elif isinstance(text, str) and fields.get("type") == "text":
            parts.append(Part("text", text))
        else:
            rule = "may hold only {type: text, text} and {type: tool, expression, result}"
            raise invalid(f"{name} {rule}", name)
    return tuple(parts)


def as_request(message: Message) -> dict[str, Any]:
    """Return a message as a dict in the format that read_conversation reads."""
    if message.role != "assistant":
        return {"role": message.role, "content": message.text, **message.fields}
    request: dict[str, Any] = {"role": "assistant", "parts": parts_as_request(message.parts)}
    if "reasoning_content" in message.fields:
        request["reasoning_content"] = message.fields["reasoning_content"]
    if "tool_calls" in message.fields:
        request["tool_calls"] = list(map(_call_as_request, message.fields["tool_calls"]))
    return request


def _call_as_request(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as text."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


# --- order ---------------------------------------------------------------------------------------


def alternating(conversation: Conversation) -> Conversation:
    """Return a chat in the form of training data: a system message, if any, then alternating turns.

    System messages are joined into one, and so are consecutive messages of the user or of the
    assistant. If the assistant speaks first, an empty user message is put in front. If there are
    only system messages, they become one user message.
    """
    instructions: list[str] = []
    turns: list[Message] = []
    for message in conversation.messages:
        if message.role == "system":
            instructions.append(message.text)
        elif turns and turns[-1].role == message.role != "tool":
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    text = "\n\n".join(instructions)
    if not turns:
        return replace(conversation, messages=(user(text),))
    head = [system(text)] if text else []
    if turns[0].role == "assistant":
        head.append(user(""))
    return replace(conversation, messages=(*head, *turns))


def with_instructions(conversation: Conversation, instructions: str) -> Conversation:
    """Return a conversation whose system message begins with `instructions`, if there are any."""
    messages = conversation.messages
    if not instructions:
        return conversation
    texts = [instructions]
    if messages[0].role == "system":
        texts.append(messages[0].text)
        messages = messages[1:]
    return replace(conversation, messages=(system("\n\n".join(texts)), *messages))


def answerable(conversation: Conversation) -> Conversation:
    """Return a chat in the form of training data (see alternating) that ends with a user message.

    If the assistant spoke last, an empty user message is added.
    """
    plain = alternating(conversation)
    if plain.messages[-1].role != "assistant":
        return plain
    return replace(plain, messages=(*plain.messages, user("")))


def with_replies(conversation: Conversation) -> Conversation:
    """Return a chat with an empty reply before each message of the user that follows a result.

    Mistral's templates refuse other chats. Clients send such a message beside the results.
    """
    messages: list[Message] = []
    for message in conversation.messages:
        if message.role == "user" and messages and messages[-1].role == "tool":
            messages.append(assistant(""))
        messages.append(message)
    return replace(conversation, messages=tuple(messages))

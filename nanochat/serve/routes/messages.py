"""Reads the messages of a request into a conversation: texts, our calculator's calls, and calls of a client's tools."""

import itertools
from typing import Any

from nanochat.data.conversation import Conversation, Message, Part, Role, system, user
from nanochat.serve.routes.fields import ApiError, invalid, kind, missing
from nanochat.serve.routes.tools import written_calls, written_result

MOST_MESSAGES = 1000  # a chat of 500 questions; checking more would keep other clients waiting
MOST_PARTS = 4000  # of all messages together
# Whom the model takes for the speaker of a message, by the role that a client gives.
SPEAKERS: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "user",
}

TEXTS = (
    "text",
    "input_text",
    "output_text",
)  # types of parts that are text; the last two in the responses format


def read_conversation(given: Any, instructions: str = "", continued: bool = False) -> Conversation:
    """The conversation of a list of messages, in any order that OpenAI takes. ApiError 400.

    The assistant speaks last in a chat whose last reply is to be `continued`. Results of tools count as the user's, and
    those that follow each other are one message. An empty system message counts as none, and an empty reply is a turn,
    because a model may say nothing. `instructions` go in front of the system message.
    """
    if given is None:
        raise missing("messages", "a list of {role, content}")
    if not isinstance(given, list):
        raise invalid("messages must be a list of {role, content}, got " + kind(given), "messages")
    none = ApiError(
        400, "empty_prompt", "messages must hold at least one user message, got none", "messages"
    )
    if not given:
        raise none
    if len(given) > MOST_MESSAGES:
        text = f"there may be at most {MOST_MESSAGES:,} messages, got {len(given):,}: leave out the oldest"
        raise ApiError(400, "too_many_messages", text, "messages")
    if (parts := sum(map(_count, given))) > MOST_PARTS:
        text = f"all messages together may have at most {MOST_PARTS:,} parts, got {parts:,}: leave out the oldest messages"
        raise ApiError(400, "too_many_messages", text, "messages")
    messages = _joined([_message(item, f"messages[{i}]") for i, item in enumerate(given)], given)
    messages = [message for message in messages if message.role != "system" or message.text.strip()]
    if not messages:
        raise none
    last = f"messages[{len(given) - 1}].role"
    if continued and messages[-1].role != "assistant":
        text = "continue_final_message needs a reply to continue: the last message must have the role assistant"
        raise invalid(text, last)
    if not continued and given[-1].get("tool_calls"):
        raise invalid(
            "calls need their results: the last message must have the role user or tool", last
        )
    return instructed(Conversation(tuple(messages)), instructions)


def _joined(messages: list[Message], given: list[Any]) -> list[Message]:
    """The messages, with results and calls joined to their neighbours.

    A result of a tool joins the result, or the user's turn, before or after it, and a call joins what
    the assistant said or called before it.
    """
    joined: list[Message] = []
    for i, message in enumerate(messages):
        both = (given[i - 1], given[i]) if i else ()
        if given[i]["role"] == "tool" and (
            i == 0 or given[i - 1]["role"] not in ("assistant", "tool")
        ):
            raise invalid(
                f"messages[{i}] is the result of a tool: put it after the call",
                f"messages[{i}].role",
            )
        if (
            joined
            and message.role == "user" == joined[-1].role
            and any(item["role"] == "tool" for item in both)
        ):
            joined[-1] = Message("user", (Part("text", f"{joined[-1].text}\n{message.text}"),))
        elif (
            joined
            and message.role == "assistant" == joined[-1].role
            and any(item.get("tool_calls") for item in both)
        ):
            joined[-1] = Message("assistant", _together(*joined[-1].parts, *message.parts))
        else:
            joined.append(message)
    return joined


def alternating(conversation: Conversation) -> Conversation:
    """The chat in the order of training data: one system message, then user and assistant in turn.

    A blank line joins all system messages, and messages of one role that follow each other. An empty
    turn of the user stands before a greeting of the assistant. A chat of nothing but system messages
    becomes a question.
    """
    orders = "\n\n".join(
        message.text for message in conversation.messages if message.role == "system"
    )
    turns: list[Message] = []
    for message in conversation.messages:
        if message.role == "system":
            continue
        if turns and turns[-1].role == message.role:
            space = (Part("text", "\n\n"),) if turns[-1].parts and message.parts else ()
            turns[-1] = Message(message.role, _together(*turns[-1].parts, *space, *message.parts))
        else:
            turns.append(message)
    if not turns:
        return Conversation((user(orders),))
    greeted = (user(""),) if turns[0].role == "assistant" else ()
    return Conversation((*((system(orders),) if orders else ()), *greeted, *turns))


def instructed(conversation: Conversation, instructions: str) -> Conversation:
    """A conversation with instructions in front of its system message."""
    messages = conversation.messages
    if not instructions:
        return conversation
    own = messages[: messages[0].role == "system"]
    text = "\n\n".join([instructions, *(message.text for message in own)])
    return Conversation((system(text), *messages[len(own) :]))


def _count(item: Any) -> int:
    """How many parts a message has, before it is checked."""
    lists = [item.get(name) for name in ("content", "parts")] if isinstance(item, dict) else []
    return sum(len(some) for some in lists if isinstance(some, list))


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, dict):
        raise invalid(f"{name} must be an object {{role, content}}, got {kind(item)}", name)
    role = item.get("role")
    if not isinstance(role, str) or role not in SPEAKERS:
        got = repr(role[:80]) if isinstance(role, str) else kind(role)
        raise invalid(
            f"{name}.role must be system, user, assistant or tool, got {got}", f"{name}.role"
        )
    if role == "assistant":
        parts = _said(item, name)
    elif role == "tool":
        parts = (Part("text", written_result(text_of(item.get("content"), f"{name}.content"))),)
    else:
        parts = (Part("text", text_of(item.get("content"), f"{name}.content")),)
    if role == "user" and not parts[0].text.strip():
        text = f"{name} is empty: every message of the user must hold some text"
        raise ApiError(400, "empty_prompt", text, f"{name}.content")
    return Message(SPEAKERS[role], parts)


def _said(item: dict[str, Any], name: str) -> tuple[Part, ...]:
    """What an assistant message holds: text or parts, then the calls of a client's tools."""
    calls, content = item.get("tool_calls"), item.get("content")
    if item.get("parts") is not None:
        parts = _parts(item["parts"], f"{name}.parts")
    else:
        parts = (
            Part("text", "" if calls and content is None else text_of(content, f"{name}.content")),
        )
    return (
        _together(*parts, Part("text", written_calls(calls, f"{name}.tool_calls")))
        if calls
        else parts
    )


def _together(*parts: Part) -> tuple[Part, ...]:
    """Parts, of which texts next to each other are one: a token of the model may reach over the border between them."""
    joined: list[Part] = []
    for text, some in itertools.groupby(parts, lambda part: part.kind == "text"):
        run = [*some]
        joined += [Part("text", "".join(part.text for part in run))] if text else run
    return tuple(joined)


def text_of(content: Any, name: str) -> str:
    """The text of a message: a string, or a list of text parts, which some clients send."""
    if isinstance(content, list):
        for part in content:
            texts = (
                isinstance(part, dict)
                and part.get("type") in TEXTS
                and isinstance(part.get("text"), str)
            )
            if not texts:
                raise invalid(f"{name} may hold only text parts, {{type: text, text}}", name)
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise invalid(f"{name} must be a string or a list of text parts, got {kind(content)}", name)
    return content


def _parts(value: Any, name: str) -> tuple[Part, ...]:
    """The parts of an assistant message with calculator calls, in the form in which `Reply.parts` sent them."""
    parts: list[Part] = []
    for item in value if isinstance(value, list) else [value]:
        tool = item.get("expression") if isinstance(item, dict) else None
        text = item.get("text") if isinstance(item, dict) else None
        if isinstance(tool, str) and item.get("type") == "tool":
            parts.append(Part("python", tool))
            if isinstance(item.get("result"), str):
                parts.append(Part("python_output", item["result"]))
        elif isinstance(text, str) and item.get("type") == "text":
            parts.append(Part("text", text))
        else:
            raise invalid(
                f"{name} may hold only {{type: text, text}} and {{type: tool, expression, result}}",
                name,
            )
    return tuple(parts)


def written(message: Message) -> dict[str, Any]:
    """A message as a request gives it: what read_conversation reads as this message."""
    if message.role != "assistant":
        return {"role": message.role, "content": message.text}
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if part.kind == "text":
            parts.append({"type": "text", "text": part.text})
        elif part.kind == "python":
            parts.append({"type": "tool", "expression": part.text, "result": None})
        else:
            parts[-1]["result"] = part.text  # the call stands before it
    return {"role": "assistant", "parts": parts}

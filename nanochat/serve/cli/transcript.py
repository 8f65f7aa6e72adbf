"""Saves a chat as a JSON file, and loads it again."""

from pathlib import Path
from typing import Any

from nanochat.common import UserError, read_json, tr, write_json
from nanochat.data.bpe import replace_surrogates
from nanochat.data.conversation import Message, Part
from nanochat.data.library_words import os_problem

FORMAT = "nanochat-chat"


def instructions(messages: list[Message]) -> list[Message]:
    """Return a list that holds the system message at the start of a chat, or [] without one."""
    return [message for message in messages[:1] if message.role == "system"]


def write_transcript(path: Path, messages: list[Message]) -> None:
    """Write a chat to a JSON file.

    The file holds the role and the text of every message, and also the thoughts of replies and the
    parts of replies with calculator calls. Raises UserError if the file cannot be written.
    """
    saved_messages = []
    for message in messages:
        # A flag may hold bytes that are not UTF-8, which Python reads as halves of surrogate pairs.
        content = replace_surrogates(message.text)
        saved_message: dict[str, Any] = {"role": message.role, "content": content}
        if any(part.kind != "text" for part in message.parts):
            saved_message["parts"] = [
                {"kind": part.kind, "text": replace_surrogates(part.text)} for part in message.parts
            ]
        thought = message.fields.get("reasoning_content")
        if thought:
            saved_message["reasoning_content"] = replace_surrogates(thought)
        saved_messages.append(saved_message)
    try:
        write_json(path, {"format": FORMAT, "version": 1, "messages": saved_messages})
    except (OSError, ValueError) as failure:  # ValueError: the path holds a null byte
        is_refused = isinstance(failure, OSError)
        reason = os_problem(failure) if is_refused else tr("the path holds a null byte")
        raise UserError(
            tr(
                "{path} cannot be written ({reason}): name a file in a folder of yours",
                path=path,
                reason=reason,
            )
        ) from failure


def read_transcript(path: Path) -> list[Message]:
    """Return the messages of a chat that write_transcript saved.

    Any JSON object {"messages": [{"role", "content"}, ...]} is also accepted, if whole exchanges
    follow an optional system message. U+FFFD replaces unpaired surrogates. Raises UserError if the
    file cannot be read or is not such a chat.
    """
    try:
        messages = [_read_message(saved_message) for saved_message in read_json(path)["messages"]]
    except OSError as failure:
        raise UserError(
            tr(
                "{path} cannot be read ({strerror}): name a file that /save has written",
                path=path,
                strerror=os_problem(failure),
            )
        ) from failure
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise UserError(
            tr(
                '{path} is not a chat: name a JSON file of the form {{"messages": [{{"role": '
                '"user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]}}',
                path=path,
            )
        ) from failure
    turns = [message.role for message in messages[len(instructions(messages)) :]]
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise UserError(
            tr(
                "{path} is not a chat that can be continued: after an optional system "
                "message, user and assistant must take turns, and the assistant must come "
                "last, got {turns}. Correct the file, or name another",
                path=path,
                turns=", ".join(turns),
            )
        )
    return messages


def _read_message(saved_message: dict[str, Any]) -> Message:
    """Return a message of a saved chat as a Message.

    Raises ValueError, KeyError, TypeError or AttributeError if the message is malformed, for
    example if its role or the kind of a part is unknown.
    """
    role = saved_message["role"]
    if role not in ("system", "user", "assistant"):
        raise ValueError(role)
    saved_parts = saved_message.get("parts")
    if not saved_parts:
        saved_parts = [{"kind": "text", "text": saved_message["content"]}]
    parts = []
    for saved_part in saved_parts:
        kind = saved_part["kind"]
        if kind not in ("text", "python", "python_output"):
            raise ValueError(kind)
        parts.append(Part(kind, replace_surrogates(saved_part["text"])))
    thought = saved_message.get("reasoning_content")
    fields = {"reasoning_content": replace_surrogates(thought)} if thought else {}
    return Message(role, tuple(parts), fields=fields)

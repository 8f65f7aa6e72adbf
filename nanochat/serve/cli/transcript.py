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
    items = []
    for message in messages:
        # A flag may hold bytes that are not UTF-8, which Python reads as halves of surrogate pairs.
        item: dict[str, Any] = {"role": message.role, "content": replace_surrogates(message.text)}
        if any(part.kind != "text" for part in message.parts):
            item["parts"] = [
                {"kind": part.kind, "text": replace_surrogates(part.text)} for part in message.parts
            ]
        thought = message.fields.get("reasoning_content")
        if thought:
            item["reasoning_content"] = replace_surrogates(thought)
        items.append(item)
    try:
        write_json(path, {"format": FORMAT, "version": 1, "messages": items})
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
        messages = [_read_message(item) for item in read_json(path)["messages"]]
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


def _read_message(item: dict[str, Any]) -> Message:
    """Return an item of a saved chat as a Message.

    Raises ValueError, KeyError, TypeError or AttributeError if the item is malformed, for example
    if its role or the kind of a part is unknown.
    """
    saved_parts = item.get("parts") or [{"kind": "text", "text": item["content"]}]
    parts = tuple(Part(part["kind"], replace_surrogates(part["text"])) for part in saved_parts)
    if item["role"] not in ("system", "user", "assistant"):
        raise ValueError(item["role"])
    if any(part.kind not in ("text", "python", "python_output") for part in parts):
        raise ValueError(item["role"])
    thought = item.get("reasoning_content")
    fields = {"reasoning_content": replace_surrogates(thought)} if thought else {}
    return Message(item["role"], parts, fields=fields)

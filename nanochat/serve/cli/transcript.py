"""Saves a chat as a JSON file and reads it again."""

from pathlib import Path
from typing import Any

from nanochat.common import UserError, read_json, write_json
from nanochat.data.bpe import replace_surrogates
from nanochat.data.conversation import Message, Part

FORMAT = "nanochat-chat"


def instructions(messages: list[Message]) -> list[Message]:
    """Return the system message at the start of a chat, if there is one."""
    return [message for message in messages[:1] if message.role == "system"]


def write_transcript(path: Path, messages: list[Message]) -> None:
    """Write a chat as JSON: role and text of every message, and also the parts of replies with
    calculator calls.

    Raises UserError if the file cannot be written.
    """
    entries = []
    for message in messages:
        # A flag may hold bytes that are not UTF-8, which Python reads as halves of surrogate pairs.
        entry: dict[str, Any] = {"role": message.role, "content": replace_surrogates(message.text)}
        if any(part.kind != "text" for part in message.parts):
            entry["parts"] = [
                {"kind": part.kind, "text": replace_surrogates(part.text)} for part in message.parts
            ]
        entries.append(entry)
    try:
        write_json(path, {"format": FORMAT, "version": 1, "messages": entries})
    except (OSError, ValueError) as failure:  # ValueError: the path holds a null byte
        reason = failure.strerror if isinstance(failure, OSError) else failure
        raise UserError(
            f"{path} cannot be written ({reason}): name a file in a folder of yours"
        ) from failure


def read_transcript(path: Path) -> list[Message]:
    """Read a chat that write_transcript wrote, or any {"messages": [{"role", "content"}, ...]} of
    whole exchanges.

    U+FFFD replaces each half of a surrogate pair. Raises UserError if the file cannot be read or is
    not a chat.
    """
    try:
        messages = [_read_message(entry) for entry in read_json(path)["messages"]]
    except OSError as failure:
        raise UserError(
            f"{path} cannot be read ({failure.strerror}): name a file that /save has written"
        ) from failure
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise UserError(
            f"{path} is not a chat: name a JSON file of the form "
            f'{{"messages": [{{"role": "user", "content": "..."}}, '
            f'{{"role": "assistant", "content": "..."}}]}}'
        ) from failure
    turns = [message.role for message in messages[len(instructions(messages)) :]]
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise UserError(
            f"{path} is not a chat that can be continued: after an optional system message, user "
            "and assistant must take turns, and the assistant must come last, got "
            f"{', '.join(turns)}. Correct the file, or name another"
        )
    return messages


def _read_message(entry: dict[str, Any]) -> Message:
    """Return the message of an entry. Raises ValueError for a role or a kind of part that no chat
    has."""
    items = entry.get("parts") or [{"kind": "text", "text": entry["content"]}]
    parts = tuple(Part(item["kind"], replace_surrogates(item["text"])) for item in items)
    if entry["role"] not in ("system", "user", "assistant"):
        raise ValueError(entry["role"])
    if any(part.kind not in ("text", "python", "python_output") for part in parts):
        raise ValueError(entry["role"])
    return Message(entry["role"], parts)

"""Your own conversations, from JSON files in common layouts: messages, ShareGPT and Alpaca."""

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nanochat.common import UserError, parse_json
from nanochat.data.conversation import Conversation
from tasks.common import Ungraded, read_messages
from tasks.record_keys import check_record

Record = TypeVar("Record")
_SHAPE = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)
# The names that ShareGPT files and their descendants give the three roles.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "system": "system",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class CustomJSON(Ungraded):
    """The conversations in a file, in any layout that read_record() knows.

    Raises UserError as read_file() does.
    """

    def __init__(self, filepath: str | Path):
        self.name = Path(filepath).expanduser().stem
        self._conversations = read_file(filepath, read_record, "conversation", _SHAPE)

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, i: int) -> Conversation:
        return self._conversations[i]


# --- layouts -------------------------------------------------------------------------------------


def read_record(value: Any) -> Conversation:
    """Convert a JSON value in any of the known layouts to a conversation.

    Raises ValueError, naming the rule, if the value breaks one.

    messages: a list of {"role", "content"}, or an object with such a list under "messages" or
    "conversations".
    ShareGPT: {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}],
    "system": ...}.
    Alpaca: {"instruction", "input", "output"}, or {"query", "response"}, with "system" and
    "history", a list of [question, answer]. The input is appended to the instruction on a line of
    its own.

    Every object may have "system" next to the messages. Keys that ask for what cannot be trained
    are refused, as check_record() describes.
    """
    if isinstance(value, list):
        return read_messages(value)
    if not isinstance(value, Mapping):
        raise ValueError(
            f"a conversation is a list of messages or an object, got {type(value).__name__}"
        )
    for name in ("messages", "conversations", "conversation"):
        if name in value:
            check_record(value, (name, "system"))
            turns = list(plain_turns(value[name]))
            return read_messages(with_system(value, turns))
    for question, answer in (("instruction", "output"), ("query", "response")):
        if question in value and answer in value:
            check_record(value, (question, answer, "input", "history", "system"))
            turns = list(alpaca_turns(value, question))
            turns.append({"role": "assistant", "content": value[answer]})
            return read_messages(with_system(value, turns))
    raise ValueError(
        'an object needs the key "messages", "conversations" (ShareGPT), or "instruction" and '
        f'"output" (Alpaca); it has the keys {first_keys(value)}'
    )


def first_keys(value: Mapping[str, Any]) -> str:
    """Return the first keys of a record, or "none", for an error message."""
    return ", ".join(str(key)[:20] for key in list(value)[:6]) or "none"


def with_system(value: Mapping[str, Any], messages: Any) -> Any:
    """Return messages, preceded by the system message that a record has under "system".

    The messages are returned unchanged if "system" is empty or missing, or if they are not a list,
    which read_messages() then refuses. Raises ValueError if they begin with another system message.
    """
    system = value.get("system")
    if not system or not isinstance(messages, list):
        return messages
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise ValueError(
            'the messages begin with another system message than the key "system" holds; keep one '
            "of them"
        )
    return messages


def plain_turns(turns: Any) -> Iterator[Any]:
    """Yield turns as messages, converting those with "from" and "value".

    Turns in another form stay as they are, and read_messages() checks them. Raises ValueError if
    `turns` is not a list, or if a name in "from" is unknown.
    """
    if not isinstance(turns, list):
        raise ValueError(f"a conversation is a list of messages, got {type(turns).__name__}")
    for n, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            yield turn
            continue
        role = turn["from"]
        if not isinstance(role, str) or role not in _ROLES:
            names = ", ".join(_ROLES)
            raise ValueError(f'message {n} is "from" {reprlib.repr(role)}; known are {names}')
        message = dict(turn)
        del message["from"], message["value"]
        yield {**message, "role": _ROLES[role], "content": turn["value"]}


def alpaca_turns(value: Mapping[str, Any], question: str) -> Iterator[dict[str, Any]]:
    """Yield the earlier exchanges of an Alpaca record, then its question, as messages.

    `question` is the key of the question. Raises ValueError if "history" is not a list of pairs, or
    if the question or its "input" is not a text.
    """
    history = value.get("history") or []
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise ValueError('"history" must be a list of [question, answer]')
    instruction = value[question]
    input_text = value.get("input") or ""
    if not isinstance(instruction, str) or not isinstance(input_text, str):
        raise ValueError(f'"{question}" and "input" must be texts')
    for earlier_question, earlier_answer in history:
        yield {"role": "user", "content": earlier_question}
        yield {"role": "assistant", "content": earlier_answer}
    yield {"role": "user", "content": "\n".join(filter(None, (instruction, input_text)))}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


# --- files ---------------------------------------------------------------------------------------


def read_file(
    filepath: str | Path,
    to_record: Callable[[Any], Record],
    label: str,
    shape: str,
) -> list[Record]:
    """Return the records that `to_record` makes from the JSON values in a file.

    The file holds one value per line, or one list of values. In error messages, `label` names such
    a value and `shape` shows one. Raises UserError, naming the file, the line and the rule, at the
    first mistake in the whole file, and UserError (exit code 2) if there is no file.
    """
    path = Path(filepath).expanduser()
    if not path.is_file():
        raise UserError(
            f"there is no file {path}. Check the path; the file should hold one {label} per line: "
            f"{shape}",
            2,
        )
    read_records = []
    try:
        for place, value in records(path):
            read_records.append(_read_at(place, value, to_record))
    except ValueError as broken:  # not UTF-8, not JSON, or against a rule of `to_record`
        raise UserError(f"{path}, {broken}. A line should look like {shape}") from broken
    if not read_records:
        raise UserError(f"{path} holds no {label}. Write one {label} per line: {shape}")
    return read_records


def _read_at(
    place: str,
    value: Any,
    to_record: Callable[[Any], Record],
) -> Record:
    """Return the record that `to_record` makes from a value.

    Raises ValueError, naming the place in the file, if the value breaks a rule.
    """
    try:
        return to_record(value)
    except ValueError as broken:
        raise ValueError(f"{place}: {broken}") from broken


def records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every JSON value in a file, with its place in words, such as "line 3".

    The file holds one value per line, or is a single JSON list of records. Empty lines are skipped.
    Raises ValueError, naming the place, if something is not UTF-8 or not JSON.
    """
    values = _list_of_records(path)
    if values is not None:
        for n, value in enumerate(values, start=1):
            yield f"item {n}", value
        return
    with open(path, "rb") as lines:
        for n, line in enumerate(lines, start=1):
            try:
                text = line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8").strip()
                if text:
                    yield f"line {n}", parse_json(text)
            except ValueError as broken:
                raise ValueError(f"line {n}: {broken}") from broken


def _list_of_records(path: Path) -> list[Any] | None:
    """Return the records of a file that is one JSON list, or None if it has a value per line."""
    with open(path, "rb") as file:
        beginning = file.read(64)
    if not beginning.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        return None
    data = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    first_line, _, more_lines = data.strip().partition(b"\n")
    try:
        values = parse_json(first_line)
    except ValueError:
        return _over_lines(data)
    if more_lines or _is_conversation(values):
        return None
    return values


def _is_conversation(values: list[Any]) -> bool:
    """Return whether a list holds the messages of one conversation instead of records."""
    if not values or not isinstance(values[0], Mapping):
        return False
    return "role" in values[0] or "from" in values[0]


def _over_lines(data: bytes) -> list[Any] | None:
    """Return the values of a JSON list that spans several lines.

    Returns None if the first line is invalid, or if the data is not UTF-8 or nested too deeply.
    Raises ValueError, naming the line, if a later line is invalid.
    """
    try:
        return parse_json(data)
    except json.JSONDecodeError as broken:
        if broken.lineno > 1:
            raise
    except ValueError:
        pass  # not UTF-8, or nested too deeply
    return None

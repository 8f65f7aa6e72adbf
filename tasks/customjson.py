"""Your own conversations, from JSON files in the layouts that people have: messages, ShareGPT, Alpaca."""

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


def read_record(value: Any) -> Conversation:
    """A conversation in any of the known layouts. ValueError names the rule that the value breaks.

    messages: a list of {"role", "content"}, or an object with such a list under "messages" or "conversations".
    ShareGPT: {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}], "system": ...}.
    Alpaca: {"instruction", "input", "output"}, or {"query", "response"}, with "system" and "history", a list of
    [question, answer]. The input is appended to the instruction on a line of its own. "system" may stand beside the
    messages in every layout. Keys that ask for what cannot be trained are refused, as check_record() says.
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
            return read_messages(with_system(value, list(plain_turns(value[name]))))
    for question, answer in (("instruction", "output"), ("query", "response")):
        if question in value and answer in value:
            check_record(value, (question, answer, "input", "history", "system"))
            reply = {"role": "assistant", "content": value[answer]}
            return read_messages(with_system(value, [*alpaca_turns(value, question), reply]))
    keys = ", ".join(str(key)[:20] for key in list(value)[:6]) or "none"
    raise ValueError(
        f'an object needs the key "messages", "conversations" (ShareGPT), or "instruction" and "output" (Alpaca); it '
        f"has the keys {keys}"
    )


def with_system(value: Mapping[str, Any], messages: Any) -> Any:
    """The messages behind the system message that many records have under "system" and many leave empty.

    ValueError if the messages begin with another system message. What is no list is left to read_messages().
    """
    if not value.get("system") or not isinstance(messages, list):
        return messages
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": value["system"]}, *messages]
    if first.get("content") != value["system"]:
        raise ValueError(
            'the messages begin with another system message than the key "system" holds; keep one of them'
        )
    return messages


def plain_turns(turns: Any) -> Iterator[Any]:
    """Turns of {"from", "value"} as messages; turns in another form stay as they are, and read_messages() checks
    them."""
    if not isinstance(turns, list):
        raise ValueError(f"a conversation is a list of messages, got {type(turns).__name__}")
    for n, turn in enumerate(turns, start=1):
        if isinstance(turn, Mapping) and {"from", "value"} <= set(turn):
            if not isinstance(role := turn["from"], str) or role not in _ROLES:
                raise ValueError(
                    f'message {n} is "from" {reprlib.repr(role)}; known are {", ".join(_ROLES)}'
                )
            others = {key: turn[key] for key in turn if key not in ("from", "value")}
            yield {**others, "role": _ROLES[role], "content": turn["value"]}
        else:
            yield turn


def alpaca_turns(value: Mapping[str, Any], question: str) -> Iterator[dict[str, Any]]:
    """The earlier exchanges of an Alpaca record, then its question, as messages."""
    history = value.get("history") or []
    if not (
        isinstance(history, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    ):
        raise ValueError('"history" must be a list of [question, answer]')
    asked, more = value[question], value.get("input") or ""
    if not (isinstance(asked, str) and isinstance(more, str)):
        raise ValueError(f'"{question}" and "input" must be texts')
    for said, replied in history:
        yield {"role": "user", "content": said}
        yield {"role": "assistant", "content": replied}
    yield {"role": "user", "content": "\n".join(filter(None, (asked, more)))}


def records(path: Path) -> Iterator[tuple[str, Any]]:
    """Every JSON value of a file with its place in words, such as "line 3".

    The file holds one value per line, or is a single JSON list of records. Empty lines are skipped. ValueError, which
    names the place, for what is no UTF-8 or no JSON.
    """
    with open(path, "rb") as lines:
        is_list = lines.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    if (
        is_list
        and (values := _whole_list(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))) is not None
    ):
        yield from ((f"item {n}", value) for n, value in enumerate(values, start=1))
        return
    with open(path, "rb") as lines:
        for n, line in enumerate(lines, start=1):
            try:
                if text := line.removeprefix(b"\xef\xbb\xbf").decode("utf-8").strip():
                    yield f"line {n}", parse_json(text)
            except ValueError as broken:
                raise ValueError(f"line {n}: {broken}") from broken


def _whole_list(data: bytes) -> list[Any] | None:
    """The values of a file that is one JSON list of records; None if its first line is a value by itself."""
    first, _, more = data.strip().partition(b"\n")
    try:
        values = parse_json(first)
    except ValueError:
        return _over_lines(data)
    is_conversation = (
        bool(values) and isinstance(values[0], Mapping) and {"role", "from"} & set(values[0])
    )
    return None if more or is_conversation else values


def _over_lines(data: bytes) -> list[Any] | None:
    """A list over several lines. ValueError names the line of a mistake; None if the first line is wrong by itself."""
    try:
        return parse_json(data)
    except json.JSONDecodeError as broken:
        if broken.lineno > 1:
            raise
    except ValueError:
        pass  # not UTF-8, or nested too deeply
    return None


def _placed(place: str, value: Any, read: Callable[[Any], Record]) -> Record:
    """What `read` makes of a record. ValueError, which names its place, if it breaks a rule."""
    try:
        return read(value)
    except ValueError as broken:
        raise ValueError(f"{place}: {broken}") from broken


def read_file(
    filepath: str | Path, read: Callable[[Any], Record], what: str, shape: str
) -> list[Record]:
    """What `read` makes of every JSON value of a file, one value per line or in one list; `what` and `shape` name and
    show such a value. The whole file is checked at once: UserError names the file, the line and the rule of the first
    mistake."""
    path = Path(filepath).expanduser()
    if not path.is_file():
        raise UserError(
            f"there is no file {path}. Check the path; the file should hold one {what} per line: {shape}",
            2,
        )
    try:
        found = [_placed(place, value, read) for place, value in records(path)]
    except ValueError as broken:  # not UTF-8, not JSON, or against a rule of `read`
        raise UserError(f"{path}, {broken}. A line should look like {shape}") from broken
    if not found:
        raise UserError(f"{path} holds no {what}. Write one {what} per line: {shape}")
    return found


class CustomJSON(Ungraded):
    """The conversations of a file in one of the layouts of read_record(). UserError as read_file() says."""

    def __init__(self, filepath: str | Path):
        self.name = Path(filepath).expanduser().stem
        self._conversations = read_file(filepath, read_record, "conversation", _SHAPE)

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, i: int) -> Conversation:
        return self._conversations[i]

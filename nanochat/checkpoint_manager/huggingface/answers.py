"""Finds in a rendered conversation what the assistant is trained to write.

A chat template is rendered twice: first as it is, then with a mark at the beginning of each text,
function name and thought of the assistant. The marks show where the assistant's turns are. The turn
begins after the words that open a reply, and ends with the token that ends it.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.huggingface.segments import BEGIN, CLOSE
from nanochat.common import UserError, tr
from nanochat.data.conversation import Conversation, Message, user

# The names under which templates look for the reasoning of the assistant.
REASONING = ("reasoning_content", "reasoning", "thinking")
_MARK = re.compile(f"{BEGIN}(\\d+){CLOSE}")  # with the index of a message
# The marks around thoughts, of families of models.
THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
OPENING = f"{THOUGHT_MARKS[0][0]}\n"  # begins thoughts
# A function, and a chat with a call of it and the result, for questions to a template.
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "a_tool",
        "description": "D",
        "parameters": {"type": "object", "properties": {"a_key": {"type": "string"}}},
    },
}
PROBE_CALL, PROBE_CALL_2 = (
    {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": {}}}
    for name in ("a_tool", "b_tool")
)
PROBE_CHAT = (
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]},
    {"role": "tool", "content": "a_result", "tool_call_id": "call_a_tool"},
)
# The same chat with a second call in the reply, and its result.
PROBE_CALLS = (
    PROBE_CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL, PROBE_CALL_2]},
    PROBE_CHAT[2],
    {"role": "tool", "content": "b_result", "tool_call_id": "call_b_tool"},
)
# The forms of calls that the server reads, and how a call of a_tool begins in each: "json" and
# "xml" are Hermes' and Qwen3-Coder's, "list" and "args" are Mistral's, "bare" is Llama's.
CALL_FORMATS = {
    "xml": re.compile(r"<tool_call>\s*<function=a_tool>"),
    "json": re.compile("<tool_call>"),
    "list": re.compile(r'\[TOOL_CALLS\] ?\[\{"name": "a_tool", "arguments": '),
    "args": re.compile(r"\[TOOL_CALLS\]a_tool\[(CALL_ID|ARGS)\]"),
    "bare": re.compile(r'\A\s*\{"name": "a_tool", "parameters": '),
}
# An empty thought, whose opening mark the prompt may hold.
_EMPTY_THOUGHT = re.compile(r"(<think>)?\s*</think>\s*")
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class Span:
    """A part of a text that is trained: from character `start` to before character `end`."""

    start: int
    end: int


def without_system(conversation: Conversation) -> Conversation:
    """Return a conversation in which a leading system message stands in the user's first text.

    It is in front of that text, with a blank line between them.
    """
    turns = conversation.messages
    if [turn.role for turn in turns[:2]] != ["system", "user"]:
        return conversation
    merged = user(f"{turns[0].text}\n\n{turns[1].text}")
    prompt_turns = max(conversation.prompt_turns - 1, 0)
    return replace(conversation, messages=(merged, *turns[2:]), prompt_turns=prompt_turns)


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template in which all calls and results have IDs of nine characters.

    The characters are letters and digits. The same other ID always becomes the same short one. A
    result without an ID gets that of the first call that has no result.
    """
    changed_messages = []
    open_calls: list[str] = []  # the IDs of calls that have no result yet
    for i, message in enumerate(messages):
        changed = dict(message)
        if message.get("tool_calls"):
            changed["tool_calls"] = [
                {**call, "id": _short_id(call.get("id") or f"call {number} of message {i}")}
                for number, call in enumerate(message["tool_calls"])
            ]
            open_calls = [call["id"] for call in changed["tool_calls"]]
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or next(iter(open_calls), "")
            changed["tool_call_id"] = _short_id(str(call_id))
            open_calls = [call for call in open_calls if call != changed["tool_call_id"]]
        changed_messages.append(changed)
    return changed_messages


def with_single_calls(conversation: Conversation) -> Conversation:
    """Return a conversation with a reply for each call, where a reply has several.

    The results of a call follow it: those with its ID or, without IDs, those in its place.
    """
    groups: list[list[Message]] = []  # each is a turn and the results that follow it
    for i, turn in enumerate(conversation.messages):
        turn = replace(turn, trained=turn.trained and i >= conversation.prompt_turns)
        if turn.role == "tool" and groups:
            groups[-1].append(turn)
        else:
            groups.append([turn])
    turns = tuple(single for turn, *results in groups for single in _single_calls(turn, results))
    return replace(conversation, messages=turns, prompt_turns=0)


def _single_calls(turn: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yield a reply for each call of a turn, and after it the results of that call."""
    calls = turn.fields.get("tool_calls", ())
    replies = [turn]
    if len(calls) > 1:
        replies = [replace(turn, fields={**turn.fields, "tool_calls": [calls[0]]})]
        replies += [replace(turn, parts=(), fields={"tool_calls": [call]}) for call in calls[1:]]
    ids = [call.get("id") for call in calls]
    results_of: list[list[Message]] = [[] for _ in replies]
    for place, result in enumerate(results):
        call_id = result.fields.get("tool_call_id")
        if call_id and call_id in ids:
            results_of[ids.index(call_id)].append(result)
        else:
            results_of[min(place, len(replies) - 1)].append(result)
    for reply, own_results in zip(replies, results_of, strict=True):
        yield reply
        yield from own_results


def call_format(written: str) -> str | None:
    """Return the form in which a rendered reply has PROBE_CALL, or None for another one."""
    return next((form for form, call in CALL_FORMATS.items() if call.search(written)), None)


def _short_id(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else sha256(call_id.encode()).hexdigest()[:9]


def mark(index: int) -> str:
    """Return the mark of the message with an index."""
    return f"{BEGIN}{index}{CLOSE}"


def template_message(
    message: Message,
    safe: Callable[[str], str],
    index: int | None = None,
) -> dict[str, Any]:
    """Return a message as chat templates expect it, with `safe` applied to every text.

    With an `index`, the message is the assistant's, is trained, and gets marks. White space around
    its texts is left out.
    """
    fields = dict(message.fields)
    reasoning = fields.pop("reasoning_content", None)
    text = safe(message.text)
    if message.role == "assistant" and index is not None:
        text = _with_marks(text, mark(index))
    template_fields = {"role": message.role, "content": text, **_each_text(fields, safe)}
    if reasoning is not None:
        reasoning = safe(reasoning)
        if index is not None:
            reasoning = mark(index) + reasoning.strip()
        template_fields |= dict.fromkeys(REASONING, reasoning)
    if index is not None:
        for call in template_fields.get("tool_calls", ()):
            call["function"]["name"] = mark(index) + call["function"]["name"]
    return template_fields


def _with_marks(text: str, begin: str) -> str:
    """Return a text with marks where it and its thoughts and its words after them begin."""
    text = text.strip()
    if not text:
        return ""
    before, thinks, after = text.partition("</think>")
    if not thinks:
        return begin + text
    thought = before.removeprefix("<think>").strip("\n")
    return f"{begin}<think>\n{begin}{thought}\n</think>\n\n{begin}{after.lstrip()}"


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_each_text(item, change) for item in value]
    return value


def safe_options(options: Mapping[str, Any], safe: Callable[[str], str]) -> dict[str, Any]:
    """Return variables of a template with `safe` applied to every text in their values."""
    return {key: _each_text(value, safe) for key, value in options.items()}


def without_marks(text: str) -> str:
    """Return a marked text as it is without marks."""
    return _MARK.sub("", text)


def spans(
    marked_text: str,
    messages: Sequence[Message],
    opening: str,
    stops: Collection[str],
    own_beginnings: Sequence[str] = (),
    call_beginning: str = "",
) -> list[Span]:
    """Return what is trained in a rendered text, from the text with marks.

    `opening` is what a template writes before a reply, and `stops` are the special tokens that end
    one. A message of words alone begins with its words, or with one of `own_beginnings` in front of
    them, which the model has to write; one with calls and no opening, with `call_beginning` or its
    words. Any other message begins after the opening, as far as the template writes it, and after
    an empty thought. Raises UserError if the beginning or the end of a message cannot be found.
    """
    text = without_marks(marked_text)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    removed = 0
    for match in _MARK.finditer(marked_text):
        position = match.start() - removed
        removed += len(match[0])
        first.setdefault(int(match[1]), position)
        last[int(match[1])] = position
    ends = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))) or "(?!)")
    spans = []
    for index, begin in first.items():
        end = ends.search(text, last[index])
        if end is None:
            raise UserError(tr("no special token ends what the assistant says"))
        fields = messages[index].fields
        if fields and (opening or "reasoning_content" in fields):
            start = _start(text, begin, opening)
        else:
            names = [call["function"]["name"] for call in fields.get("tool_calls", ())]
            owns = [call_beginning] if names else own_beginnings
            start = begin - max(
                (len(own) for own in owns if text.endswith(own, 0, begin)), default=0
            )
            if start == begin and names and text.startswith(names[0], begin):
                raise no_opening()
        spans.append(Span(start, end.end()))
    return spans


def _start(
    text: str,
    begin: int,
    opening: str,
) -> int:
    """Return where a turn begins whose first mark is at `begin`: after the lines of its opening.

    A call may have only the first of them, as where the opening ends with <think> and a template
    writes no thoughts before the calls of an earlier turn. An empty thought of the template's own
    is not part of the turn. Raises UserError if it does not open as a reply does.
    """
    stem = opening.partition("\n")[0]
    position = text.rfind(stem, 0, begin) if stem else -1
    if position < 0:
        raise no_opening()
    start = position + len(stem)
    for line in opening.removeprefix(stem).splitlines(keepends=True):
        if not text.startswith(line, start, begin):
            break
        start += len(line)
    empty_thought = _EMPTY_THOUGHT.match(text, start, begin)
    return empty_thought.end() if empty_thought else start


def with_ends(text: str, begin: str, end: str) -> str:
    """Return the assistant's words between two marks.

    Templates may leave out the thoughts in <think> tags, or rewrite them. So `begin` is put
    wherever the part that a template keeps can begin, and the first one that is kept counts.
    """
    return f"{_with_marks(text, begin) or begin}{end}"


# --- templates that leave out what is to be trained ----------------------------------------------


def no_opening() -> UserError:
    """Return the error that it cannot be found where the words of the assistant begin."""
    return UserError(tr("what the assistant says does not begin as a reply does"))


def silent_template(folder: Path) -> UserError:
    """Return the error that the chat template in a folder leaves out all words to train on."""
    return UserError(
        tr(
            "the chat template in {folder} leaves out what the assistant says. Remove it",
            folder=folder,
        )
    )


def lost_thoughts(folder: Path) -> UserError:
    """Return the error that the chat template in a folder leaves out the thoughts of a reply."""
    return UserError(
        tr(
            "the chat template in {folder} leaves out what a reply says before </think>, so that "
            "these thoughts would not be trained. Remove them from the records, or change the "
            "template so that it writes them",
            folder=folder,
        )
    )

"""Finds in a rendered conversation what the assistant is trained to write.

A chat template is rendered twice: first as it is, then with a mark at the beginning of each text,
function name and thought of the assistant. The marks show where the assistant's turns are. The turn
begins after the words that open a reply, and ends with the token that ends it.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanochat.common import UserError, tr
from nanochat.data.conversation import Conversation, Message, user

# Private-use characters around the index of a message. FolderTokenizer replaces them in the texts.
OPEN_MARK, CLOSE_MARK = "\ue002", "\ue001"
# The names under which templates look for the reasoning of the assistant.
REASONING = ("reasoning_content", "reasoning", "thinking")
_MARK = re.compile(f"{OPEN_MARK}(\\d+){CLOSE_MARK}")
# The marks around thoughts, of families of models.
THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
OPENING = f"{THOUGHT_MARKS[0][0]}\n"  # begins thoughts
# One call of a function, for a question to a template.
PROBE_TOOL = {"type": "function", "function": {"name": "a_tool", "parameters": {"type": "object"}}}


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


def mark(index: int) -> str:
    """Return the mark of the message with an index."""
    return f"{OPEN_MARK}{index}{CLOSE_MARK}"


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
) -> list[Span]:
    """Return what is trained in a rendered text, from the text with marks.

    `opening` is what a template writes before a reply, and `stops` are the special tokens that end
    one. A message of words alone begins with its words, or with one of `own_beginnings` in front of
    them, which the model has to write; one with reasoning or calls begins after the opening, as far
    as the template writes it. Raises UserError if the beginning or the end of a message cannot be found.
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
    ends = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))))
    spans = []
    for index, begin in first.items():
        end = ends.search(text, last[index])
        if end is None:
            raise UserError(tr("no special token ends what the assistant says"))
        if messages[index].fields:
            start = _start(text, begin, opening)
        else:
            owns = [own for own in own_beginnings if text.endswith(own, 0, begin)]
            start = begin - max(map(len, owns), default=0)
        spans.append(Span(start, end.end()))
    return spans


def _start(
    text: str,
    begin: int,
    opening: str,
) -> int:
    """Return where a turn begins whose first mark is at `begin`: after the lines of its opening.

    A call may have only the first of them, as where the opening ends with <think> and a template
    writes no thoughts before the calls of an earlier turn. Raises UserError if it does not open as
    a reply does.
    """
    stem = opening.partition("\n")[0]
    position = text.rfind(stem, 0, begin) if stem else -1
    if position < 0:
        raise UserError(tr("what the assistant says does not begin as a reply does"))
    start = position + len(stem)
    for line in opening.removeprefix(stem).splitlines(keepends=True):
        if not text.startswith(line, start, begin):
            break
        start += len(line)
    return start


def with_ends(text: str, begin: str, end: str) -> str:
    """Return the assistant's words between two marks.

    Templates may leave out the thoughts in <think> tags, or rewrite them. So `begin` is put
    wherever the part that a template keeps can begin, and the first one that is kept counts.
    """
    return f"{_with_marks(text, begin) or begin}{end}"


# --- templates that leave out what is to be trained ----------------------------------------------


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

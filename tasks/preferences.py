"""Pairs of a preferred and a rejected answer, from JSON files in common layouts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanochat.common import UserError, tr, warn
from nanochat.data.conversation import Conversation
from tasks.customjson import first_keys, message_list, question_turns, with_system
from tasks.messages import CALL, read_messages, role_of, single_messages, with_options
from tasks.record_files import read_file
from tasks.record_keys import EMPTY, check_record

# The conversations with the preferred and with the rejected answer.
Pair = tuple[Conversation, Conversation]
_SHAPE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
_ALPACA = ("instruction", "question", "query", "input")
_TURNS = ("conversations", "conversation", "messages")
_BESIDE = ("system", "system_prompt", "tools", "functions", "chat_template_kwargs")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def read_pairs(filepath: str, skip_bad_lines: bool = False) -> list[Pair]:
    """Return the pairs of answers in a file, in any layout that read_pair() knows.

    Pairs whose two answers are equal prefer nothing: they are left out with a warning. Raises
    UserError as read_file() does, and if all pairs are equal.
    """
    pairs: list[Pair] = []
    equal: list[str] = []
    records = read_file(filepath, read_pair, tr("pair of answers"), _SHAPE, skip_bad_lines)
    for place, (chosen, rejected) in records:
        if chosen.messages == rejected.messages:
            equal.append(place)
        else:
            pairs.append((replace(chosen, origin=place), replace(rejected, origin=place)))
    if not pairs:
        raise UserError(
            tr(
                "{filepath}: chosen and rejected are equal in all {count:,} pairs, so "
                "nothing is preferred; give answers that differ",
                filepath=filepath,
                count=len(equal),
            )
        )
    if equal:
        warn(
            tr(
                "{filepath}: {count:,} pairs with equal answers are left out, the "
                "first of them in {place}",
                filepath=filepath,
                count=len(equal),
                place=equal[0].rpartition(", ")[2],
            )
        )
    return pairs


def read_pair(value: Any) -> Pair:
    """Convert a JSON value in any of the known layouts to a pair of conversations.

    Raises ValueError, naming the rule, if the value breaks one.

    TRL: {"prompt", "chosen", "rejected"}, each a text or a list of messages. The prompt may be left
    out if both answers begin with it: as messages, as a text, or as turns after "Human:" and
    "Assistant:" (HH-RLHF).
    ShareGPT of LLaMA-Factory: {"conversations": [...], "chosen": {...}, "rejected": {...},
    "system"}.
    Alpaca of LLaMA-Factory: {"instruction" or "question", "input", "chosen", "rejected", "system",
    "history"}; "input" alone is the question.
    ms-swift: {"messages": [...], "rejected_response": "..."}, or "rejected_messages".
    """
    if not isinstance(value, Mapping):
        raise ValueError(
            tr("a pair of answers is an object, got {kind}", kind=type(value).__name__)
        )
    if "messages" in value and ("rejected_response" in value or "rejected_messages" in value):
        chosen, rejected = _swift_messages(value)
    elif "chosen" in value and "rejected" in value:
        chosen, rejected = _chosen_and_rejected(value)
    else:
        raise ValueError(
            tr(
                'a pair of answers needs the keys "chosen" and "rejected"; it has the keys {keys}',
                keys=first_keys(value),
            )
        )
    chosen_conversation = _read("chosen", value, chosen)
    rejected_conversation = _read("rejected", value, rejected)
    return _pair(chosen_conversation, rejected_conversation)


def _read(
    name: str,
    value: Mapping[str, Any],
    messages: Any,
) -> Conversation:
    try:
        conversation = read_messages(with_system(value, messages))
        if conversation.messages[-1].role != "assistant":
            raise ValueError(
                tr("a conversation of a pair must end with a message of role 'assistant'")
            )
        return with_options(conversation, value)
    except ValueError as broken:
        raise ValueError(f"{name}: {broken}") from broken


def _pair(chosen: Conversation, rejected: Conversation) -> Pair:
    """Return both conversations, with the first turns that they share marked as their prompt.

    Raises ValueError if they do not answer the same question, or if one of the answers is not to be
    trained.
    """
    if not (chosen.messages[-1].trained and rejected.messages[-1].trained):
        raise ValueError(
            tr("both answers of a pair are compared, so neither may be left out of training")
        )
    prompt_turns = _shared_beginning(chosen.messages[:-1], rejected.messages[:-1])
    if not any(message.role == "user" for message in chosen.messages[:prompt_turns]):
        raise ValueError(
            tr("chosen and rejected must answer the same question of the user, and they share none")
        )
    return (
        replace(chosen, prompt_turns=prompt_turns),
        replace(rejected, prompt_turns=prompt_turns),
    )


def _shared_beginning(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common beginning of two sequences."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


# --- layouts: the messages of the chosen and of the rejected conversation ------------------------


def _swift_messages(value: Mapping[str, Any]) -> tuple[list[Any], Any]:
    is_whole = value.get("rejected_messages") not in EMPTY
    rejected_key = "rejected_messages" if is_whole else "rejected_response"
    check_record(value, ("messages", *_BESIDE, rejected_key), pairs=True)
    chosen = _messages(value["messages"])
    if is_whole:
        return chosen, message_list(value["rejected_messages"])
    return chosen, [*chosen[:-1], *_messages(value.get("rejected_response"))]


def _chosen_and_rejected(value: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    question = _question_key(value)
    keys = [question, *_BESIDE, "chosen", "rejected"]
    if question == "prompt":
        keys.append("messages")  # UltraFeedback repeats the chosen conversation
    if question in _ALPACA:
        keys += ["input", "history"]
    check_record(value, keys, pairs=True)
    before, chosen, rejected = _split(value, question)
    return _continue(before, chosen), _continue(before, rejected)


def _continue(before: list[Any], answer: list[Any]) -> list[Any]:
    """Return the messages before an answer, then the answer.

    An answer that brings its own earlier messages is returned alone.
    """
    return [*before, *answer] if _first_role(answer) in (None, "assistant") else answer


def _question_key(value: Mapping[str, Any]) -> str | None:
    """Return the key of what precedes both answers, or None if the record has no such key."""
    for name in ("prompt", *_TURNS, *_ALPACA):
        nothing = EMPTY if name in _TURNS else (None,)
        if value.get(name) not in nothing:
            return name
    return None


def _split(
    value: Mapping[str, Any],
    question: str | None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages before the answers, the chosen answer, and the rejected answer.

    `question` is the key of the messages before the answers.
    """
    chosen = value["chosen"]
    rejected = value["rejected"]
    if question is not None:
        return _before(value, question), _messages(chosen), _messages(rejected)
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return [], _messages(chosen), _messages(rejected)
    if chosen.lstrip().startswith("Human:"):
        return [], _transcript(chosen), _transcript(rejected)
    # The prompt is the words that both texts begin with, up to the last space.
    shared = chosen[: _shared_beginning(chosen, rejected)]
    shared_words = re.match(r".*\s", shared, re.DOTALL)
    if shared_words is None:
        raise ValueError(
            tr('there is no "prompt", and chosen and rejected do not begin with the same words')
        )
    prompt = _messages(shared_words[0].strip(), "user")
    end = shared_words.end()
    return prompt, _messages(chosen[end:]), _messages(rejected[end:])


def _before(value: Mapping[str, Any], question: str) -> list[Any]:
    """Return the messages before both answers, whose key in the record is `question`."""
    if question in _ALPACA:
        return question_turns(value, question)
    return _messages(value[question], "user" if question == "prompt" else "assistant")


def _messages(content: Any, role: str = "assistant") -> list[Any]:
    """Return the single messages in a text, in a message, or in a list of messages.

    A text becomes one message with the given role, unless it is such a list as JSON text. Raises
    ValueError for anything else.
    """
    if isinstance(content, str) and not content.startswith("[{"):
        return [{"role": role, "content": content}]
    messages = message_list(content)
    if isinstance(messages, Mapping):
        messages = [messages]
    if not isinstance(messages, list):
        raise ValueError(
            tr("a conversation is a list of messages, got {kind}", kind=type(messages).__name__)
        )
    return list(single_messages(messages))


def _transcript(text: str) -> list[dict[str, str]]:
    """Return the turns of a text in which "Human:" or "Assistant:" starts each turn.

    Each of these words is at the beginning of the text or follows a blank line.
    """
    _, *pieces = re.split(r"(?:^|\n\n)(Human|Assistant):", text.lstrip())
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return [{"role": _SPEAKERS[speaker], "content": words.strip()} for speaker, words in turns]


def _first_role(messages: list[Any]) -> Any:
    """Return the role of the first message, or None if there is no message.

    read_messages() later refuses what is not a message.
    """
    if messages and isinstance(messages[0], Mapping):
        name = messages[0].get("role", messages[0].get("from"))
        return "assistant" if role_of(name) in ("assistant", CALL) else name
    return None

"""Pairs of answers, of which one is preferred, from JSON files in the layouts that people have."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from nanochat.data.conversation import Conversation
from tasks.common import read_messages
from tasks.customjson import alpaca_turns, plain_turns, read_file, with_system
from tasks.record_keys import check_record

Pair = tuple[
    Conversation, Conversation
]  # the preferred answer and the other one, each after all that came before it
_SHAPE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
_ALPACA = ("instruction", "question", "query")
_TURNS = ("conversations", "conversation", "messages")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def read_pairs(filepath: str) -> list[Pair]:
    """The pairs of a file in the layouts of read_pair(). UserError as read_file() says."""
    return read_file(filepath, read_pair, "pair of answers", _SHAPE)


def read_pair(value: Any) -> Pair:
    """A pair of answers in any of the known layouts. ValueError names the rule that the value breaks.

    TRL: {"prompt", "chosen", "rejected"}, each a text or a list of messages. The prompt may be left out where both
    answers begin with it: as messages, as a text, or as turns after "Human:" and "Assistant:" (HH-RLHF).
    ShareGPT of LLaMA-Factory: {"conversations": [...], "chosen": {...}, "rejected": {...}, "system"}.
    Alpaca of LLaMA-Factory: {"instruction" or "question", "input", "chosen", "rejected", "system", "history"}.
    ms-swift: {"messages": [...], "rejected_response": "..."}, or "rejected_messages".
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"a pair of answers is an object, got {type(value).__name__}")
    if "messages" in value and {"rejected_response", "rejected_messages"} & set(value):
        check_record(value, ("messages", "system", "rejected_response", "rejected_messages"))
        chosen = list(plain_turns(value["messages"]))
        rejected = value.get("rejected_messages") or [
            *chosen[:-1],
            *_turns(value.get("rejected_response")),
        ]
    elif {"chosen", "rejected"} <= set(value):
        check_record(
            value, ("prompt", *_TURNS, *_ALPACA, "input", "history", "system", "chosen", "rejected")
        )
        before, chosen, rejected = _sides(value)
        chosen, rejected = (
            [*before, *side] if _role(side) in (None, "assistant") else side
            for side in (chosen, rejected)
        )
    else:
        keys = ", ".join(str(key)[:20] for key in list(value)[:6]) or "none"
        raise ValueError(
            f'a pair of answers needs the keys "chosen" and "rejected"; it has the keys {keys}'
        )
    chosen, rejected = with_system(value, chosen), with_system(value, rejected)
    return _pair(_read("chosen", chosen), _read("rejected", rejected))


def _read(name: str, messages: Any) -> Conversation:
    try:
        return read_messages(messages)
    except ValueError as broken:
        raise ValueError(f"{name}: {broken}") from broken


def _pair(chosen: Conversation, rejected: Conversation) -> Pair:
    """The conversations with the turns that both share as given. ValueError if they do not answer the same question,
    or if one of the answers is not to be trained."""
    if not (chosen.messages[-1].trained and rejected.messages[-1].trained):
        raise ValueError(
            "both answers of a pair are compared, so neither may have weight 0 or loss false"
        )
    both = zip(chosen.messages[:-1], rejected.messages[:-1], strict=False)
    given = sum(1 for _ in takewhile(lambda turns: turns[0] == turns[1], both))
    if not any(message.role == "user" for message in chosen.messages[:given]):
        raise ValueError(
            "chosen and rejected must answer the same question, and their first questions differ"
        )
    return replace(chosen, prompt_turns=given), replace(rejected, prompt_turns=given)


def _sides(value: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The messages before the answers, and those of both answers."""
    chosen, rejected = value["chosen"], value["rejected"]
    asked = next((name for name in _ALPACA if name in value), None)
    if "prompt" in value:
        return _turns(value["prompt"], "user"), _turns(chosen), _turns(rejected)
    if told := next((value[name] for name in _TURNS if name in value), None):
        return _turns(told), _turns(chosen), _turns(rejected)
    if asked:
        return list(alpaca_turns(value, asked)), _turns(chosen), _turns(rejected)
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return [], _turns(chosen), _turns(rejected)
    if chosen.lstrip().startswith("Human:"):
        return [], _transcript(chosen), _transcript(rejected)
    alike = zip(chosen, rejected, strict=False)
    shared = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], alike))
    words = re.match(r".*\s", chosen[:shared], re.DOTALL)
    if words is None:
        raise ValueError(
            'there is no "prompt", and chosen and rejected do not begin with the same words'
        )
    return (
        _turns(words[0].strip(), "user"),
        _turns(chosen[words.end() :]),
        _turns(rejected[words.end() :]),
    )


def _turns(told: Any, role: str = "assistant") -> list[Any]:
    """Messages from a text, which has the given role, from one message, or from a list of messages."""
    if isinstance(told, str):
        return [{"role": role, "content": told}]
    return list(plain_turns([told] if isinstance(told, Mapping) else told))


def _transcript(text: str) -> list[dict[str, str]]:
    """The turns of a text in which every turn follows "Human:" or "Assistant:" on a line of its own."""
    _, *parts = re.split(r"(?:^|\n\n)(Human|Assistant):", text.lstrip())
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _SPEAKERS[who], "content": said.strip()} for who, said in turns]


def _role(messages: list[Any]) -> Any:
    """Who speaks first: None for what is no message, which read_messages() refuses."""
    return messages[0].get("role") if messages and isinstance(messages[0], Mapping) else None

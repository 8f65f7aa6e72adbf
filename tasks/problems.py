"""Your own problems with answers that can be checked, from JSON files in the layouts that people have."""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanochat.data.conversation import Conversation
from tasks.common import final_number, read_messages
from tasks.customjson import read_file, with_system

_SHAPE = '{"question": "...", "answer": "42"}'
_QUESTIONS = ("question", "problem", "prompt", "instruction", "query", "messages")
_ANSWERS = ("answer", "answers", "solution", "ground_truth", "target")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SAID = re.compile(r"(?:####|answer\s*(?:is|:)|答案\s*(?:是|为|[::])?)\s*", re.I)
_AROUND = " .,;:!?。、\"'`*()[]「」“”‘’$"
_NUMBER = re.compile(r"[-+]?[$¥€]?\s*\d[\d,]*(\.\d+)?\s*[%.。]?")


@dataclass(frozen=True)
class Problem:
    """A conversation whose last turn is the first right answer, and all right answers."""

    conversation: Conversation
    answers: tuple[str, ...]


def final_answer(text: str) -> str:
    """What a text says its answer is: the last \\boxed{...}; else what follows the last `####`, "answer is", "Answer:"
    or 答案; else its last line that is not empty."""
    if boxed := _BOXED.findall(text):
        return str(boxed[-1])
    lines = [line for line in _SAID.split(text)[-1].strip().splitlines() if line.strip()]
    after = _SAID.search(text) is not None
    return lines[0 if after else -1].strip() if lines else ""


def plain(text: str) -> str:
    """A text without differences that do not matter: case, width, spaces, and marks around it."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(_AROUND)


def is_right(reply: str, answer: str) -> bool:
    """Whether a reply ends with an answer: with the same number, or with the same words."""
    said, wanted = final_answer(reply), final_answer(answer)
    is_number = _NUMBER.fullmatch(unicodedata.normalize("NFKC", wanted).strip())
    number = (
        final_number(wanted) if is_number else None
    )  # None also for more digits than final_number() reads
    return plain(said) == plain(wanted) if number is None else final_number(said) == number


def read_problem(value: Any) -> Problem:
    """A problem in any of the known layouts. ValueError names the rule that the value breaks.

    The question is a text or a list of messages under one of `_QUESTIONS`; the answer is a text, a number or a list of
    right answers under one of `_ANSWERS`, or stands in verl's {"reward_model": {"ground_truth": ...}}. A published
    solution is reduced to its final answer when replies are compared with it.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"a problem is an object, got {type(value).__name__}")
    asked = next((value[name] for name in _QUESTIONS if value.get(name)), None)
    if asked is None:
        raise ValueError(
            f"a problem needs one of the keys {', '.join(_QUESTIONS)}; it has {_keys(value)}"
        )
    holders = [value, *(part for part in (value.get("reward_model"),) if isinstance(part, Mapping))]
    found = next(
        (holder[name] for holder in holders for name in _ANSWERS if holder.get(name) is not None),
        None,
    )
    if found is None:
        raise ValueError(
            f"a problem needs one of the keys {', '.join(_ANSWERS)}; it has {_keys(value)}"
        )
    answers = tuple(str(one) for one in (found if isinstance(found, list) else [found]))
    if not answers or not all(plain(final_answer(answer)) for answer in answers):
        raise ValueError(
            f"an answer must be a text or a number that is not empty, got {str(found)[:40]!r}"
        )
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list):
        raise ValueError(f"a question is a text or a list of messages, got {type(asked).__name__}")
    answered = (
        bool(asked) and isinstance(asked[-1], Mapping) and asked[-1].get("role") == "assistant"
    )
    turns = with_system(value, asked[:-1] if answered else asked)
    return Problem(read_messages([*turns, {"role": "assistant", "content": answers[0]}]), answers)


def _keys(value: Mapping[str, Any]) -> str:
    return ", ".join(str(key)[:20] for key in list(value)[:6]) or "none"


class Problems:
    """The problems of a file. UserError names the file, the line and the rule of the first mistake."""

    kind: Literal["choice", "generative"] = "generative"

    def __init__(self, filepath: str | Path):
        self.name = Path(filepath).expanduser().stem
        self._problems = read_file(filepath, read_problem, "problem", _SHAPE)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, i: int) -> Conversation:
        return self._problems[i].conversation

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        return float(any(is_right(reply, answer) for answer in self._problems[i].answers))

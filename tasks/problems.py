"""Your own problems with checkable answers, from JSON files in common layouts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from nanochat.common import parse_json, tr
from nanochat.data.conversation import Conversation
from tasks.common import final_number, in_one_form
from tasks.customjson import first_keys, message_list, with_system
from tasks.messages import parsed, read_alternating
from tasks.record_files import read_file

_SHAPE = '{"question": "...", "answer": "42"}'
_QUESTIONS = ("question", "problem", "prompt", "instruction", "query", "messages")
_ANSWERS = ("answer", "answers", "solution", "ground_truth", "target")
_BRACE = re.compile(r"\\boxed\s*\{|(?<!\\)[{}]")  # \{ and \} are signs of a formula
_STYLED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")  # words in a formula
# How LaTeX writes the ends of a formula, degrees, and fractions of another size.
_FORMULA_END = re.compile(r"(?<!\\)\\[()\[\]]")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")
# 答案 alone is a word of a sentence, such as 42就是答案, unless a space or a number follows.
_ANSWER_IS = r"答案[\s*]*(?:应?该?[是为]|就是|选|[:\uff1a]|(?=[\s\d$\\-]))"
_MARKER = re.compile(rf"(?:####|answer[\s*]*(?:is|[:\uff1a])|{_ANSWER_IS})\s*", re.I)
_AROUND = " .,;:!?。、\"'`*()[]「」“”‘’$"
_WHOLE = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}|\d+)"
_NUMBER = re.compile(rf"[-+]?(?:\\?[$¥€£])?\s*(?:{_WHOLE}(?:\.\d+)?|\.\d+)\s*(?:\\?%|[.。])?")
_COMMA = re.compile(r"\{,\}|,\\!|(?<=\d)\\,(?=\d{3}(?!\d))")  # how LaTeX writes the comma of 1,000
_BRACKETS = re.compile(r"([\[(])[^\[\]()]*,[^\[\]()]*([\])])")  # of an interval or a point


@dataclass(frozen=True)
class Problem:
    """A conversation that ends with the first right answer to a problem, and all right answers.

    Without answers, which only some rewards need, the conversation ends with the question. `record`
    is what the file has.
    """

    conversation: Conversation
    answers: tuple[str, ...]
    record: Mapping[str, Any] = field(default_factory=dict)


class Problems:
    """The problems in a file, in any layout that read_problem() knows.

    With `need_answers`, every problem must have an answer. Raises UserError as read_file() does.
    """

    kind: Literal["choice", "generative"] = "generative"

    def __init__(self, filepath: str | Path, need_answers: bool = True):
        self.name = Path(filepath).expanduser().stem

        def read(value: Any) -> Problem:
            return read_problem(value, need_answers)

        records = read_file(filepath, read, tr("problem"), _SHAPE)
        self._problems = [problem for _, problem in records]

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, i: int) -> Conversation:
        return self._problems[i].conversation

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        answers = self._problems[i].answers
        return float(any(is_right(reply, answer) for answer in answers))

    def record(self, i: int) -> Mapping[str, Any]:
        """Return problem `i` as the file has it."""
        return self._problems[i].record


# --- grading -------------------------------------------------------------------------------------


def final_answer(text: str) -> str:
    """Return the final answer in a text, or "" if there is none.

    That is the content of the last \\boxed{...}, or else what follows the last `####`, "answer is",
    "Answer:" or 答案是, or else the last line that is more than marks such as $$.
    """
    return _marked_answer(text)[1]


def _marked_answer(text: str) -> tuple[str, str]:
    """Return the marker before the final answer of a text, or "" if it has none, and the answer."""
    text = _FRACTION.sub(r"\\frac", _DEGREES.sub("°", _FORMULA_END.sub("$", text)))
    text = _STYLED.sub(r"\1", _COMMA.sub(",", text))
    boxed = _boxed(text)
    if boxed is not None:
        return "", boxed
    marker = ""
    start = 0
    for match in _MARKER.finditer(text):
        marker = match[0]
        start = match.end()
    lines = [line for line in text[start:].splitlines() if plain(line)]  # not those of marks alone
    if not lines:
        return marker, ""
    return marker, lines[0 if marker else -1].strip()


def _boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} whose braces are closed, or None."""
    content = None
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{":
            content = text[start.end() : brace.start()]
    return content


def plain(text: str) -> str:
    """Normalise a text for grading.

    Case, the width of characters, the form of minus signs, repeated spaces, spaces beside commas,
    and marks around the text are ignored.
    """
    folded = " ".join(in_one_form(text).casefold().split())
    return re.sub(" ?, ?", ",", folded).strip(_AROUND)


def is_right(reply: str, answer: str) -> bool:
    """Return whether the final answers of `reply` and `answer` agree, as numbers or as words."""
    marker, reply_answer = _marked_answer(reply)
    right_answer = final_answer(answer)
    right_number = in_one_form(right_answer).strip(" $*")
    if _NUMBER.fullmatch(right_number):
        number = final_number(right_number.replace(" ", ""))  # the sign may stand apart
        if number is not None:  # None for more digits than final_number() reads
            return final_number(marker + reply_answer, alone=True) == number
    brackets = [_brackets(text) for text in (reply_answer, right_answer)]
    differ = None not in brackets and brackets[0] != brackets[1]
    return plain(reply_answer) == plain(right_answer) and not differ


def _brackets(text: str) -> tuple[str, ...] | None:
    """Return the brackets of a list in a text, such as [ and ) of the interval [0, 1), or None."""
    match = _BRACKETS.search(in_one_form(text))
    return match and match.groups()


# --- layouts -------------------------------------------------------------------------------------


def read_problem(value: Any, need_answer: bool = True) -> Problem:
    """Convert a JSON value in any of the known layouts to a problem.

    Raises ValueError, naming the rule, if the value breaks one, and if it has no answer but needs
    one.

    The question is a text or a list of messages under one of the keys `_QUESTIONS`. The answer is a
    text, a number or a list of right answers under one of the keys `_ANSWERS`, in the record or in
    verl's {"reward_model": {"ground_truth": ...}}. Only the final answer of a published solution is
    compared with replies. In a table, messages, "reward_model" and the list under "answers" are JSON
    texts.
    """
    if not isinstance(value, Mapping):
        raise ValueError(tr("a problem is an object, got {kind}", kind=type(value).__name__))
    question = next((value[name] for name in _QUESTIONS if value.get(name)), None)
    if question is None:
        raise ValueError(
            tr(
                "a problem needs one of the keys {questions}; it has {keys}",
                questions=", ".join(_QUESTIONS),
                keys=first_keys(value),
            )
        )
    answers = _answers(value) if need_answer or _answer_of(value) is not None else ()
    if isinstance(question, str) and question.startswith("[{"):
        question = message_list(question)
    elif isinstance(question, str):
        question = [{"role": "user", "content": question}]
    if not isinstance(question, list):
        kind = type(question).__name__
        raise ValueError(tr("a question is a text or a list of messages, got {kind}", kind=kind))
    if question and isinstance(question[-1], Mapping) and question[-1].get("role") == "assistant":
        question = question[:-1]
    turns = with_system(value, question)
    reference = {"role": "assistant", "content": answers[0] if answers else "?"}
    conversation = read_alternating([*turns, reference])
    return Problem(conversation if answers else conversation.prompt, answers, value)


def _answers(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the right answers of a problem.

    Raises ValueError if there is none, or if one of them is empty.
    """
    answer = _answer_of(value)
    if answer is None:
        raise ValueError(
            tr(
                "a problem needs one of the keys {answers}; it has {keys}",
                answers=", ".join(_ANSWERS),
                keys=first_keys(value),
            )
        )
    answers = tuple(map(_text_of, answer if isinstance(answer, list) else [answer]))
    if not answers or not all(plain(final_answer(text)) for text in answers):
        raise ValueError(
            tr(
                "an answer must be a text or a number that is not empty, got {answer!r}",
                answer=str(answer)[:40],
            )
        )
    return answers


def _text_of(answer: Any) -> str:
    """Return an answer as text, and a number without an exponent."""
    return f"{Decimal(str(answer)):f}" if isinstance(answer, float) else str(answer)


def _answer_of(value: Mapping[str, Any]) -> Any:
    """Return the answer of a problem as the record has it, or None."""
    answer = _first_answer(value)
    reward_model = value.get("reward_model")
    if answer is None and isinstance(reward_model, str) and reward_model.startswith("{"):
        reward_model = parsed(reward_model, tr('an object under "reward_model"'))
    if answer is None and isinstance(reward_model, Mapping):
        return _first_answer(reward_model)
    return answer


def _first_answer(record: Mapping[str, Any]) -> Any:
    """Return what the record has under the first of its keys for answers, or None."""
    for name in _ANSWERS:
        answer = record.get(name)
        if name == "answers" and isinstance(answer, str) and answer.startswith("["):
            return _list_or_text(answer)
        if answer is not None:
            return answer
    return None


def _list_or_text(text: str) -> Any:
    """Return the list whose JSON a text is, or else the text, such as the interval [0, 1)."""
    try:
        return parse_json(text)
    except ValueError:
        return text

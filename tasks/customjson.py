"""Your own conversations, from files in the layouts of OpenAI, TRL, ms-swift and others."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanochat.common import tr, visible
from nanochat.data.conversation import Conversation
from tasks.common import Ungraded
from tasks.messages import (
    check_own_format,
    checked,
    parsed,
    read_messages,
    single_messages,
    with_options,
)
from tasks.record_files import read_file
from tasks.record_keys import EMPTY, check_record

_SHAPE = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)
MESSAGES = ("messages", "conversations", "conversation")
_SYSTEM = ("system", "system_prompt")
_OPTIONS = ("tools", "functions", "chat_template_kwargs")
_QUESTIONS = ("instruction", "query", "question", "prompt", "INSTRUCTION")
# Their "input" is more of the question.
_WITH_INPUT = ("instruction", "query", "question", "INSTRUCTION")
_ANSWERS = ("output", "response", "answer", "completion", "generation", "RESPONSE")


class CustomJSON(Ungraded):
    """The conversations in a file, a folder or the files of a pattern, in any known layout.

    With `own_format`, they are for the chat format of our own models, as check_own_format() says;
    otherwise, for the chat template of a published model. `skip_bad_lines` leaves out what cannot
    be used. Raises UserError as read_file() does.
    """

    def __init__(
        self,
        filepath: str | Path,
        own_format: bool = True,
        skip_bad_lines: bool = False,
    ):
        self.name = Path(filepath).expanduser().stem

        def read(value: Any) -> Conversation:
            conversation = read_record(value)
            if own_format:
                check_own_format(conversation)
            return conversation

        self._conversations = []
        for place, conversation in read_file(
            filepath, read, tr("conversation"), _SHAPE, skip_bad_lines
        ):
            self._conversations.append(replace(conversation, origin=place))

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, i: int) -> Conversation:
        return self._conversations[i]


def read_record(value: Any) -> Conversation:
    """Convert a JSON value in any of the known layouts to a conversation.

    Raises ValueError, naming the rule, if the value breaks one. The layouts are

    messages: a list of messages, or an object with such a list under "messages", "conversations"
    or "conversation";
    TRL: {"prompt": [...], "completion": [...]}, lists of messages, of which the completion is
    trained;
    questions and answers: one of the keys _QUESTIONS and one of _ANSWERS, with "history", a list of
    [question, answer]. "input" is appended to an instruction on a line of its own.

    Every object may have a system message, tools and variables of the chat template beside them.
    tasks/record_keys.py says what becomes of other keys.
    """
    if isinstance(value, list):
        return read_messages(value)
    if not isinstance(value, Mapping):
        raise ValueError(
            tr(
                "a conversation is a list of messages or an object, got {kind}",
                kind=type(value).__name__,
            )
        )
    names = [name for name in MESSAGES if value.get(name) is not None]
    if names:
        conversation = _of_messages(value, names[0])
    elif isinstance(value.get("prompt"), list):
        conversation = _of_prompt_and_completion(value)
    else:
        conversation = _of_question_and_answer(value)
    return with_options(conversation, value)


def _of_messages(value: Mapping[str, Any], name: str) -> Conversation:
    turns = message_list(value[name])
    layout = [name, *_SYSTEM, *_OPTIONS]
    if value.get("prompt") == first_question(turns):
        layout.append("prompt")  # UltraChat repeats the first question
    check_record(value, layout)
    return read_messages(with_system(value, turns))


def first_question(turns: Any) -> Any:
    """Return the content of the first message of the user, or None if there is none."""
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in ("user", "human"):
            return turn.get("content", turn.get("value"))
    return None


def _of_prompt_and_completion(value: Mapping[str, Any]) -> Conversation:
    check_record(value, ("prompt", "completion", *_SYSTEM, *_OPTIONS))
    completion = value.get("completion")
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if not isinstance(completion, list):
        raise ValueError(
            tr(
                'a list of messages under "prompt" needs a list of messages under '
                '"completion", got {kind}',
                kind=type(completion).__name__,
            )
        )
    prompt = with_system(value, value["prompt"])
    conversation = read_messages([*prompt, *completion])
    turns = []
    for number, turn in enumerate(conversation.messages):
        in_prompt = number < len(prompt) and turn.role == "assistant"
        turns.append(replace(turn, trained=False) if in_prompt else turn)
    return checked(replace(conversation, messages=tuple(turns)))


def _of_question_and_answer(value: Mapping[str, Any]) -> Conversation:
    questions = [key for key in _QUESTIONS if value.get(key) not in EMPTY]
    if not questions and value.get("input") not in EMPTY:
        questions = ["input"]
    answers = [key for key in _ANSWERS if value.get(key) is not None]
    if not questions or not answers:
        raise ValueError(
            tr(
                'an object needs "messages" or "conversations", or a question (instruction, '
                "query, question, prompt or input) and its answer (output, response, answer "
                "or completion); it has the keys {keys}{hint}",
                keys=first_keys(value),
                hint=_hint(value),
            )
        )
    question = questions[0]
    answer = answers[0]
    layout = [question, answer, "history", *_SYSTEM, *_OPTIONS]
    if question in _WITH_INPUT:
        layout.append("input")
    check_record(value, layout)
    turns = question_turns(value, question)
    text = value[answer]
    if question == "prompt" and isinstance(text, str):
        text = text.strip()  # the completion of a text begins with a space
    turns.append({"role": "assistant", "content": text})
    return read_messages(with_system(value, turns))


def _hint(value: Mapping[str, Any]) -> str:
    if "chosen" in value and "rejected" in value:
        return tr(". Pairs of answers are read with scripts.finetune --loss=dpo")
    return ""


def first_keys(value: Mapping[str, Any]) -> str:
    """Return the first keys of a record, or tr("none"), for an error message."""
    return ", ".join(visible(str(key)[:20]) for key in list(value)[:6]) or tr("none")


def message_list(messages: Any) -> Any:
    """Return messages, parsed if they are JSON text, as tables hold them."""
    return parsed(messages, tr("a list of messages")) if isinstance(messages, str) else messages


def with_system(value: Mapping[str, Any], messages: Any) -> Any:
    """Return single messages, preceded by the system message that a record has beside them.

    The messages are returned unchanged if they are not a list, which read_messages() then refuses.
    Raises ValueError if they begin with another system message.
    """
    if not isinstance(messages, list):
        return messages
    messages = list(single_messages(messages))
    systems = [value[key] for key in _SYSTEM if value.get(key) not in EMPTY]
    if not systems:
        return messages
    system = systems[0]
    if system != systems[-1]:
        raise ValueError(tr('"system" and "system_prompt" differ; keep one of them'))
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role", first.get("from")) not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if first.get("content", first.get("value")) != system:
        raise ValueError(
            tr(
                'the messages begin with another system message than the key "system" '
                "holds; keep one of them"
            )
        )
    return messages


def question_turns(value: Mapping[str, Any], question: str) -> list[dict[str, Any]]:
    """Return the earlier exchanges of a record, then its question, as messages.

    `question` is the key of the question. Raises ValueError if "history" is not a list of pairs, or
    if the question or its "input" is not a text.
    """
    history = value.get("history")
    if isinstance(history, str) and history not in EMPTY:
        history = parsed(history, tr('a list of [question, answer] under "history"'))
    if history in EMPTY:
        history = []
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise ValueError(tr('"history" must be a list of [question, answer]'))
    words = value[question]
    input_text = value.get("input") if question in _WITH_INPUT else None
    if input_text in EMPTY:
        input_text = ""
    if not isinstance(words, str) or not isinstance(input_text, str):
        raise ValueError(tr('"{question}" and "input" must be texts', question=question))
    turns: list[dict[str, Any]] = []
    for earlier_question, earlier_answer in history:
        turns.append({"role": "user", "content": earlier_question})
        turns.append({"role": "assistant", "content": earlier_answer})
    joined = f"{words}\n{input_text}" if input_text else words
    return [*turns, {"role": "user", "content": joined}]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2

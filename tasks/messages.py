"""Reads the messages of a record: roles, texts, function calls, reasoning, and what is trained."""

import json
import re
import reprlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanochat.common import parse_json, tr, visible
from nanochat.data.conversation import Conversation, Message, Part, Role
from nanochat.data.library_words import in_words
from tasks.record_keys import EMPTY, check_message, is_trained, reads_no_media

# The role of a message by the name that OpenAI, ShareGPT and ms-swift give it. Calls are messages
# of the assistant whose content is the call.
CALL = "call"
ROLES: dict[str, Role | str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "observations": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": CALL,
    "tool_call": CALL,
}
_QUESTIONS = ("human", "user", "input")
_ANSWERS = ("assistant", "gpt", "bot", "output")
# Where tools put an image into a question. Beside a closing tag, it is a piece of HTML.
_MEDIA = re.compile(r"\A<(image|video|audio)>|<(image|video|audio)>\Z")
_REASONING = ("reasoning_content", "reasoning", "thinking")


def _own_remedy() -> str:
    return tr(
        "the chat format of our own models has only the calculator; fine-tune a published model with "
        "scripts.finetune, or leave such records out"
    )


def _thoughts_remedy() -> str:
    return tr(
        "the chat format of our own models has no place for reasoning; write it at the beginning of the "
        "content, as <think>...</think>, or remove the key"
    )


def read_messages(messages: Any) -> Conversation:
    """Return the conversation in a list of messages, in the order of the list.

    A message has "role" and "content", or "from" and "value", or is a question and its answer in
    one object (ms-swift). Raises ValueError, naming the broken rule, if a message cannot be read,
    if a tool answers without a call, or if no answer is trained.
    """
    if isinstance(messages, str):
        messages = parsed(messages, tr("a list of messages"))
    if not isinstance(messages, list):
        raise ValueError(
            tr("a conversation is a list of messages, got {kind}", kind=type(messages).__name__)
        )
    turns: list[Message] = []
    for n, message in enumerate(single_messages(messages), start=1):
        turn = _read_message(message, n)
        if turn.role == "tool" and not any(earlier.role == "assistant" for earlier in turns):
            raise ValueError(
                tr("message {n} is the result of a tool, and no call comes before it", n=n)
            )
        turns.append(turn)
    return checked(Conversation(tuple(turns)))


def checked(conversation: Conversation) -> Conversation:
    """Return a conversation.

    Raises ValueError if it holds no answer to train, or if the user shows an image, a video or a sound.
    """
    for turn in conversation.messages:
        if turn.role == "user":
            _check_media(turn.text)
    answers = [turn for turn in conversation.messages if turn.role == "assistant"]
    if not answers:
        raise ValueError(
            tr("a conversation needs a message of role 'assistant' to train, got none")
        )
    if not any(turn.trained for turn in answers):
        raise ValueError(
            tr(
                "every assistant message has weight 0, loss false or train false, so "
                "nothing is trained; remove the record"
            )
        )
    return conversation


def _check_media(question: str) -> None:
    mark = _MEDIA.search(question)
    if mark is not None and f"</{mark[0][1:]}" not in question:
        raise ValueError(
            tr(
                'a question holds the mark "{mark}", and {rule}',
                mark=mark[0],
                rule=reads_no_media(),
            )
        )


def read_alternating(messages: Any) -> Conversation:
    """Return the conversation in a list of messages that our own chat format can write.

    Raises ValueError as read_messages() and check_own_format() do.
    """
    conversation = read_messages(messages)
    check_own_format(conversation)
    return conversation


def check_own_format(conversation: Conversation) -> None:
    """Raise ValueError unless our own chat format can write a conversation.

    It has no tools but the calculator, and user and assistant take turns in it after an optional
    system message.
    """
    for key in conversation.options:
        raise ValueError(
            tr('the key "{key}" cannot be honoured: {remedy}', key=key, remedy=_own_remedy())
        )
    expected_role = "user"
    for n, message in enumerate(conversation.messages, start=1):
        for key in message.fields:
            remedy = _thoughts_remedy() if key == "reasoning_content" else _own_remedy()
            raise ValueError(
                tr(
                    'the key "{key}" of message {n} cannot be honoured: {remedy}',
                    key=key,
                    n=n,
                    remedy=remedy,
                )
            )
        if message.role == "system" and n == 1:
            continue
        if message.role != expected_role:
            raise ValueError(
                tr(
                    "message {n} must have role {expected_role!r}, because user and "
                    "assistant take turns in the chat format of our own models, after an "
                    "optional system message; got {role!r}. Reorder or join the messages, "
                    "or fine-tune a published model with scripts.finetune",
                    n=n,
                    expected_role=expected_role,
                    role=message.role,
                )
            )
        expected_role = "user" if message.role == "assistant" else "assistant"


def parsed(text: str, expected: str) -> Any:
    """Return the value of a JSON text; raise ValueError, naming what is expected, if it is none.

    Tables (CSV, parquet) hold lists and objects as such texts.
    """
    try:
        return parse_json(text)
    except ValueError as broken:
        raise ValueError(
            tr(
                "{what} is expected, got a text that is not JSON ({broken}): {text!r}",
                what=expected,
                broken=in_words(broken),
                text=text[:40],
            )
        ) from broken


def single_messages(messages: list[Any]) -> Iterator[Any]:
    """Yield messages, taking apart objects that hold both a question and its answer."""
    for message in messages:
        if not isinstance(message, Mapping) or {"role", "from"} & set(message):
            yield message
            continue
        question = next((key for key in _QUESTIONS if key in message), None)
        answer = next((key for key in _ANSWERS if key in message and key != question), None)
        if question is None or answer is None:
            yield message
            continue
        fields = dict(message)
        system = fields.pop("system", None)
        if system:
            yield {"role": "system", "content": system}
        yield {"role": "user", "content": fields.pop(question)}
        yield {"role": "assistant", "content": fields.pop(answer), **fields}


# --- one message ---------------------------------------------------------------------------------


def _read_message(message: Any, n: int) -> Message:
    """Return message `n` of a conversation as a turn.

    Raises ValueError, naming the rule, if the message breaks one.
    """
    role = _role(message, n)
    check_message(message, n)
    _check_speaker(message, role, n)
    content = _agreed(_values(message, ("content", "value"), (None,)), n)
    fields: dict[str, Any] = {}
    if role == CALL:
        fields.update(_assistant_fields(message, n, _content_calls(content, n)))
        role = "assistant"
        content = ""
    elif role == "assistant":
        fields.update(_assistant_fields(message, n))
    elif role == "tool":
        fields.update(
            (key, message[key]) for key in ("name", "tool_call_id") if message.get(key) is not None
        )
        if isinstance(content, Mapping):
            content = json.dumps(content, ensure_ascii=False)
    text = _text(content, n, may_be_empty=bool(fields) or role == "tool")
    trained = is_trained({**message, "role": role}, n)
    return Message(role, (Part("text", text),), trained, fields)  # pyright: ignore[reportArgumentType]


def _values(
    message: Mapping[str, Any],
    keys: Sequence[str],
    empty: Container[Any] = EMPTY,
) -> dict[str, Any]:
    """Return the values of a message under some of its keys, without those that are empty."""
    return {key: message[key] for key in keys if message.get(key) not in empty}


def _agreed(values: Mapping[str, Any], n: int) -> Any:
    """Return the value that keys of message `n` have in common, or None if there are no keys.

    Raises ValueError if the keys have different values.
    """
    first = next(iter(values.values()), None)
    if any(value != first for value in values.values()):
        names = tr(" and ").join(f'"{key}"' for key in values)
        raise ValueError(tr("{names} of message {n} differ; keep one of them", names=names, n=n))
    return first


def _role(message: Any, n: int) -> str:
    """Return the role of message `n`. Raises ValueError if it has none or an unknown one."""
    fields = message if isinstance(message, Mapping) else {}
    names = _values(fields, ("role", "from"), (None,))
    if not names or not {"content", "value", "tool_calls", "function_call"} & set(fields):
        raise ValueError(
            tr(
                'message {n} must be an object with "role" and "content", or with "from" '
                'and "value"',
                n=n,
            )
        )
    return _agreed({key: _known_role(name, key, n) for key, name in names.items()}, n)


def _known_role(
    name: Any,
    key: str,
    n: int,
) -> str:
    """Return the role that message `n` names under `key`. Raises ValueError if it is unknown."""
    role = role_of(name)
    if role is None:
        raise ValueError(
            tr(
                'message {n} has "{key}" {value}; known are {names}',
                n=n,
                key=key,
                value=reprlib.repr(name),
                names=", ".join(ROLES),
            )
        )
    return role


def role_of(name: Any) -> str | None:
    """Return the role that a message calls `name`, as ROLES has it, or None if it is unknown."""
    return ROLES.get(name.replace("-", "_")) if isinstance(name, str) else None


def _check_speaker(
    message: Mapping[str, Any],
    role: str,
    n: int,
) -> None:
    """Raise ValueError if message `n` has the words of another speaker.

    Such keys are those that only the assistant may have, and those of ms-swift's objects that hold
    a question and its answer.
    """
    for key in _values(message, (*_QUESTIONS, *_ANSWERS)):
        raise ValueError(
            tr(
                'the key "{key}" is not read beside the role of message {n}; make it a message of '
                "its own",
                key=key,
                n=n,
            )
        )
    if role in ("assistant", CALL):
        return
    for key in ("tool_calls", "function_call", *_REASONING):
        if message.get(key) not in EMPTY:
            raise ValueError(
                tr(
                    'the key "{key}" of message {n} belongs to the assistant, got {role!r}',
                    key=key,
                    n=n,
                    role=role,
                )
            )


def _text(
    content: Any,
    n: int,
    may_be_empty: bool,
) -> str:
    """Return the text of a message's content, which is a text or a list of text parts.

    Raises ValueError if it is neither, or if it is empty and may not be.
    """
    if content is None and may_be_empty:
        return ""
    if isinstance(content, list):
        content = "".join(_part_text(part, n) for part in content)
    if not isinstance(content, str):
        raise ValueError(
            tr(
                "the content of message {n} must be a text, got {kind}",
                n=n,
                kind=type(content).__name__,
            )
        )
    if not may_be_empty and not content.strip():
        raise ValueError(tr("the content of message {n} must be a text that is not empty", n=n))
    return content


def _part_text(part: Any, n: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text":
        text = part.get("text", part.get("value"))  # LLaMA-Factory writes "value"
        if isinstance(text, str):
            return text
    raise ValueError(
        tr(
            "the content of message {n} may hold only text parts, got {value}: {rule}",
            n=n,
            value=reprlib.repr(kind),
            rule=reads_no_media(),
        )
    )


# --- calls and reasoning -------------------------------------------------------------------------


def _assistant_fields(
    message: Mapping[str, Any],
    n: int,
    content_calls: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the calls and the reasoning of an assistant message, under the names of templates.

    `content_calls` are the calls in the content of a message that is a call. Raises ValueError if
    two keys hold different calls or different reasoning.
    """
    fields: dict[str, Any] = {}
    calls_by_key = {} if content_calls is None else {"content": content_calls}
    calls = message.get("tool_calls")
    if isinstance(calls, str) and calls not in EMPTY:
        calls = parsed(calls, tr('a list under "tool_calls" of message {n}', n=n))
    if calls not in EMPTY:
        calls_by_key["tool_calls"] = _calls(calls, n)
    if message.get("function_call") not in EMPTY:
        calls_by_key["function_call"] = _calls([message["function_call"]], n)
    if calls_by_key:
        # The calls of one key may have IDs that those of another lack.
        functions = {key: [call["function"] for call in calls_by_key[key]] for key in calls_by_key}
        _agreed(functions, n)
        fields["tool_calls"] = next(iter(calls_by_key.values()))
    reasoning = _agreed(_reasoning(message, n), n)
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    return fields


def _content_calls(content: Any, n: int) -> list[dict[str, Any]]:
    """Return the calls in the content of message `n`: a call or a list of calls, or their JSON."""
    if isinstance(content, str):
        content = parsed(content, tr("a call as content of message {n}", n=n))
    return _calls(content if isinstance(content, list) else [content], n)


def _reasoning(message: Mapping[str, Any], n: int) -> dict[str, str]:
    """Return the reasoning of message `n` by its keys. Raises ValueError if it is not a text."""
    values = _values(message, _REASONING)
    for key, reasoning in values.items():
        if not isinstance(reasoning, str):
            raise ValueError(
                tr(
                    '"{key}" of message {n} must be a text, got {kind}',
                    key=key,
                    n=n,
                    kind=type(reasoning).__name__,
                )
            )
    return values


def _calls(calls: Any, n: int) -> list[dict[str, Any]]:
    """Return the calls of message `n` in OpenAI's form, with their arguments as objects.

    Raises ValueError if they are not calls of functions.
    """
    if not isinstance(calls, list) or not calls:
        raise ValueError(
            tr(
                "the calls of message {n} must be a list, got {kind}",
                n=n,
                kind=type(calls).__name__,
            )
        )
    return [_call(call, n) for call in calls]


def _call(call: Any, n: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            tr(
                'a call of message {n} must be {{"name": ..., "arguments": {{...}}}}, got {value}',
                n=n,
                value=reprlib.repr(call),
            )
        )
    label = visible(name[:40])
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments = parsed(
            arguments, tr("the arguments of {label} in message {n}", label=label, n=n)
        )
    if arguments in EMPTY:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(
            tr(
                "the arguments of {label} in message {n} must be an object, got {kind}",
                label=label,
                n=n,
                kind=type(arguments).__name__,
            )
        )
    read_call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str):
        read_call = {"id": call["id"], **read_call}
    return read_call


def read_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a record asks for: its tools, and others.

    Raises ValueError if they cannot be used.
    """
    options: dict[str, Any] = {}
    for key in ("tools", "functions"):
        tools = record.get(key)
        if isinstance(tools, str) and tools not in EMPTY:
            tools = parsed(tools, tr('a list under "{key}"', key=key))
        if tools not in EMPTY:
            read_tools = _tools(tools, key)
            if options.setdefault("tools", read_tools) != read_tools:
                raise ValueError(tr('"tools" and "functions" differ; keep one of them'))
    variables = record.get("chat_template_kwargs")
    if isinstance(variables, str) and variables not in EMPTY:
        variables = parsed(variables, tr('an object under "chat_template_kwargs"'))
    if variables in EMPTY:
        return options
    if not isinstance(variables, Mapping):
        raise ValueError(
            tr(
                '"chat_template_kwargs" must be an object, got {kind}',
                kind=type(variables).__name__,
            )
        )
    reserved = {"messages", "tools", "add_generation_prompt"} & set(variables)
    if reserved:
        names = ", ".join(sorted(reserved))
        raise ValueError(tr('"chat_template_kwargs" may not hold {taken}', taken=names))
    return {**options, **variables}


def _tools(tools: Any, key: str) -> list[dict[str, Any]]:
    """Return functions in the form {"type": "function", "function": {...}}."""
    if not isinstance(tools, list):
        raise ValueError(
            tr(
                '"{key}" must be a list of functions, got {kind}',
                key=key,
                kind=type(tools).__name__,
            )
        )
    read_tools = []
    for tool in tools:
        if isinstance(tool, str):
            tool = parsed(tool, tr('a function under "{key}"', key=key))
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                tr(
                    '"{key}" must hold functions with a "name", got {value}',
                    key=key,
                    value=reprlib.repr(tool),
                )
            )
        read_tools.append({"type": "function", "function": dict(function)})
    return read_tools


def with_options(conversation: Conversation, record: Mapping[str, Any]) -> Conversation:
    """Return a conversation with the template variables of its record, as read_options() does."""
    return replace(conversation, options=read_options(record))

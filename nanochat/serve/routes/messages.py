"""Reads the messages of a request into a conversation, and makes a prompt that fits the context.

A message may hold texts, calls of our calculator, and calls of a client's tools.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanochat.common import UserError
from nanochat.data.conversation import Conversation, Message, Part, Role, merge_texts, system, user
from nanochat.serve.formats.thoughts import closing
from nanochat.serve.routes.fields import ApiError, flag, invalid, kind, missing
from nanochat.serve.routes.tools import read_calls
from nanochat.tokenizer import Tokenizer

MOST_MESSAGES = 1000  # a chat of 500 questions; checking more would keep other clients waiting
MOST_PARTS = 4000  # of all messages together
# Characters of a chat that is counted in slices of so many characters before it is rendered, and
# how many tokens the cuts between slices may add.
LARGE_TEXT = 1 << 18
SLICE = 1 << 15
SLICE_TOKENS = 1024
# The role that the model sees for a message, by the role that the client gives.
SPEAKERS: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# The names under which clients send the thought of an earlier reply.
THOUGHTS = ("reasoning_content", "reasoning")
# Types of parts that are text. The last two belong to the responses format.
TEXTS = ("text", "input_text", "output_text")


class PromptTooLong(ApiError):
    """A refusal (400) of a prompt of `tokens` tokens that leaves no room for an answer."""

    def __init__(self, tokens: int, context: int, field: str):
        """Create the error about `field`; the model's context holds `context` tokens."""
        text = (
            f"the model's context holds {context} tokens; the messages have {tokens}, which leaves "
            'no room for an answer: shorten the chat, or send "truncation": "auto"'
        )
        super().__init__(400, "context_length_exceeded", text, field)
        self.tokens = tokens


# --- reading -------------------------------------------------------------------------------------


def read_conversation(
    items: Any,
    continued: bool = False,
) -> Conversation:
    """Check a request's list of messages, and return it as a conversation.

    Roles may come in any order. The results of calls are put after their calls, in the order of
    these; a result that names no call must follow an assistant message or another result. Empty
    system messages are left out. If `continued` is true, the last message must be a reply for the
    model to continue.

    Raises ApiError (400) if the messages are invalid or too many.
    """
    items = _checked_items(items)
    read = [_message(item, f"messages[{i}]") for i, item in enumerate(items)]
    messages = [
        message
        for message in _results_after_calls(read)
        if message.role != "system" or message.text.strip()
    ]
    if not messages:
        raise _no_messages()
    last = f"messages[{len(items) - 1}].role"
    if continued and messages[-1].role != "assistant":
        text = (
            "continue_final_message needs a reply to continue: the last message must have the role "
            "assistant"
        )
        raise invalid(text, last)
    if not continued and items[-1].get("tool_calls"):
        text = "calls need their results: the last message must have the role user or tool"
        raise invalid(text, last)
    return Conversation(tuple(messages))


def _checked_items(items: Any) -> list[Any]:
    """Return `items`, the messages of a request, after checking only how many there are.

    Raises ApiError (400) if `items` is not a list, is empty, or has too many messages or parts.
    """
    if items is None:
        raise missing("messages", "a list of {role, content}")
    if not isinstance(items, list):
        raise invalid("messages must be a list of {role, content}, got " + kind(items), "messages")
    if not items:
        raise _no_messages()
    if len(items) > MOST_MESSAGES:
        text = (
            f"there may be at most {MOST_MESSAGES:,} messages, got {len(items):,}: leave out the "
            "oldest"
        )
        raise ApiError(400, "too_many_messages", text, "messages")
    parts = sum(map(_part_count, items))
    if parts > MOST_PARTS:
        text = (
            f"all messages together may have at most {MOST_PARTS:,} parts, got {parts:,}: leave "
            "out the oldest messages"
        )
        raise ApiError(400, "too_many_messages", text, "messages")
    return items


def _no_messages() -> ApiError:
    text = "messages must hold at least one user message, got none"
    return ApiError(400, "empty_prompt", text, "messages")


def _part_count(item: Any) -> int:
    """Return how many parts an unchecked message has, in `content` and `parts`."""
    if not isinstance(item, dict):
        return 0
    lists = (item.get("content"), item.get("parts"))
    return sum(len(parts) for parts in lists if isinstance(parts, list))


def _results_after_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a request, with the result of each call after the call.

    Neighbouring messages of the assistant are one if either has calls. Raises ApiError (400) for a
    result that names no call and follows none.
    """
    # Each with its index in the request.
    joined: list[tuple[int, Message]] = []
    for i, message in enumerate(messages):
        if joined and joined[-1][1].role == "assistant" == message.role:
            first, earlier = joined[-1]
            if "tool_calls" in {**earlier.fields, **message.fields}:
                joined[-1] = first, _joined(earlier, message)
                continue
        joined.append((i, message))
    places: dict[str, tuple[int, int]] = {}  # by the ID of a call
    keys = []
    for i, (_, message) in enumerate(joined):
        key = (i, 0)
        if message.role == "tool":
            key = places.get(message.fields.get("tool_call_id", ""), key)
        keys.append((*key, i))
        for number, call in enumerate(message.fields.get("tool_calls", ())):
            places[call.get("id", "")] = (i, number + 1)
    ordered = [joined[i] for *_, i in sorted(keys)]
    for previous, (i, message) in itertools.pairwise([(-1, user("")), *ordered]):
        if message.role == "tool" and previous[1].role not in ("assistant", "tool"):
            text = f"messages[{i}] is the result of a tool: put it after the call"
            raise invalid(text, f"messages[{i}].role")
    return [message for _, message in ordered]


def _joined(first: Message, second: Message, between: tuple[Part, ...] = ()) -> Message:
    """Return two messages of one speaker as one, with the thoughts and the calls of both."""
    fields = {**first.fields, **second.fields}
    both = (first.fields, second.fields)
    thoughts = [each["reasoning_content"] for each in both if "reasoning_content" in each]
    if thoughts:
        fields["reasoning_content"] = "\n\n".join(thoughts)
    calls = [call for each in both for call in each.get("tool_calls", ())]
    if calls:
        fields["tool_calls"] = calls
    return Message(first.role, merge_texts(*first.parts, *between, *second.parts), fields=fields)


def _message(item: Any, name: str) -> Message:
    """Check one message of a request, and return it as a Message.

    Raises ApiError (400) if the message is malformed. The error calls it `name`, such as
    messages[0].
    """
    if not isinstance(item, dict):
        raise invalid(f"{name} must be an object {{role, content}}, got {kind(item)}", name)
    role = item.get("role")
    if not isinstance(role, str) or role not in SPEAKERS:
        role_text = repr(role[:80]) if isinstance(role, str) else kind(role)
        text = f"{name}.role must be system, user, assistant or tool, got {role_text}"
        raise invalid(text, f"{name}.role")
    if role == "assistant":
        return Message("assistant", _assistant_parts(item, name), fields=_fields(item, name))
    text = text_of(item.get("content"), f"{name}.content")
    if role == "user" and not text.strip():
        refusal = f"{name} is empty: every message of the user must hold some text"
        raise ApiError(400, "empty_prompt", refusal, f"{name}.content")
    fields = {}
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        fields["tool_call_id"] = item["tool_call_id"]
    return Message(SPEAKERS[role], (Part("text", text),), fields=fields)


def _fields(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the thought and the calls of an assistant message.

    Raises ApiError (400) if one of them is malformed.
    """
    fields: dict[str, Any] = {}
    for key in THOUGHTS:
        thought = item.get(key)
        if isinstance(thought, str) and thought:
            fields["reasoning_content"] = thought
            break
        if thought is not None and not isinstance(thought, str):
            raise invalid(f"{name}.{key} must be a text, got {kind(thought)}", f"{name}.{key}")
    if item.get("tool_calls"):
        fields["tool_calls"] = read_calls(item["tool_calls"], f"{name}.tool_calls")
    return fields


def _assistant_parts(item: dict[str, Any], name: str) -> tuple[Part, ...]:
    """Return the parts of an assistant message: its `parts`, or else its text."""
    content = item.get("content")
    if item.get("parts") is not None:
        return _parts(item["parts"], f"{name}.parts")
    if content is None:
        return (Part("text", ""),)
    return (Part("text", text_of(content, f"{name}.content")),)


def text_of(content: Any, name: str) -> str:
    """Return the text of a message's `content`, which is a string or a list of text parts.

    Raises ApiError (400) for anything else.
    """
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not _is_text(part):
                raise _no_text(part, f"{name}[{i}]")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise invalid(f"{name} must be a string or a list of text parts, got {kind(content)}", name)
    return content


def _no_text(part: Any, name: str) -> ApiError:
    """Return the refusal of a part that is no text, such as an image."""
    part_type = part.get("type") if isinstance(part, dict) else None
    if isinstance(part_type, str) and part_type not in TEXTS:
        text = f"{name} is of type {part_type[:80]!r}, and the model reads only text: leave it out"
        return ApiError(400, "unsupported_content", text, name)
    return invalid(f"{name} must be a text part, {{type: text, text}}", name)


def _is_text(part: Any) -> bool:
    """Return whether a part of a message is a valid text part."""
    if not isinstance(part, dict):
        return False
    return part.get("type") in TEXTS and isinstance(part.get("text"), str)


def _parts(items: Any, name: str) -> tuple[Part, ...]:
    """Return the parts of a reply that a client sends back in the format of Reply.parts.

    Raises ApiError (400) if a part has any other format.
    """
    parts: list[Part] = []
    for item in items if isinstance(items, list) else [items]:
        fields = item if isinstance(item, dict) else {}
        expression = fields.get("expression")
        text = fields.get("text")
        if isinstance(expression, str) and fields.get("type") == "tool":
            parts.append(Part("python", expression))
            if isinstance(fields.get("result"), str):
                parts.append(Part("python_output", fields["result"]))
        elif isinstance(text, str) and fields.get("type") == "text":
            parts.append(Part("text", text))
        else:
            rule = "may hold only {type: text, text} and {type: tool, expression, result}"
            raise invalid(f"{name} {rule}", name)
    return tuple(parts)


def as_request(message: Message) -> dict[str, Any]:
    """Return a message as a dict in the format that read_conversation reads."""
    if message.role != "assistant":
        return {"role": message.role, "content": message.text, **message.fields}
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if part.kind == "text":
            parts.append({"type": "text", "text": part.text})
        elif part.kind == "python":
            parts.append({"type": "tool", "expression": part.text, "result": None})
        else:
            parts[-1]["result"] = part.text  # the part before a result is its call
    request: dict[str, Any] = {"role": "assistant", "parts": parts}
    if "reasoning_content" in message.fields:
        request["reasoning_content"] = message.fields["reasoning_content"]
    if "tool_calls" in message.fields:
        request["tool_calls"] = list(map(_call_as_request, message.fields["tool_calls"]))
    return request


def _call_as_request(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as text."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


# --- order ---------------------------------------------------------------------------------------


def alternating(conversation: Conversation) -> Conversation:
    """Return a chat in the form of training data: a system message, if any, then alternating turns.

    System messages are joined into one, and so are consecutive messages of the user or of the
    assistant. If the assistant speaks first, an empty user message is put in front. If there are
    only system messages, they become one user message.
    """
    instructions: list[str] = []
    turns: list[Message] = []
    for message in conversation.messages:
        if message.role == "system":
            instructions.append(message.text)
        elif turns and turns[-1].role == message.role != "tool":
            has_both = turns[-1].parts and message.parts
            blank_line = (Part("text", "\n\n"),) if has_both else ()
            turns[-1] = _joined(turns[-1], message, blank_line)
        else:
            turns.append(message)
    text = "\n\n".join(instructions)
    if not turns:
        return replace(conversation, messages=(user(text),))
    head = [system(text)] if text else []
    if turns[0].role == "assistant":
        head.append(user(""))
    return replace(conversation, messages=(*head, *turns))


def with_instructions(conversation: Conversation, instructions: str) -> Conversation:
    """Return a conversation whose system message begins with `instructions`, if there are any."""
    messages = conversation.messages
    if not instructions:
        return conversation
    texts = [instructions]
    if messages[0].role == "system":
        texts.append(messages[0].text)
        messages = messages[1:]
    return replace(conversation, messages=(system("\n\n".join(texts)), *messages))


def answerable(conversation: Conversation) -> Conversation:
    """Return a chat in the form of training data (see alternating) that ends with a user message.

    If the assistant spoke last, an empty user message is added.
    """
    plain = alternating(conversation)
    if plain.messages[-1].role != "assistant":
        return plain
    return replace(plain, messages=(*plain.messages, user("")))


# --- replies to continue -------------------------------------------------------------------------


def continues(fields: Mapping[str, Any]) -> bool:
    """Return whether the last message of a request is a reply for the model to continue.

    Raises ApiError (400) if the fields about that are invalid or contradict each other.
    """
    continued = flag(fields, "continue_final_message")
    if flag(fields, "add_generation_prompt", not continued) == continued:
        text = "add_generation_prompt must be the opposite of continue_final_message, or left out"
        raise invalid(text, "add_generation_prompt")
    return continued


def without_beginning(
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> tuple[Conversation, list[int]]:
    """Return a chat without the reply to continue at its end, and the tokens of that reply."""
    plain = alternating(conversation)
    return plain.prompt, _beginning_tokens(plain.messages[-1], tokenizer)


def _beginning_tokens(message: Message, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a reply without its end mark, so that the model continues the reply."""
    roles = {"python": "python", "python_output": "output"}
    tokens: list[int] = []
    for part in message.parts:
        part_tokens = tokenizer.encode_reply(part.text)
        role = roles.get(part.kind)
        if role is not None:
            start = tokenizer.special(f"{role}_start")
            end = tokenizer.special(f"{role}_end")
            part_tokens = [start, *part_tokens, end]
        tokens += part_tokens
    return tokens


# --- prompts -------------------------------------------------------------------------------------


def render_chat(
    conversation: Conversation,
    tokenizer: Tokenizer,
    field: str = "messages",
) -> list[int]:
    """Return the tokens of a chat, followed by those that begin the reply.

    A chat that does not have the form that answerable() returns is converted to it, unless a
    published model's template can render the chat as sent. Raises ApiError (400) about `field` if
    the template refuses the chat.
    """
    plain = answerable(conversation)
    try:
        if plain != conversation:
            tokens = tokenizer.render_as_sent(conversation)
            if tokens is not None:
                return tokens
        return tokenizer.render_prompt(plain)
    except UserError:  # its text would tell the client the folder of the model
        text = (
            f"the chat template of this model refuses {field}: send other messages, or ask "
            "/v1/completions"
        )
        raise ApiError(400, "invalid_value", text, field) from None


def chat_tokens(
    conversation: Conversation,
    continued: bool,
    tokenizer: Tokenizer,
) -> list[int]:
    """Return the tokens of a whole chat, and of the beginning of the reply if it is `continued`.

    Raises ApiError (400) if the template refuses the chat.
    """
    if not continued:
        return render_chat(conversation, tokenizer)
    conversation, reply_start = without_beginning(conversation, tokenizer)
    prompt = render_chat(conversation, tokenizer)
    return [*prompt, *closing(prompt, tokenizer), *reply_start]


def make_prompt(
    conversation: Conversation,
    max_tokens: int | None,
    truncate: bool,
    tokenizer: Tokenizer,
    context: int,
    field: str = "messages",
    begun: int = 0,
) -> tuple[list[int], int]:
    """Return the tokens of a prompt that fits, and how many of the oldest turns were dropped.

    The prompt leaves room in the context for one token, and for the `begun` tokens with which the
    reply begins. Turns, as counted after answerable(), are dropped only with `truncate`: as many as
    it takes to make room for `max_tokens` tokens or, if these are a whole context, for half of one.
    Raises ApiError (400) about `field` if the prompt does not fit or cannot be rendered. Of a chat
    of more than LARGE_TEXT characters, only as much is encoded and rendered as may fit.
    """
    too_old = 0
    if is_large(conversation):
        enough = context
        if truncate:
            conversation, too_old = _newest(conversation, tokenizer, context)
            enough += SLICE_TOKENS
        tokens = least_tokens(conversation, tokenizer, enough)
        if tokens > enough:
            raise PromptTooLong(tokens, context, field)
    reply_length = 1
    if truncate and max_tokens:
        reply_length = max_tokens if max_tokens < context else max(1, context // 2)
    room = context - reply_length - begun
    messages = answerable(conversation).messages
    if messages != conversation.messages:
        prompt = render_chat(conversation, tokenizer, field)
        if len(prompt) <= room:
            return prompt, too_old
    head = messages[: messages[0].role == "system"]
    turns = messages[len(head) :]

    def render_without(dropped: int) -> list[int]:
        kept = replace(conversation, messages=(*head, *turns[dropped:]))
        return render_chat(kept, tokenizer, field)

    # A chat may begin with each message of the user; results of tools go with their question.
    starts = [i for i, message in enumerate(turns) if message.role == "user"]
    dropped = 0
    if truncate:
        newest = len(render_without(starts[-1]))
        dropped = _dropped_turns(turns, starts, newest, room, tokenizer)
    prompt = render_without(dropped)
    # A template may merge the system message with the first turn, which makes the prompt longer.
    while truncate and len(prompt) > room and dropped < starts[-1]:
        dropped = starts[starts.index(dropped) + 1]
        prompt = render_without(dropped)
    if len(prompt) + begun < context:
        return prompt, too_old + dropped
    raise PromptTooLong(len(prompt) + begun, context, field)


def without_thought(message: Message) -> Message:
    """Return a message without what its speaker thought."""
    fields = {key: value for key, value in message.fields.items() if key != "reasoning_content"}
    return replace(message, fields=fields)


def _without_old_thoughts(conversation: Conversation) -> Conversation:
    """Return a chat without the thoughts before the last question, which templates leave out."""
    messages = list(conversation.messages)
    questions = [i for i, message in enumerate(messages) if message.role == "user"]
    for i in range(questions[-1] if questions else 0):
        messages[i] = without_thought(messages[i])
    return replace(conversation, messages=tuple(messages))


def _newest(
    conversation: Conversation,
    tokenizer: Tokenizer,
    context: int,
) -> tuple[Conversation, int]:
    """Return a chat with only the newest exchanges that may fit, and how many turns it lost.

    The system message and the last exchange are never dropped. Exchanges are counted from the end,
    and only until one does not fit.
    """
    plain = answerable(conversation)
    counted = _without_old_thoughts(plain)
    first = int(plain.messages[0].role == "system")
    head = replace(counted, messages=counted.messages[:first])
    tokens = least_tokens(head, tokenizer, context)
    turns = counted.messages[first:]
    end = len(turns)
    for start in reversed([i for i, message in enumerate(turns) if message.role == "user"]):
        tokens += least_tokens(Conversation(turns[start:end]), tokenizer, context)
        if tokens > context + SLICE_TOKENS and end < len(turns):
            break
        end = start
    if end == 0:
        return conversation, 0
    messages = (*plain.messages[:first], *plain.messages[first + end :])
    return replace(plain, messages=messages), end


def _texts(conversation: Conversation) -> Iterator[str]:
    """Return what a template writes of a chat, tools and calls as JSON."""
    if conversation.options:
        yield json.dumps(dict(conversation.options), ensure_ascii=False)
    for message in _without_old_thoughts(conversation).messages:
        yield from (part.text for part in message.parts)
        if message.fields:
            yield json.dumps(dict(message.fields), ensure_ascii=False)


def is_large(conversation: Conversation) -> bool:
    """Return whether a chat has more than LARGE_TEXT characters."""
    return sum(map(len, _texts(conversation))) > LARGE_TEXT


def least_tokens(
    conversation: Conversation,
    tokenizer: Tokenizer,
    enough: float = math.inf,
) -> int:
    """Return about how many tokens the texts of a large chat have, without a template's own.

    They are encoded slice by slice, which takes little memory, until there are more than `enough`.
    """
    tokens = 0
    for text in _texts(conversation):
        for start in range(0, len(text), SLICE):
            tokens += len(tokenizer.encode(text[start : start + SLICE]))
            if tokens > enough + SLICE_TOKENS:
                return tokens
    return tokens


def _dropped_turns(
    turns: tuple[Message, ...],
    starts: Sequence[int],
    length: int,
    room: int,
    tokenizer: Tokenizer,
) -> int:
    """Return how many of the oldest turns to drop so that the prompt should fit into `room` tokens.

    `starts` are the turns with which an exchange begins. `length` is the token count of a prompt
    with only the system message, if any, and the last exchange, which are never dropped. Exchanges
    are rendered from the end, each once, and only until one does not fit.
    """
    dropped = starts[-1]
    for start in reversed(starts[:-1]):
        exchange = Conversation(turns[start:dropped])
        if exchange.needs_template:  # the opening of a reply makes up for the words after the calls
            length += len(tokenizer.render_prompt(exchange))
        else:
            length += len(tokenizer.render(exchange).ids) - 1
        if length > room:
            break
        dropped = start
    return dropped

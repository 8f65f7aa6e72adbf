"""Turns the conversation of a request into a prompt that fits the model's context.

If a chat is too long, its oldest turns are dropped.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanochat.common import UserError
from nanochat.data.conversation import Conversation, Message, user
from nanochat.serve.formats.thoughts import closing, without_thought
from nanochat.serve.routes.fields import ApiError, flag, invalid
from nanochat.serve.routes.messages import alternating, answerable, with_replies
from nanochat.tokenizer import Tokenizer

LARGE_TEXT = 1 << 18  # a chat of more characters is counted in slices before it is rendered
SLICE = 1 << 15  # characters of a slice
SLICE_TOKENS = 1024  # the most tokens that the cuts between slices may add


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
) -> tuple[Conversation, list[int], str]:
    """Return a chat without the reply to continue at its end, and that reply's tokens and thought."""
    plain = alternating(conversation)
    begun = plain.messages[-1]
    thought = begun.fields.get("reasoning_content", "")
    return plain.prompt, _beginning_tokens(begun, tokenizer), thought


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
    the template refuses the chat, also with replies to all results of tools.
    """
    plain = answerable(conversation)
    if plain != conversation:
        tokens = tokenizer.render_as_sent(conversation)
        if tokens is not None:
            return tokens
    for chat in (plain, with_replies(plain)):
        try:
            return tokenizer.render_prompt(chat)
        except UserError:  # its text would tell the client the folder of the model
            continue
    text = (
        f"the chat template of this model refuses {field}: send other messages, or ask "
        "/v1/completions"
    )
    raise ApiError(400, "invalid_value", text, field)


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
    conversation, reply_start, thought = without_beginning(conversation, tokenizer)
    prompt = render_chat(conversation, tokenizer)
    return [*prompt, *closing(prompt, tokenizer, thought), *reply_start]


def make_prompt(
    conversation: Conversation,
    reply_room: int,
    truncate: bool,
    tokenizer: Tokenizer,
    context: int,
    field: str = "messages",
    begun: int = 0,
) -> tuple[list[int], int]:
    """Return the tokens of a prompt that fits, and how many of the oldest turns were dropped.

    The prompt leaves room in the context for one token, and for the `begun` tokens with which the
    reply begins. Turns, as counted after answerable(), are dropped only with `truncate`: as many as
    it takes to make room for `reply_room` tokens. Raises ApiError (400) about `field` if the prompt
    does not fit or cannot be rendered. Of a chat of more than LARGE_TEXT characters, only as much
    is encoded and rendered as may fit.
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
    reply_length = reply_room if truncate else 1
    room = context - reply_length - begun
    messages = answerable(conversation).messages
    if messages != conversation.messages:
        prompt = render_chat(conversation, tokenizer, field)
        if len(prompt) <= room:
            return prompt, too_old
    head = messages[:1] if messages[0].role == "system" else ()
    turns = messages[len(head) :]

    def render_without(dropped: int) -> list[int]:
        shortened = replace(conversation, messages=(*head, *turns[dropped:]))
        return render_chat(shortened, tokenizer, field)

    # A chat may begin with each message of the user; results of tools go with their question.
    starts = [i for i, message in enumerate(turns) if message.role == "user"]
    dropped = 0
    if truncate:
        newest = len(render_without(starts[-1]))
        without_head = replace(conversation, messages=turns)
        dropped = _dropped_turns(without_head, starts, newest, room, tokenizer, field)
    prompt = render_without(dropped)
    # A template may merge the system message with the first turn, which makes the prompt longer.
    while truncate and len(prompt) > room and dropped < starts[-1]:
        dropped = starts[starts.index(dropped) + 1]
        prompt = render_without(dropped)
    if len(prompt) + begun < context:
        return prompt, too_old + dropped
    raise PromptTooLong(len(prompt) + begun, context, field)


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
    """Return a chat with only the newest exchanges that may fit, and how many turns were dropped.

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
    """Yield the texts of a chat that a template writes, with tools and calls as JSON."""
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
    """Return about how many tokens the texts of a large chat have, without the template's tokens.

    The texts are encoded slice by slice, which takes little memory, until there are more tokens
    than `enough`.
    """
    tokens = 0
    for text in _texts(conversation):
        for start in range(0, len(text), SLICE):
            tokens += len(tokenizer.encode(text[start : start + SLICE]))
            if tokens > enough + SLICE_TOKENS:
                return tokens
    return tokens


def _dropped_turns(
    conversation: Conversation,
    starts: Sequence[int],
    length: int,
    room: int,
    tokenizer: Tokenizer,
    field: str,
) -> int:
    """Return how many of the oldest turns to drop so that the prompt should fit into `room` tokens.

    `conversation` has no system message, and `starts` are the turns with which an exchange begins.
    `length` is the token count of a prompt with only the system message, if any, and the last
    exchange, which are never dropped. Exchanges are rendered from the end, each once, and only
    until one does not fit. Raises ApiError (400) about `field` if the template refuses one.
    """
    turns = conversation.messages
    options = {name: value for name, value in conversation.options.items() if name != "tools"}

    def rendered(*messages: Message) -> int:
        return len(render_chat(Conversation(messages, options=options), tokenizer, field))

    # In front of another question, since templates write instructions of their own at the beginning
    # of a chat, and leave out the thoughts of earlier replies.
    question = user("a")
    question_length = rendered(question)
    dropped = starts[-1]
    for start in reversed(starts[:-1]):
        length += rendered(*turns[start:dropped], question) - question_length
        if length > room:
            break
        dropped = start
    return dropped

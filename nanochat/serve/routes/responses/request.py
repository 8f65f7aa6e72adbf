"""Reads POST /v1/responses: checks a request, which may continue a stored response."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.data.conversation import Conversation, Message
from nanochat.serve.routes.answers import Work
from nanochat.serve.routes.constraints import constrained
from nanochat.serve.routes.fields import (
    ApiError,
    Defaults,
    Limits,
    flag,
    invalid,
    kind,
    mapping,
    missing,
    read_fields,
    read_format,
    read_settings,
    truncates,
    upper_bound,
)
from nanochat.serve.routes.fitted import OPTIONS, fitted, read_max_thought, read_options, written
from nanochat.serve.routes.messages import (
    alternating,
    as_request,
    read_conversation,
    text_of,
    with_instructions,
)
from nanochat.serve.routes.prompts import make_prompt
from nanochat.serve.routes.reply import form_of
from nanochat.serve.routes.responses.store import Shelf
from nanochat.serve.routes.responses.writer import Repeated, ResponseWriter
from nanochat.serve.routes.tools import read_tools
from nanochat.tokenizer import Tokenizer

ITEM_TYPES = "message, function_call, function_call_output or reasoning"
ECHOED = ("tools", "tool_choice", "parallel_tool_calls")
SAMPLED = ("temperature", "top_p", "top_k", "seed", "stream")
# `max_tool_calls` counts tools that a server calls itself, and `stream_options` only adds noise to
# streams.
IGNORED_HERE = ("max_tool_calls", "stream_options")
# Of what `include` can add to a response, the only thing that our responses could hold.
LOGPROBS = "message.output_text.logprobs"
FIELDS = {
    "input",
    "instructions",
    "max_output_tokens",
    "text",
    "truncation",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "previous_response_id",
    "include",
    *IGNORED_HERE,
    *OPTIONS,
    *SAMPLED,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "top_logprobs": (0,),
}


@dataclass(frozen=True)
class ResponseRequest:
    """A checked request to POST /v1/responses."""

    conversation: Conversation  # without the instructions, which apply to one response only
    instructions: str
    repeated: Repeated
    options: Mapping[str, Any]  # variables of the chat template
    max_thought: int | None  # tokens
    shelf: Shelf | None  # stores the response; None if it is not stored

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """Return the engine request for the reply, and a function that makes the writer.

        Raises ApiError (400) if the prompt cannot be rendered or does not fit into the context.
        """
        settings = self.repeated.settings
        truncate = self.repeated.truncate
        tools = self.repeated.tools
        conversation = with_instructions(self.conversation, self.instructions)
        conversation = fitted(conversation, tools, self.options, tokenizer)
        prompt, dropped = make_prompt(
            conversation,
            settings.reply_room(limits.context),
            truncate,
            tokenizer,
            limits.context,
            "input",
        )

        form = form_of(prompt, tools, tokenizer)

        def store(message: dict[str, Any], body: dict[str, Any]) -> None:
            if self.shelf is not None:
                # Turns are dropped as the model reads them: results may be the user's turns.
                chat = self.conversation
                if tokenizer.call_format is None:
                    chat = written(chat)
                messages = [as_request(message) for message in _without_oldest(chat, dropped)]
                self.shelf.keep(body["id"], [*messages, message], body)

        def writer(number: str) -> ResponseWriter:
            return ResponseWriter(
                number, limits.model, self.repeated, len(prompt), tokenizer, form, store
            )

        requests = settings.requests(prompt, limits.context)
        requests = constrained(requests, form, self.max_thought)
        return Work(requests, writer, headers=tools.headers)


def _without_oldest(conversation: Conversation, dropped: int) -> tuple[Message, ...]:
    """Return the messages of a conversation without the `dropped` oldest turns.

    This keeps a stored chat from growing without end.
    """
    if dropped:
        conversation = alternating(conversation)
    messages = conversation.messages
    head = int(messages[0].role == "system")
    return (*messages[:head], *messages[head + dropped :])


def read_response(
    value: Any,
    limits: Limits,
    defaults: Defaults,
    shelf: Shelf,
) -> ResponseRequest:
    """Check a decoded body, and return it as a ResponseRequest.

    `shelf` holds the client's stored responses. Raises ApiError (400) for an invalid body.
    """
    fields = read_fields(value, FIELDS, NEUTRAL)
    store = flag(value, "store", True)
    instructions = _text(fields, "instructions")
    previous = _text(fields, "previous_response_id")
    _check_include(fields.get("include", []))
    tools = read_tools(fields)
    max_tokens = upper_bound(fields, "max_output_tokens", limits.context)
    text_format = mapping(fields, "text").get("format")
    schema = read_format(text_format, "text.format")
    sampled = {name: fields[name] for name in SAMPLED if name in fields}
    settings = read_settings(sampled, limits, defaults, max_tokens, schema=schema)
    earlier = [] if previous is None else shelf.messages(previous)
    conversation = read_input(fields.get("input"), earlier)
    repeated = Repeated(
        tools=tools,
        settings=settings,
        instructions=instructions,
        truncate=truncates(fields),
        previous=previous,
        store=store,
        echoed={name: fields[name] for name in ECHOED if name in fields},
    )
    return ResponseRequest(
        conversation,
        instructions or "",
        repeated,
        read_options(fields),
        read_max_thought(fields, limits),
        shelf if store else None,
    )


def _text(fields: dict[str, Any], name: str) -> str | None:
    """Return the text field `name`, or None if it is absent.

    Raises ApiError (400) if it is not a text.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{name} must be a text, got {kind(value)}", name)
    return value


def _check_include(value: Any) -> None:
    """Raise ApiError (400) if `include` is not a list of texts, or asks for log-probabilities.

    Everything else that it can ask for belongs to reasoning, images or tools of OpenAI's, which no
    response of this server has.
    """
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid("include must be a list of texts", "include")
    if LOGPROBS in value:
        text = (
            f"this route does not support include {LOGPROBS}: ask /v1/chat/completions for logprobs"
        )
        raise ApiError(400, "unsupported_parameter", text, "include")


# --- input ---------------------------------------------------------------------------------------


def read_input(items: Any, earlier: Sequence[dict[str, Any]]) -> Conversation:
    """Return the conversation of the `earlier` messages, followed by `items` as messages.

    `items` is the field `input`: a text, or a list of items. A call's result must name a call in
    the last of the earlier messages, or in an item before the result. Raises ApiError (400) if the
    input is not valid.
    """
    if items is None:
        raise missing("input", "a text or a list of items")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise invalid(f"input must be a text or a list of items, got {kind(items)}", "input")
    call_ids: set[str] = set()
    for message in earlier[-1:]:
        call_ids |= {call["id"] for call in message.get("tool_calls", ())}
    messages = []
    positions = []  # in `items`, for each of the messages
    thought = ""  # the thought of the reply that comes next
    for i, item in enumerate(items):
        if isinstance(item, dict):
            if item.get("type") == "reasoning":
                thought += _thought(item)
                continue
            item = _message(item, f"input[{i}]", call_ids)
            if thought and item.get("role") == "assistant":
                item = {**item, "reasoning_content": thought}
            thought = ""
        messages.append(item)
        positions.append(i)
    try:
        return read_conversation([*earlier, *messages])
    except ApiError as refusal:  # the field has another name on this route
        text = _renamed(str(refusal), len(earlier), positions)
        param = refusal.param and _renamed(refusal.param, len(earlier), positions)
        raise ApiError(refusal.status, refusal.code, text, param) from None


def _thought(item: dict[str, Any]) -> str:
    """Return the text of a reasoning item; one without its content, or of another form, has none."""
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _renamed(
    text: str,
    earlier: int,
    positions: Sequence[int],
) -> str:
    """Return an error text of the chat route with the field name of this route.

    Only the beginning of a text is a field name, since the rest may quote the client. The first
    `earlier` messages belong to the response that the request continues. `positions` are those of
    the other messages in the input.
    """

    def field(match: re.Match[str]) -> str:
        index = int(match[1]) - earlier
        if index < 0:
            return "previous_response_id"
        return f"input[{positions[index]}]{match[2] or ''}"

    text = re.sub(r"^messages\[(\d+)\](\.\w+)?", field, text)
    return re.sub(r"^messages\b", "input", text)


def _message(
    item: dict[str, Any],
    name: str,
    call_ids: set[str],
) -> dict[str, Any]:
    """Return an input item as a message of the chat format, adding a call's ID to `call_ids`.

    Raises ApiError (400) for an unknown type, or a malformed call or result.
    """
    item_type = item.get("type", "message")
    if item_type == "function_call":
        return _call_message(item, name, call_ids)
    if item_type == "function_call_output":
        return _result_message(item, name, call_ids)
    if item_type != "message":
        raise invalid(f"{name}.type must be {ITEM_TYPES}", f"{name}.type")
    if item.get("role") == "tool":
        text = f"{name} is a result without its call: send it as a function_call_output"
        raise invalid(text, f"{name}.role")
    return {key: item[key] for key in ("role", "content", "parts") if key in item}


def _call_message(
    item: dict[str, Any],
    name: str,
    call_ids: set[str],
) -> dict[str, Any]:
    """Return a call as an assistant message, adding the call's ID to `call_ids`.

    Raises ApiError (400) if the call is malformed.
    """
    values = [item.get(key) for key in ("call_id", "name", "arguments")]
    if not all(isinstance(value, str) for value in values):
        form = "{type: function_call, call_id, name, arguments}"
        raise invalid(f"{name} must be a call: {form}, all texts", name)
    call_id, function, arguments = values
    call_ids.add(str(call_id))
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": function, "arguments": arguments},
    }
    return {"role": "assistant", "tool_calls": [call]}


def _result_message(
    item: dict[str, Any],
    name: str,
    call_ids: set[str],
) -> dict[str, Any]:
    """Return a call's result as a tool message.

    Raises ApiError (400) for an unknown call or a malformed result.
    """
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or call_id not in call_ids:
        text = f"{name}.call_id must be the call_id of a function_call before it"
        raise invalid(text, f"{name}.call_id")
    content = text_of(item.get("output"), f"{name}.output")
    return {"role": "tool", "tool_call_id": call_id, "content": content}

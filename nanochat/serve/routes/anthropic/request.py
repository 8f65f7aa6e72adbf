"""Reads requests in the format of Anthropic's Messages API, as requests to the chat route.

Records of the client and wishes about caches, speed and price change nothing here. Tools that run on
Anthropic's servers are skipped, as the chat route skips OpenAI's.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.serve.routes.answers import Work
from nanochat.serve.routes.anthropic.blocks import Messages
from nanochat.serve.routes.anthropic.writer import MessageWriter
from nanochat.serve.routes.chat import ChatRequest, read_chat
from nanochat.serve.routes.fields import (
    LARGEST_SEED,
    ApiError,
    Defaults,
    Limits,
    flag,
    integer,
    invalid,
    kind,
    mapping,
    missing,
    read_fields,
)
from nanochat.serve.routes.fitted import fitted
from nanochat.serve.routes.prompts import PromptTooLong, chat_tokens, is_large, least_tokens
from nanochat.tokenizer import Tokenizer

SAME = ("max_tokens", "temperature", "top_p", "top_k", "stream")  # as on the chat route
IGNORED_HERE = (
    "cache_control",
    "context_management",
    "diagnostics",
    "inference_geo",
    "speed",
    "user_profile_id",
)
FIELDS = {
    *SAME,
    *IGNORED_HERE,
    "messages",
    "output_config",
    "output_format",
    "stop_sequences",
    "system",
    "thinking",
    "thread",
    "tool_choice",
    "tools",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # tool choices -> their OpenAI names
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
# Fields of the chat route in its errors, and their names on this route.
NAMES = (
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"\bmax_reasoning_tokens\b", "thinking.budget_tokens"),
    (r"\breasoning_effort\b", "output_config.effort"),
    (r"\bresponse_format\b", "output_config.format"),
    (r"\bstop\b(?= m| t)", "stop_sequences"),
)


@dataclass(frozen=True)
class MessagesRequest:
    """A checked request to /v1/messages."""

    chat: ChatRequest
    shows_thoughts: bool

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """Return the engine request for the reply, and a function that makes the writer.

        Raises ApiError (400) if the prompt cannot be rendered or does not fit into the context.
        """
        try:
            work = self.chat.work(tokenizer, limits)
        except PromptTooLong as refusal:  # clients look for these words before they shorten a chat
            text = f"prompt is too long: {refusal.tokens} tokens > {limits.context} maximum"
            raise ApiError(400, refusal.code, text) from None
        prompt = work.requests[0][0]
        writer = functools.partial(
            MessageWriter,
            model=limits.model,
            prompt_length=len(prompt),
            tokenizer=tokenizer,
            form=work.form,
            stream=self.chat.settings.stream,
            shows_thoughts=self.shows_thoughts,
        )
        return work._replace(writer=writer)


def read_messages(value: Any, limits: Limits, defaults: Defaults) -> MessagesRequest:
    """Check a decoded body, and return it as a MessagesRequest.

    Raises ApiError (400) for an invalid body.
    """
    fields = read_fields(value, FIELDS, NEUTRAL)
    if "max_tokens" not in fields:
        raise missing("max_tokens", "the largest number of tokens of the reply")
    integer(fields, "max_tokens", 1, LARGEST_SEED)  # unlike the chat route, here -1 is no number
    body = {name: fields[name] for name in SAME if name in fields}
    if "stop_sequences" in fields:
        body["stop"] = fields["stop_sequences"]
    _check_thread(fields)
    body |= _thinking(fields) | _output(fields) | _tools(fields)
    names: list[str] = []
    body["messages"] = Messages(names).read(fields)
    body["continue_final_message"] = _is_begun(body["messages"])
    try:
        chat = read_chat(body, limits, defaults)
    except ApiError as refusal:
        param = refusal.param and _renamed(refusal.param, names)
        text = _renamed(str(refusal), names)
        raise ApiError(refusal.status, refusal.code, text, param) from None
    shows_thoughts = mapping(fields, "thinking").get("display") != "omitted"
    return MessagesRequest(chat, shows_thoughts)


def count_tokens(value: Any, tokenizer: Tokenizer, limits: Limits) -> dict[str, Any]:
    """Return the answer to /v1/messages/count_tokens, a dict with the length of the prompt.

    The prompt may be longer than the context. A large one is not rendered, and its length is that
    of its texts. Raises ApiError (400) for an invalid body.
    """
    if isinstance(value, Mapping):
        value = {**value, "max_tokens": 1}
    chat = read_messages(value, limits, Defaults(0.0, 0.0, 0, 1)).chat
    conversation = fitted(chat.conversation, chat.tools, chat.options, tokenizer)
    if is_large(conversation):
        return {"input_tokens": least_tokens(conversation, tokenizer)}
    return {"input_tokens": len(chat_tokens(conversation, chat.continued, tokenizer))}


def _renamed(text: str, names: Sequence[str]) -> str:
    """Return an error text of the chat route with the field names of this route.

    `names` are those of the messages, in their order on the chat route.
    """
    for pattern, name in NAMES:
        text = re.sub(pattern, name, text)
    return re.sub(r"messages\[(\d+)\]", lambda match: names[int(match[1])], text)


# --- fields --------------------------------------------------------------------------------------


def _thinking(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat route's fields for `thinking`, without which the model does not think.

    Raises ApiError (400) if the field is invalid.
    """
    thinking = mapping(fields, "thinking")
    kind_of_thinking = thinking.get("type", "disabled" if not thinking else None)
    if not isinstance(kind_of_thinking, str) or kind_of_thinking not in THINKING:
        raise invalid(f"thinking.type must be one of {', '.join(THINKING)}", "thinking.type")
    options = {"enable_thinking": THINKING[kind_of_thinking]}
    budget = integer(thinking, "budget_tokens", 1, 2**31)
    return options if budget is None else {**options, "max_reasoning_tokens": budget}


def _check_thread(fields: Mapping[str, Any]) -> None:
    """Raise ApiError (404) for a request that continues a thread, since the server keeps none.

    The client then sends the whole conversation, as it does when it begins a thread.
    """
    if mapping(fields, "thread").get("type", "create") != "create":
        text = "this server keeps no threads: send the whole conversation"
        raise ApiError(404, "thread_not_found", text, "thread")


def _output(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat route's fields for a wish about the form of the reply."""
    config = mapping(fields, "output_config")
    output = {}
    wanted_format = config.get("format", fields.get("output_format"))
    if wanted_format is not None:
        output["response_format"] = wanted_format
    if config.get("effort") is not None:
        output["reasoning_effort"] = config["effort"]
    return output


def _tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat route's fields for `tools` and `tool_choice`."""
    items = fields.get("tools", [])
    if not isinstance(items, list):
        raise invalid("tools must be a list of tools, got " + kind(items), "tools")
    tools = {"tools": [_tool(item, f"tools[{i}]") for i, item in enumerate(items)]}
    choice = mapping(fields, "tool_choice")
    if not choice:
        return tools
    parallel = {}
    if "disable_parallel_tool_use" in choice:
        parallel = {"parallel_tool_calls": not flag(choice, "disable_parallel_tool_use")}
    choice_type = choice.get("type")
    if choice_type == "tool":
        function = {"type": "function", "function": {"name": choice.get("name")}}
        return {**tools, **parallel, "tool_choice": function}
    if not isinstance(choice_type, str) or choice_type not in CHOICES:
        raise invalid("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    return {**tools, **parallel, "tool_choice": CHOICES[choice_type]}


def _tool(item: Any, name: str) -> dict[str, Any]:
    """Return a tool as the chat route's function, or as a tool of a type that it skips."""
    if not isinstance(item, dict):
        raise invalid(f"{name} must be {{name, description, input_schema}}", name)
    if item.get("type") not in (None, "custom"):
        return {"type": item["type"]}
    keys = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {chat_key: item[key] for key, chat_key in keys.items() if key in item}
    return {"type": "function", "function": function}


def _is_begun(messages: Any) -> bool:
    """Return whether the last message is the beginning of the reply."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last["role"] == "assistant"

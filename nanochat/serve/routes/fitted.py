"""Fits a conversation with calls, thoughts and template variables to what a model's template writes.

A template with a section for tools gets the tools, calls and results as they are. For any other
model, the tools are described in the system message, calls become text of the assistant, and
results become messages of the user.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanochat.data.conversation import Conversation, Message, Part, merge_texts, user
from nanochat.serve.formats import json_calls
from nanochat.serve.formats.thoughts import without_thought
from nanochat.serve.formats.values import NO_JSON
from nanochat.serve.routes.fields import Limits, invalid, mapping, upper_bound
from nanochat.serve.routes.messages import with_instructions
from nanochat.serve.routes.tools import Tools
from nanochat.tokenizer import Tokenizer

# The fields of a request about thoughts and the variables of the template.
BUDGETS = ("max_reasoning_tokens", "thinking_budget")  # the second is Qwen's own name
OPTIONS = (
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
    "reasoning",
    *BUDGETS,
)
# Variables of templates that other fields of a request set, and names that are in use where a
# template is rendered.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "documents", "reply", "self"})
# The efforts that stand for no thoughts; all others leave them to the template.
NO_EFFORT = ("none",)


def fitted(
    conversation: Conversation,
    tools: Tools,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> Conversation:
    """Return a conversation that the model's template can write, with the tools in their place.

    `options` are variables of the template, which a model without a template does not have.
    """
    variables = dict(options) if tokenizer.takes_options else {}
    if tokenizer.call_format is None:
        conversation = with_instructions(written(conversation), tools.instructions)
    elif tools.definitions:
        variables["tools"] = list(tools.definitions)
    messages = conversation.messages
    if tokenizer.thought_marks is None:
        messages = tuple(map(without_thought, messages))
    if tokenizer.call_format == "xml":
        messages = tuple(map(_with_object_arguments, messages))
    return replace(conversation, messages=messages, options=variables)


def _with_object_arguments(message: Message) -> Message:
    """Return a message whose calls have arguments that a template can write one by one."""
    calls = []
    for call in message.fields.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            call = {**call, "function": {**call["function"], "arguments": {NO_JSON: arguments}}}
        calls.append(call)
    return replace(message, fields={**message.fields, "tool_calls": calls}) if calls else message


def written(conversation: Conversation) -> Conversation:
    """Return a conversation in which calls and their results are text.

    Results become user messages, merged with the user messages next to them.
    """
    messages: list[Message] = []
    is_result = False
    for message in conversation.messages:
        follows_result = is_result
        is_result = message.role == "tool"
        if is_result:
            message = user(f"<tool_response>{message.text}</tool_response>")
        elif message.fields.get("tool_calls"):
            message = _with_written_calls(message)
        is_joined = is_result or follows_result
        if is_joined and messages and messages[-1].role == "user" == message.role:
            messages[-1] = user(f"{messages[-1].text}\n{message.text}")
        else:
            messages.append(message)
    return replace(conversation, messages=tuple(messages))


def _with_written_calls(message: Message) -> Message:
    """Return an assistant message with its calls as text after its words."""
    fields = dict(message.fields)
    texts = []
    for call in fields.pop("tool_calls"):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        texts.append(json_calls.written(call["function"]["name"], arguments))
    parts = merge_texts(*message.parts, Part("text", "".join(texts)))
    return replace(message, parts=parts, fields=fields)


# --- variables of the template -------------------------------------------------------------------


def read_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets.

    They are `chat_template_kwargs`, and `enable_thinking` and `reasoning_effort` beside it or, as
    in the responses format, in `reasoning`. An effort of "none" switches thoughts off. Raises
    ApiError (400) if a field is not valid.
    """
    options = dict(mapping(fields, "chat_template_kwargs"))
    taken = RESERVED & options.keys()
    if taken:
        name = f"chat_template_kwargs.{min(taken)}"
        raise invalid(f"{name} cannot be set: the server sets it, so leave it out", name)
    enabled = fields.get("enable_thinking", options.get("enable_thinking"))
    effort = fields.get("reasoning_effort")
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict):
        effort = reasoning.get("effort", effort)
    if enabled is None and effort in NO_EFFORT:
        enabled = False
    if enabled is not None:
        if not isinstance(enabled, bool):
            raise invalid("enable_thinking must be true or false", "enable_thinking")
        options["enable_thinking"] = enabled
    if isinstance(effort, str):
        options.setdefault("reasoning_effort", effort)
    return options


def read_max_thought(fields: Mapping[str, Any], limits: Limits) -> int | None:
    """Return the most tokens that the thought of a reply may have, or None if no field says so.

    Raises ApiError (400) if the number is not valid.
    """
    budgets = [upper_bound(fields, name, limits.context, low=0) for name in BUDGETS]
    return next((budget for budget in budgets if budget is not None), None)

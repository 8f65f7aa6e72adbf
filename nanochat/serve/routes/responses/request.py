"""POST /v1/responses: checks a request, which may continue a response that is kept here."""

from dataclasses import dataclass
from typing import Any

from nanochat.data.conversation import Conversation, Message
from nanochat.serve.routes.answers import Work
from nanochat.serve.routes.fields import (
    Defaults,
    Limits,
    flag,
    integer,
    invalid,
    kind,
    mapping,
    read_fields,
    read_format,
    read_settings,
    truncates,
)
from nanochat.serve.routes.messages import (
    alternating,
    as_request,
    make_prompt,
    with_instructions,
)
from nanochat.serve.routes.responses.items import read_input
from nanochat.serve.routes.responses.store import Shelf
from nanochat.serve.routes.responses.writer import Repeated, ResponseWriter
from nanochat.serve.routes.tools import only_schema, read_tools
from nanochat.tokenizer import Tokenizer

SAMPLED = ("temperature", "top_p", "top_k", "seed", "stream")
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
    *SAMPLED,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "service_tier": ("auto",),
    "top_logprobs": (0,),
}


@dataclass(frozen=True)
class ResponseRequest:
    """A checked request."""

    conversation: Conversation  # without the instructions, which hold for one response only
    instructions: str
    repeated: Repeated
    shelf: Shelf | None  # where the response is kept; None: nowhere

    def work(self, tokenizer: Tokenizer, limits: Limits) -> Work:
        """The prompt as a request to the engine, and the writer of the reply. ApiError 400 if it
        does not fit."""
        settings = self.repeated.settings
        truncate = self.repeated.truncate
        conversation = with_instructions(self.conversation, self.instructions)
        prompt, dropped = make_prompt(
            conversation, settings.max_tokens, truncate, tokenizer, limits.context, "input"
        )

        def keep(message: dict[str, Any], body: dict[str, Any]) -> None:
            if self.shelf is not None:
                self.shelf.keep(body["id"], [*map(as_request, self._from(dropped)), message], body)

        def writer(number: str) -> ResponseWriter:
            return ResponseWriter(number, limits.model, self.repeated, len(prompt), tokenizer, keep)

        return Work(settings.requests(prompt, limits.context), writer)

    def _from(self, dropped: int) -> tuple[Message, ...]:
        """The messages that the model read: a chat that is kept never outgrows the context, nor
        does a request that continues it."""
        messages = (alternating(self.conversation) if dropped else self.conversation).messages
        head = int(messages[0].role == "system")
        return (*messages[:head], *messages[head + dropped :])


def read_response(value: Any, limits: Limits, defaults: Defaults, shelf: Shelf) -> ResponseRequest:
    """Check a decoded body; `shelf` has the responses of the client. ApiError (400, or 404 for an
    unknown model) that names the field."""
    fields = read_fields(value, limits, FIELDS, NEUTRAL)
    store = flag(value, "store", True)
    instructions, previous = (
        _text(fields, name) for name in ("instructions", "previous_response_id")
    )
    flag(fields, "parallel_tool_calls")
    if not fields.get("tools") and fields.get("tool_choice") == "auto":
        del fields["tool_choice"]  # what clients send that have no tools
    tools = read_tools(fields)
    longest = integer(fields, "max_output_tokens", 1, limits.context)
    schema = only_schema(tools, read_format(mapping(fields, "text").get("format"), "text.format"))
    sampled = {name: fields[name] for name in SAMPLED if name in fields}
    settings = read_settings(sampled, limits, defaults, longest, schema=schema)
    earlier = [] if previous is None else shelf.messages(previous)
    conversation = read_input(fields.get("input"), earlier)
    orders = "\n\n".join(filter(None, (tools.instructions, instructions)))
    echoed = {
        name: fields[name]
        for name in ("tools", "tool_choice", "parallel_tool_calls")
        if name in fields
    }
    repeated = Repeated(tools, settings, instructions, truncates(fields), previous, store, echoed)
    return ResponseRequest(conversation, orders, repeated, shelf if store else None)


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{name} must be a text, got {kind(value)}", name)
    return value

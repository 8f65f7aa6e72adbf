"""A client's tools: how the model hears of them, and how its calls go back to the client.

The models write calls as Qwen's do, <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Where the client wants a
call for certain, a JSON schema keeps the whole reply to one. Our own calculator has marks of its own and is not here.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanochat.serve.routes.fields import invalid, kind

MOST_TOOLS = 64
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
INSTRUCTIONS = (
    "You may call functions to answer. Their signatures are in <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    'To call a function, write its name and arguments as JSON: {open}{{"name": ..., "arguments": {{...}}}}{close}'
)


@dataclass(frozen=True)
class Tools:
    """The functions that a client offers."""

    parameters: Mapping[str, Any]  # name -> JSON schema of the arguments
    instructions: str  # what the model reads of them; empty if it must not call any
    forced: tuple[str, ...]  # the reply must be a call of one of these; empty: the model is free

    @property
    def schema(self) -> str | None:
        """The JSON schema of a reply that must be a call."""
        if not self.forced:
            return None
        documents = _documents({name: self.parameters[name] for name in self.forced})
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": document},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, document in documents.items()
        ]
        return json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})


NONE = Tools({}, "", ())


def _documents(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """JSON schemas that mean inside another schema what they mean alone: name -> schema.

    A pointer such as #/$defs/Colour starts at the nearest schema around it that has a `$id`, so every
    schema gets a `$id` here. A schema keeps its own `$id`, which its references may name, unless two
    schemas share it. `$schema` is left out: drafts before 2019-09 ignore a `$id` beside a `$ref`, and
    draft 4 has no `$id`.
    """
    own = Counter(str(schema.get("$id")) for schema in parameters.values())
    documents = {}
    for name, schema in parameters.items():
        address = schema.get("$id")
        unique = isinstance(address, str) and own[address] == 1 and not address.startswith("#")
        rest = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
        documents[name] = {"$id": address if unique else f"tool:{name}", **rest}
    return documents


def read_tools(fields: Mapping[str, Any]) -> Tools:
    """The tools of a request. ApiError 400 where they are not functions as OpenAI describes them."""
    given = fields.get("tools", [])
    if not isinstance(given, list):
        raise invalid("tools must be a list of functions, got " + kind(given), "tools")
    if len(given) > MOST_TOOLS:
        raise invalid(
            f"there may be at most {MOST_TOOLS} tools, got {len(given):,}: send fewer", "tools"
        )
    functions = [_function(item, f"tools[{i}]") for i, item in enumerate(given)]
    parameters = {
        function["name"]: function.get("parameters", {"type": "object"}) for function in functions
    }
    choice = fields.get("tool_choice", "auto" if functions else "none")
    if choice == "none":
        return NONE
    if isinstance(choice, dict):
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, dict) else None
        if not isinstance(name, str) or name not in parameters:
            raise invalid(
                "tool_choice names a function that is not in tools: name one of them", "tool_choice"
            )
        forced: tuple[str, ...] = (name,)
    elif choice in ("auto", "required"):
        forced = tuple(parameters) if choice == "required" else ()
    else:
        raise invalid(
            'tool_choice must be "none", "auto", "required" or a function of tools', "tool_choice"
        )
    if not functions:
        raise invalid(
            "tool_choice needs tools: send a list of functions, or leave tool_choice out",
            "tool_choice",
        )
    listed = "\n".join(
        json.dumps({"type": "function", "function": item}, ensure_ascii=False) for item in functions
    )
    return Tools(parameters, INSTRUCTIONS.format(tools=listed, open=OPEN, close=CLOSE), forced)


def only_schema(tools: Tools, wanted: str | None) -> str | None:
    """The JSON schema that holds a reply: that of the call that it must be, or the one that the request asks for.

    ApiError 400 where there are both.
    """
    if tools.schema and wanted:
        raise invalid(
            "a reply that must be a call has no format of its own: leave one of them out",
            "tool_choice",
        )
    return tools.schema or wanted


def _function(item: Any, name: str) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type") != "function":
        text = "{type: function, function: {name, parameters}}, or for /v1/responses {type: function, name, parameters}"
        raise invalid(f"{name} must be a function: {text}", name)
    function = item.get(
        "function", item
    )  # the responses route has name and parameters beside the type
    place = f"{name}.function" if "function" in item else name
    called = function.get("name") if isinstance(function, dict) else None
    if not isinstance(called, str) or not NAME.fullmatch(called):
        raise invalid(f"{place}.name must have 1 to 64 letters, digits, _ . or -", f"{place}.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(
            f"{place}.parameters must be a JSON schema, got {kind(parameters)}",
            f"{place}.parameters",
        )
    return {
        key: function[key]
        for key in ("name", "description", "parameters")
        if function.get(key) is not None
    }


# --- messages of earlier turns -------------------------------------------------------------------


def written_calls(calls: Any, name: str) -> str:
    """The calls of an assistant message, as the model wrote them. ApiError 400."""
    if not isinstance(calls, list):
        raise invalid(f"{name} must be a list of calls, got {kind(calls)}", name)
    texts = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        called, arguments = (
            (function.get("name"), function.get("arguments"))
            if isinstance(function, dict)
            else (None, None)
        )
        if not isinstance(called, str) or not isinstance(arguments, str):
            text = (
                f"{name}[{i}] must be a call: {{id, type: function, function: {{name, arguments}}}}"
            )
            raise invalid(text, f"{name}[{i}]")
        texts.append(f'{OPEN}{{"name": {json.dumps(called)}, "arguments": {arguments}}}{CLOSE}')
    return "".join(texts)


def written_result(text: str) -> str:
    """The result of a call, as the model reads it."""
    return f"<tool_response>{text}</tool_response>"


# --- calls in a reply ----------------------------------------------------------------------------


class CallText:
    """Separates calls from the text of a reply while it streams. What may begin a call is held back."""

    def __init__(self, tools: Tools):
        self._tools = tools
        self._held = ""
        self.calls = 0

    def push(self, text: str, last: bool = False) -> list[str | dict[str, Any]]:
        """Add text, the end of the reply with `last`; return texts to show and calls in OpenAI's form."""
        self._held += text
        if self._tools.forced:
            return self._take(self._held) if last else []
        found: list[str | dict[str, Any]] = []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                break
            found += [
                self._held[:start],
                *self._take(self._held[start + len(OPEN) : end], marked=True),
            ]
            self._held = self._held[end + len(CLOSE) :]
        keep = 0 if last else self._beginning(start)
        found.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return [item for item in found if item]

    def _beginning(self, start: int) -> int:
        """How many characters at the end may be the beginning of a call; `start` is where an open call begins."""
        if start >= 0:
            return len(self._held) - start
        longest = min(len(OPEN) - 1, len(self._held))
        return next(
            (count for count in range(longest, 0, -1) if OPEN.startswith(self._held[-count:])), 0
        )

    def _take(self, text: str, marked: bool = False) -> list[str | dict[str, Any]]:
        """The call that a text holds; the text itself if it is none."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            call = None
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if (
            not isinstance(name, str)
            or name not in self._tools.parameters
            or not isinstance(arguments, dict)
        ):
            return [f"{OPEN}{text}{CLOSE}" if marked else text]
        self.calls += 1
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}]

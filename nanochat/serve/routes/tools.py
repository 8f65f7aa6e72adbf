"""Reads a client's tools, which of them a reply must call, and the calls of earlier replies.

A template with a section for tools gets them there. For any other model, the instructions here tell
it to write calls as Qwen models do. Our own calculator has its own special tokens, and is not
handled here.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanochat.serve.formats.marked_calls import CLOSE, OPEN
from nanochat.serve.formats.values import decoded
from nanochat.serve.routes.fields import flag, invalid, kind, schema_text

MOST_TOOLS = 128  # as many as OpenAI takes
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
TYPE = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
INSTRUCTIONS = (
    "You may call functions to answer. Their signatures are in <tools></tools>:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, write its name and arguments as JSON: "
    '{open}{{"name": ..., "arguments": {{...}}}}{close}'
)


@dataclass(frozen=True)
class Tools:
    """The functions that a client offers."""

    parameters: Mapping[str, Any] = field(default_factory=dict)  # schemas of arguments, by name
    definitions: tuple[dict[str, Any], ...] = ()  # the callable functions, as OpenAI's
    forced: tuple[str, ...] = ()  # the reply must call one of these; empty if no call is required
    parallel: bool | None = None  # whether a reply may have several calls; None: not said
    # The types of the client's other tools, such as web_search, which this server does not have.
    skipped: tuple[str, ...] = ()

    @property
    def instructions(self) -> str:
        """What a model reads whose template has no place for tools; empty without functions."""
        if not self.definitions:
            return ""
        lines = [json.dumps(tool, ensure_ascii=False) for tool in self.definitions]
        return INSTRUCTIONS.format(tools="\n".join(lines), open=OPEN, close=CLOSE)

    def call_schema(self, names: Sequence[str], key: str = "arguments") -> str:
        """Return the JSON schema (as text) of a call of one of these functions.

        `key` is the key of the arguments.
        """
        argument_schemas = standalone({name: self.parameters[name] for name in names})
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: argument_schema},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for name, argument_schema in argument_schemas.items()
        ]
        return schema_text(calls[0] if len(calls) == 1 else {"anyOf": calls})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response, which name the skipped tools, if there are any."""
        return {"X-Skipped-Tools": ", ".join(self.skipped)} if self.skipped else {}


NONE = Tools()


def standalone(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a dict of JSON schemas, changed so that they mean the same inside another schema.

    A pointer such as #/$defs/Colour starts at the nearest schema around it that has a `$id`, so
    every schema gets a `$id` here. A schema keeps its own `$id`, which its references may name,
    unless that is not a string, begins with # or is shared by two schemas. `$schema` is left out,
    because drafts before 2019-09 ignore a `$id` next to a `$ref`, and draft 4 has no `$id`.
    """
    id_counts = Counter(str(schema.get("$id")) for schema in parameters.values())
    standalone_schemas = {}
    for name, schema in parameters.items():
        schema_id = schema.get("$id")
        if not isinstance(schema_id, str) or id_counts[schema_id] > 1 or schema_id.startswith("#"):
            schema_id = f"tool:{name}"
        standalone_schema = {"$id": schema_id}
        for key, value in schema.items():
            if key not in ("$id", "$schema"):
                standalone_schema[key] = value
        standalone_schemas[name] = standalone_schema
    return standalone_schemas


def read_tools(fields: Mapping[str, Any]) -> Tools:
    """Return a request's tools, of which the model may call the functions.

    Tools of other types are skipped, and `tool_choice` may not demand one of them. Raises ApiError
    (400) if `tools` or `tool_choice` is not valid.
    """
    items = fields.get("tools", [])
    if not isinstance(items, list):
        raise invalid("tools must be a list of functions, got " + kind(items), "tools")
    if len(items) > MOST_TOOLS:
        text = f"there may be at most {MOST_TOOLS} tools, got {len(items):,}: send fewer"
        raise invalid(text, "tools")
    functions = []
    skipped = []
    for i, item in enumerate(items):
        if _is_function(item, f"tools[{i}]"):
            functions.append(_function(item, f"tools[{i}]"))
        else:
            skipped.append(item["type"])
    parameters: dict[str, Any] = {}
    for function in functions:
        parameters[function["name"]] = function.get("parameters", {"type": "object"})
    choice = fields.get("tool_choice", "auto" if functions else "none")
    parallel = None
    if fields.get("parallel_tool_calls") is not None:
        parallel = flag(fields, "parallel_tool_calls")
    no_tools = Tools(parallel=parallel, skipped=tuple(dict.fromkeys(skipped)))
    if choice == "none" or (choice == "auto" and not functions):
        return no_tools
    forced, callable_names = _chosen(choice, parameters)
    if not functions:
        raise invalid(
            "tool_choice needs tools: send a list of functions, or leave tool_choice out",
            "tool_choice",
        )
    definitions = [
        {"type": "function", "function": function}
        for function in functions
        if function["name"] in callable_names
    ]
    return replace(
        no_tools,
        parameters={name: parameters[name] for name in callable_names},
        definitions=tuple(definitions),
        forced=forced,
    )


def _chosen(
    choice: Any,
    parameters: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of which one must be called, if any, and of those that may be called.

    Raises ApiError (400) if the choice is not valid.
    """
    names = tuple(parameters)
    if choice == "auto":
        return (), names
    if choice == "required":
        return names, names
    if not isinstance(choice, dict):
        raise invalid(
            'tool_choice must be "none", "auto", "required" or a function of tools', "tool_choice"
        )
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, parameters)
    return (_named(choice, parameters),), names


def _allowed(
    choice: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what _chosen() does, for a choice that lists the allowed tools."""
    # On the responses route, the mode and the tools are next to the type.
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(allowed.get("tools"), list):
        form = 'mode "auto" or "required" and a list of tools'
        raise invalid(f"tool_choice of type allowed_tools must have {form}", "tool_choice")
    names = tuple(dict.fromkeys(_named(tool, parameters) for tool in allowed["tools"]))
    if mode == "required" and not names:
        text = 'tool_choice of mode "required" needs tools: allow one, or choose mode "auto"'
        raise invalid(text, "tool_choice")
    return (names if mode == "required" else ()), names


def _named(choice: Any, parameters: Mapping[str, Any]) -> str:
    """Return the name of the function that a part of `tool_choice` names.

    Raises ApiError (400) if `tools` has no such function.
    """
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in parameters:
        raise invalid(
            "tool_choice names a function that is not in tools: name one of them", "tool_choice"
        )
    return name


def _is_function(item: Any, name: str) -> bool:
    """Return whether an item of `tools`, which errors call `name`, is a function.

    Raises ApiError (400) if it is not a tool at all.
    """
    tool_type = item.get("type") if isinstance(item, dict) else None
    if not isinstance(tool_type, str) or not TYPE.fullmatch(tool_type):
        form = (
            "{type: function, function: {name, parameters}}, or for /v1/responses {type: "
            "function, name, parameters}"
        )
        raise invalid(f"{name} must be a function: {form}", name)
    return tool_type == "function"


def _function(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Check a function, and return a dict with its name and, if given, description and parameters.

    Raises ApiError (400) if the function is not valid. The error calls it `name`, such as tools[0].
    """
    # On the responses route, name and parameters are next to the type.
    function = item.get("function", item)
    if "function" in item:
        name = f"{name}.function"
    function_name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function_name, str) or not NAME.fullmatch(function_name):
        raise invalid(f"{name}.name must have 1 to 64 letters, digits, _ . or -", f"{name}.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        text = f"{name}.parameters must be a JSON schema, got {kind(parameters)}"
        raise invalid(text, f"{name}.parameters")
    keys = ("name", "description", "parameters")
    return {key: function[key] for key in keys if function.get(key) is not None}


# --- messages of earlier turns -------------------------------------------------------------------


def read_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant message, with the arguments decoded.

    Blank arguments become an empty object, and arguments that are not a JSON object stay a text.
    Raises ApiError (400) if `calls` is not a list of calls whose names and arguments are texts.
    """
    if not isinstance(calls, list):
        raise invalid(f"{name} must be a list of calls, got {kind(calls)}", name)
    checked_calls = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        fields = function if isinstance(function, dict) else {}
        function_name = fields.get("name")
        arguments = fields.get("arguments")
        if not isinstance(function_name, str) or not isinstance(arguments, str):
            form = "{id, type: function, function: {name, arguments}}"
            raise invalid(f"{name}[{i}] must be a call: {form}", f"{name}[{i}]")
        values = decoded(arguments if arguments.strip() else "{}")
        function = {"name": function_name, "arguments": arguments if values is None else values}
        checked_call: dict[str, Any] = {"type": "function", "function": function}
        if isinstance(call.get("id"), str):
            checked_call["id"] = call["id"]
        checked_calls.append(checked_call)
    return checked_calls

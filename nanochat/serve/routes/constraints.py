"""Writes the grammar of a reply that must be a call, meet a schema, or end its thought in time.

The text is llguidance's dialect of Lark, or a JSON schema if nothing else is asked for.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from nanochat.common import UserError
from nanochat.generate.sampling import Sampling
from nanochat.generate.schema.grammar import MOST_BYTES
from nanochat.generate.schema.thought_budget import budget_line
from nanochat.serve.formats.listed_calls import LISTED
from nanochat.serve.formats.marked_calls import CLOSE, OPEN
from nanochat.serve.formats.values import object_schema
from nanochat.serve.formats.xml_calls import END, FUNCTION, PARAMETER
from nanochat.serve.routes.fields import invalid, kind
from nanochat.serve.routes.reply import Form
from nanochat.serve.routes.tools import standalone

TEXT = r"/(.|\n)*/"
# The white space with which models are trained to write calls.
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMPACT = {"whitespace_flexible": False}
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
VALUES = ("const", "enum", "default", "examples")  # keywords of a schema that hold values
KEY = re.compile(r"[^<>\n]{1,200}")


def constrained(
    requests: list[tuple[list[int], Sampling]],
    form: Form,
    max_thought: int | None,
) -> list[tuple[list[int], Sampling]]:
    """Return engine requests whose replies keep to the grammar of their form.

    `max_thought` is the most tokens of a thought, after which its closing mark follows; the reply
    then begins with a thought. The settings may already hold the schema of the answer. Raises
    ApiError (400) if a forced function has an argument that the model cannot write, or if the other
    settings do not fit a grammar.
    """
    grammar = _grammar(form, requests[0][1].schema, max_thought)
    try:
        return [(prompt, replace(sampling, schema=grammar)) for prompt, sampling in requests]
    except UserError as refusal:  # ignore_eos or min_tokens
        raise invalid(str(refusal)) from None


def _grammar(form: Form, schema: str | None, max_thought: int | None) -> str | None:
    """Return the grammar of a reply, or None if any text will do.

    If the client forces a call, the reply is calls only. Otherwise `schema` is the schema of the
    answer's text, and the reply may be calls instead of that text.
    """
    tools = form.tools
    marks = form.marks
    names = tools.forced or (() if schema is None else tuple(tools.parameters))
    if marks is None and not names:
        return schema
    if schema is None and not names and (max_thought is None or form.closed):
        return None
    rules = _answer_rules(form, names, schema)
    if marks is None or form.closed:
        return "\n".join(["start: answer", *rules])
    must_think = form.opened or max_thought is not None
    think = "think" if must_think else "think?"
    opening = "" if form.opened else marks.open
    rules += _thought_rules(opening, marks.close, max_thought == 0)
    if max_thought:
        rules.append(budget_line(max_thought, opening, marks.close))
    return "\n".join([f"start: {think} answer", *rules])


def _answer_rules(form: Form, names: Sequence[str], schema: str | None) -> list[str]:
    """Return the rules of an answer: calls of these functions, or text unless a call is forced."""
    kinds = []
    rules = []
    if names:
        kinds.append("calls")
        rules += _call_rules(form, names)
    if not form.tools.forced:
        kinds.append("text")
        text = TEXT if schema is None else _json(json.loads(schema), COMPACT)
        rules.append(f"text: {text}")
    return [f"answer: {' | '.join(kinds)}", *rules]


def _thought_rules(opening: str, closing: str, is_empty: bool) -> list[str]:
    """Return the rules of a thought between two marks; the first is "" if the prompt has it."""
    begin = _quoted(opening) if opening else ""
    think = f'think: {begin} thought "\\n\\n"'
    if is_empty:
        return [think, f"thought: {_quoted(closing)}"]
    return [think, f"thought[suffix={_quoted(closing)}]: {TEXT}"]


def _call_rules(form: Form, names: Sequence[str]) -> list[str]:
    """Return the rules of one call of these functions or, where the client allows, of several."""
    tools = form.tools
    if form.calls in ("list", "args"):
        return _listed_rules(form, names)
    if form.calls == "bare":  # Llama's templates write one call only
        schema = json.loads(tools.call_schema(names, "parameters"))
        return [f"calls: {_json(schema, SPACED)}"]
    rules = [r'calls: call ("\n" call)*' if tools.parallel else "calls: call"]
    opening = f'{_mark(form, OPEN)} "\\n"'
    closing = f'"\\n" {_mark(form, CLOSE)}'
    if form.calls != "xml":
        schema = json.loads(tools.call_schema(names))
        rules.append(f"call: {opening} arguments {closing}")
        return [*rules, f"arguments: {_json(schema, SPACED)}"]
    functions = [f"function_{number}" for number in range(len(names))]
    rules.append(f"call: {opening} ({' | '.join(functions)}) {_quoted(END)} {closing}")
    for rule, name in zip(functions, names, strict=True):
        rules += _xml_rules(rule, name, tools.parameters[name])
    return rules


def _listed_rules(form: Form, names: Sequence[str]) -> list[str]:
    """Return the rules of calls in one list, or of calls that each have a mark and their name."""
    parallel = form.tools.parallel
    mark = _mark(form, LISTED)
    if form.calls == "list":
        more = ' (", " call)*' if parallel else ""
        schema = json.loads(form.tools.call_schema(names))
        return [f'calls: {mark} " "? "[" call{more} "]"', f"call: {_json(schema, SPACED)}"]
    rules = ["calls: call+" if parallel else "calls: call"]
    functions = []
    schemas = standalone({name: form.tools.parameters[name] for name in names})
    for number, (name, schema) in enumerate(schemas.items()):
        functions.append(f"{_quoted(name)} id? {_mark(form, '[ARGS]')} arguments_{number}")
        rules.append(f"arguments_{number}: {_json(schema, SPACED)}")
    rules.append(f"call: {mark} ({' | '.join(functions)})")
    return [*rules, f"id: {_mark(form, '[CALL_ID]')} /[a-zA-Z0-9]{{9}}/"]


def _mark(form: Form, text: str) -> str:
    """Return the symbol of a mark: its special token or, if the model has none, its text."""
    return f"<[{form.specials[text]}]>" if text in form.specials else _quoted(text)


def _xml_rules(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the rules of a call of one function, with its arguments in the order of the schema.

    A text keeps to the `enum`, `const`, `minLength` and `maxLength` of its schema. Any other value
    keeps to its whole schema.
    """
    pointer, arguments = object_schema(schema)
    properties = arguments.get("properties", {})
    if not isinstance(properties, dict):
        text = f"the properties of {name} must be an object, got {kind(properties)}"
        raise invalid(text, "tools")
    required = arguments.get("required")
    required = required if isinstance(required, list) else []
    tool_schema = standalone({name: schema})[name]
    address = tool_schema.pop("$id").removesuffix("#")
    tool_schema = {"$id": address, **_absolute(tool_schema, address)}
    tool_schema_size = len(json.dumps(tool_schema))
    spare_bytes = MOST_BYTES
    symbols = []
    rules = []
    for number, (key, property_schema) in enumerate(properties.items()):
        if not KEY.fullmatch(key):
            text = f"the parameter {key[:80]!r} of {name} cannot be written: rename it"
            raise invalid(text, "tools")
        argument = f"{rule}_{number}"
        symbols.append(argument if key in required else f"{argument}?")
        if not isinstance(property_schema, dict):
            property_schema = {}
        json_schema = property_schema
        if "$ref" in json.dumps(property_schema):
            spare_bytes -= tool_schema_size
            if spare_bytes < 0:
                text = (
                    f"the parameters of {name} are too large for so many references, each of which "
                    "needs all of them: shorten the schema, or write out what it refers to"
                )
                raise invalid(text, "tools")
            reference = f"{address}#{pointer}/properties/{_pointer_key(key)}"
            json_schema = {"$ref": reference, "$defs": {"tool": tool_schema}}
        opening_tag = f"{PARAMETER}{key}>\n"
        rules += _value_rules(argument, opening_tag, property_schema, json_schema)
    head = _quoted(f"{FUNCTION}{name}>\n")
    return [f"{rule}: {' '.join([head, *symbols])}", *rules]


def _absolute(schema: Any, address: str, is_map: bool = False) -> Any:
    """Return a schema, or a value in it, with `address` in front of references that begin with #.

    llguidance looks for references without an address in the outermost schema. If `is_map` is true,
    `schema` is a map of schemas by name, such as `properties`. A schema with a `$id` of its own
    stays as it is.
    """
    if isinstance(schema, list):
        return [_absolute(item, address) for item in schema]
    if not isinstance(schema, dict) or ("$id" in schema and not is_map):
        return schema
    absolute: dict[str, Any] = {}
    for key, value in schema.items():
        if is_map:
            absolute[key] = _absolute(value, address)
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            absolute[key] = address + value
        elif key not in VALUES:
            absolute[key] = _absolute(value, address, key in MAPS)
        else:
            absolute[key] = value
    return absolute


def _pointer_key(key: str) -> str:
    """Return a key as a JSON pointer in a reference has it."""
    return quote(key.replace("~", "~0").replace("/", "~1"))


def _value_rules(
    rule: str,
    head: str,
    schema: Mapping[str, Any],
    json_schema: Mapping[str, Any],
) -> list[str]:
    """Return the rules of one argument, whose opening tag is `head`.

    `json_schema` means the same as `schema`, but its references also work outside the tool's schema.
    """
    end = "\n</parameter>\n"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        choices = " | ".join(map(_quoted, values))
        return [f"{rule}: {_quoted(head)} ({choices}) {_quoted(end)}"]
    types = schema.get("type")
    if types != "string" and not (isinstance(types, list) and "string" in types):
        value_rule = f"{rule}_value"
        return [
            f"{rule}: {_quoted(head)} {value_rule} {_quoted(end)}",
            f"{value_rule}: {_json(json_schema, SPACED)}",
        ]
    text = TEXT
    min_length = _length(schema, "minLength")
    max_length = _length(schema, "maxLength")
    if min_length is not None or max_length is not None:
        limits = f"{min_length or 0},{'' if max_length is None else max_length}"
        text = rf"/(.|\n){{{limits}}}/"
    return [
        f"{rule}: {_quoted(head)} {rule}_text",
        f"{rule}_text[suffix={_quoted(end)}]: {text}",
    ]


def _length(schema: Mapping[str, Any], key: str) -> int | None:
    """Return a limit of a text's length, or None if the schema has no valid one."""
    length = schema.get(key)
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        return None
    return length


def _json(schema: Mapping[str, Any], spacing: Mapping[str, Any]) -> str:
    """Return the symbol of a JSON value, which must stand at the end of its line."""
    return f"%json {json.dumps({**schema, 'x-guidance': spacing})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

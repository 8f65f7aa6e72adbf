"""Reads JSON that clients or models write, so that every value that is read can be written again.

UTF-8 has no half of a surrogate pair, JSON has no NaN, and Python cannot write what is nested too
deep: halves become U+FFFD, and the rest is no JSON here.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MOST_DEPTH = 100  # levels of objects and lists; templates and schemas are walked by recursion
MOST_REFERENCES = 8  # references that are followed to the schema with the properties
# The key of what a model wrote in place of a JSON object, where only an object can be passed on.
# Anthropic's documentation names it.
NO_JSON = "INVALID_JSON"
# The escape sequence of a surrogate pair or of half of one in JSON text. No other sequence matches,
# since each match takes memory.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    r"(?<!\\)(?P<before>(?:\\\\)*)\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2}))"
)


class NotFinite(ValueError):
    """A number that JSON lacks, or that is too large for a float; the text is the number."""


class TooDeep(ValueError):
    """JSON that is nested deeper than MOST_DEPTH."""


def parsed(text: str, strict: bool = True) -> Any:
    """Return the value of JSON text, with U+FFFD in place of each unpaired surrogate.

    Unless `strict`, line breaks in strings are allowed. Raises NotFinite for NaN, Infinity and
    numbers too large for a float, TooDeep, and ValueError for other text that is no JSON.
    """
    if _SURROGATE.search(text):
        text = _ESCAPE.sub(_without_half, text)
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, strict=strict)
    except RecursionError:
        raise TooDeep from None
    if text.count("[") + text.count("{") > MOST_DEPTH and _is_deep(value):
        raise TooDeep
    return value


def decoded(text: str) -> dict[str, Any] | None:
    """Return the JSON object in what a model wrote, or None if the text is something else."""
    try:
        value = parsed(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def properties_text(values: Mapping[str, Any]) -> str:
    """Return properties of an object as JSON, without the braces around them."""
    return json.dumps(values, ensure_ascii=False)[1:-1]


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument, by the types that its schema allows; the default is text."""
    types = _types(schema)
    if types <= {"string"}:
        return text
    try:
        value = parsed(text, strict=False)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if "string" in types and value is not None:
        return text
    return value


def object_schema(schema: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Follow the references at the top of a function's schema to the schema with its properties.

    Zod writes such references. Returns the JSON pointer of the schema with the properties, and that
    schema. A reference that leads to no schema is not followed.
    """
    pointer = ""
    referenced = schema
    for _ in range(MOST_REFERENCES):
        reference = referenced.get("$ref")
        if "properties" in referenced or not isinstance(reference, str) or reference[:2] != "#/":
            break
        target: Any = schema
        for segment in reference[2:].split("/"):
            key = unquote(segment).replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            break
        pointer = reference[1:]
        referenced = target
    return pointer, referenced


def _without_half(escape: re.Match[str]) -> str:
    """Return a matched escape sequence, or that of U+FFFD for an unpaired surrogate."""
    return rf"{escape['before']}\ufffd" if escape["half"] else escape[0]


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise NotFinite(number)
    return value


def _is_deep(value: Any) -> bool:
    """Return whether a value is nested deeper than MOST_DEPTH."""
    level = [value]
    for _ in range(MOST_DEPTH):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    return any(isinstance(item, dict | list) for item in level)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema and its alternatives name; "value" stands for any.

    Schemas come from clients, and need not be valid.
    """
    alternatives = [*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))]
    types: set[str] = set()
    for alternative in (schema, *alternatives):
        if not isinstance(alternative, Mapping):
            continue
        named = alternative.get("type")
        types |= {named} if isinstance(named, str) else set(map(str, _listed(named)))
        values = _listed(alternative.get("enum"))
        if "const" in alternative:
            values = [alternative["const"]]
        is_text = all(isinstance(value, str) for value in values)
        if "$ref" in alternative or "allOf" in alternative or not (named or is_text):
            types.add("value")
    return types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

"""Renders a chat template in a child process (platforms/child.py): a template is a program that someone else wrote."""

import json
from collections.abc import Callable
from typing import Any

TEXT = 1 << 22  # characters of an answer


def refuse(message: str) -> None:
    """What templates call where they refuse a conversation."""
    raise ValueError(message)


def compiled(source: str, tokens: dict[str, str]) -> Any:
    """The template, in a sandbox that can change nothing and see no attribute of Python's own."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def as_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals |= {"raise_exception": refuse, **tokens}
    return environment.from_string(source)


def begin(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """A function that gives the text of a conversation, or why there is none."""
    template = compiled(setup["template"], setup["tokens"])

    def answer(asked: dict[str, Any]) -> dict[str, str]:
        parts, length = [], 0
        for part in template.generate(**asked):
            parts.append(part)
            length += len(part)
            if length > TEXT:
                return {"error": f"it writes more than {TEXT:,} characters"}
        return {"text": "".join(parts)}

    return answer

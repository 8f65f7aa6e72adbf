"""Renders a chat template in a child process, because a template is somebody else's program.

platforms/child.py starts the process and calls begin() in it.
"""

import json
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 1 << 22  # of a rendered conversation


def refuse(message: str) -> None:
    """Raise ValueError with a message. Templates call this to refuse a conversation."""
    raise ValueError(message)


def compiled(source: str, tokens: dict[str, str]) -> Any:
    """Compile and return a template, which renders in a sandbox.

    `tokens` are variables that the template may use. The sandbox hides Python's own attributes and
    forbids changes to the objects passed in.
    """
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
    """Return a function that renders a conversation and returns {"text": ...}.

    If the text is too long, the function returns {"error": ...} instead. `setup` holds the source
    of the template and the tokens that it may use.
    """
    template = compiled(setup["template"], setup["tokens"])

    def answer(variables: dict[str, Any]) -> dict[str, str]:
        pieces = []
        length = 0
        for piece in template.generate(**variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHARACTERS:
                return {"error": f"it writes more than {MAX_CHARACTERS:,} characters"}
        return {"text": "".join(pieces)}

    return answer

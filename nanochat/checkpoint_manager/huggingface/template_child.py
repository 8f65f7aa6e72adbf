"""Renders a chat template in a child process, because a template is somebody else's program.

platforms/child.py starts the process and calls begin() in it.
"""

import datetime
import json
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 1 << 22  # the longest rendered conversation


def refuse(message: str) -> None:
    """Raise ValueError with a message. Templates call this to refuse a conversation."""
    raise ValueError(message)


def strftime_now(form: str) -> str:
    """Return the time now in a form of strftime. Templates write the date with it."""
    return datetime.datetime.now().strftime(form)


def compiled(source: str, tokens: dict[str, str]) -> Any:
    """Compile and return a template, which renders in a sandbox.

    `tokens` are variables that the template may use. The sandbox hides Python's own attributes and
    forbids changes to the objects passed in.
    """
    from jinja2 import nodes, parser
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Writes what stands between {% generation %} and {% endgeneration %}."""

        tags = {"generation"}  # noqa: RUF012  jinja declares it as a set of the class

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def as_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = as_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": strftime_now, **tokens}
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

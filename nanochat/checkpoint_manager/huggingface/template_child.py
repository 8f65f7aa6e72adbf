"""Renders chat templates in a process of its own, with limits: a template is a program that someone else wrote.

It reads a line of JSON with the template, then a line for each conversation, and answers each with a line of JSON.
"""

import json
import resource
import sys
from typing import Any

SECONDS, BYTES, TEXT = 600, 1 << 29, 1 << 22  # CPU time of the process, its memory, characters of an answer


def refuse(message: str) -> None:
    """What templates call where they refuse a conversation."""
    raise ValueError(message)


def compiled(source: str, tokens: dict[str, str]) -> Any:
    """The template, in a sandbox that can change nothing and see no attribute of Python's own."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def as_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = as_json
    environment.globals |= {"raise_exception": refuse, **tokens}
    return environment.from_string(source)


def answer(template: Any, asked: dict[str, Any]) -> dict[str, str]:
    """The rendered text, or why there is none."""
    parts, length = [], 0
    for part in template.generate(**asked):
        parts.append(part)
        length += len(part)
        if length > TEXT:
            return {"error": f"it writes more than {TEXT:,} characters"}
    return {"text": "".join(parts)}


def main() -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    first = json.loads(sys.stdin.readline())
    template: Any = None
    for line in sys.stdin:
        try:
            template = template or compiled(first["template"], first["tokens"])
            found = answer(template, json.loads(line))
        except (Exception, RecursionError) as failure:  # whatever the template does, the parent hears of it
            found = {"error": f"{type(failure).__name__}: {failure}"[:500]}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

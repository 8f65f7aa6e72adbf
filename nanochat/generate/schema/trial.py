"""Refuses JSON schemas that ask for too much work, before this process makes the automaton of one.

A schema of 1 kB can keep llguidance busy for hours, in code that nobody can stop but by ending its process. Two things
take that long: making an automaton, which is therefore tried in a child process first, and a step of an automaton
that follows many patterns at once, whose number is therefore limited.
"""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanochat.common import UserError
from nanochat.platforms.child import Child

SECONDS = 2.0  # that making an automaton may take
CHILD = Path(__file__).with_name("trial_child.py")
# Patterns and formats that one text may have to meet. Each one more multiplies the time of a step by up to 2.5: with
# eight, no step of the worst patterns that we found took more than 0.25 s, and with 20 a step took 4 s.
MOST_PATTERNS = 8
BRANCHES = (
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
)  # what brings in other schemas
# What adds no rule of its own to a schema that a branch brings in.
NEUTRAL = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "type",
        "writeOnly",
    }
)


class Trial:
    """Tries schemas in a child process. Several threads may use it; one schema is tried at a time."""

    def __init__(self, overrides: Mapping[str, Any]):
        """`overrides` are options of llguidance's compiler of schemas."""
        self._child = Child(CHILD, dict(overrides))
        self._lock = threading.Lock()

    def check(self, content: Mapping[str, Any], text: str) -> None:
        """Raise UserError if making the automaton of a schema, decoded and as JSON text, takes too much time or
        memory, or if following it might."""
        found = patterns_together(content)
        if found > MOST_PATTERNS:
            raise UserError(
                f"a JSON schema that combines schemas may have at most {MOST_PATTERNS} different patterns and formats, "
                f"got {found}: leave some out, or write every value's rules in one place instead of allOf, and instead "
                "of $ref, anyOf and oneOf beside other rules"
            )
        with self._lock:
            answer = self._child.ask(text, SECONDS)
        if answer is None:
            raise UserError(
                f"the JSON schema takes more than {SECONDS:g} seconds or too much memory to prepare. Simplify it: use "
                "fewer or shorter patterns and alternatives, and smaller numbers in multipleOf, minLength and maxLength"
            )
        if isinstance(answer, dict):
            raise UserError(
                f"the JSON schema cannot be used: {answer['error']}. Correct the schema"
            )


def patterns_together(content: Mapping[str, Any]) -> int:
    """How many different patterns and formats one text may have to meet: all that the schema has if one of its parts
    combines several schemas, else 0."""
    rules: set[tuple[str, str]] = set()
    combines = False
    for part in _parts(content):
        rules |= {
            (name, part[name]) for name in ("pattern", "format") if isinstance(part.get(name), str)
        }
        names = part.get("patternProperties")
        if isinstance(names, dict):
            rules |= {("pattern", name) for name in names}
            combines |= len(names) > 1
        branches = [name for name in BRANCHES if isinstance(part.get(name), str | list)]
        combines |= len(branches) > 1 or bool(branches and part.keys() - NEUTRAL - {*branches})
        combines |= isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1
    return len(rules) if combines else 0


def _parts(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every object of a JSON value."""
    left: list[Any] = [content]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value

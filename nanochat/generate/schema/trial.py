"""Refuses JSON schemas that ask for too much work, before this process makes their automata.

A schema of 1 kB can keep llguidance busy for hours, in code that only ends with its process. Two
things take that long: making an automaton, which is therefore tried in a child process first, and a
step of an automaton that follows many patterns at once, so the number of patterns is limited.
"""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanochat.common import UserError, tr
from nanochat.platforms.child import BYTES, Child

# The most time that making an automaton may take. Large schemas that we tried take 0.05 s, and while
# one is made, new schemas of other clients wait.
SECONDS = 1.0
CHILD = Path(__file__).with_name("trial_child.py")
# Patterns and formats that one text may have to meet. Each one more multiplies the time of a step
# by up to 2.5: with eight, no step of the worst patterns that we found took more than 0.25 s, and
# with 20 a step took 4 s.
MOST_PATTERNS = 8
# Keywords that bring in other schemas.
BRANCHES = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef")
# Keywords that add no rule of their own to a schema that a branch brings in.
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
    """Tries schemas in a child process.

    Several threads may use this object; one schema is tried at a time.
    """

    def __init__(self, overrides: Mapping[str, Any]):
        """Prepare to try schemas; `overrides` are options of llguidance's schema compiler."""
        self._child = Child(CHILD, dict(overrides))
        self._lock = threading.Lock()

    def check(self, content: Mapping[str, Any], text: str) -> None:
        """Raise UserError if making a schema's automaton fails or may take too much time or memory.

        `content` is the decoded schema, and `text` the same as JSON.
        """
        patterns = patterns_together(content)
        if patterns > MOST_PATTERNS:
            raise UserError(
                tr(
                    "a JSON schema that combines schemas may have at most {most} different "
                    "patterns and formats, got {patterns}: leave some out, or write every value's "
                    "rules in one place instead of allOf, and instead of $ref, anyOf and oneOf "
                    "beside other rules",
                    most=MOST_PATTERNS,
                    patterns=patterns,
                )
            )
        with self._lock:
            answer = self._child.ask(text, SECONDS)
        if answer is None:
            raise UserError(
                tr(
                    "the JSON schema cannot be prepared in {seconds:g} s and {memory} MiB. "
                    "Simplify it: use fewer or shorter patterns and alternatives, and "
                    "smaller numbers in multipleOf, minLength and maxLength",
                    seconds=SECONDS,
                    memory=BYTES >> 20,
                )
            )
        if isinstance(answer, dict):
            raise UserError(
                tr(
                    "the JSON schema cannot be used: {reason}. Correct the schema",
                    reason=answer["error"],
                )
            )


def patterns_together(content: Mapping[str, Any]) -> int:
    """Return how many different patterns and formats a schema has if it combines schemas, else 0.

    Only a schema that combines others can make one text meet many patterns at once.
    """
    patterns: set[tuple[str, str]] = set()
    combines = False
    for subschema in _objects(content):
        for keyword in ("pattern", "format"):
            if isinstance(subschema.get(keyword), str):
                patterns.add((keyword, subschema[keyword]))
        properties = subschema.get("patternProperties")
        if isinstance(properties, dict):
            patterns |= {("pattern", name) for name in properties}
        combines = combines or _combines(subschema)
    return len(patterns) if combines else 0


def _combines(subschema: Mapping[str, Any]) -> bool:
    """Return whether this object of a schema may make one text meet several schemas."""
    properties = subschema.get("patternProperties")
    if isinstance(properties, dict) and len(properties) > 1:
        return True
    all_of = subschema.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        return True
    branches = {name for name in BRANCHES if isinstance(subschema.get(name), str | list)}
    if len(branches) > 1:
        return True
    other_rules = subschema.keys() - NEUTRAL - branches
    return bool(branches and other_rules)


def _objects(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a JSON object and all objects inside it."""
    values: list[Any] = [content]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield value
            values += value.values()
        elif isinstance(value, list):
            values += value

"""Schemas that ask for too much work are refused in time, and ordinary ones are not."""

import json
import threading
import time
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.generate.schema.grammar import Schemas
from nanochat.generate.schema.trial import MOST_PATTERNS, SECONDS, patterns_together
from tests.support.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SLOW = {"type": "integer", "multipleOf": 99_999_989}  # an automaton of as many states: hours


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def many(template: str, count: int) -> list[dict[str, Any]]:
    """Patterns that differ in the number in their template."""
    return [text(template % number) for number in range(8, 8 + count)]


MANY = many("^[a-c]{%d}$", MOST_PATTERNS + 1)
NAMED = {f"p{number}": each for number, each in enumerate(MANY)}


def test_a_schema_whose_automaton_takes_too_long_is_refused_and_the_next_one_is_not() -> None:
    schemas = Schemas(TOKENIZER)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"cannot be prepared in 1 s and 512 MiB\. Simplify"):
        schemas.grammar(json.dumps(SLOW))
    assert time.monotonic() - start < SECONDS + 10
    assert any(schemas.grammar('{"type": "integer", "multipleOf": 7}').allowed())


def test_known_schemas_do_not_wait_for_one_that_is_tried() -> None:
    schemas, known = Schemas(TOKENIZER), '{"type": "boolean"}'
    assert not schemas.is_ready(known)
    schemas.grammar(known)
    assert schemas.is_ready(known)

    def refused() -> None:
        with pytest.raises(UserError):
            schemas.grammar(json.dumps(SLOW))

    slow = threading.Thread(target=refused)
    slow.start()
    schemas.grammar(known)
    assert slow.is_alive()
    slow.join()
    assert not schemas.is_ready(json.dumps(SLOW))


def test_patterns_that_a_text_must_meet_together_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """These twenty are quick to prepare, but the mask after the quotation mark takes 4 s, and that of forty no end."""
    slow = {"allOf": many("^(c?|((a|b)*a(a|b){%d})+)$", 20)}
    with pytest.raises(UserError, match="at most 8 different patterns and formats, got 20: leave some out"):
        Schemas(TOKENIZER).grammar(json.dumps(slow))
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    with pytest.raises(UserError, match="最多有 8 个不同的 pattern"):
        Schemas(TOKENIZER).grammar(json.dumps(slow))
    fewer = {"allOf": many("^(c?|((a|b)*a(a|b){%d})+)$", MOST_PATTERNS)}
    grammar = Schemas(TOKENIZER).grammar(json.dumps(fewer))
    start = time.process_time()
    grammar.accept(TOKENIZER.encode('"')[0])
    grammar.allowed()
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": MANY},
        {"properties": {"x": {"allOf": MANY}}},
        {"allOf": [{"properties": {"x": each}} for each in MANY]},
        {"$ref": "#/$defs/p0", "pattern": "x", "$defs": NAMED},
        {"anyOf": MANY, "pattern": "x"},
        {"anyOf": [{}, {}], "oneOf": MANY},
        {"anyOf": [{}, {}], "properties": NAMED},
        {"patternProperties": {f"^x{number}": {} for number in range(len(MANY))}},
        {"allOf": [{}, {}], "items": [{"format": f"f{number}"} for number in range(len(MANY))]},
    ],
)
def test_patterns_are_counted_where_schemas_are_combined(schema: dict[str, Any]) -> None:
    assert patterns_together(schema) >= len(MANY)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": NAMED, "required": ["p0"]},
        {"anyOf": MANY, "title": "one of them", "description": "d", "default": "aaaaaaaa"},
        {"$defs": NAMED, "properties": {name: {"$ref": f"#/$defs/{name}", "title": name} for name in NAMED}},
        {"properties": {"x": {"allOf": [{"$ref": "#/$defs/p0"}], "default": "a"}}, "$defs": NAMED},
        {"properties": {"$ref": {}, "allOf": {}, "anyOf": {}, **NAMED}},
        {"properties": {"x": {"anyOf": [MANY[0], {"type": "null"}]}, **NAMED}},
    ],
)
def test_patterns_of_different_values_may_be_many(schema: dict[str, Any]) -> None:
    assert patterns_together(schema) == 0
    Schemas(TOKENIZER).grammar(json.dumps({"type": "object", **schema} if "properties" in schema else schema))


def test_the_same_pattern_counts_once() -> None:
    assert patterns_together({"allOf": [text("x")] * 20}) == 1

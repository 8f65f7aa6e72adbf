"""Schemas keep random text inside JSON, and bad schemas are refused in words."""

import json
import random

import pytest
import torch

from nanochat.common import UserError
from nanochat.generate.adjust import allowed_rows
from nanochat.generate.schema import grammar
from nanochat.generate.schema.grammar import MOST_BYTES, Schemas
from tests.support.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["cat", "猫", None]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def allowed(schemas: Schemas, schema: str, said: list[int]) -> list[int]:
    reply = schemas.grammar(schema)
    for token in said:
        reply.accept(token)
    mask = allowed_rows([reply.allowed()], TOKENIZER.vocab_size, torch.device("cpu"))
    return mask[0].nonzero().flatten().tolist()


def test_any_walk_over_allowed_tokens_writes_a_value_that_meets_the_schema():
    schemas, end = Schemas(TOKENIZER), TOKENIZER.special("assistant_end")
    for seed in range(8):
        rng, said = random.Random(seed), []
        while not said or said[-1] != end:
            choices = allowed(schemas, json.dumps(PERSON), said)
            said.append(end if end in choices else rng.choice(choices))
            assert len(said) < 200
        value = json.loads(TOKENIZER.decode_bytes(said[:-1]).decode())
        assert set(value) == {"name", "age", "likes"} and 0 <= value["age"] <= 120 and len(value["name"]) <= 6
        assert all(liked in ("cat", "猫", None) for liked in value["likes"])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"allOf": [{"type": "string"}, {"type": "number"}]}', "cannot be met.*incompatible"),
        ('{"type": "string", "minLength": 5, "maxLength": 2}', "cannot be met"),
        ('{"enum": []}', "cannot be met"),
        ('{"type": "nope"}', "cannot be met.*nope"),
        ('{"$ref": "http://x.invalid/y"}', "cannot be met"),
        ("{", "not valid JSON"),
        ("[" * 9000, "not valid JSON"),
        ("false", "must be an object"),
        (json.dumps({"type": "string", "description": "x" * MOST_BYTES}), "at most 32,768 bytes"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_in_words(schema, message):
    with pytest.raises(UserError, match=message):
        Schemas(TOKENIZER).grammar(schema)


def test_a_schema_whose_reply_was_given_up_is_refused_in_the_users_language(monkeypatch):
    schemas, schema = Schemas(TOKENIZER), json.dumps(PERSON)
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    schemas.give_up(schema)
    with pytest.raises(UserError, match="太复杂"):
        schemas.grammar(schema)


def test_the_schemas_that_were_used_last_stay_ready(monkeypatch):
    monkeypatch.setattr("nanochat.generate.schema.grammar.MOST_KNOWN", 2)
    schemas, (first, second, third) = Schemas(TOKENIZER), (json.dumps({"enum": [number]}) for number in range(3))
    for schema in (first, second, first, third):
        schemas.grammar(schema)
    assert [schemas.is_ready(schema) for schema in (first, second, third)] == [True, False, True]


def test_bits_become_booleans_in_order():
    masks = [bytes([0b0000_0101, 0b1000_0000]), bytes([0, 1])]
    rows = allowed_rows(masks, 11, torch.device("cpu"))
    assert rows.shape == (2, 11)
    assert rows[0].nonzero().flatten().tolist() == [0, 2] and rows[1].nonzero().flatten().tolist() == [8]


# --- limits --------------------------------------------------------------------------------------

HOSTILE = json.dumps({"type": "string", "pattern": "|".join(f".*{letter}.{{20}}X" for letter in "abcde")})


def test_a_reply_whose_automaton_grows_too_much_fails_and_may_only_end(monkeypatch):
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 300)
    schemas, said = Schemas(TOKENIZER), random.Random(1)
    reply = schemas.grammar(HOSTILE)
    reply.accept(TOKENIZER.encode('"')[0])
    for _ in range(100):
        bits = (
            allowed_rows([reply.allowed()], TOKENIZER.vocab_size, torch.device("cpu"))[0].nonzero().flatten().tolist()
        )
        if reply.failed:
            break
        reply.accept(said.choice([token for token in bits if token not in TOKENIZER.stops]))
    assert reply.failed and set(bits) == TOKENIZER.stops


def test_a_reply_whose_masks_take_too_much_time_fails(monkeypatch):
    reply = Schemas(TOKENIZER).grammar('{"type": "string"}')
    assert not reply.failed
    monkeypatch.setattr(grammar, "REPLY_SECONDS", reply.seconds)
    monkeypatch.setattr(grammar, "TOKEN_SECONDS", 0)
    reply.allowed()
    assert reply.failed


def test_refusals_are_remembered_for_a_while_and_only_the_latest(monkeypatch):
    now, tries = [1000.0], []
    schemas = Schemas(TOKENIZER)
    monkeypatch.setattr(grammar.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(grammar, "MOST_REFUSED", 2)
    compiled = schemas._compiled
    monkeypatch.setattr(schemas, "_compiled", lambda schema: tries.append(schema) or compiled(schema))
    first, second, third = (json.dumps({"enum": [], "title": str(number)}) for number in range(3))
    for schema in (first, first, second, first, third, first):
        with pytest.raises(UserError, match="cannot be met"):
            schemas.grammar(schema)
    assert tries == [first, second, third, first]
    now[0] += grammar.REFUSED_SECONDS + 1
    schemas.check(first)


def test_the_known_automata_are_bounded_by_their_size_together(monkeypatch):
    schemas, names = Schemas(TOKENIZER), [json.dumps({"enum": [number]}) for number in range(4)]
    monkeypatch.setattr(grammar, "BYTES_PER_SECOND", 0)
    automata = [schemas.prepare(name) for name in names[:2]]
    monkeypatch.setattr(grammar, "BYTES_PER_SECOND", grammar.KNOWN_BYTES / 1.5)
    monkeypatch.setattr(grammar, "STATES_BYTES", grammar.KNOWN_BYTES)
    for automaton in automata:
        automaton.grown = 1.0
    schemas.prepare(names[2])
    assert list(schemas._cached) == [names[1], names[2]]


def test_an_automaton_that_has_grown_gets_no_new_replies_unless_they_hold_it(monkeypatch):
    schemas, name = Schemas(TOKENIZER), '{"type": "boolean"}'
    held = schemas.prepare(name)
    held.grown = 1.0
    assert not schemas.is_ready(name)
    assert schemas.grammar(name)._automaton is held
    fresh = schemas.prepare(name)
    assert fresh is not held and schemas.is_ready(name)

"""Schemas keep random text inside JSON, and bad schemas are refused in words."""

import json
import random

import pytest
import torch

from nanochat.common import UserError
from nanochat.generate.schema.grammar import MOST_BYTES, Schemas, allowed_rows
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
    grammar = schemas.grammar(schema)
    for token in said:
        grammar.accept(token)
    mask = allowed_rows([grammar.allowed()], TOKENIZER.vocab_size, torch.device("cpu"))
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


def test_the_schemas_that_were_used_last_stay_ready(monkeypatch):
    monkeypatch.setattr("nanochat.generate.schema.grammar.MOST_KNOWN", 2)
    schemas, (first, second, third) = Schemas(TOKENIZER), (json.dumps({"enum": [number]}) for number in range(3))
    for schema in (first, second, first, third):
        schemas.grammar(schema)
    assert [schemas.knows(schema) for schema in (first, second, third)] == [True, False, True]


def test_bits_become_booleans_in_order():
    masks = [bytes([0b0000_0101, 0b1000_0000]), bytes([0, 1])]
    rows = allowed_rows(masks, 11, torch.device("cpu"))
    assert rows.shape == (2, 11)
    assert rows[0].nonzero().flatten().tolist() == [0, 2] and rows[1].nonzero().flatten().tolist() == [8]

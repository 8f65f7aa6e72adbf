"""A step computes masks for a limited time, and the rows that wait for theirs say the same as alone."""

import gc
import json
import weakref
from typing import Any

import pytest

from nanochat.engine import Completion, Engine
from nanochat.generate.sampling import Sampling
from nanochat.generate.schema import mask_turns
from nanochat.generate.schema.mask_turns import PATIENCE, STEP_SECONDS, MaskTurns
from tests.support.qwens import VOCABULARY, tiny_qwen
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer, words


class Timed:
    """A grammar each of whose masks takes so many seconds."""

    def __init__(self, number: int, cost: float):
        self.number, self.cost = number, cost
        self.costly = cost > STEP_SECONDS / 5
        self.seconds, self.waited, self.masks = 0.0, 0, 0

    def allowed(self) -> bytes:
        self.seconds += self.cost
        self.masks += 1
        return b"x"


def steps(turns: MaskTurns, rows: list[Any], count: int) -> None:
    for _ in range(count):
        turns.take(rows)


def test_costly_masks_take_their_share_of_the_steps_beside_other_replies():
    costly = [Timed(number, 4 * STEP_SECONDS) for number in range(10)]
    steps(MaskTurns(), [None, *costly], 101)
    assert sum(grammar.masks for grammar in costly) == 26  # one mask in four steps
    assert [grammar.masks for grammar in costly] == [26, *[0] * 9]  # one reply after the other


def test_cheap_masks_go_first_and_take_turns():
    cheap, costly = [Timed(number, STEP_SECONDS / 10) for number in range(20)], Timed(0, 4 * STEP_SECONDS)
    steps(MaskTurns(), [None, costly, *cheap], PATIENCE)
    assert costly.masks == 0
    assert {abs(grammar.masks - PATIENCE // 2) for grammar in cheap} <= {0, 1}
    steps(MaskTurns(), [None, costly, *cheap], 4)
    assert costly.masks == 1


def test_one_row_at_least_takes_part_where_all_have_schemas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mask_turns, "ALONE_SECONDS", 0.0)
    rows = [Timed(number, 1.0) for number in range(3)]
    steps(MaskTurns(), rows, 9)
    assert sum(row.masks for row in rows) == 9


SCHEMA = json.dumps({"type": "array", "items": {"enum": ["cat", 12, True]}, "minItems": 2, "maxItems": 4})


@pytest.mark.parametrize("family", ["ours", "qwen3.5"])
def test_rows_that_wait_for_their_masks_say_the_same_as_alone(family: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = tiny_tokenizer(VOCABULARY)
    model = tiny_gpt(VOCABULARY, 160, bigram_rows=211, offset_layers=1) if family == "ours" else tiny_qwen(family)
    asked = [(words(9 + i, i), Sampling(1.0, None, 30 - 5 * i, i, schema=None if i == 1 else SCHEMA)) for i in range(4)]

    def replies(slots: int) -> list[Completion]:
        engine = Engine(model, tokenizer, slots, 160)
        said = {engine.submit(*request): Completion() for request in asked}
        while engine.busy:
            for event in engine.step():
                said[event.request].add(event)
        return list(said.values())

    alone = replies(1)
    monkeypatch.setattr(mask_turns, "STEP_SECONDS", 1e-5)
    monkeypatch.setattr(mask_turns, "ALONE_SECONDS", 1e-5)
    waited: list[int] = []
    take = MaskTurns.take

    def counted(self: MaskTurns, grammars: Any) -> dict[int, bytes]:
        masks = take(self, grammars)
        waited.append(sum(grammar is not None for grammar in grammars) - len(masks))
        return masks

    monkeypatch.setattr(MaskTurns, "take", counted)
    assert [(reply.tokens, reply.finish) for reply in replies(4)] == [(reply.tokens, reply.finish) for reply in alone]
    assert sum(waited) > 10


def test_a_finished_reply_keeps_no_automaton_alive():
    """Its slot keeps the request, whose tokens a later prompt may share."""
    engine = Engine(tiny_gpt(VOCABULARY, 160), tiny_tokenizer(VOCABULARY), 4, 160)
    automaton = weakref.ref(engine.schemas.prepare(SCHEMA))
    engine.generate([words(30, 1)], Sampling(0.0, max_tokens=9, schema=SCHEMA))
    engine.schemas.give_up(SCHEMA)
    gc.collect()
    assert automaton() is None

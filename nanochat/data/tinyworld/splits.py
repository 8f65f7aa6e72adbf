"""The split between training and evaluation: which facts, names, sums and turns are held out."""

import functools
import hashlib

from nanochat.data.tinyworld.facts import Fact, all_facts, facts_by_relation
from nanochat.data.tinyworld.wording import SPLIT_SEED, split_rng

HELD_OUT_SHARE = 0.1
SMALLEST_RELATION = 6
# New users ask about these first, so nothing about them is held out.
FAMOUS = frozenset(
    (
        "China France Japan Germany Italy Egypt sky sun moon water cat dog cow apple banana hot "
        "big good up"
    ).split()
) | {"United Kingdom", "United States"}


@functools.cache
def held_out_keys() -> frozenset[tuple[str, ...]]:
    """Return the keys of the facts that training never asks about.

    The documents do state these facts. A fact is held out in both languages or in none, so that a
    model cannot learn an answer through the other language. Relations with fewer than six facts
    have no held-out facts.
    """
    keys: set[tuple[str, ...]] = set()
    for relation, facts in facts_by_relation().items():
        if len(facts) < SMALLEST_RELATION:
            continue
        candidates = [fact for fact in facts if not _is_famous(fact)]
        size = max(1, round(HELD_OUT_SHARE * len(facts)))
        held_out = split_rng("combination", relation).sample(candidates, size)
        keys.update(fact.key for fact in held_out)
    return frozenset(keys)


def _is_famous(fact: Fact) -> bool:
    return any(word.key in FAMOUS for word in (fact.value, *fact.subjects))


@functools.cache
def asked_facts() -> tuple[Fact, ...]:
    """Return the facts that training asks about."""
    return tuple(fact for fact in all_facts() if fact.key not in held_out_keys())


@functools.cache
def held_out_facts() -> tuple[Fact, ...]:
    """Return the facts that training never asks about."""
    return tuple(fact for fact in all_facts() if fact.key in held_out_keys())


def place(*names: object) -> float:
    """Return a number in [0, 1) from a hash of the names, the same on every platform."""
    text = "/".join((SPLIT_SEED, *map(str, names)))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def kept_for_evaluation(*names: object) -> bool:
    """Return whether the item that the names identify, such as a sum, is kept for evaluation.

    About a tenth of all items are kept.
    """
    return place(*names) < HELD_OUT_SHARE

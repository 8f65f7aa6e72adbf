"""Reads a tale by the grammar, and says what is wrong with it: the grader of stories that a model tells."""

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nanochat.data.tinyworld.talks.tale_grammar import (
    SENTENCES,
    Facts,
    Plot,
    plots,
    says,
    slots,
    tale_data,
)
from nanochat.data.tinyworld.words import Language

Role = Literal["open", "describe", "plot", "end"]


@dataclass(frozen=True)
class Place:
    """Where a sentence can stand in a story: its role, which description or plot it belongs to, and its step there."""

    role: Role
    name: str = ""
    step: int = 0


@dataclass(frozen=True)
class Meaning:
    """One way to understand a sentence: its place, and what it says."""

    place: Place
    facts: Facts
    speaks_of: frozenset[str]


@dataclass(frozen=True)
class _Rule:
    place: Place
    pattern: re.Pattern[str]
    slots: tuple[str, ...]
    speaks_of: frozenset[str]


def _rule(place: Place, pattern: str, language: Language) -> _Rule:
    """The regular expression of a pattern, with one group for each slot."""
    pieces = re.split(r"\{(\w+)\}", pattern)
    table = slots(language)
    expression = ""
    for i, piece in enumerate(pieces):
        texts = sorted(table[piece], key=len, reverse=True) if i % 2 else ()
        expression += f"({'|'.join(map(re.escape, texts))})" if i % 2 else re.escape(piece)
    return _Rule(place, re.compile(expression), tuple(pieces[1::2]), says(pattern, language))


@functools.cache
def _rules(language: Language) -> tuple[_Rule, ...]:
    data = tale_data()
    found = [(Place("open"), pattern) for pattern in data["open"][language]]
    found += [
        (Place("describe", kind), one)
        for kind, by in data["describe"].items()
        for one in by[language]
    ]
    for plot in plots(language):
        found += [
            (Place("plot", plot.name, i), one) for i, step in enumerate(plot.steps) for one in step
        ]
    found += [(Place("end"), pattern) for pattern in data["end"][language]]
    return tuple(_rule(place, pattern, language) for place, pattern in found)


def together(one: Facts, other: Facts) -> Facts | None:
    """Both together, or None if they contradict each other."""
    if any(other[name] != value for name, value in one.items() if name in other):
        return None
    return {**one, **other}


def meanings(sentence: str, language: Language) -> list[Meaning]:
    """Every way in which the grammar understands a sentence; a sentence that it cannot make has none."""
    found: list[Meaning] = []
    for rule in _rules(language):
        match = rule.pattern.fullmatch(sentence)
        facts: Facts | None = {} if match else None
        for slot, text in zip(rule.slots, match.groups() if match else (), strict=False):
            facts = facts if facts is None else together(facts, slots(language)[slot][text])
        if facts is not None:
            found.append(Meaning(rule.place, facts, rule.speaks_of))
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a story; what remains after the last full stop comes last."""
    text = unicodedata.normalize("NFC", text).strip()
    return [
        piece.strip()
        for piece in re.findall(r".*?[.!?。！？][\"”]?(?=\s|$|[^\s\"”])|.+$", text)
        if piece.strip()
    ]


def _follows(
    before: Sequence[Meaning], known: frozenset[str], new: Meaning, by_name: dict[str, Plot]
) -> bool:
    """Whether a sentence can stand after the sentences before it; `known` are the variables that they introduced."""
    place, last = new.place, before[-1].place if before else None
    if last is None or place.role == "open":
        return last is None and place.role == "open"
    if last.role == "end":
        return False
    if place.role == "describe":
        return last.role in ("open", "describe") and place not in [one.place for one in before]
    if place.role == "plot":
        plot = by_name[place.name]
        if last.role != "plot":
            return set(plot.needs) <= known and place.step == (1 if plot.optional == 0 else 0)
        between = range(last.step + 1, place.step)
        return (
            last.name == place.name and place.step > last.step and set(between) <= {plot.optional}
        )
    if last.role != "plot":
        return False
    plot = by_name[last.name]
    rest = range(last.step + 1, len(plot.steps))
    return set(rest) <= {plot.optional} and new.speaks_of <= known


def _readings(
    understood: Sequence[Sequence[Meaning]],
    before: tuple[Meaning, ...],
    facts: Facts,
    by_name: dict[str, Plot],
) -> Iterator[Facts]:
    """What the story says, for every way to read it from the first sentence to the last."""
    if len(before) == len(understood):
        if before[-1].place.role == "end":
            yield facts
        return
    known = frozenset().union(*(one.speaks_of for one in before))
    for new in understood[len(before)]:
        more = together(facts, new.facts)
        if more is not None and _follows(before, known, new, by_name):
            yield from _readings(understood, (*before, new), more, by_name)


def fault(story: str, hero: str | None, language: Language) -> str | None:
    """What is wrong with a story about a hero (None: about any hero), or None if nothing is.

    A story has four to eight sentences, all different, each of them one that the grammar can make. It opens, describes,
    tells one plot in order and ends; names, pronouns and all other facts agree from the first sentence to the last.
    """
    told = sentences(story)
    if not SENTENCES[0] <= len(told) <= SENTENCES[1]:
        return f"it has {len(told)} sentences"
    if len(set(told)) < len(told):
        return "a sentence comes twice"
    understood = [meanings(sentence, language) for sentence in told]
    for sentence, ways in zip(told, understood, strict=True):
        if not ways:
            return f"a broken sentence: {sentence}"
    if not any(way.place.role == "end" for way in understood[-1]):
        return "it does not end as a story does"
    by_name = {plot.name: plot for plot in plots(language)}
    readings = list(_readings(understood, (), {}, by_name))
    if not readings:
        return "its facts contradict each other, or its sentences are in the wrong order"
    if hero is not None and all(facts["h"] != hero for facts in readings):
        return f"it is about {readings[0]['h']}"
    return None

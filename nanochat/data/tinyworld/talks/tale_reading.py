"""Grade stories that a model tells: read them by the grammar, and report the first fault."""

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nanochat.data.tinyworld.talks.tale_grammar import (
    SENTENCES,
    SLOT,
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
    """A place where a sentence can stand in a story.

    `name` is the plot or the described variable, if any, and `step` the index of the step in the
    plot.
    """

    role: Role
    name: str = ""
    step: int = 0


@dataclass(frozen=True)
class Meaning:
    """One way to understand a sentence: its place in a story, and the facts that it states.

    `speaks_of` holds the variables that the sentence mentions, without the pronoun.
    """

    place: Place
    facts: Facts
    speaks_of: frozenset[str]


def fault(
    story: str,
    hero: str | None,
    language: Language,
) -> str | None:
    """Return a phrase that names a fault of a story, or None if the story is correct.

    `hero` is the key of the hero that the story must be about, or None for any. A correct story has
    four to eight different sentences, all of which the grammar can make: an opening, descriptions
    if any, one plot in order, and an ending. No fact, name or pronoun contradicts another.
    """
    story_sentences = sentences(story)
    smallest, largest = SENTENCES
    if not smallest <= len(story_sentences) <= largest:
        return f"it has {len(story_sentences)} sentences"
    if len(set(story_sentences)) < len(story_sentences):
        return "a sentence comes twice"
    understood = [meanings(sentence, language) for sentence in story_sentences]
    for sentence, readings in zip(story_sentences, understood, strict=True):
        if not readings:
            return f"a broken sentence: {sentence}"
    if not any(meaning.place.role == "end" for meaning in understood[-1]):
        return "it does not end as a story does"
    by_name = {plot.name: plot for plot in plots(language)}
    stories = list(_readings(understood, (), {}, by_name))
    if not stories:
        return "its facts contradict each other, or its sentences are in the wrong order"
    if hero is not None and all(facts["h"] != hero for facts in stories):
        return f"it is about {stories[0]['h']}"
    return None


# --- sentences -----------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    """Return the sentences of a story.

    Text after the last full stop counts as a sentence.
    """
    text = unicodedata.normalize("NFC", text).strip()
    pieces = re.findall(r".*?[.!?。！？][\"”]?(?=\s|$|[^\s\"”])|.+$", text)
    return [piece.strip() for piece in pieces if piece.strip()]


def meanings(sentence: str, language: Language) -> list[Meaning]:
    """Return every meaning that a sentence can have, or [] if the grammar cannot make it."""
    table = slots(language)
    readings: list[Meaning] = []
    for rule in _rules(language):
        match = rule.pattern.fullmatch(sentence)
        if match is None:
            continue
        facts: Facts | None = {}
        for slot, text in zip(rule.slots, match.groups(), strict=True):
            if facts is not None:
                facts = together(facts, table[slot][text])
        if facts is not None:
            readings.append(Meaning(rule.place, facts, rule.speaks_of))
    return readings


def together(left: Facts, right: Facts) -> Facts | None:
    """Return the union of two sets of facts, or None if they contradict each other."""
    for name, value in left.items():
        if right.get(name, value) != value:
            return None
    return {**left, **right}


@dataclass(frozen=True)
class _Rule:
    """A sentence pattern of the grammar as a regular expression, with one group for each slot."""

    place: Place
    pattern: re.Pattern[str]
    slots: tuple[str, ...]
    speaks_of: frozenset[str]


@functools.cache
def _rules(language: Language) -> tuple[_Rule, ...]:
    data = tale_data()
    rules = [_rule(Place("open"), pattern, language) for pattern in data["open"][language]]
    for variable, descriptions in data["describe"].items():
        for pattern in descriptions[language]:
            rules.append(_rule(Place("describe", variable), pattern, language))
    for plot in plots(language):
        for number, step in enumerate(plot.steps):
            for pattern in step:
                rules.append(_rule(Place("plot", plot.name, number), pattern, language))
    for pattern in data["end"][language]:
        rules.append(_rule(Place("end"), pattern, language))
    return tuple(rules)


def _rule(
    place: Place,
    pattern: str,
    language: Language,
) -> _Rule:
    table = slots(language)
    pieces = SLOT.split(pattern)  # words and slots alternate
    slot_names = tuple(pieces[1::2])
    expression = re.escape(pieces[0])
    for slot, words in zip(slot_names, pieces[2::2], strict=True):
        texts = sorted(table[slot], key=len, reverse=True)
        expression += f"({'|'.join(map(re.escape, texts))})" + re.escape(words)
    return _Rule(place, re.compile(expression), slot_names, says(pattern, language))


# --- the order of sentences ----------------------------------------------------------------------


def _readings(
    understood: Sequence[Sequence[Meaning]],
    before: tuple[Meaning, ...],
    facts: Facts,
    by_name: dict[str, Plot],
) -> Iterator[Facts]:
    """Yield the facts of a story for each way to understand it that begins with `before`.

    `understood` holds the possible meanings of each sentence. `facts` are the facts of `before`.
    """
    if len(before) == len(understood):
        if before[-1].place.role == "end":
            yield facts
        return
    introduced = frozenset().union(*(meaning.speaks_of for meaning in before))
    for meaning in understood[len(before)]:
        all_facts = together(facts, meaning.facts)
        if all_facts is not None and _follows(before, introduced, meaning, by_name):
            yield from _readings(understood, (*before, meaning), all_facts, by_name)


def _follows(
    before: Sequence[Meaning],
    introduced: frozenset[str],  # the variables that the sentences before speak of
    meaning: Meaning,
    by_name: dict[str, Plot],
) -> bool:
    """Return whether a sentence with this meaning can stand after the sentences `before`."""
    place = meaning.place
    if not before or place.role == "open":
        return not before and place.role == "open"
    last = before[-1].place
    if last.role == "end":
        return False
    if place.role == "describe":
        places = [earlier.place for earlier in before]
        return last.role in ("open", "describe") and place not in places
    if place.role == "plot":
        return _plot_continues(last, place, by_name[place.name], introduced)
    # An ending: the plot must be complete, except for its optional step.
    if last.role != "plot":
        return False
    plot = by_name[last.name]
    left_out = set(range(last.step + 1, len(plot.steps)))
    return left_out <= {plot.optional} and meaning.speaks_of <= introduced


def _plot_continues(
    last: Place,
    place: Place,
    plot: Plot,
    introduced: frozenset[str],
) -> bool:
    """Return whether the plot step `place` can stand after the sentence at `last`."""
    if last.role != "plot":
        first_step = 1 if plot.optional == 0 else 0
        return set(plot.needs) <= introduced and place.step == first_step
    left_out = set(range(last.step + 1, place.step))
    return last.name == place.name and place.step > last.step and left_out <= {plot.optional}

"""The grammar of tales: possible heroes, words for each slot of a sentence, order of sentences."""

import functools
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanochat.data.tinyworld.splits import FAMOUS, HELD_OUT_SHARE
from nanochat.data.tinyworld.wording import split_rng
from nanochat.data.tinyworld.words import (
    Language,
    Word,
    article,
    chinese,
    data_text,
    english,
    lexicon,
)

Facts = Mapping[str, str]
"""The facts that a story states, by variable: h is the kind of hero and p its name, q the friend,
x the home, t a trait, l the thing that is found, o and c an object and its colour, he the pronoun
for the hero."""

SENTENCES = (4, 8)
SLOT = re.compile(r"\{(\w+)\}")


@functools.cache
def tale_data() -> dict:
    """Return the content of tales.json."""
    return json.loads(data_text("tales.json"))


# --- heroes --------------------------------------------------------------------------------------


@functools.cache
def heroes() -> dict[str, Word]:
    """Return the heroes of tales by key, except for invented ones.

    These are most countable things of the world, and the heroes that people ask for first, such as
    the moon, a dragon or a teacher.
    """
    words = dict(_counted())
    for en, zh in _more_heroes().items():
        key = _bare(en)
        words[key] = Word(key, english(key, "a"), chinese(zh))
    return words


def _counted() -> dict[str, Word]:
    """Return the countable animals, plants and things of the world that can be heroes, by key."""
    words = {}
    for key, word in lexicon().items():
        is_countable = word.en.plural and word.zh.counted
        if is_countable and key not in tale_data()["not_heroes"]:
            words[key] = word
    return words


def _more_heroes() -> dict[str, str]:
    """Return the additional heroes in tales.json, as a dict from English to Chinese names.

    An English name begins with "the" if requests use it that way, as in "the sun".
    """
    return tale_data()["more_heroes"]


def _bare(name: str) -> str:
    return name.removeprefix("the ")


@functools.cache
def asked_for() -> dict[str, Word]:
    """Return the heroes by key, with the names that requests use.

    A request asks for a story about the sun, but the story tells of a sun.
    """
    words = dict(heroes())
    for en in _more_heroes():
        key = _bare(en)
        if key != en:
            words[key] = replace(words[key], en=english(key, "the"))
    return words


@functools.cache
def held_out_heroes() -> tuple[str, ...]:
    """Return the keys of the heroes that appear in no training story.

    They are about a tenth of the countable heroes.
    """
    data = tale_data()
    counted = _counted()
    in_stories = FAMOUS | set(data["friends"]) | set(data["props"])
    liked_plurals = {en for en, _ in data["likes"]}
    candidates = []
    for key, word in counted.items():
        if key not in in_stories and word.en.plural not in liked_plurals:
            candidates.append(key)
    size = round(HELD_OUT_SHARE * len(counted))
    return tuple(split_rng("tales").sample(candidates, size))


@functools.cache
def trained_heroes() -> tuple[str, ...]:
    """Return the keys of the heroes that may appear in training stories."""
    return tuple(key for key in heroes() if key not in held_out_heroes())


# --- slots: the texts that may fill them, and the facts that each text states --------------------


def names(language: Language) -> dict[str, str]:
    """Return a dict from each name that a hero may have to its pronoun, which is "" in Chinese.

    No friend of a hero has any of these names.
    """
    data = tale_data()["names"][language]
    if language == "zh":
        return dict.fromkeys(data, "")
    pronouns = {}
    for pronoun, names_with_pronoun in data.items():
        pronouns |= dict.fromkeys(names_with_pronoun, pronoun)
    return pronouns


@functools.cache
def slots(language: Language) -> dict[str, dict[str, Facts]]:
    """Return, for each slot, the texts that may fill it, with the facts that each text states."""
    heroes_by_name: dict[str, Facts] = {}
    for name, pronoun in names(language).items():
        heroes_by_name[name] = {"p": name, "he": pronoun}
    # Each kind of friend always has the same name, so the name tells what the friend is.
    by_short_name: dict[str, Facts] = {}
    by_full_name: dict[str, Facts] = {}
    for key, friend_names in tale_data()["friends"].items():
        name = friend_names[language]
        full_name = f"{name} the {lexicon()[key].en.name}" if language == "en" else name
        short_name = name if language == "en" else name[-2:]
        by_short_name[short_name] = {"q": key}
        by_full_name[full_name] = {"q": key}
    people = {"p": heroes_by_name, "q": by_short_name, "Q": by_full_name}
    language_slots = _english_slots() if language == "en" else _chinese_slots()
    return people | language_slots


def _english_slots() -> dict[str, dict[str, Facts]]:
    data = tale_data()
    words = lexicon()
    traits = [en for en, _ in data["traits"]]
    colours = data["colours"]
    return {
        "h": {word.en.name: {"h": key} for key, word in heroes().items()},
        "ah": {word.en.usual: {"h": key} for key, word in heroes().items()},
        "x": {where: {"x": where} for where, _, _ in data["homes"]},
        "xb": {place: {"x": where} for where, place, _ in data["homes"]},
        "t": {trait: {"t": trait} for trait in traits},
        "at": {f"{article(trait)} {trait}": {"t": trait} for trait in traits},
        "l": {en: {"l": en} for en, _ in data["likes"]},
        "o": {words[key].en.name: {"o": key} for key in data["props"]},
        "c": {colour: {"c": colour} for colour in colours},
        "ac": {f"{article(colour)} {colour}": {"c": colour} for colour in colours},
        "he": {pronoun: {"he": pronoun} for pronoun in ("he", "she")},
        "He": {pronoun.capitalize(): {"he": pronoun} for pronoun in ("he", "she")},
    }


def _chinese_slots() -> dict[str, dict[str, Facts]]:
    data = tale_data()
    words = lexicon()
    objects: dict[str, Facts] = {}
    counted_things: dict[str, Facts] = {}
    for prop, colour in itertools.product(data["props"], data["colours"]):
        object_name = f"{words[colour].zh.name}的{words[prop].zh.name}"
        objects[object_name] = {"o": prop, "c": colour}
        counted_things[_measure(prop) + object_name] = {"o": prop, "c": colour}
    return {
        "h": {word.zh.name: {"h": key} for key, word in heroes().items()},
        "co": objects,
        "mo": counted_things,
        "x": {zh: {"x": en} for en, _, zh in data["homes"]},
        "t": {zh: {"t": en} for en, zh in data["traits"]},
        "l": {zh: {"l": en} for en, zh in data["likes"]},
    }


def _measure(key: str) -> str:
    """Return 一 and the measure word of a thing."""
    noun = lexicon()[key].zh
    return "一" + noun.counted.removesuffix(noun.name)


def fill(
    pattern: str,
    facts: Facts,
    language: Language,
    hero: Word,
) -> str:
    """Return a sentence pattern with its slots filled from `hero` and the facts of a story.

    The hero may be an invented one.
    """
    table = _slot_texts(language)

    def text(slot: re.Match[str]) -> str:
        name = slot[1]
        if name == "h":
            return hero[language].name
        if name == "ah":
            return hero[language].usual
        variables, texts = table[name]
        return texts[tuple(facts[variable] for variable in variables)]

    return SLOT.sub(text, pattern)


@functools.cache
def _slot_texts(
    language: Language,
) -> dict[str, tuple[tuple[str, ...], dict[tuple[str, ...], str]]]:
    """Return, for each slot, its variables and a dict from their values to the slot's text."""
    table = {}
    for slot, texts in slots(language).items():
        by_values = {tuple(facts.values()): text for text, facts in texts.items()}
        table[slot] = (_variables(texts), by_values)
    return table


def _variables(texts: dict[str, Facts]) -> tuple[str, ...]:
    """Return the variables that a slot mentions, which are the same for all its texts."""
    return tuple(next(iter(texts.values())))


@functools.cache
def says(pattern: str, language: Language) -> frozenset[str]:
    """Return the variables that a sentence pattern mentions, except for the pronoun."""
    table = slots(language)
    variables: set[str] = set()
    for slot in SLOT.findall(pattern):
        variables.update(_variables(table[slot]))
    return frozenset(variables - {"he"})


# --- plots ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plot:
    """The events of a story, as steps in order; a step is a choice of sentence patterns.

    The step with the index `optional` may be left out. The variables in `needs` must be introduced
    before the plot.
    """

    name: str
    needs: str
    optional: int
    steps: tuple[tuple[str, ...], ...]


@functools.cache
def plots(language: Language) -> tuple[Plot, ...]:
    """Return all plots in one language."""
    table = []
    for plot in tale_data()["plots"]:
        steps = tuple(tuple(step[language]) for step in plot["steps"])
        table.append(Plot(plot["name"], plot["needs"], plot["optional"], steps))
    return tuple(table)

"""The grammar of tales: who can be a hero, what may fill each slot of a sentence, and which sentences follow which."""

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
"""What a story says, by variable: h is what the hero is and p its name, q the friend, x the home, t a trait, l what is
found, o and c a thing and its colour, he the pronoun of the hero's name."""

SENTENCES = (4, 8)


@functools.cache
def tale_data() -> dict:
    """The words and sentences of tales."""
    return json.loads(data_text("tales.json"))


@functools.cache
def heroes() -> dict[str, Word]:
    """Everything that a tale can be about, by key: what can be counted, and what people ask for first, such as the
    moon, a dragon or a teacher."""
    more = {
        _bare(en): Word(_bare(en), english(_bare(en), "a"), chinese(zh))
        for en, zh in _more().items()
    }
    return {**_counted(), **more}


def _counted() -> dict[str, Word]:
    """The animals, plants and things of the world that can be counted and can be heroes."""
    left_out = set(tale_data()["not_heroes"])
    return {
        k: w for k, w in lexicon().items() if w.en.plural and w.zh.counted and k not in left_out
    }


def _more() -> dict[str, str]:
    """The heroes of tales.json's own, English to Chinese; an English name has "the" if a request says "the sun"."""
    return tale_data()["more_heroes"]


def _bare(name: str) -> str:
    return name.removeprefix("the ")


@functools.cache
def asked_for() -> dict[str, Word]:
    """The heroes as a request names them: it asks for a story about the sun, which then tells of a sun."""
    the = {_bare(en) for en in _more() if en != _bare(en)}
    return {
        key: replace(hero, en=english(key, "the")) if key in the else hero
        for key, hero in heroes().items()
    }


@functools.cache
def held_out_heroes() -> tuple[str, ...]:
    """The tenth of the things that can be counted of which no story of training tells."""
    counted, told = _counted(), FAMOUS | set(tale_data()["friends"]) | set(tale_data()["props"])
    plurals = {one for one, _ in tale_data()["likes"]}
    free = [
        key for key, word in counted.items() if key not in told and word.en.plural not in plurals
    ]
    return tuple(split_rng("tales").sample(free, round(HELD_OUT_SHARE * len(counted))))


@functools.cache
def trained_heroes() -> tuple[str, ...]:
    """The heroes of the stories in training."""
    return tuple(key for key in heroes() if key not in held_out_heroes())


def names(language: Language) -> dict[str, str]:
    """The names that heroes may have, none of which a friend has, and the pronoun of each; Chinese stories use none."""
    data = tale_data()["names"][language]
    if language == "zh":
        return dict.fromkeys(data, "")
    return {name: pronoun for pronoun, some in data.items() for name in some}


def _measure(key: str) -> str:
    noun = lexicon()[key].zh
    return "一" + noun.counted.removesuffix(noun.name)


@functools.cache
def slots(language: Language) -> dict[str, dict[str, Facts]]:
    """For each slot of a pattern the texts that may fill it, and what each text says."""
    data, words = tale_data(), lexicon()
    called = names(language)
    found: dict[str, dict[str, Facts]] = {"p": {n: {"p": n, "he": he} for n, he in called.items()}}
    for key, called in data[
        "friends"
    ].items():  # a friend is always called the same, so a name says what it is
        name = called[language]
        found.setdefault("q", {})[name if language == "en" else name[-2:]] = {"q": key}
        found.setdefault("Q", {})[
            f"{name} the {words[key].en.name}" if language == "en" else name
        ] = {"q": key}
    things = list(itertools.product(data["props"], data["colours"]))
    if language == "zh":
        found["h"] = {word.zh.name: {"h": key} for key, word in heroes().items()}
        coloured = {(o, c): f"{words[c].zh.name}的{words[o].zh.name}" for o, c in things}
        found["co"] = {coloured[o, c]: {"o": o, "c": c} for o, c in things}
        found["mo"] = {_measure(o) + coloured[o, c]: {"o": o, "c": c} for o, c in things}
        found["x"] = {zh: {"x": en} for en, _, zh in data["homes"]}
        found["t"] = {zh: {"t": en} for en, zh in data["traits"]}
        found["l"] = {zh: {"l": en} for en, zh in data["likes"]}
        return found
    found["h"] = {word.en.name: {"h": key} for key, word in heroes().items()}
    found["ah"] = {word.en.usual: {"h": key} for key, word in heroes().items()}
    found["x"] = {where: {"x": where} for where, _, _ in data["homes"]}
    found["xb"] = {place: {"x": where} for where, place, _ in data["homes"]}
    found["t"] = {en: {"t": en} for en, _ in data["traits"]}
    found["at"] = {f"{article(en)} {en}": {"t": en} for en, _ in data["traits"]}
    found["l"] = {en: {"l": en} for en, _ in data["likes"]}
    found["o"] = {words[o].en.name: {"o": o} for o in data["props"]}
    found["c"] = {c: {"c": c} for c in data["colours"]}
    found["ac"] = {f"{article(c)} {c}": {"c": c} for c in data["colours"]}
    found["he"] = {he: {"he": he} for he in ("he", "she")}
    found["He"] = {he.capitalize(): {"he": he} for he in ("he", "she")}
    return found


def fill(pattern: str, facts: Facts, language: Language, hero: Word) -> str:
    """The sentence that a pattern makes of the facts of a story, whose hero may be a thing that does not exist."""
    table = _texts(language)

    def text(slot: re.Match[str]) -> str:
        if slot[1] in ("h", "ah"):
            return hero[language].usual if slot[1] == "ah" else hero[language].name
        variables, texts = table[slot[1]]
        return texts[tuple(facts[variable] for variable in variables)]

    return re.sub(r"\{(\w+)\}", text, pattern)


@functools.cache
def _texts(language: Language) -> dict[str, tuple[tuple[str, ...], dict[tuple[str, ...], str]]]:
    """For each slot the variables that it speaks of, and its text for their values."""
    return {
        slot: (
            tuple(next(iter(texts.values()))),
            {tuple(about.values()): text for text, about in texts.items()},
        )
        for slot, texts in slots(language).items()
    }


@functools.cache
def says(pattern: str, language: Language) -> frozenset[str]:
    """The variables that a pattern speaks of."""
    table = slots(language)
    return frozenset(
        variable
        for slot in re.findall(r"\{(\w+)\}", pattern)
        for variable in next(iter(table[slot].values()))
    ) - {"he"}


@dataclass(frozen=True)
class Plot:
    """What happens in a story: steps in order, of which the optional one may be left out. The variables of `needs` are
    introduced before the plot."""

    name: str
    needs: str
    optional: int
    steps: tuple[tuple[str, ...], ...]


@functools.cache
def plots(language: Language) -> tuple[Plot, ...]:
    """All plots in one language."""
    return tuple(
        Plot(
            one["name"],
            one["needs"],
            one["optional"],
            tuple(tuple(step[language]) for step in one["steps"]),
        )
        for one in tale_data()["plots"]
    )

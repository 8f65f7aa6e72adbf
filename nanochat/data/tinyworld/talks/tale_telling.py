"""Tells tales: about a hero, in four to eight sentences, in either language, and asks for them."""

import functools
import random
import re

from nanochat.data.conversation import Message, assistant, user
from nanochat.data.tinyworld.talks.tale_grammar import (
    Facts,
    asked_for,
    fill,
    held_out_heroes,
    heroes,
    names,
    plots,
    says,
    tale_data,
    trained_heroes,
)
from nanochat.data.tinyworld.wording import split_rng
from nanochat.data.tinyworld.words import (
    LANGUAGES,
    Language,
    Word,
    article,
    chinese,
    english,
    lexicon,
)

WITHOUT_TOPIC = 0.05  # the share of requests that leave the hero open
MADE_UP = 0.4  # the share whose hero does not exist, so that a model learns to copy whatever it was asked for
LONG_NAME = 0.3  # the share of made-up Chinese words with three characters; the others have two


def facts_about(hero: Word, rng: random.Random, language: Language) -> Facts:
    """What a story says about a hero: its name, friend, home, trait, what it finds, and a thing with its colour."""
    data, called = tale_data(), names(language)
    p = rng.choice(list(called))
    likes = [en for en, zh in data["likes"] if en != hero.en.plural and hero.zh.name not in zh]
    return {
        "p": p,
        "he": called[p],
        "h": hero.key,
        "q": rng.choice(list(data["friends"])),
        "x": rng.choice(data["homes"])[0],
        "t": rng.choice(data["traits"])[0],
        "l": rng.choice(likes),
        "o": rng.choice([prop for prop in data["props"] if prop != hero.key]),
        "c": rng.choice(data["colours"]),
    }


def tale(hero: Word, language: Language, rng: random.Random) -> str:
    """A story of five to eight sentences about a hero."""
    data, facts = tale_data(), facts_about(hero, rng, language)
    plot = rng.choice(plots(language))
    opening = rng.choice(data["open"][language])
    known = set(says(opening, language))
    wanted = {kind for kind in plot.needs if kind not in known}
    # A trait and a thing never come together: a model that has told of home and trait would add the thing all the same,
    # and its story would have nine sentences.
    more = [kind for kind in ("x" if "o" in wanted else "xt") if kind not in known | wanted]
    wanted |= set(rng.sample(more, min(len(more), rng.randint(0, 1))))
    patterns = [opening]
    # Always in this order: a small model does not remember what it has described.
    patterns += [
        rng.choice(by[language]) for kind, by in data["describe"].items() if kind in wanted
    ]
    skipped = plot.optional if rng.random() < 0.3 else None
    patterns += [rng.choice(step) for i, step in enumerate(plot.steps) if i != skipped]
    known = frozenset().union(*(says(pattern, language) for pattern in patterns))
    patterns.append(
        rng.choice([end for end in data["end"][language] if says(end, language) <= known])
    )
    return ("" if language == "zh" else " ").join(
        fill(pattern, facts, language, hero) for pattern in patterns
    )


def beginning(hero: Word, language: Language, rng: random.Random) -> str:
    """The first sentences of a story about a hero, which say where it lives."""
    data, facts = tale_data(), facts_about(hero, rng, language)
    patterns = [rng.choice(data["open"][language])]
    if "x" not in says(patterns[0], language):
        patterns.append(rng.choice(data["describe"]["x"][language]))
    return ("" if language == "zh" else " ").join(
        fill(pattern, facts, language, hero) for pattern in patterns
    )


@functools.cache
def requests(language: Language, held_out: bool = False) -> tuple[str, ...]:
    """The ways to ask for a story that training uses, or the two that are held out. The plainest one is trained."""
    patterns = tale_data()["request"][language]
    kept = split_rng("tale request", language).sample(patterns[1:], 2)
    return tuple(pattern for pattern in patterns if (pattern in kept) == held_out)


def ask_for(hero: Word, pattern: str, language: Language) -> str:
    """A request for a story about a hero, or a story's title, which names it in the same way."""
    return fill(pattern, {}, language, asked_for().get(hero.key, hero))


@functools.cache
def _parts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The English and the Chinese words that made-up words are made of: all but the held-out heroes."""
    words = [word for key, word in lexicon().items() if key not in held_out_heroes()]
    return (
        tuple({word.en.name: None for word in words if re.fullmatch(r"[a-z]{4,}", word.en.name)}),
        tuple({word.zh.name: None for word in words if len(word.zh.name) > 1}),
    )


@functools.cache
def _known() -> frozenset[str]:
    """Every word of the world and every hero, in both languages."""
    words = (*lexicon().values(), *heroes().values())
    return frozenset(word[language].name for word in words for language in LANGUAGES)


def made_up(rng: random.Random) -> Word:
    """A thing that does not exist: the beginning of a word and the end of another, such as a "rocip"."""
    while True:
        (a, b), (c, d) = (rng.sample(words, 2) for words in _parts())
        en, zh = (
            a[: (len(a) + 1) // 2] + b[len(b) // 2 :],
            c[: 2 if rng.random() < LONG_NAME else 1] + d[-1],
        )
        plain = (article(en) == "an") == (en[0] in "aeiou")  # not "a eune"
        if plain and not {en, zh} & _known():
            return Word(en, english(en, "a"), chinese(zh))


def _hero(rng: random.Random) -> Word:
    """A hero of training, or a thing that does not exist."""
    return made_up(rng) if rng.random() < MADE_UP else heroes()[rng.choice(trained_heroes())]


def told(language: Language, rng: random.Random) -> list[Message]:
    """A request for a story and the story, about a hero of training or a thing that does not exist."""
    if rng.random() < WITHOUT_TOPIC:
        hero = heroes()[rng.choice(trained_heroes())]
        request = rng.choice(tale_data()["any"][language])
    else:
        hero = _hero(rng)
        request = ask_for(hero, rng.choice(requests(language)), language)
    return [user(request), assistant(tale(hero, language, rng))]


def begun(language: Language, rng: random.Random) -> list[Message]:
    """A request for the beginning of a story, and the beginning."""
    hero = _hero(rng)
    request = ask_for(hero, rng.choice(tale_data()["begin"][language]), language)
    return [user(request), assistant(beginning(hero, language, rng))]


def written(language: Language, rng: random.Random, whole: bool) -> str:
    """A story, or its beginning, with a title, as a document."""
    hero = _hero(rng)
    title = ask_for(hero, tale_data()["title"][language], language)
    return f"{title}\n{(tale if whole else beginning)(hero, language, rng)}"

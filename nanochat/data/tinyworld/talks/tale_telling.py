"""Tells tales: about a hero, in four to eight sentences, in either language, and asks for them."""

import functools
import random

from nanochat.data.conversation import Message, assistant, user
from nanochat.data.tinyworld.talks.tale_grammar import (
    Facts,
    fill,
    heroes,
    names,
    plots,
    says,
    tale_data,
    trained_heroes,
)
from nanochat.data.tinyworld.wording import split_rng
from nanochat.data.tinyworld.words import Language

WITHOUT_TOPIC = 0.05  # the share of requests that leave the hero open
WITH_TITLE = 0.5  # the share of the stories among documents that have a title


def facts_about(hero: str, rng: random.Random, language: Language) -> Facts:
    """What a story says about a hero: names, friend, home, trait, what it likes, and a thing with its colour."""
    data, called = tale_data(), names(language)
    p, q = rng.sample(list(called), 2)
    word = heroes()[hero]
    likes = [en for en, zh in data["likes"] if en != word.en.plural and word.zh.name not in zh]
    return {
        "p": p,
        "q": q,
        "he": called[p],
        "h": hero,
        "g": rng.choice([friend for friend in data["friends"] if friend != hero]),
        "x": rng.choice(data["homes"])[0],
        "t": rng.choice(data["traits"])[0],
        "l": rng.choice(likes),
        "o": rng.choice([prop for prop in data["props"] if prop != hero]),
        "c": rng.choice(data["colours"]),
    }


def tale(hero: str, language: Language, rng: random.Random) -> str:
    """A story of five to eight sentences about a hero, which is named by its key."""
    data, facts = tale_data(), facts_about(hero, rng, language)
    plot = rng.choice(plots(language))
    opening = rng.choice(data["open"][language])
    known = set(says(opening, language))
    wanted = [kind for kind in plot.needs if kind not in known]
    more = [kind for kind in "xtl" if kind not in known and kind not in wanted]
    wanted += rng.sample(more, min(len(more), rng.randint(0, max(0, 2 - len(wanted)))))
    rng.shuffle(wanted)
    wanted.sort(key="q".__eq__)  # the friend comes last, or "he" after it could mean the friend
    patterns = [opening]
    patterns += [rng.choice(data["describe"][kind][language]) for kind in wanted]
    skipped = plot.optional if rng.random() < 0.3 else None
    patterns += [rng.choice(step) for i, step in enumerate(plot.steps) if i != skipped]
    patterns.append(rng.choice(data["end"][language]))
    return ("" if language == "zh" else " ").join(fill(pattern, facts, language) for pattern in patterns)


@functools.cache
def requests(language: Language, held_out: bool = False) -> tuple[str, ...]:
    """The ways to ask for a story that training uses, or the two that are held out. The plainest one is trained."""
    patterns = tale_data()["request"][language]
    kept = split_rng("tale request", language).sample(patterns[1:], 2)
    return tuple(pattern for pattern in patterns if (pattern in kept) == held_out)


def ask_for(hero: str, pattern: str, language: Language) -> str:
    """A request for a story about a hero."""
    return fill(pattern, {"h": hero}, language)


def told(language: Language, rng: random.Random) -> list[Message]:
    """A request for a story and the story, about a hero of training."""
    hero = rng.choice(trained_heroes())
    if rng.random() < WITHOUT_TOPIC:
        request = rng.choice(tale_data()["any"][language])
    else:
        request = ask_for(hero, rng.choice(requests(language)), language)
    return [user(request), assistant(tale(hero, language, rng))]


def written(language: Language, rng: random.Random) -> str:
    """A story as a document, often with a title."""
    hero = rng.choice(trained_heroes())
    title = fill(tale_data()["title"][language], {"h": hero}, language) + "\n"
    return (title if rng.random() < WITH_TITLE else "") + tale(hero, language, rng)

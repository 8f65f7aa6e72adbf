"""Tales: every story that is told passes the grader, and a story with one thing wrong does not."""

import random
import re
from collections.abc import Callable

import pytest

from nanochat.data.tinyworld.splits import FAMOUS
from nanochat.data.tinyworld.talks.tale_grammar import (
    SENTENCES,
    held_out_heroes,
    heroes,
    slots,
    tale_data,
    trained_heroes,
)
from nanochat.data.tinyworld.talks.tale_reading import fault, meanings, sentences
from nanochat.data.tinyworld.talks.tale_telling import made_up, request_for, requests, tale
from nanochat.data.tinyworld.words import LANGUAGES, Language, lexicon
from tests.support.tinyworld_rows import corpus, training

Mutation = Callable[[list[str], Language, random.Random], list[str] | None]


def stories(language: Language, count: int = 300) -> list[tuple[str, str]]:
    """Heroes, the held-out ones too, and a story about each."""
    rng = random.Random(f"test/{language}")
    keys = [rng.choice(list(heroes())) for _ in range(count)]
    return [(key, tale(heroes()[key], language, rng)) for key in keys]


def join(told: list[str], language: Language) -> str:
    return ("" if language == "zh" else " ").join(told)


def test_stories_can_be_about_more_than_a_hundred_things_and_a_tenth_is_held_out():
    assert len(trained_heroes()) >= 100 and len(held_out_heroes()) >= 20
    assert not set(held_out_heroes()) & (FAMOUS | set(trained_heroes()) | set(tale_data()["friends"]))
    for language in LANGUAGES:
        names = [word[language].name for word in heroes().values()]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_story_passes(language: Language):
    for hero, story in stories(language, 600):
        assert fault(story, hero, language) is None, (story, fault(story, hero, language))
        assert SENTENCES[0] <= len(sentences(story)) <= SENTENCES[1]
        assert join(sentences(story), language) == story


def test_made_up_things_have_no_name_that_the_world_knows():
    rng = random.Random(0)
    known = {word[language].name for word in lexicon().values() for language in LANGUAGES}
    made = [made_up(rng) for _ in range(500)]
    assert not known & {name for word in made for name in (word.en.name, word.zh.name)}
    assert len({word.en.name for word in made}) > 490 and len({word.zh.name for word in made}) > 490
    story = tale(made[0], "en", rng)
    assert made[0].en.usual in story and fault(story, None, "en") == f"a broken sentence: {sentences(story)[0]}"


def swap(slot: str) -> Mutation:
    """A mutation that changes what one mention of a variable says, where the story speaks of it twice."""

    def mutate(told: list[str], language: Language, rng: random.Random) -> list[str] | None:
        texts = list(slots(language)[slot])
        name = slots(language)[slot][texts[0]].keys() - {"he"}
        spoken = [i for i, one in enumerate(told) if name <= meanings(one, language)[0].speaks_of]
        held = [i for i in spoken[1:] for text in texts if re.search(word(text, language), told[i])]
        if not held:
            return None
        i = rng.choice(held)
        there = max((text for text in texts if re.search(word(text, language), told[i])), key=len)
        other = rng.choice([text for text in texts if text not in told[i] and there not in text])
        return [*told[:i], re.sub(word(there, language), other, told[i]), *told[i + 1 :]]

    return mutate


def word(text: str, language: Language) -> str:
    return re.escape(text) if language == "zh" else rf"\b{re.escape(text)}\b"


def cut(told: list[str], language: Language, rng: random.Random) -> list[str]:
    """A sentence without its second half."""
    i = rng.randrange(len(told))
    return [*told[:i], told[i][: len(told[i]) // 2] + told[i][-1], *told[i + 1 :]]


def mutations() -> dict[str, Mutation]:
    """Every kind of mistake that a story may have; a mutation gives None where a story has no place for it."""
    return {
        "hero": swap("h"),
        "name": swap("p"),
        "friend": swap("q"),
        "home": swap("xb"),
        "likes": swap("l"),
        "pronoun": lambda told, language, rng: next(
            (
                [*told[:i], re.sub(r"\b(He|She)\b", lambda m: swapped[m[0]], one, count=1), *told[i + 1 :]]
                for i, one in enumerate(told)
                if re.search(r"\b(He|She)\b", one)
            ),
            None,
        ),
        "colour": lambda told, language, rng: recoloured(told, language),
        "cut": cut,
        "no end": lambda told, language, rng: told[:-1],
        "no beginning": lambda told, language, rng: told[1:],
        "too short": lambda told, language, rng: [told[0], *told[-2:]],
        "too long": lambda told, language, rng: [*told[:-1], *told[1:]],
        "twice": lambda told, language, rng: [*told[:-1], told[-2], told[-1]],
        "order": lambda told, language, rng: [*told[:-3], told[-2], told[-3], told[-1]],
        "unfinished": lambda told, language, rng: [*told[:-1], told[-1][:-1]],
    }


swapped = {"He": "She", "She": "He"}


def recoloured(told: list[str], language: Language) -> list[str] | None:
    names = [lexicon()[key][language].name for key in tale_data()["colours"]]
    coloured = [i for i, one in enumerate(told) if any(name in one for name in names)]
    if len(coloured) < 2:
        return None
    i = coloured[-1]
    there = next((name for name in names if re.search(word(name, language), told[i])), None)
    if there is None or not re.search(word(there, language), told[coloured[0]]):
        return None
    return [*told[:i], told[i].replace(there, names[names.index(there) - 1]), *told[i + 1 :]]


# In Chinese no pronoun stands for the hero, and what it is and where it lives is said once.
MISTAKES = [(kind, language) for kind in mutations() for language in LANGUAGES
            if language == "en" or kind not in ("pronoun", "hero", "home")]  # fmt: skip


@pytest.mark.parametrize(("kind", "language"), MISTAKES)
def test_a_story_with_a_mistake_fails(kind: str, language: Language):
    rng = random.Random(kind)
    changed = 0
    for hero, story in stories(language, 300):
        told = mutations()[kind](sentences(story), language, rng)
        if told is not None:
            changed += 1
            assert fault(join(told, language), hero, language), (story, told)
    assert changed >= 20


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_story_about_something_else_fails(language: Language):
    for hero, story in stories(language, 50):
        other = "dog" if hero != "dog" else "cat"
        assert fault(story, other, language) == f"it is about {hero}"
        assert fault(story, None, language) is None


@pytest.mark.parametrize("language", LANGUAGES)
def test_held_out_heroes_and_requests_are_never_in_a_story_of_training(language: Language):
    told = [(text, text) for text in corpus()]
    told += [
        (asked.text, reply.text)
        for conversation in training()
        for asked, reply in zip(conversation.messages[::2], conversation.messages[1::2], strict=True)
    ]
    tales = [(asked, reply) for asked, reply in told if fault(reply.split("\n")[-1], None, language) is None]
    assert len(tales) > 100
    held_out = [slots(language)["h"][name]["h"] for name in slots(language)["h"]]
    for key in held_out_heroes():
        assert key in held_out
        name = lexicon()[key][language].name
        for _, reply in tales:
            heard = {one for said in sentences(reply.split("\n")[-1]) for m in meanings(said, language)
                     for kind, one in m.facts.items() if kind in "hq"}  # fmt: skip
            assert key not in heard, (name, reply)
    asked = {question for question, _ in tales}
    assert not asked & {
        request_for(hero, one, language) for hero in heroes().values() for one in requests(language, held_out=True)
    }
    assert asked & {request_for(hero, requests(language)[0], language) for hero in heroes().values()}

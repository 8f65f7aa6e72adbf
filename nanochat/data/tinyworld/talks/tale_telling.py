"""Tell stories of five to eight sentences about a hero, in either language, and ask for them."""

import functools
import random
import re

from nanochat.data.conversation import Message, assistant, user
from nanochat.data.tinyworld.talks.tale_grammar import (
    Facts,
    Plot,
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
    joined,
    lexicon,
)

WITHOUT_TOPIC = 0.05  # the share of requests that leave the hero open
# The share of invented heroes, from which a model learns to tell of whatever it was asked for.
MADE_UP = 0.4
LONG_NAME = 0.3  # the share of made-up Chinese words with three characters; the others have two
LEAVES_OUT = 0.3  # the share of tales without the optional step of their plot


# --- tales ---------------------------------------------------------------------------------------


def facts_about(
    hero: Word,
    rng: random.Random,
    language: Language,
) -> Facts:
    """Draw and return the facts of a story about a hero, by variable; see Facts."""
    data = tale_data()
    pronouns = names(language)
    name = rng.choice(list(pronouns))
    likes = []
    for en, zh in data["likes"]:
        if en != hero.en.plural and hero.zh.name not in zh:
            likes.append(en)
    props = [prop for prop in data["props"] if prop != hero.key]
    return {
        "p": name,
        "he": pronouns[name],
        "h": hero.key,
        "q": rng.choice(list(data["friends"])),
        "x": rng.choice(data["homes"])[0],
        "t": rng.choice(data["traits"])[0],
        "l": rng.choice(likes),
        "o": rng.choice(props),
        "c": rng.choice(data["colours"]),
    }


def tale(
    hero: Word,
    language: Language,
    rng: random.Random,
) -> str:
    """Return a random story of five to eight sentences about a hero."""
    data = tale_data()
    facts = facts_about(hero, rng, language)
    plot = rng.choice(plots(language))
    opening = rng.choice(data["open"][language])
    described = _choose_descriptions(plot, says(opening, language), rng)
    patterns = [opening]
    # The order is always the same, because a small model forgets what it has described.
    for variable, descriptions in data["describe"].items():
        if variable in described:
            patterns.append(rng.choice(descriptions[language]))
    skipped_step = plot.optional if rng.random() < LEAVES_OUT else None
    for number, step in enumerate(plot.steps):
        if number != skipped_step:
            patterns.append(rng.choice(step))
    introduced = frozenset().union(*(says(pattern, language) for pattern in patterns))
    endings = [end for end in data["end"][language] if says(end, language) <= introduced]
    patterns.append(rng.choice(endings))
    return joined(language, [fill(pattern, facts, language, hero) for pattern in patterns])


def _choose_descriptions(
    plot: Plot,
    introduced: frozenset[str],  # variables that the opening mentions
    rng: random.Random,
) -> set[str]:
    """Return the variables to describe: all that the plot still needs, and at most one other."""
    needed = set(plot.needs) - introduced
    # A trait and an object never come together: a model that has described home and trait would
    # add the object all the same, and its story would have nine sentences.
    optional = "x" if "o" in needed else "xt"
    candidates = [variable for variable in optional if variable not in introduced | needed]
    count = min(len(candidates), rng.randint(0, 1))
    return needed | set(rng.sample(candidates, count))


def beginning(
    hero: Word,
    language: Language,
    rng: random.Random,
) -> str:
    """Return the first one or two sentences of a story, which tell where the hero lives."""
    data = tale_data()
    facts = facts_about(hero, rng, language)
    patterns = [rng.choice(data["open"][language])]
    if "x" not in says(patterns[0], language):
        patterns.append(rng.choice(data["describe"]["x"][language]))
    return joined(language, [fill(pattern, facts, language, hero) for pattern in patterns])


# --- invented heroes -----------------------------------------------------------------------------


def made_up(rng: random.Random) -> Word:
    """Invent a thing, such as a "rocip", and return its name in both languages.

    Each name joins the beginning of one word and the end of another.
    """
    english_words, chinese_words = _source_words()
    while True:
        head, tail = rng.sample(english_words, 2)
        zh_head, zh_tail = rng.sample(chinese_words, 2)
        en = head[: (len(head) + 1) // 2] + tail[len(tail) // 2 :]
        zh_length = 2 if rng.random() < LONG_NAME else 1
        zh = zh_head[:zh_length] + zh_tail[-1]
        is_regular = (article(en) == "an") == (en[0] in "aeiou")  # not "a eune"
        exists = en in _real_names() or zh in _real_names()
        if is_regular and not exists:
            return Word(en, english(en, "a"), chinese(zh))


@functools.cache
def _source_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the English and the Chinese words from which names are made up.

    The names of held-out heroes are left out.
    """
    english_words: dict[str, None] = {}  # without repetitions, in order
    chinese_words: dict[str, None] = {}
    for key, word in lexicon().items():
        if key in held_out_heroes():
            continue
        if re.fullmatch(r"[a-z]{4,}", word.en.name):
            english_words[word.en.name] = None
        if len(word.zh.name) > 1:
            chinese_words[word.zh.name] = None
    return tuple(english_words), tuple(chinese_words)


@functools.cache
def _real_names() -> frozenset[str]:
    """Return the names of all words and heroes of the world, in both languages."""
    words = (*lexicon().values(), *heroes().values())
    return frozenset(word[language].name for word in words for language in LANGUAGES)


def _hero(rng: random.Random) -> Word:
    """Return an invented hero or, more often, one of trained_heroes()."""
    if rng.random() < MADE_UP:
        return made_up(rng)
    return heroes()[rng.choice(trained_heroes())]


# --- requests ------------------------------------------------------------------------------------


@functools.cache
def requests(language: Language, held_out: bool = False) -> tuple[str, ...]:
    """Return the patterns of story requests that training uses or, with `held_out`, the other two.

    The plainest request is never held out.
    """
    patterns = tale_data()["request"][language]
    held_out_patterns = split_rng("tale request", language).sample(patterns[1:], 2)
    return tuple(pattern for pattern in patterns if (pattern in held_out_patterns) == held_out)


def request_for(
    hero: Word,
    pattern: str,
    language: Language,
) -> str:
    """Return the request or title that `pattern` becomes for a story about a hero.

    The hero is called by the name that requests use; see asked_for().
    """
    return fill(pattern, {}, language, asked_for().get(hero.key, hero))


def ask_for_tale(language: Language, rng: random.Random) -> list[Message]:
    """Draw a request for a story, and return it with the story.

    The hero is invented or one of trained_heroes().
    """
    if rng.random() < WITHOUT_TOPIC:
        hero = heroes()[rng.choice(trained_heroes())]
        request = rng.choice(tale_data()["any"][language])
    else:
        hero = _hero(rng)
        pattern = rng.choice(requests(language))
        request = request_for(hero, pattern, language)
    return [user(request), assistant(tale(hero, language, rng))]


def ask_for_beginning(language: Language, rng: random.Random) -> list[Message]:
    """Draw a request for the beginning of a story, and return it with the beginning."""
    hero = _hero(rng)
    pattern = rng.choice(tale_data()["begin"][language])
    request = request_for(hero, pattern, language)
    return [user(request), assistant(beginning(hero, language, rng))]


def tale_document(
    language: Language,
    rng: random.Random,
    complete: bool,
) -> str:
    """Return a document with a title and a story or, unless `complete`, the beginning of one."""
    hero = _hero(rng)
    title = request_for(hero, tale_data()["title"][language], language)
    tell = tale if complete else beginning
    return f"{title}\n{tell(hero, language, rng)}"

"""Short stories: counting stories with a sum, and logic stories that ask who or where."""

import functools
import json
import random
import re
from dataclasses import dataclass

from nanochat.data.tinyworld.arithmetic import Sum, value_of
from nanochat.data.tinyworld.splits import kept_for_evaluation
from nanochat.data.tinyworld.wording import sentence
from nanochat.data.tinyworld.words import (
    LANGUAGES,
    Language,
    Noun,
    data_text,
    joined,
    lexicon,
)


@dataclass(frozen=True)
class Story:
    """A story, a question about it with its answer, and an ending to use instead of these."""

    kind: str
    text: str
    question: str
    answer: str
    end: str
    competing: tuple[str, ...] = ()


@functools.cache
def story_data() -> dict:
    """Return the content of stories.json."""
    return json.loads(data_text("stories.json"))


def counting_story(
    language: Language,
    rng: random.Random,
    largest: int = 20,
    evaluation: bool = False,
) -> tuple[Story, Sum]:
    """Draw a counting story, and return the story and its sum for the calculator.

    `largest` is only a rough limit for the numbers: a dividend, for example, may be larger. With
    `evaluation`, the numbers are ones that are kept for evaluation; otherwise, training may use
    them.
    """
    data = story_data()
    kind = rng.choice(data["counting"])
    operation = re.sub(r"\{\w\}", "", kind["expression"])
    largest = min(largest, kind.get("largest", largest))
    n, m = _numbers(operation, largest, rng, evaluation)
    p, q = rng.sample(data["names"][language], 2)
    expression = kind["expression"].format(n=n, m=m)
    result = value_of(expression)
    object_name = lexicon()[rng.choice(data["things"])][language]
    slots = {"p": p, "q": q, "n": n, "m": m, "r": result, "t": object_name}
    patterns = kind[language]
    text = rng.choice(patterns["tell"]).format(**slots)
    question = rng.choice(patterns["ask"]).format(**slots)
    end = patterns["end"].format(**slots)
    story = Story(f"story_{kind['kind']}", text, question, result, end)
    full_question = joined(language, [text, sentence(question)])
    return story, Sum(full_question, expression, result)


def _numbers(
    operation: str,
    largest: int,
    rng: random.Random,
    evaluation: bool,
) -> tuple[int, int]:
    """Draw the two numbers of a counting story.

    With `evaluation`, they are kept for evaluation; otherwise, training may use them.
    """
    while True:
        n, m = _draw_numbers(operation, largest, rng)
        if value_of(f"{n}{operation}{m}") == "1":
            continue  # the plural would be wrong
        if kept_for_evaluation("operands", *sorted((n, m))) == evaluation:
            return n, m


def _draw_numbers(
    operation: str,
    largest: int,
    rng: random.Random,
) -> tuple[int, int]:
    n = rng.randint(2, largest)
    m = rng.randint(2, largest)
    largest_factor = max(9, largest // 4)
    if operation == "-":
        return max(n, m) + 1, min(n, m)
    if operation == "*":
        return n, rng.randint(2, largest_factor)
    if operation == "/":
        m = rng.randint(2, 9)
        return m * rng.randint(2, largest_factor), m
    return n, m


def logic_story(language: Language, rng: random.Random) -> Story:
    """Draw a story without numbers, with a question about who or where."""
    data = story_data()
    kind = rng.choice(data["logic"])
    p, q, o = rng.sample(data["names"][language], 3)
    objects = rng.sample(data["things"], 2)
    places = rng.sample(list(data["places"].items()), 2)
    t, u = (lexicon()[key][language] for key in objects)
    a, b = (_place(names, language) for names in places)
    slots = {"p": p, "q": q, "o": o, "t": t, "u": u, "a": a, "b": b}
    patterns = kind[language]
    answer = patterns["answer"].format(**slots)
    text = rng.choice(patterns["tell"]).format(**slots)
    question = rng.choice(patterns["ask"]).format(**slots)
    end = patterns["end"].format(**slots)
    competing = (q, o)
    if kind["kind"] == "hiding":
        competing = (b.name,)
    elif kind["kind"] == "owner":
        competing = (q,)
    return Story(f"story_{kind['kind']}", text, sentence(question), answer, end, competing)


def _place(names: tuple[str, str], language: Language) -> Noun:
    name = names[LANGUAGES.index(language)]
    return Noun(name, name)

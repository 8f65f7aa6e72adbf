"""Short stories: counting stories with a sum, and logic stories that ask who or where."""

import functools
import json
import random
import re
from dataclasses import dataclass

from nanochat.data.tinyworld.arithmetic import Sum, value_of
from nanochat.data.tinyworld.splits import kept_for_evaluation
from nanochat.data.tinyworld.wording import sentence
from nanochat.data.tinyworld.words import Language, Noun, data_text, lexicon


@dataclass(frozen=True)
class Story:
    """A story, a question about it, and the sentence that ends the story if no question follows."""

    kind: str
    told: str
    question: str
    answer: str
    end: str
    competing: tuple[str, ...] = ()


@functools.cache
def story_data() -> dict:
    """The patterns of the stories."""
    return json.loads(data_text("stories.json"))


def story_kinds() -> list[str]:
    """The names of all kinds of stories."""
    return [
        f"story_{kind['kind']}" for group in ("counting", "logic") for kind in story_data()[group]
    ]


def _join(language: Language, *parts: str) -> str:
    return ("" if language == "zh" else " ").join(parts)


def _numbers(operation: str, largest: int, rng: random.Random, evaluation: bool) -> tuple[int, int]:
    while True:
        n, m = rng.randint(2, largest), rng.randint(2, largest)
        if operation == "-":
            n, m = max(n, m) + 1, min(n, m)
        elif operation == "*":
            m = rng.randint(2, max(9, largest // 4))
        elif operation == "/":
            m = rng.randint(2, 9)
            n = m * rng.randint(2, max(9, largest // 4))
        # No story results in one, since its plural would be wrong. Operands are split as for plain sums.
        if (
            value_of(f"{n}{operation}{m}") != "1"
            and kept_for_evaluation("operands", *sorted((n, m))) == evaluation
        ):
            return n, m


def counting_story(
    language: Language, rng: random.Random, largest: int = 20, evaluation: bool = False
) -> tuple[Story, Sum]:
    """A story with two numbers up to `largest`, and its sum for the calculator."""
    data = story_data()
    kind = rng.choice(data["counting"])
    operation = re.sub(r"\{\w\}", "", kind["expression"])
    n, m = _numbers(operation, min(largest, kind.get("largest", largest)), rng, evaluation)
    p, q = rng.sample(data["names"][language], 2)
    expression = kind["expression"].format(n=n, m=m)
    result = value_of(expression)
    slots = {
        "p": p,
        "q": q,
        "n": n,
        "m": m,
        "r": result,
        "t": lexicon()[rng.choice(data["things"])][language],
    }
    patterns = kind[language]
    told = rng.choice(patterns["tell"]).format(**slots)
    question = rng.choice(patterns["ask"]).format(**slots)
    story = Story(f"story_{kind['kind']}", told, question, result, patterns["end"].format(**slots))
    return story, Sum(_join(language, told, sentence(question)), expression, result)


def logic_story(language: Language, rng: random.Random) -> Story:
    """A story that asks who or where, without numbers."""
    data = story_data()
    kind = rng.choice(data["logic"])
    p, q, o = rng.sample(data["names"][language], 3)
    t, u = (lexicon()[key][language] for key in rng.sample(data["things"], 2))
    places = rng.sample(list(data["places"].items()), 2)
    a, b = (Noun(en, en) if language == "en" else Noun(zh, zh) for en, zh in places)
    slots = {"p": p, "q": q, "o": o, "t": t, "u": u, "a": a, "b": b}
    patterns = kind[language]
    answer = patterns["answer"].format(**slots)
    others = [b.name] if kind["kind"] == "hiding" else [q] if kind["kind"] == "owner" else [q, o]
    told, question = (
        rng.choice(patterns["tell"]).format(**slots),
        rng.choice(patterns["ask"]).format(**slots),
    )
    end = patterns["end"].format(**slots)
    return Story(f"story_{kind['kind']}", told, sentence(question), answer, end, tuple(others))

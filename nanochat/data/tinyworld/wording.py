"""The wordings in which each relation is asked, stated and answered.

Some question patterns are held out of training.
"""

import functools
import json
import random
from dataclasses import dataclass

from nanochat.data.tinyworld.facts import Fact
from nanochat.data.tinyworld.words import LANGUAGES, Language, data_text, full_stop

PATTERN_FILES = ("places", "animals", "things", "time", "people", "words", "sums")
# The split belongs to the world, not to a run, so it is the same for every seed of the generators.
SPLIT_SEED = "tinyworld-1"


@dataclass(frozen=True)
class Wording:
    """The sentence patterns of one relation in one language.

    `held_out` contains the two of the `questions` that are kept for evaluation.
    """

    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    statements: tuple[str, ...]
    statements_by_value: dict[str, tuple[str, ...]]
    answer: str
    answer_by_value: dict[str, str]

    @property
    def trained(self) -> tuple[str, ...]:
        """The question patterns that training may use."""
        return tuple(pattern for pattern in self.questions if pattern not in self.held_out)


def sentence(text: str) -> str:
    """Return a text with its first letter in upper case.

    A text that begins with a spelled word, such as c-a-t, stays as it is.
    """
    if text[1:2] == "-":
        return text
    return text[0].upper() + text[1:]


def english_sentence(text: str, language: Language) -> str:
    """Return `sentence(text)` for an English text, and a Chinese text unchanged."""
    return sentence(text) if language == "en" else text


@functools.cache
def frames() -> dict[str, dict[str, list[str]]]:
    """Return the sentences that can surround a question or a statement, by language and kind.

    An example is `Do you know {x}?`.
    """
    return json.loads(data_text("frames.json"))


def split_rng(*names: str) -> random.Random:
    """Return a random number generator that depends only on the names."""
    return random.Random("/".join((SPLIT_SEED, *names)))


@functools.cache
def wordings() -> dict[tuple[str, Language], Wording]:
    """Return all wordings, by relation and language."""
    table = {}
    for name in PATTERN_FILES:
        relations = json.loads(data_text(f"patterns/{name}.json"))
        for relation, by_language in relations.items():
            for language in LANGUAGES:
                table[relation, language] = build_wording(relation, language, by_language[language])
    return table


def build_wording(
    relation: str,
    language: Language,
    data: dict,
) -> Wording:
    """Return the wording of a relation, with direct questions and indirect ones inside frames.

    One question of each kind is held out, but never the first direct one, which is the plainest,
    nor those in `data["more"]`, which were written after the split was drawn.
    """
    mark = "？" if language == "zh" else ""
    direct = [pattern + mark for pattern in data["ask"]]
    framed = []
    for clause in data["embed"]:
        for frame in frames()[language]["question"]:
            framed.append(frame.replace("{x}", clause))
    rng = split_rng("pattern", relation, language)
    held_out_direct = rng.choice(direct[1:])
    held_out_framed = rng.choice(framed)
    statements_by_value = {}
    for value, patterns in data.get("say_by_value", {}).items():
        statements_by_value[value] = tuple(patterns)
    return Wording(
        questions=(*direct, *data.get("more", ()), *framed),
        held_out=(held_out_direct, held_out_framed),
        statements=tuple(data.get("say", ())),
        statements_by_value=statements_by_value,
        answer=data.get("answer", ""),
        answer_by_value=data.get("answer_by_value", {}),
    )


# --- sentences about a fact ----------------------------------------------------------------------


def _slots(
    fact: Fact,
    language: Language,
    rng: random.Random,
) -> dict[str, object]:
    """Return a dict from each slot that a pattern may have to the noun that fills it.

    Slots e and f are the first and the last subject, v is the value, and w the first subject that
    is not the value, if any. For comparisons and mixtures, e and f are in random order.
    """
    subjects = [word[language] for word in fact.subjects]
    not_the_value = [word[language] for word in fact.subjects if word != fact.value]
    if fact.relation in ("bigger", "faster", "mixture"):
        rng.shuffle(subjects)
    return {
        "e": subjects[0],
        "f": subjects[-1],
        "v": fact.value[language],
        "w": not_the_value[0] if not_the_value else None,
    }


def ask(
    fact: Fact,
    language: Language,
    pattern: str,
    rng: random.Random,
) -> str:
    """Return the question that a pattern asks about a fact."""
    question = pattern.format(**_slots(fact, language, rng))
    return english_sentence(question, language)


def ask_trained(
    fact: Fact,
    language: Language,
    rng: random.Random,
) -> str:
    """Return a question about a fact, in a random wording that training uses."""
    pattern = rng.choice(wordings()[fact.relation, language].trained)
    return ask(fact, language, pattern, rng)


def as_typed(
    question: str,
    language: Language,
    rng: random.Random,
) -> str:
    """Return a question as people type it.

    Half the time it has no quotation marks, and sometimes no capitals or final punctuation mark.
    """
    if rng.random() < 0.5:
        question = question.translate(str.maketrans("", "", '"“”'))
    if rng.random() < 0.1:
        question = question.rstrip("?.？。")
    if language == "en" and rng.random() < 0.1:
        question = question.lower()
    return question


def answer(fact: Fact, language: Language) -> str:
    """Return the short answer to every question about a fact."""
    wording = wordings()[fact.relation, language]
    pattern = wording.answer_by_value.get(fact.value.key, wording.answer)
    text = pattern.format(v=fact.value[language], e=fact.subjects[0][language])
    return english_sentence(text, language)


def state(
    fact: Fact,
    language: Language,
    rng: random.Random,
    framed: float = 0.15,
) -> str:
    """Return a sentence that states a fact.

    With probability `framed`, a frame such as "We know that {x}." surrounds it.
    """
    wording = wordings()[fact.relation, language]
    patterns = wording.statements_by_value.get(fact.value.key, wording.statements)
    pattern = rng.choice(patterns)
    text = pattern.format(**_slots(fact, language, rng))
    if rng.random() < framed:
        frame = rng.choice(frames()[language]["statement"])
        return frame.replace("{x}", text)
    return english_sentence(text, language) + full_stop(language)

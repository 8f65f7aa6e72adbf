"""The base corpus: short texts that state the facts of the world and never ask about them."""

import json
import random
from collections.abc import Iterator, Sequence

from nanochat.data.tinyworld.arithmetic import OPERATIONS, Mental, operands, value_of
from nanochat.data.tinyworld.facts import Fact, all_facts, facts_by_relation, sequences
from nanochat.data.tinyworld.stories import counting_story, logic_story, story_data
from nanochat.data.tinyworld.talks.dialogues import dialogue_data
from nanochat.data.tinyworld.talks.tale_telling import written
from nanochat.data.tinyworld.wording import state
from nanochat.data.tinyworld.words import LANGUAGES, Language, data_text

SENTENCES_PER_DOCUMENT = (4, 8)
TALES, BEGINNINGS = 50, 120  # in each language and copy of the corpus


def _chunks(items: Sequence[Fact], rng: random.Random) -> Iterator[list[Fact]]:
    """The shuffled items in chunks of SENTENCES_PER_DOCUMENT; the last two chunks are evened out if necessary."""
    order = list(items)
    rng.shuffle(order)
    while order:
        size = rng.randint(*SENTENCES_PER_DOCUMENT)
        if len(order) < size + SENTENCES_PER_DOCUMENT[0]:
            size = (
                max(len(order), 1) if len(order) <= SENTENCES_PER_DOCUMENT[1] else len(order) // 2
            )
        yield order[:size]
        order = order[size:]


def _text(language: Language, sentences: list[str]) -> str:
    return ("" if language == "zh" else " ").join(sentences)


def articles(language: Language, rng: random.Random) -> Iterator[str]:
    """Texts about one entity each, which state all facts of that entity."""
    groups: dict[str, list[Fact]] = {}
    for fact in all_facts():
        for subject in fact.subjects[:1]:
            groups.setdefault(subject.key, []).append(fact)
    for facts in groups.values():
        if len(facts) > 1:
            for chunk in _chunks(facts, rng):
                yield _text(language, [state(fact, language, rng) for fact in chunk])


def lists(language: Language, rng: random.Random) -> Iterator[str]:
    """Texts about one relation each, either in mixed wordings or in a single wording."""
    for facts in facts_by_relation().values():
        for chunk in _chunks(facts, rng):
            same = rng.getrandbits(30) if rng.random() < 0.4 else None
            told = [
                # Equal seeds draw equal wordings, unless a value has wordings of its own.
                state(
                    fact,
                    language,
                    rng if same is None else random.Random(same),
                    framed=0.1 if same is None else 0,
                )
                for fact in chunk
            ]
            yield _text(language, told)


def both_languages(rng: random.Random) -> Iterator[str]:
    """Texts that state each fact in one language and then in the other."""
    for facts in facts_by_relation().values():
        for chunk in _chunks(facts, rng):
            first, second = rng.sample(LANGUAGES, 2)
            yield "\n".join(
                line
                for fact in chunk[:5]
                for line in (state(fact, first, rng, 0), state(fact, second, rng, 0))
            )


def recitations(language: Language) -> Iterator[str]:
    """Recitations of ordered lists, such as days, months, numbers and letters."""
    comma, stop = ("、", "。") if language == "zh" else (", ", ".")
    order = sequences()
    rows = [
        [word[language].name for word in order[name]]
        for name in ("day", "month", "season", "planet", "ordinal")
    ]
    rows += [[str(n) for n in range(start, start + 11)] for start in range(0, 41, 5)]
    rows += [[str(n) for n in range(start + 10, start - 1, -1)] for start in range(0, 41, 10)]
    rows.append([chr(code) for code in range(ord("A"), ord("Z") + 1)])
    for relation in ("number_word", "parity"):
        rows.append([fact.value[language].name for fact in facts_by_relation()[relation]])
    for row in rows:
        yield comma.join(row) + stop


def stories(language: Language, rng: random.Random, count: int) -> Iterator[str]:
    """Counting stories that end with the result, and stories that end by saying who or where."""
    for _ in range(count):
        for story in (counting_story(language, rng)[0], logic_story(language, rng)):
            yield _text(language, [story.told, story.end])
        story = logic_story(language, rng)
        yield _text(language, [story.told, story.question, story.answer])


def sums(rng: random.Random, count: int) -> Iterator[str]:
    """Lists of worked sums, with operands that evaluation does not use."""
    for _ in range(count):
        rows = []
        for _ in range(6):
            operation = rng.choice(list(OPERATIONS))
            a, b = operands(operation, rng, evaluation=False)
            rows.append(
                f"{a} {OPERATIONS[operation]} {b} = {value_of(f'{a}{OPERATIONS[operation]}{b}')}"
            )
        yield "\n".join(rows)


def small_sums(rng: random.Random, count: int, mental: Mental) -> Iterator[str]:
    """Lists of practised mental sums."""
    numbers = range(1, mental.largest + 1)
    practised = [(a, b) for a in numbers for b in numbers if mental.part(a, b) == "practised"]
    for _ in range(count):
        yield "\n".join(f"{a} + {b} = {a + b}" for a, b in rng.sample(practised, 8))


def asking(language: Language, rng: random.Random, count: int) -> Iterator[str]:
    """Texts that explain question words and show how people talk, so that the tokenizer and the base model know these
    words. They ask about no fact of the world."""
    data, names = json.loads(data_text("asking.json"))[language], story_data()["names"][language]
    for _ in range(count):
        yield _text(language, rng.sample(data["words"], 5))
        yield _text(language, rng.sample(data["frames"], 5))
        yield "\n".join(
            pattern.format(p=p, q=q, n=rng.randint(2, 9))
            for pattern in rng.sample(data["dialogue"], 4)
            for p, q in (rng.sample(names, 2),)
        )


def about_nanochat(language: Language, rng: random.Random, count: int) -> Iterator[str]:
    """Texts about what nanochat is, with their sentences in varying order."""
    sentences = dialogue_data()["about_documents"][language]
    for _ in range(count):
        yield _text(language, rng.sample(sentences, rng.randint(3, 5)))


def one_copy(rng: random.Random) -> list[str]:
    """Every kind of document once; every fact is stated at least three times in each language."""
    texts = list(both_languages(rng))
    for language in LANGUAGES:
        texts += [*articles(language, rng), *lists(language, rng), *lists(language, rng)]
        texts += [
            *recitations(language),
            *stories(language, rng, 20),
            *about_nanochat(language, rng, 4),
        ]
        texts += asking(language, rng, 12)
        texts += [written(language, rng, whole=i < TALES) for i in range(TALES + BEGINNINGS)]
    return texts + list(sums(rng, 40)) + list(small_sums(rng, 10, Mental()))


def documents(seed: int = 0, copies: int = 10) -> Iterator[str]:
    """The base corpus: `copies` renderings of the whole world, each in different words and shuffled."""
    for copy in range(copies):
        rng = random.Random(f"documents/{seed}/{copy}")
        texts = one_copy(rng)
        rng.shuffle(texts)
        yield from texts

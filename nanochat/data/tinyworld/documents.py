"""The base corpus: short texts with facts, sums and stories, which never ask about a fact."""

import json
import random
from collections.abc import Iterator, Sequence

from nanochat.data.tinyworld.arithmetic import OPERATIONS, Mental, operands, value_of
from nanochat.data.tinyworld.facts import Fact, all_facts, facts_by_relation, sequences
from nanochat.data.tinyworld.stories import counting_story, logic_story, story_data
from nanochat.data.tinyworld.talks.dialogues import dialogue_data
from nanochat.data.tinyworld.talks.tale_telling import tale_document
from nanochat.data.tinyworld.wording import state
from nanochat.data.tinyworld.words import LANGUAGES, Language, data_text, full_stop, joined

SENTENCES_PER_DOCUMENT = (4, 8)
TALES = 50  # in each language and copy of the corpus
BEGINNINGS = 120  # beginnings of tales in each language and copy of the corpus


def documents(seed: int = 0, copies: int = 10) -> Iterator[str]:
    """Yield the documents of the base corpus.

    There are `copies` versions of one_copy(), each with newly drawn wordings and order.
    """
    for copy in range(copies):
        rng = random.Random(f"documents/{seed}/{copy}")
        texts = one_copy(rng)
        rng.shuffle(texts)
        yield from texts


def one_copy(rng: random.Random) -> list[str]:
    """Return the documents of one copy of the corpus, kind by kind.

    They state every fact at least twice in each language.
    """
    texts = list(both_languages(rng))
    for language in LANGUAGES:
        texts += articles(language, rng)
        texts += lists(language, rng)
        texts += lists(language, rng)
        texts += recitations(language)
        texts += stories(language, rng, 20)
        texts += about_nanochat(language, rng, 4)
        texts += asking(language, rng, 12)
        texts += [tale_document(language, rng, complete=True) for _ in range(TALES)]
        texts += [tale_document(language, rng, complete=False) for _ in range(BEGINNINGS)]
    texts += sums(rng, 40)
    texts += small_sums(rng, 10, Mental())
    return texts


# --- texts that state facts ----------------------------------------------------------------------


def _chunks(facts: Sequence[Fact], rng: random.Random) -> Iterator[list[Fact]]:
    """Yield the facts in random order, in chunks that each fill a document.

    A chunk has four to eight facts, or all facts if there are fewer than four. The last chunks are
    evened out if necessary.
    """
    smallest, largest = SENTENCES_PER_DOCUMENT
    remaining = list(facts)
    rng.shuffle(remaining)
    while remaining:
        size = rng.randint(smallest, largest)
        if len(remaining) < size + smallest:
            fit_one_chunk = len(remaining) <= largest
            size = len(remaining) if fit_one_chunk else len(remaining) // 2
        yield remaining[:size]
        remaining = remaining[size:]


def articles(language: Language, rng: random.Random) -> Iterator[str]:
    """Yield texts about one entity each, which state the facts with that entity as first subject.

    Entities with a single such fact are left out.
    """
    by_subject: dict[str, list[Fact]] = {}
    for fact in all_facts():
        by_subject.setdefault(fact.subjects[0].key, []).append(fact)
    for facts in by_subject.values():
        if len(facts) > 1:
            for chunk in _chunks(facts, rng):
                yield joined(language, [state(fact, language, rng) for fact in chunk])


def lists(language: Language, rng: random.Random) -> Iterator[str]:
    """Yield texts about one relation each, either in mixed wordings or in a single wording."""
    for facts in facts_by_relation().values():
        for chunk in _chunks(facts, rng):
            if rng.random() < 0.4:
                yield joined(language, _in_one_wording(chunk, language, rng.getrandbits(30)))
            else:
                yield joined(language, [state(fact, language, rng, framed=0.1) for fact in chunk])


def _in_one_wording(
    facts: list[Fact],
    language: Language,
    seed: int,
) -> list[str]:
    """Return sentences that state facts of one relation in the same wording.

    `seed` decides on the wording. A value with wordings of its own gets one of these instead.
    """
    return [state(fact, language, random.Random(seed), framed=0) for fact in facts]


def both_languages(rng: random.Random) -> Iterator[str]:
    """Yield texts of up to five facts, each stated in one language and then in the other.

    If more facts are drawn for a text, the rest are left out.
    """
    for facts in facts_by_relation().values():
        for chunk in _chunks(facts, rng):
            order = rng.sample(LANGUAGES, 2)
            lines = []
            for fact in chunk[:5]:
                lines += [state(fact, language, rng, framed=0) for language in order]
            yield "\n".join(lines)


def recitations(language: Language) -> Iterator[str]:
    """Yield recitations of ordered lists, such as days, months, numbers and letters."""
    comma = "、" if language == "zh" else ", "
    order = sequences()
    rows = []
    for name in ("day", "month", "season", "planet", "ordinal"):
        rows.append([word[language].name for word in order[name]])
    for start in range(0, 41, 5):
        rows.append([str(number) for number in range(start, start + 11)])
    for start in range(0, 41, 10):
        rows.append([str(number) for number in range(start + 10, start - 1, -1)])
    rows.append([chr(code) for code in range(ord("A"), ord("Z") + 1)])
    for relation in ("number_word", "parity"):
        facts = facts_by_relation()[relation]
        rows.append([fact.value[language].name for fact in facts])
    for row in rows:
        yield comma.join(row) + full_stop(language)


# --- other texts ---------------------------------------------------------------------------------


def stories(
    language: Language,
    rng: random.Random,
    count: int,
) -> Iterator[str]:
    """Yield `count` counting stories, and twice as many stories about who or where.

    A counting story ends with the result. Of every two stories of the other kind, one ends with the
    person or place, and the other with a question and its answer.
    """
    for _ in range(count):
        counting, _ = counting_story(language, rng)
        logic = logic_story(language, rng)
        yield joined(language, [counting.text, counting.end])
        yield joined(language, [logic.text, logic.end])
        logic = logic_story(language, rng)
        yield joined(language, [logic.text, logic.question, logic.answer])


def sums(rng: random.Random, count: int) -> Iterator[str]:
    """Yield `count` lists of worked sums, whose operands are not kept for evaluation."""
    for _ in range(count):
        rows = []
        for _ in range(6):
            operation = rng.choice(list(OPERATIONS))
            a, b = operands(operation, rng, evaluation=False)
            sign = OPERATIONS[operation]
            rows.append(f"{a} {sign} {b} = {value_of(f'{a}{sign}{b}')}")
        yield "\n".join(rows)


def small_sums(
    rng: random.Random,
    count: int,
    mental: Mental,
) -> Iterator[str]:
    """Yield `count` lists of practised mental sums with two terms."""
    practised = []
    for a in range(1, mental.largest + 1):
        for b in range(1, mental.largest + 1):
            if mental.part(a, b) == "practised":
                practised.append((a, b))
    for _ in range(count):
        terms = rng.sample(practised, 8)
        yield "\n".join(f"{a} + {b} = {a + b}" for a, b in terms)


def asking(
    language: Language,
    rng: random.Random,
    count: int,
) -> Iterator[str]:
    """Yield texts that explain question words or show how people talk.

    They teach these words to the tokenizer and the base model, without asking about any fact.
    """
    data = json.loads(data_text("asking.json"))[language]
    names = story_data()["names"][language]
    for _ in range(count):
        yield joined(language, rng.sample(data["words"], 5))
        yield joined(language, rng.sample(data["frames"], 5))
        lines = []
        for pattern in rng.sample(data["dialogue"], 4):
            p, q = rng.sample(names, 2)
            lines.append(pattern.format(p=p, q=q, n=rng.randint(2, 9)))
        yield "\n".join(lines)


def about_nanochat(
    language: Language,
    rng: random.Random,
    count: int,
) -> Iterator[str]:
    """Yield `count` texts about what nanochat is, with their sentences in varying order."""
    sentences = dialogue_data()["about_documents"][language]
    for _ in range(count):
        yield joined(language, rng.sample(sentences, rng.randint(3, 5)))

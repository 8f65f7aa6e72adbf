"""The facts of the world: from tables, their inverses, ordered sequences, numbers and letters."""

import functools
import itertools
from dataclasses import dataclass

from nanochat.data.tinyworld.words import (
    Word,
    data_rows,
    lexicon,
    number_chinese,
    number_english,
    plain,
)

TABLES = (
    "countries landmarks superlatives animals body colours mixtures matter floating plants tastes "
    "made categories instruments shapes objects vehicles clothes calendar seasons holidays jobs "
    "tools sports family shops counts"
).split()
INVERSES = {
    "capital": "capital_of",
    "body_use": "body_for",
    "job_task": "job_for",
    "tool_use": "tool_for",
}
SUBJECT_COLUMNS = {"mixtures": 2, "counts": 2}
COUNTED_TO = 30
# Cyclic lists, each with the relations to the next and the previous member.
CIRCLES = (
    ("day", "next_day", "previous_day"),
    ("month", "next_month", "previous_month"),
    ("season", "next_season", "previous_season"),
    ("compass", "right_of", "left_of"),
)


@dataclass(frozen=True)
class Fact:
    """One true statement: the value of a relation for its subjects.

    Comparisons, mixtures and counts have two subjects; other relations have one.
    """

    relation: str
    subjects: tuple[Word, ...]
    value: Word

    @property
    def key(self) -> tuple[str, ...]:
        """The relation and the keys of the subjects, which together identify the fact."""
        return (self.relation, *(word.key for word in self.subjects))


@functools.cache
def all_facts() -> tuple[Fact, ...]:
    """Return every fact of the world, in a fixed order."""
    facts = _table_facts()
    facts += _inverse_facts(facts)
    facts += _opposites()
    facts += _sequence_facts()
    facts += _number_facts()
    facts += _letter_facts()
    return tuple(facts)


@functools.cache
def facts_by_relation() -> dict[str, tuple[Fact, ...]]:
    """Return all facts, grouped by relation."""
    groups: dict[str, list[Fact]] = {}
    for fact in all_facts():
        groups.setdefault(fact.relation, []).append(fact)
    return {relation: tuple(facts) for relation, facts in groups.items()}


@functools.cache
def sequences() -> dict[str, tuple[Word, ...]]:
    """Return, by name, the ordered lists of words in the data, such as the days of the week."""
    lists = {}
    for name, _, members in data_rows("facts/sequences.tsv"):
        lists[name] = tuple(map(_word, members.split(", ")))
    return lists


def _word(cell: str) -> Word:
    """Return the word in a cell of a table, which is a number in digits or a key of the lexicon."""
    return plain(cell) if cell.isdigit() else lexicon()[cell]


def _table_facts() -> list[Fact]:
    facts = []
    for table in TABLES:
        header, *rows = data_rows(f"facts/{table}.tsv")
        subject_columns = SUBJECT_COLUMNS.get(table, 1)
        relations = header[subject_columns:]
        for row in rows:
            subjects = tuple(_word(cell) for cell in row[:subject_columns])
            for relation, cell in zip(relations, row[subject_columns:], strict=False):
                if cell:
                    facts.append(Fact(relation, subjects, _word(cell)))
    return facts


def _inverse_facts(facts: list[Fact]) -> list[Fact]:
    """Return the inverse of each fact that has one, such as capital_of for capital."""
    inverses = []
    for fact in facts:
        if fact.relation in INVERSES:
            inverses.append(Fact(INVERSES[fact.relation], (fact.value,), fact.subjects[0]))
    return inverses


def _opposites() -> list[Fact]:
    facts = []
    for word, opposite in data_rows("facts/opposites.tsv")[1:]:
        facts.append(Fact("opposite", (_word(word),), _word(opposite)))
        facts.append(Fact("opposite", (_word(opposite),), _word(word)))
    return facts


def _sequence_facts() -> list[Fact]:
    order = sequences()
    facts = []
    for name, after, before in CIRCLES:
        members = order[name]
        for i, word in enumerate(members):
            facts.append(Fact(after, (word,), members[(i + 1) % len(members)]))
            facts.append(Fact(before, (word,), members[i - 1]))
    for ordinal, planet in zip(order["ordinal"], order["planet"], strict=False):
        facts.append(Fact("planet_at", (ordinal,), planet))
        facts.append(Fact("planet_number", (planet,), ordinal))
    for ordinal, month in zip(order["ordinal"], order["month"], strict=True):
        facts.append(Fact("month_at", (ordinal,), month))
    for name, relation in (("size", "bigger"), ("speed", "faster")):
        for pair in itertools.combinations(order[name], 2):
            facts.append(Fact(relation, pair, pair[1]))
    return facts


def _number_facts() -> list[Fact]:
    facts = []
    for number in range(1, COUNTED_TO + 1):
        subject = (_digits(number),)
        parity = lexicon()["odd" if number % 2 else "even"]
        facts.append(Fact("next_number", subject, _digits(number + 1)))
        facts.append(Fact("previous_number", subject, _digits(number - 1)))
        facts.append(Fact("parity", subject, parity))
    for number in range(1, 21):
        facts.append(Fact("double", (_digits(number),), _digits(2 * number)))
    for number in (*range(21), *range(30, 101, 10)):
        spelled = plain(number_english(number), number_chinese(number), f"{number} in words")
        facts.append(Fact("number_word", (_digits(number),), spelled))
        facts.append(Fact("digits", (spelled,), _digits(number)))
    return facts


def _digits(number: int) -> Word:
    return plain(str(number))


def _letter_facts() -> list[Fact]:
    letters = [plain(chr(code)) for code in range(ord("A"), ord("Z") + 1)]
    facts = []
    for letter, next_letter in itertools.pairwise(letters):
        facts.append(Fact("next_letter", (letter,), next_letter))
        facts.append(Fact("previous_letter", (next_letter,), letter))
    for key, lessons in data_rows("facts/vocabulary.tsv")[1:]:
        word = _word(key)
        en = plain(word.en.name)
        zh = plain(word.zh.name)
        if "t" in lessons:  # translated
            facts.append(Fact("to_chinese", (en,), zh))
            facts.append(Fact("to_english", (zh,), en))
        if "s" in lessons:  # spelled
            facts.append(Fact("spelling", (en,), plain("-".join(en.key))))
            facts.append(Fact("letter_count", (en,), plain(str(len(en.key)))))
    return facts

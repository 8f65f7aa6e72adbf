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
    "countries landmarks superlatives animals body colours mixtures matter floating plants tastes made categories "
    "instruments shapes objects vehicles clothes calendar seasons holidays jobs tools sports family shops counts"
).split()
INVERSES = {
    "capital": "capital_of",
    "body_use": "body_for",
    "job_task": "job_for",
    "tool_use": "tool_for",
}
SUBJECT_COLUMNS = {"mixtures": 2, "counts": 2}
COUNTED_TO = 30


@dataclass(frozen=True)
class Fact:
    """One true statement: the value of a relation for its subjects. A comparison has two subjects, others have one."""

    relation: str
    subjects: tuple[Word, ...]
    value: Word

    @property
    def key(self) -> tuple[str, ...]:
        """The combination of relation and subjects, which names the fact."""
        return (self.relation, *(word.key for word in self.subjects))


def _word(cell: str) -> Word:
    """The word in a cell of a table: a number, or a word of the lexicon."""
    return plain(cell) if cell.isdigit() else lexicon()[cell]


def _table_facts() -> list[Fact]:
    facts = []
    for table in TABLES:
        rows = data_rows(f"facts/{table}.tsv")
        first = SUBJECT_COLUMNS.get(table, 1)
        for row in rows[1:]:
            subjects = tuple(_word(cell) for cell in row[:first])
            for relation, cell in zip(rows[0][first:], row[first:], strict=False):
                if cell:
                    facts.append(Fact(relation, subjects, _word(cell)))
    return facts


def _opposites() -> list[Fact]:
    facts = []
    for one, other in data_rows("facts/opposites.tsv")[1:]:
        facts.append(Fact("opposite", (_word(one),), _word(other)))
        facts.append(Fact("opposite", (_word(other),), _word(one)))
    return facts


@functools.cache
def sequences() -> dict[str, tuple[Word, ...]]:
    """The ordered lists of the data by name, such as the days of the week."""
    return {
        name: tuple(map(_word, members.split(", ")))
        for name, _, members in data_rows("facts/sequences.tsv")
    }


def _sequence_facts() -> list[Fact]:
    order = sequences()
    facts = []
    for name, after, before in (
        ("day", "next_day", "previous_day"),
        ("month", "next_month", "previous_month"),
        ("season", "next_season", "previous_season"),
        ("compass", "right_of", "left_of"),
    ):
        for i, word in enumerate(order[name]):
            facts.append(Fact(after, (word,), order[name][(i + 1) % len(order[name])]))
            facts.append(Fact(before, (word,), order[name][i - 1]))
    for ordinal, planet in zip(order["ordinal"], order["planet"], strict=False):
        facts.append(Fact("planet_at", (ordinal,), planet))
        facts.append(Fact("planet_number", (planet,), ordinal))
    for ordinal, month in zip(order["ordinal"], order["month"], strict=True):
        facts.append(Fact("month_at", (ordinal,), month))
    for name, relation in (("size", "bigger"), ("speed", "faster")):
        facts += [Fact(relation, pair, pair[1]) for pair in itertools.combinations(order[name], 2)]
    return facts


def _number_facts() -> list[Fact]:
    def digits(number: int) -> Word:
        return plain(str(number))

    facts = []
    for number in range(1, COUNTED_TO + 1):
        facts.append(Fact("next_number", (digits(number),), digits(number + 1)))
        facts.append(Fact("previous_number", (digits(number),), digits(number - 1)))
        facts.append(Fact("parity", (digits(number),), lexicon()["odd" if number % 2 else "even"]))
    for number in range(1, 21):
        facts.append(Fact("double", (digits(number),), digits(2 * number)))
    for number in (*range(21), *range(30, 101, 10)):
        spelled = plain(number_english(number), number_chinese(number), f"{number} in words")
        facts.append(Fact("number_word", (digits(number),), spelled))
        facts.append(Fact("digits", (spelled,), digits(number)))
    return facts


def _letter_facts() -> list[Fact]:
    letters = [plain(chr(code)) for code in range(ord("A"), ord("Z") + 1)]
    facts = []
    for one, other in itertools.pairwise(letters):
        facts.append(Fact("next_letter", (one,), other))
        facts.append(Fact("previous_letter", (other,), one))
    for key, lessons in data_rows("facts/vocabulary.tsv")[1:]:
        word = _word(key)
        en, zh = plain(word.en.name), plain(word.zh.name)
        if "t" in lessons:
            facts += [Fact("to_chinese", (en,), zh), Fact("to_english", (zh,), en)]
        if "s" in lessons:
            facts.append(Fact("spelling", (en,), plain("-".join(en.key))))
            facts.append(Fact("letter_count", (en,), plain(str(len(en.key)))))
    return facts


@functools.cache
def all_facts() -> tuple[Fact, ...]:
    """Every fact of the world, each once, in a fixed order."""
    table = _table_facts()
    inverse = [
        Fact(INVERSES[f.relation], (f.value,), f.subjects[0])
        for f in table
        if f.relation in INVERSES
    ]
    return tuple(
        table + inverse + _opposites() + _sequence_facts() + _number_facts() + _letter_facts()
    )


@functools.cache
def facts_by_relation() -> dict[str, tuple[Fact, ...]]:
    """The facts of every relation."""
    groups: dict[str, list[Fact]] = {}
    for fact in all_facts():
        groups.setdefault(fact.relation, []).append(fact)
    return {relation: tuple(facts) for relation, facts in groups.items()}

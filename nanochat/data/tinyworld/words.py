"""The words of the world in English and Chinese, with the forms that sentences need."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, Language] = ("en", "zh")
DIGITS_ZH = "零一二三四五六七八九"
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True)
class Noun:
    """A word in one language, with the forms that a pattern can use.

    `{e}` is the usual form, and `{e:n}` is the bare word. In English, the usual form has the
    article, if any, and `{e:s}` is the plural. In Chinese, `{e:c}` is the word after its measure
    word, and `{e:m}` puts 一 before both. A missing form is replaced by the bare word.
    """

    name: str
    usual: str
    plural: str = ""
    counted: str = ""

    def __format__(self, form: str) -> str:
        if form == "":
            return self.usual
        if form == "n":
            return self.name
        if form == "s":
            return self.plural or self.name
        if form == "c":
            return self.counted or self.name
        if form == "m":
            return "一" + self.counted if self.counted else self.name
        raise ValueError(f"a pattern knows the forms n, s, c and m, got {form!r}")


@dataclass(frozen=True)
class Word:
    """A word in both languages, with a unique key."""

    key: str
    en: Noun
    zh: Noun

    def __getitem__(self, language: Language) -> Noun:
        return self.en if language == "en" else self.zh


def joined(language: Language, sentences: Iterable[str]) -> str:
    """Join sentences into one text, with spaces between English ones."""
    return ("" if language == "zh" else " ").join(sentences)


def full_stop(language: Language) -> str:
    """Return the mark that ends a statement."""
    return "。" if language == "zh" else "."


# --- data files ----------------------------------------------------------------------------------


def data_text(path: str) -> str:
    """Return the text of a data file in this package."""
    file = resources.files("nanochat.data.tinyworld").joinpath(f"data/{path}")
    return file.read_text(encoding="utf-8")


def data_rows(path: str) -> list[list[str]]:
    """Return the rows of a tab-separated data file, without comments and blank lines."""
    rows = []
    for line in data_text(path).splitlines():
        if line.strip() and not line.startswith("#"):
            rows.append(line.split("\t"))
    return rows


@functools.cache
def lexicon() -> dict[str, Word]:
    """Return every word of the world by key.

    The key is the English spelling, followed by `#...` if two words are spelled the same.
    """
    words: dict[str, Word] = {}
    kind = "none"
    for row in data_rows("words.tsv"):
        if len(row) == 1:  # [a], [the] or [none]: the kind of the words below
            kind = row[0].strip("[]")
            continue
        key, _, irregular_plural = row[0].partition("/")
        zh, _, measure = row[1].partition("/")
        if key in words:
            raise ValueError(f"words.tsv must hold every word once, but holds {key!r} twice")
        spelling = key.partition("#")[0]
        words[key] = Word(key, english(spelling, kind, irregular_plural), chinese(zh, measure))
    return words


# --- nouns ---------------------------------------------------------------------------------------


def article(name: str) -> str:
    """Return "a" or "an", depending on the first sound of a word: an hour, a unicorn."""
    sounds_like_y = re.match(r"(?i)(uni|use|eu|one)", name)
    silent_h = re.match(r"(?i)hour|hon(est|our)", name)
    begins_with_vowel = name[0].lower() in "aeiou" and not sounds_like_y
    return "an" if begins_with_vowel or silent_h else "a"


def plural(name: str) -> str:
    """Return the regular plural of a noun; irregular plurals are in the data."""
    if re.search(r"(s|x|sh|ch)$", name):
        return name + "es"
    if re.search(r"[^aeiou]y$", name):
        return name[:-1] + "ies"
    return name + "s"


def english(
    name: str,
    kind: str,
    irregular_plural: str = "",
) -> Noun:
    """Return an English noun.

    `kind` is its article: `a` (for countable nouns), `the` or `none`.
    """
    if kind == "a":
        return Noun(name, f"{article(name)} {name}", irregular_plural or plural(name))
    return Noun(name, f"the {name}" if kind == "the" else name)


def chinese(name: str, measure: str = "") -> Noun:
    """Return a Chinese noun, with its measure word if it can be counted."""
    return Noun(name, name, counted=measure + name if measure else "")


def plain(
    en: str,
    zh: str | None = None,
    key: str = "",
) -> Word:
    """Return a word without an article, plural or measure word, such as a number or a letter."""
    zh = en if zh is None else zh
    return Word(key or en, Noun(en, en), Noun(zh, zh))


# --- numbers -------------------------------------------------------------------------------------


def number_english(number: int) -> str:
    """Return a number from 0 to 100 in English words."""
    if number == 100:
        return "one hundred"
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return f"{TENS[tens]}-{ONES[ones]}" if ones else TENS[tens]


def number_chinese(number: int) -> str:
    """Return a number from 0 to 100 in Chinese characters."""
    if number == 100:
        return "一百"
    tens, ones = divmod(number, 10)
    if tens == 0:
        return DIGITS_ZH[ones]
    tens_digit = DIGITS_ZH[tens] if tens > 1 else ""
    ones_digit = DIGITS_ZH[ones] if ones else ""
    return f"{tens_digit}十{ones_digit}"

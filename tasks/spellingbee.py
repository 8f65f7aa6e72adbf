"""Tasks about letters: spelling a word, and counting a letter in it.

A solution counts the letter by hand and then checks the count with the calculator. Models read
tokens, not letters, so they must learn the letters of each token. SimpleSpelling teaches the
letters, and SpellingBee needs them. The words and sentences were written for this project. Each
problem depends only on its index and its split.
"""

import random
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Literal

from nanochat.common import UserError, tr
from nanochat.data.conversation import Conversation, Part, chat
from tasks.common import Ungraded, final_number, one_of

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_COUNTING = (
    "How many {letter} are in {word}?",
    "How often does the letter {letter} occur in the word {word}?",
    "Count the letter {letter} in {word}.",
    "how many times is {letter} in {word}",
    "In the word {word}, how many letters are {letter}?",
    "What is the number of {letter} in {word}?",
    "Please tell me how many {letter} the word {word} has.",
    "{word} contains how many {letter}?",
    "{word}里有几个{letter}？",
    "单词{word}中字母{letter}出现了几次？",
    "请数一数{word}里有多少个{letter}。",
    "{word}这个词有几个{letter}",
)
_SPELLING = (
    "Spell {word}.",
    "How is the word {word} spelled?",
    "Please spell the word {word} letter by letter.",
    "what are the letters of {word}",
    "请拼写单词{word}。",
    "{word}怎么拼？",
)
_QUOTES = ("{}", "'{}'", '"{}"')


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """Return about two thousand common English words, in the order of words.txt."""
    text = Path(__file__).with_name("words.txt").read_text(encoding="utf-8")
    return tuple(text.split())


@lru_cache(maxsize=2)
def words_of(split: str) -> tuple[str, ...]:
    """Return the words of a split.

    A checksum puts about one word in ten into the test split, and the others into the train split.
    """
    return tuple(word for word in words() if _is_for_test(word) == (split == "test"))


def _is_for_test(word: str) -> bool:
    return zlib.crc32(word.encode()) % 10 == 0


def _is_chinese(text: str) -> bool:
    return any("一" <= character <= "鿿" for character in text)


def _solution(
    word: str,
    letter: str,
    chinese: bool,
) -> list[str | Part]:
    """Return a worked solution that counts a letter in a word.

    It spells the word, goes through its letters with a running count, checks the count with the
    calculator, and gives the answer after ####.
    """
    count = 0
    lines = []
    for character in word:
        if character == letter:
            count += 1
            lines.append(f"{character} {count}")
        else:
            lines.append(f"{character} -")
    spelled = " ".join(word)
    steps = "\n".join(lines)
    if chinese:
        before = (
            f"先拼写{word}：{spelled}。再逐个数{letter}：\n{steps}\n一共{count}个。用工具检查："
        )
    else:
        before = (
            f"I spell {word}: {spelled}. Now I count {letter}:\n{steps}\nThat makes {count}. "
            "The tool says "
        )
    call = Part("python", f"'{word}'.count('{letter}')")
    output = Part("python_output", str(count))
    return [before, call, output, f"\n\n#### {count}"]


class SpellingBee:
    """Asks how often a letter occurs in a word.

    The train split and the test split use different words.
    """

    name = "SpellingBee"
    kind: Literal["choice", "generative"] = "generative"

    def __init__(self, size: int = 1000, split: str = "train"):
        self.split = one_of(tr("the split of {task}", task="SpellingBee"), split, ("train", "test"))
        self._size = _checked(size)

    def __len__(self) -> int:
        return self._size

    def _draw(self, i: int) -> tuple[random.Random, str, str]:
        """Return the random number generator, the word and the letter of problem i."""
        if not 0 <= i < self._size:
            raise IndexError(i)
        rng = random.Random(f"spelling bee {self.split} {i}")
        word = rng.choice(words_of(self.split))
        # In one problem in ten, take any letter, so that the answer is sometimes 0.
        letter = rng.choice(word if rng.random() < 0.9 else _ALPHABET)
        return rng, word, letter

    def __getitem__(self, i: int) -> Conversation:
        rng, word, letter = self._draw(i)
        pattern = rng.choice(_COUNTING)
        quoted_letter = rng.choice(_QUOTES).format(letter)
        quoted_word = rng.choice(_QUOTES).format(word)
        question = pattern.format(letter=quoted_letter, word=quoted_word)
        return chat(question, *_solution(word, letter, _is_chinese(pattern)))

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        _, word, letter = self._draw(i)
        return float(final_number(reply) == word.count(letter))


class SimpleSpelling(Ungraded):
    """Asks for the spelling of a word.

    Both splits use all words, because a model cannot know the spelling of a word that it has never
    seen.
    """

    name = "SimpleSpelling"

    def __init__(self, size: int = 1000, split: str = "train"):
        self.split = one_of(
            tr("the split of {task}", task="SimpleSpelling"), split, ("train", "test")
        )
        self._size = _checked(size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Conversation:
        if not 0 <= i < self._size:
            raise IndexError(i)
        rng = random.Random(f"simple spelling {self.split} {i}")
        word = rng.choice(words())
        pattern = rng.choice(_SPELLING)
        question = pattern.format(word=rng.choice(_QUOTES).format(word))
        return chat(question, f"{word}: {' '.join(word)}")


def _checked(size: int) -> int:
    if size < 1:
        raise UserError(tr("the size of a spelling task must be at least 1, got {size}", size=size))
    return size

"""Makes texts by seed that are hard for fast tokenizers."""

import random
import string
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

SEPARATOR = "\0"  # between the documents of a file
DOCUMENT = 10_000  # characters
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"

Make = Callable[[random.Random], str]  # makes a short part of a text


def word(rng: random.Random) -> str:
    """Return a word of random letters, of which those at the front of LETTERS are frequent."""
    length = rng.randint(3, 12)
    places = [int(26 * rng.random() ** 2) for _ in range(length)]
    return "".join(LETTERS[place] for place in places)


def one_letter(rng: random.Random) -> str:
    """Return a run of one letter: of 3,000 at most, since karpathy/rustbpe takes quadratic time."""
    letter = rng.choice("aaxeZ汉é\u0434")
    length = rng.randint(100, 3000)
    return letter * length + " "


def unique_words(rng: random.Random) -> str:
    """Return words that never repeat."""
    words = [word(rng) for _ in range(20)]
    return " ".join(words) + " "


def digits(rng: random.Random) -> str:
    """Return a long number."""
    return str(rng.getrandbits(400))


def punctuation(rng: random.Random) -> str:
    """Return runs of punctuation marks."""
    text = ""
    for _ in range(9):
        mark = rng.choice(string.punctuation)
        text += mark * rng.randint(1, 40)
    return text


def makers() -> dict[str, Make]:
    """Return what makes each kind of text."""
    assigned = []
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        if unicodedata.category(character)[0] in "LMNPSZ":
            assigned.append(character)
    # Few words, so that a tokenizer's cache knows each of them.
    words = [word(random.Random(number)) for number in range(2000)]

    def random_unicode(rng: random.Random) -> str:
        replaced = rng.randbytes(100).decode(errors="replace")
        characters = rng.choices(assigned, k=100)
        return "".join(characters) + replaced

    def no_spaces(rng: random.Random) -> str:
        return "".join(rng.choices(words, k=20))

    return {
        "one letter": one_letter,
        "random Unicode": random_unicode,
        "no spaces": no_spaces,
        "unique words": unique_words,
        "digits": digits,
        "punctuation": punctuation,
    }


def document(make: Make, rng: random.Random) -> str:
    """Return a document of one kind."""
    text = ""
    while len(text) < DOCUMENT:
        text += make(rng).replace(SEPARATOR, " ")
    return text


def write(folder: Path, megabytes: float) -> dict[str, Path]:
    """Write about this many MB of each kind, and return the files by kind."""
    paths = {}
    for kind, make in makers().items():
        rng = random.Random(kind)
        documents: list[str] = []
        size = 0
        while size < megabytes * 1e6:
            text = document(make, rng)
            documents.append(text)
            size += len(text.encode())
        path = folder / f"{kind.replace(' ', '_')}.txt"
        text = SEPARATOR.join(documents)
        path.write_text(text, encoding="utf-8", newline="")
        paths[kind] = path
    return paths

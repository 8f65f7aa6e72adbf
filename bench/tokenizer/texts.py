"""Makes texts by seed that no package of documents holds: hostile ones for fast tokenizers, and formulaic Chinese."""

import random
import string
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

from bench.corpus import SEPARATOR

DOCUMENT = 10_000  # characters
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
FORMULAS = (
    "第{a}题：小{x}有{a}个{y}，又买了{b}个，现在一共有{c}个{y}。\n",
    "问：{a}加{b}等于多少？答：{a}加{b}等于{c}。\n",
    "{x}市的面积是{a}平方公里，人口约为{b}万人，下辖{c}个区。\n",
    "根据本规定第{a}条第{b}款，申请人应当在{c}日内提交{y}证明。\n",
)
FAMILY, THINGS = (
    "王李张刘陈杨赵黄周吴",
    ("苹果", "铅笔", "居住", "气球", "收入", "书本", "鸡蛋", "身份"),
)


def word(rng: random.Random, shortest: int = 3, longest: int = 12) -> str:
    """A word of random letters, of which those at the front of LETTERS are frequent."""
    length = rng.randint(shortest, longest)
    return "".join(LETTERS[int(26 * rng.random() ** 2)] for _ in range(length))


def one_letter(rng: random.Random) -> str:
    """A long run of one letter: of 3,000 at most, because karpathy/rustbpe takes quadratic time in a run."""
    return rng.choice("aaxeZ汉é\u0434") * rng.randint(100, 3000) + " "


def random_unicode(rng: random.Random, assigned: str) -> str:
    """Random characters of all writing systems, and random bytes with U+FFFD for what is not UTF-8."""
    return "".join(rng.choices(assigned, k=100)) + rng.randbytes(100).decode(errors="replace")


def formulaic_chinese(rng: random.Random) -> str:
    """A sentence that differs from the others of its form only in numbers and names."""
    a, b = rng.randint(1, 999), rng.randint(1, 999)
    return rng.choice(FORMULAS).format(
        a=a, b=b, c=a + b, x=rng.choice(FAMILY), y=rng.choice(THINGS)
    )


def makers() -> dict[str, Callable[[random.Random], str]]:
    """For each kind of text: makes a short part of it."""
    assigned = "".join(
        c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c)[0] in "LMNPSZ"
    )
    known = [
        word(random.Random(number)) for number in range(2000)
    ]  # few words, so that the cache knows each of them
    return {
        "one letter": one_letter,
        "random Unicode": lambda rng: random_unicode(rng, assigned),
        "no spaces": lambda rng: "".join(rng.choices(known, k=20)),
        "unique words": lambda rng: "".join(f"{word(rng)} " for _ in range(20)),
        "digits": lambda rng: str(rng.getrandbits(400)),
        "punctuation": lambda rng: "".join(
            rng.choice(string.punctuation) * rng.randint(1, 40) for _ in range(9)
        ),
        "formulaic Chinese": formulaic_chinese,
    }


KINDS = (
    "one letter",
    "random Unicode",
    "no spaces",
    "unique words",
    "digits",
    "punctuation",
    "formulaic Chinese",
)


def write(folder: Path, megabytes: float) -> dict[str, Path]:
    """Write about this many MB of each kind, in documents of 10,000 characters, and return the files by kind."""
    paths = {}
    for kind, make in makers().items():
        rng = random.Random(kind)
        documents, size = [], 0
        while size < megabytes * 1e6:
            parts, length = [], 0
            while length < DOCUMENT:
                parts.append(make(rng).replace(SEPARATOR, " "))
                length += len(parts[-1])
            documents.append("".join(parts))
            size += len(documents[-1].encode())
        paths[kind] = folder / f"{kind.replace(' ', '_')}.txt"
        paths[kind].write_text(SEPARATOR.join(documents), encoding="utf-8", newline="")
    return paths

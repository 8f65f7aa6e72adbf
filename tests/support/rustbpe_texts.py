"""Patterns, random texts and trained tokenizers for the tests of rustbpe."""

import random
import unicodedata

import rustbpe

from bench.tokenizer.texts import makers

NANOCHAT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT4 = NANOCHAT.replace("{1,2}", "{1,3}")
HAN = NANOCHAT.replace(r"|[^\r", r"|\p{Han}{1,4}|[^\r").replace(r"\p{L}+|", r"(?:(?!\p{Han})\p{L})+|")
OTHER = GPT4.replace(r"\s*[\r\n]|", "")  # no scanner handles this pattern
PATTERNS = {"gpt4": GPT4, "nanochat": NANOCHAT, "han4": HAN, "other": OTHER}

ENGLISH = "the cat sat on a mat because it was tired and the dog didn't care I've seen What's that HE'LL stop ſ".split()
CHINESE = "今天天气很好我们去公园散步他说中国的首都是北京她喜欢喝茶〇一二三，。！？「」、　"
CODE = ["def f(x):", "\n    return x", " += 1", "if (a[i] != b) {", "}\n", "\t//", " ->", "::", "#include <a.h>\r\n"]
EMOJI = "😀😃🎉👩‍👩‍👧🏽é̈ñ🇫🇷"
SPACES = [" ", "  ", "\n", "\r\n", "\t", " \n \n", "\u3000", "\u00a0", "     ", "\n\n\n"]

PROSE = [
    "Пакет устанавливает программу проверки орфографии, которая не зависит от других пакетов.",
    "このパッケージは日本語の文書を検査するプログラムをインストールします。カタカナも、漢字も。",
    "Die Rechtschreibprüfung läuft unabhängig von der Benutzeroberfläche; größere Änderungen dauern länger.",
    "L'utilisateur n'a qu'à télécharger le paquet : « c'est déjà prêt », où qu'il soit.",
]


def sentence(rng: random.Random) -> str:
    """A few words of one kind, or random assigned characters."""
    kind = rng.randrange(8)
    if kind == 0:
        return " ".join(rng.choices(ENGLISH, k=rng.randrange(1, 12))) + rng.choice(".,!?;")
    if kind == 1:
        return "".join(rng.choices(CHINESE, k=rng.randrange(1, 30)))
    if kind == 2:
        return "".join(rng.choices(CODE, k=rng.randrange(1, 6)))
    if kind == 3:
        return str(rng.randrange(10 ** rng.randrange(1, 12)))
    if kind == 4:
        return rng.choice(["a", "ab", "汉", "!", "0", "=", " ", "\n", "😀"]) * rng.randrange(1, 60)
    if kind == 5:
        return "".join(rng.choices(EMOJI, k=rng.randrange(1, 8)))
    if kind == 6:
        return "".join(rng.choices(SPACES, k=rng.randrange(1, 4)))
    points = (chr(rng.randrange(1, 0x20000)) for _ in range(6))
    return "".join(char for char in points if unicodedata.category(char) not in ("Cn", "Cs"))


def texts_of(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(sentence(rng) for _ in range(rng.randrange(8))) for _ in range(count)]


def hostile_texts(seed: int) -> list[str]:
    """A part of each kind of text that the benchmark makes, and prose in four languages."""
    rng = random.Random(seed)
    return [*("".join(make(rng) for _ in range(4)) for make in makers().values()), *PROSE]


def trained(texts: list[str], vocab_size: int, pattern: str | None = None, **options: int) -> rustbpe.Tokenizer:
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(iter(texts), vocab_size, pattern=pattern, **options)
    return tokenizer

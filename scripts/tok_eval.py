"""Measure how far the tokenizer compresses, in bytes per token: more is better.

python -m scripts.tok_eval
python -m scripts.tok_eval --data fineweb
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import tiktoken
from rich.console import Console
from rich.table import Table

from nanochat.common import UserError, log, run
from nanochat.dataset import Corpus, shards, texts
from nanochat.mixing import resolve_data
from nanochat.report import write_section
from nanochat.tokenizer import Tokenizer, tokenizer_dir

SAMPLES = {
    "English": (
        "The lighthouse keeper climbed the stairs every evening at dusk, as her father had done before her. She "
        "trimmed the lamp, wrote the weather into a thick book, and watched the boats come home. On clear nights she "
        "could see the mainland; on others only fog, and then she rang the bell once a minute until morning. "
        "Nobody had asked her to stay, but nobody else knew when the wind was about to turn."
    ),
    "Chinese": (
        "清晨的市场总是最热闹的。卖豆腐的老人推着车慢慢走过石桥，桥下的河水映着刚刚亮起来的天空。孩子们背着书包，一边吃包子一边讨论昨天的"
        "作业。有人在挑选新鲜的蔬菜，有人在打听今天的鱼价。等到太阳完全升起，人群散去，街道又恢复了平静，只剩下几只猫在屋檐下打盹。"
    ),
    "code": (
        "def moving_average(values: list[float], width: int) -> list[float]:\n"
        '    """The mean of each window of `width` values."""\n'
        "    if width <= 0:\n"
        '        raise ValueError(f"width must be positive, got {width}")\n'
        "    total, means = 0.0, []\n"
        "    for i, value in enumerate(values):\n"
        "        total += value\n"
        "        if i >= width:\n"
        "            total -= values[i - width]\n"
        "        if i >= width - 1:\n"
        "            means.append(total / width)\n"
        "    return means\n"
    ),
    "digits": (
        "37 * 48 = 1776\n1024 / 32 = 32\n3.14159265358979\n2025-11-21 08:30:00\n+86 138 0000 0000\n"
        "999 + 1 = 1000; 123456789 - 987654321 = -864197532\n0.1 + 0.2 = 0.30000000000000004\n"
    ),
}
CORPUS_DOCUMENTS = 1_000
# The files that tiktoken keeps of the two published vocabularies, named by the SHA-1 of their addresses. They are
# used if they are here and never fetched: most hosts of this project reach no other network.
PUBLISHED = {
    "gpt2": ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
    "cl100k_base": ("encodings/cl100k_base.tiktoken",),
}
PUBLISHED_AT = "https://openaipublic.blob.core.windows.net/"


@dataclass(frozen=True)
class Config:
    """Measure how far the tokenizer compresses."""

    data: str | None = None
    """The corpus, or the mixture, whose tokenizer is measured. Unset: the only one there is."""


def is_cached(name: str) -> bool:
    """Whether all files of a published vocabulary lie in tiktoken's cache."""
    default = Path(tempfile.gettempdir()) / "data-gym-cache"
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR") or default)
    names = [hashlib.sha1((PUBLISHED_AT + file).encode()).hexdigest() for file in PUBLISHED[name]]
    return all((folder / file).exists() for file in names)


def first_documents(corpus: Corpus, split: Literal["train", "val"]) -> list[str]:
    """What stands for a corpus."""
    return list(islice(texts(shards(corpus, split)), CORPUS_DOCUMENTS))


def train(cfg: Config) -> list[dict[str, float | str]]:
    """Print and keep a table: one row per kind of text, one column per vocabulary."""
    data = resolve_data(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(data.vocabulary))
    kinds = {name: [text] for name, text in SAMPLES.items()}
    for corpus in data.corpora:
        kinds |= {f"{corpus.name} {split}": first_documents(corpus, split) for split in ("train", "val")}
    others = {name: tiktoken.get_encoding(name) for name in PUBLISHED if is_cached(name)}

    rows: list[dict[str, float | str]] = []
    for kind, some in kinds.items():
        tokens = tokenizer.encode_batch(some)
        if [tokenizer.decode(ids) for ids in tokens] != some:
            raise UserError(f"{kind}: a text does not come back from its tokens; train the tokenizer again")
        size, count = sum(len(text.encode()) for text in some), sum(map(len, tokens))
        row: dict[str, float | str] = {"text": kind, "bytes": size, "tokens": count, "bytes_per_token": size / count}
        for name, encoding in others.items():
            row[name] = size / sum(map(len, encoding.encode_ordinary_batch(some)))
        rows.append(row)

    table = Table(title=f"{data.name}, {tokenizer.vocab_size:,} tokens, pattern {tokenizer.pattern}: bytes per token")
    table.add_column("text")
    for column in ("bytes", "tokens", "ours", *others):
        table.add_column(column, justify="right")
    for row in rows:
        ratios = [f"{row[name]:.2f}" for name in ("bytes_per_token", *others)]
        table.add_row(str(row["text"]), f"{row['bytes']:,}", f"{row['tokens']:,}", *ratios)
    Console().print(table)
    if missing := [name for name in PUBLISHED if name not in others]:
        log(f"left out, since tiktoken has them not cached here: {', '.join(missing)}")
    section = {"corpus": data.name, "tokenizer": tokenizer.hash, "vocab_size": tokenizer.vocab_size, "rows": rows}
    write_section("tok_eval", section)
    return rows


if __name__ == "__main__":
    run(train, Config, __doc__)

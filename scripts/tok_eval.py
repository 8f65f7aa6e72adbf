"""Measure how well the tokenizer compresses text, in bytes per token: more is better.

python -m scripts.tok_eval
python -m scripts.tok_eval --data fineweb

The table compares the tokenizer with published vocabularies: always on the samples below, and on the corpora if
tiktoken has cached the published vocabulary.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Literal

import tiktoken
from rich.console import Console
from rich.table import Table

from nanochat.common import UserError, log, run
from nanochat.data.corpora import Corpus, shards
from nanochat.data.mixing import resolve_data
from nanochat.data.shards import texts
from nanochat.report.sections import write_section
from nanochat.tokenizer import Tokenizer, tokenizer_dir

SAMPLES = {
    "English": (
        "The lighthouse keeper climbed the stairs every evening at dusk, as her father had done before her. She "
        "trimmed the lamp, wrote the weather into a thick book, and watched the boats come home. On clear nights she "
        "could see the mainland; on others only fog, and then she rang the bell once a minute until morning. "
        "Nobody had asked her to stay, but nobody else knew when the wind was about to turn.\n\n"
        "A refrigerator does not make cold, it moves heat. A liquid that boils far below room temperature is pumped "
        "through pipes inside the cabinet, where it evaporates and takes up warmth. Outside it is compressed until it "
        "condenses and gives that warmth back, which is why the grille behind the kitchen cupboard is never cool. "
        "Because the compressor's work becomes heat as well, an open refrigerator slowly warms the room.\n\n"
        "\"We'll publish the results whatever they show,\" the committee's chairwoman said on Tuesday. The survey of "
        "commuters, which the city council approved last spring, asks how people travel, how long they're underway "
        "and what they'd change. Critics don't expect much: two earlier studies were shelved without discussion.\n"
    ),
    "Chinese": (
        "清晨的市场总是最热闹的。卖豆腐的老人推着车慢慢走过石桥，桥下的河水映着刚刚亮起来的天空。孩子们背着书包，一边吃包子一边讨论昨天的"
        "作业。有人在挑选新鲜的蔬菜，有人在打听今天的鱼价。等到太阳完全升起，人群散去，街道又恢复了平静，只剩下几只猫在屋檐下打盹。\n\n"
        "冰箱并不制造寒冷，它只是把热量搬到别处。一种沸点很低的液体在箱内的管道里蒸发，吸收食物的热量；到了箱外，压缩机把它重新变成液体，"
        "热量便散发到空气中，所以冰箱背后总是温热的。因为压缩机消耗的电能最后也变成了热，开着门的冰箱反而会让整个房间慢慢升温。\n\n"
        "“无论结果如何，我们都会公布。”委员会主席周二表示。这项针对上班族的调查去年春天由市议会批准，内容包括人们怎样出行、路上要花多少"
        "时间，以及最希望改变什么。批评者并不抱太大希望：此前的两次研究都没有经过讨论就被搁置了。\n"
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
        "    return means\n\n\n"
        "#include <stdio.h>\n\n"
        "/* Length of the longest line of a stream, without its end. */\n"
        "size_t longest_line(FILE *in)\n"
        "{\n"
        "\tsize_t longest = 0, length = 0;\n"
        "\tint c;\n\n"
        "\twhile ((c = fgetc(in)) != EOF) {\n"
        "\t\tif (c == '\\n') {\n"
        "\t\t\tlength = 0;\n"
        "\t\t} else if (++length > longest) {\n"
        "\t\t\tlongest = length;\n"
        "\t\t}\n"
        "\t}\n"
        "\treturn longest;\n"
        "}\n"
    ),
    "digits": (
        "37 * 48 = 1776\n1024 / 32 = 32\n3.14159265358979\n2025-11-21 08:30:00\n+86 138 0000 0000\n"
        "999 + 1 = 1000; 123456789 - 987654321 = -864197532\n0.1 + 0.2 = 0.30000000000000004\n"
    ),
}
CORPUS_DOCUMENTS = 1_000


@dataclass(frozen=True)
class Published:
    """A published vocabulary, with the number of tokens that it gives for each sample.

    The vocabulary itself is used only if tiktoken has cached its files. They are never downloaded, since most hosts of
    this project have no network; so the counts for the samples are kept here.
    """

    size: int  # without special tokens
    samples: dict[str, int]
    files: tuple[
        str, ...
    ] = ()  # tiktoken names them by the SHA-1 of their addresses; () if it lacks the vocabulary


# Counted with tiktoken 0.14 from the files whose SHA-256s it knows; Qwen's counts come from the
# file in Alibaba's package dashscope 2.0.2, SHA-256 b2b1b8df.... Count again if a sample changes.
PUBLISHED = {
    "gpt2": Published(
        50_256,
        {"English": 236, "Chinese": 772, "code": 315, "digits": 77},
        ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
    ),
    "cl100k_base": Published(
        100_256,
        {"English": 229, "Chinese": 477, "code": 206, "digits": 93},
        ("encodings/cl100k_base.tiktoken",),
    ),
    "o200k_base": Published(
        199_998,
        {"English": 224, "Chinese": 302, "code": 209, "digits": 93},
        ("encodings/o200k_base.tiktoken",),
    ),
    "qwen": Published(151_643, {"English": 229, "Chinese": 227, "code": 206, "digits": 157}),
}
PUBLISHED_AT = "https://openaipublic.blob.core.windows.net/"


@dataclass(frozen=True)
class Config:
    """Measure how well the tokenizer compresses text."""

    data: str | None = None
    """The corpus or mixture whose tokenizer is measured. Default: the only corpus."""


def is_cached(name: str) -> bool:
    """Whether tiktoken has cached all files of a published vocabulary."""
    default = Path(tempfile.gettempdir()) / "data-gym-cache"
    folder = Path(
        os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR") or default
    )
    names = [
        hashlib.sha1((PUBLISHED_AT + file).encode()).hexdigest() for file in PUBLISHED[name].files
    ]
    return bool(names) and all((folder / file).exists() for file in names)


def first_documents(corpus: Corpus, split: Literal["train", "val"]) -> list[str]:
    """The first documents of a split, which represent the corpus."""
    return list(islice(texts(shards(corpus, split)), CORPUS_DOCUMENTS))


def published_ratios(kinds: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    """Bytes per token of each published vocabulary for each kind of text. Vocabularies that
    tiktoken has not cached have figures for the samples only."""
    ratios: dict[str, dict[str, float]] = {}
    for name, known in PUBLISHED.items():
        counts = dict(known.samples)
        if is_cached(name):
            encoding = tiktoken.get_encoding(name)
            counts = {
                kind: sum(map(len, encoding.encode_ordinary_batch(some)))
                for kind, some in kinds.items()
            }
        ratios[name] = {
            kind: sum(len(text.encode()) for text in kinds[kind]) / counts[kind] for kind in counts
        }
    return ratios


def train(cfg: Config) -> list[dict[str, float | str]]:
    """Print a table and keep it for the report: one row per kind of text, one column per
    vocabulary."""
    data = resolve_data(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(data.vocabulary))
    kinds = {name: [text] for name, text in SAMPLES.items()}
    for corpus in data.corpora:
        kinds |= {
            f"{corpus.name} {split}": first_documents(corpus, split) for split in ("train", "val")
        }
    others = published_ratios(kinds)

    rows: list[dict[str, float | str]] = []
    for kind, some in kinds.items():
        tokens = tokenizer.encode_batch(some)
        if [tokenizer.decode(ids) for ids in tokens] != some:
            raise UserError(
                f"{kind}: decoding the tokens of a text does not give the text back. Train the tokenizer again: "
                f"python -m scripts.tok_train --data {quote(data.name)}"
            )
        size, count = sum(len(text.encode()) for text in some), sum(map(len, tokens))
        row: dict[str, float | str] = {
            "text": kind,
            "bytes": size,
            "tokens": count,
            "bytes_per_token": size / count,
        }
        rows.append(row | {name: ratios[kind] for name, ratios in others.items() if kind in ratios})

    table = Table(
        title=f"{data.name}, {tokenizer.vocab_size:,} tokens, pattern {tokenizer.pattern}: bytes per token"
    )
    table.add_column("text", no_wrap=True)
    names = (
        f"{name.removesuffix('_base')}\n{round(PUBLISHED[name].size / 1000)}k" for name in others
    )
    for column in ("bytes", "tokens", "ours", *names):
        table.add_column(column, justify="right")
    for row in rows:
        ratios = [
            f"{row[name]:.2f}" if name in row else "-" for name in ("bytes_per_token", *others)
        ]
        table.add_row(str(row["text"]), f"{row['bytes']:,}", f"{row['tokens']:,}", *ratios)
    Console().print(table)
    if missing := [name for name in others if not is_cached(name)]:
        log(
            f"tiktoken has not cached these, so they are compared on the samples only: {', '.join(missing)}"
        )
    section = {
        "corpus": data.name,
        "tokenizer": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "rows": rows,
    }
    write_section("tok_eval", section)
    return rows


if __name__ == "__main__":
    run(train, Config, __doc__)

"""Measure how well the tokenizer compresses text, in bytes per token: higher is better.

python -m scripts.tok_eval
python -m scripts.tok_eval --data fineweb

The table compares the tokenizer with published vocabularies. It always does so on the samples
below, and on the corpora if tiktoken has cached the published vocabulary.
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

from nanochat.common import UserError, log, tr
from nanochat.data.command_line import run
from nanochat.data.corpora import Corpus, shards
from nanochat.data.mixing import resolve_data
from nanochat.data.shards import texts
from nanochat.report.sections import write_section
from nanochat.tokenizer import Tokenizer, tokenizer_dir

SAMPLES = {
    "English": (
        "The lighthouse keeper climbed the stairs every evening at dusk, as her father had "
        "done before her. She "
        "trimmed the lamp, wrote the weather into a thick book, and watched the boats come "
        "home. On clear nights she "
        "could see the mainland; on others only fog, and then she rang the bell once a "
        "minute until morning. "
        "Nobody had asked her to stay, but nobody else knew when the wind was about to turn.\n\n"
        "A refrigerator does not make cold, it moves heat. A liquid that boils far below "
        "room temperature is pumped "
        "through pipes inside the cabinet, where it evaporates and takes up warmth. Outside "
        "it is compressed until it "
        "condenses and gives that warmth back, which is why the grille behind the kitchen "
        "cupboard is never cool. "
        "Because the compressor's work becomes heat as well, an open refrigerator slowly "
        "warms the room.\n\n"
        "\"We'll publish the results whatever they show,\" the committee's chairwoman said "
        "on Tuesday. The survey of "
        "commuters, which the city council approved last spring, asks how people travel, how "
        "long they're underway "
        "and what they'd change. Critics don't expect much: two earlier studies were shelved "
        "without discussion.\n"
    ),
    "Chinese": (
        "清晨的市场总是最热闹的。卖豆腐的老人推着车慢慢走过石桥，桥下的河水映着刚刚亮起来的天空。"
        "孩子们背着书包，一边吃包子一边讨论昨天的"
        "作业。有人在挑选新鲜的蔬菜，有人在打听今天的鱼价。等到太阳完全升起，人群散去，街道又恢复"
        "了平静，只剩下几只猫在屋檐下打盹。\n\n"
        "冰箱并不制造寒冷，它只是把热量搬到别处。一种沸点很低的液体在箱内的管道里蒸发，吸收食物的"
        "热量；到了箱外，压缩机把它重新变成液体，"
        "热量便散发到空气中，所以冰箱背后总是温热的。因为压缩机消耗的电能最后也变成了热，开着门的"
        "冰箱反而会让整个房间慢慢升温。\n\n"
        "“无论结果如何，我们都会公布。”委员会主席周二表示。这项针对上班族的调查去年春天由市议会"
        "批准，内容包括人们怎样出行、路上要花多少"
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
    """A published vocabulary, with the number of tokens in each sample.

    The vocabulary itself is used only if tiktoken has cached its files. They are never downloaded,
    because most hosts of this project have no network, so the counts for the samples are kept here.
    """

    size: int  # without special tokens
    samples: dict[str, int]
    # tiktoken names its files by the SHA-1 of their addresses; () if it lacks the vocabulary.
    files: tuple[str, ...] = ()


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


Row = dict[str, float | str]


def evaluate(cfg: Config) -> list[Row]:
    """Print a table of bytes per token, write it to the report, and return its rows.

    The table has a row for each kind of text, and a column of ratios for each vocabulary.
    """
    data = resolve_data(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(data.vocabulary))
    texts_by_kind = {name: [text] for name, text in SAMPLES.items()}
    for corpus in data.corpora:
        for split in ("train", "val"):
            texts_by_kind[f"{corpus.name} {split}"] = first_documents(corpus, split)
    published = published_ratios(texts_by_kind)
    rows = []
    for kind, documents in texts_by_kind.items():
        row = measure(kind, documents, tokenizer, data.name)
        for name, ratios in published.items():
            if kind in ratios:
                row[name] = ratios[kind]
        rows.append(row)
    print_table(rows, tokenizer, data.name)
    uncached = [name for name in published if not is_cached(name)]
    if uncached:
        log(
            tr(
                "tiktoken has not cached these, so they are compared on the samples only: "
                "{uncached}",
                uncached=", ".join(uncached),
            )
        )
    section = {
        "corpus": data.name,
        "tokenizer": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "rows": rows,
    }
    write_section("tok_eval", section)
    return rows


def first_documents(corpus: Corpus, split: Literal["train", "val"]) -> list[str]:
    """Return the first documents of a split, at most 1,000, as a sample of the corpus."""
    return list(islice(texts(shards(corpus, split)), CORPUS_DOCUMENTS))


def measure(
    kind: str,
    documents: list[str],
    tokenizer: Tokenizer,
    data_name: str,
) -> Row:
    """Return a table row with the bytes and tokens in one kind of text, and their ratio.

    Raises UserError if a text does not come back when its tokens are decoded.
    """
    tokens = tokenizer.encode_batch(documents)
    if [tokenizer.decode(ids) for ids in tokens] != documents:
        raise UserError(
            tr(
                "{kind}: decoding the tokens of a text does not give the text back. Train "
                "the tokenizer again: python -m scripts.tok_train --data {data_name}",
                kind=kind,
                data_name=quote(data_name),
            )
        )
    num_bytes = count_bytes(documents)
    num_tokens = sum(map(len, tokens))
    return {
        "text": kind,
        "bytes": num_bytes,
        "tokens": num_tokens,
        "bytes_per_token": num_bytes / num_tokens,
    }


def count_bytes(documents: list[str]) -> int:
    """Return the total length of texts in UTF-8 bytes."""
    return sum(len(text.encode()) for text in documents)


def published_ratios(texts_by_kind: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    """Return the bytes per token, as published vocabulary -> kind of text -> ratio.

    A vocabulary that tiktoken has not cached has ratios for the samples only.
    """
    ratios: dict[str, dict[str, float]] = {}
    for name, vocabulary in PUBLISHED.items():
        token_counts = dict(vocabulary.samples)
        if is_cached(name):
            encoding = tiktoken.get_encoding(name)
            for kind, documents in texts_by_kind.items():
                tokens = encoding.encode_ordinary_batch(documents)
                token_counts[kind] = sum(map(len, tokens))
        ratios[name] = {}
        for kind, count in token_counts.items():
            ratios[name][kind] = count_bytes(texts_by_kind[kind]) / count
    return ratios


def is_cached(name: str) -> bool:
    """Return whether tiktoken knows a published vocabulary and has cached all of its files."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    if not folder:
        folder = Path(tempfile.gettempdir()) / "data-gym-cache"
    addresses = [PUBLISHED_AT + file for file in PUBLISHED[name].files]
    cached_names = [hashlib.sha1(address.encode()).hexdigest() for address in addresses]
    return bool(cached_names) and all(Path(folder, file).exists() for file in cached_names)


def print_table(
    rows: list[Row],
    tokenizer: Tokenizer,
    data_name: str,
) -> None:
    """Print a table of bytes per token, with a column for each published vocabulary."""
    title = tr(
        "{corpus}, {size:,} tokens, pattern {pattern}: bytes per token",
        corpus=data_name,
        size=tokenizer.vocab_size,
        pattern=tokenizer.pattern,
    )
    table = Table(title=title)
    table.add_column(tr("text"), no_wrap=True)
    for column in (tr("bytes"), tr("token count"), tr("ours")):
        table.add_column(column, justify="right")
    for name, vocabulary in PUBLISHED.items():
        thousands = round(vocabulary.size / 1000)
        table.add_column(f"{name.removesuffix('_base')}\n{thousands}k", justify="right")
    for row in rows:
        cells = [kind_in_words(str(row["text"])), f"{row['bytes']:,}", f"{row['tokens']:,}"]
        for name in ("bytes_per_token", *PUBLISHED):
            cells.append(f"{row[name]:.2f}" if name in row else "-")
        table.add_row(*cells)
    Console().print(table)


def kind_in_words(kind: str) -> str:
    """Return the name of a kind of text in the user's language; names of corpora stay as they are."""
    words = {
        "English": tr("English"),
        "Chinese": tr("Chinese"),
        "code": tr("code"),
        "digits": tr("digits"),
        "train": tr("train"),
        "val": tr("val"),
    }
    corpus, space, name = kind.rpartition(" ")
    return f"{corpus}{space}{words[name]}"


if __name__ == "__main__":
    run(evaluate, Config, __doc__)

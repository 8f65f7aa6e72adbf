"""Measures what --dedup and --check_against cost: tokens per CPU second of preparation with and without them.

python -m bench.clean            # about a minute
python -m bench.clean --passes 1

The English text is Python's standard library, cut into documents as bench.data cuts it. The Chinese text is
TinyWorld's, in documents of 1,500 characters. One process, one thread; the corpus is prepared from nothing each time.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.data.__main__ import cpu_seconds, documents
from bench.train.rows import standard_library
from nanochat.common import log, run
from nanochat.data.corpora import Corpus
from nanochat.data.shards import write_shards
from nanochat.data.tinyworld import world
from nanochat.prepare.clean import clean, take_back
from nanochat.prepare.documents import prepare_documents
from nanochat.tokenizer import Tokenizer

VOCABULARY = 16_384
CHARACTERS = 1_500  # of a Chinese document
QUESTIONS = Path(__file__).resolve().parent.parent / "tests" / "support" / "files" / "tasks"


@dataclass(frozen=True)
class Config:
    """Measure the cost of cleaning a corpus."""

    passes: int = 3
    """How often the standard library is used."""


def english(passes: int) -> Iterator[str]:
    """Documents out of Python's standard library."""
    return documents("\n".join(standard_library().documents), passes)


def chinese(passes: int) -> Iterator[str]:
    """Documents out of TinyWorld's Chinese ones, joined and cut."""
    text = "\n".join(text for text in world.documents() if not text.isascii()) * passes
    return (text[at : at + CHARACTERS] for at in range(0, len(text), CHARACTERS))


def measure(folder: Path, texts: list[str]) -> dict[str, float]:
    """Tokens per CPU second by what is done besides tokenising."""
    tokenizer = Tokenizer.train(texts[: len(texts) // 3 + 1], VOCABULARY)
    write_shards(folder, texts, rows_per_shard=len(texts) // 3 + 1)
    corpus = Corpus(folder.name, folder)
    tokens = prepare_documents(corpus, tokenizer, "train", 1).tokens
    steps: dict[str, Callable[[], object]] = {
        "tokenise": lambda: None,
        "with --dedup": lambda: clean(corpus, True, None, False, 1),
        "with --dedup and --check_against": lambda: clean(corpus, True, QUESTIONS, False, 1),
    }
    speeds = {}
    for name, step in steps.items():
        before = cpu_seconds()
        step()
        cleaned = cpu_seconds() - before
        take_back(corpus)  # so that every measure tokenises all documents
        for made in folder.glob("tokens-*"):
            shutil.rmtree(made)
        before = cpu_seconds()
        prepare_documents(corpus, tokenizer, "train", 1)
        speeds[name] = tokens / (cleaned + cpu_seconds() - before)
    return speeds


def main(cfg: Config) -> None:
    """Print tokens per CPU second for both texts, and the same as JSON in the last line."""
    found = {}
    for name, texts in (("english", english(cfg.passes)), ("chinese", chinese(cfg.passes))):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = speeds = measure(Path(folder) / name, list(texts))
        for what, speed in speeds.items():
            log(f"{name}, {what}: {speed:,.0f} tokens per CPU second")
    print(json.dumps(found))


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Measures the cost of data: tokenising, packing and loading it.

python -m bench.data --quick            # ends within 50 seconds
python -m bench.data

How: the text is Python's standard library, cut into documents as long as web pages: their lengths
come from a log-normal distribution with a median of 2,700 characters, about 900 tokens on average.
Times are CPU seconds of one run. bench.data.evaluation and bench.data.checkpoint measure what a
model's data costs after training.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import child, tables
from bench.text import standard_library
from nanochat import dataloader, device
from nanochat.common import log
from nanochat.data.command_line import run
from nanochat.data.corpora import Corpus
from nanochat.data.shards import write_shards
from nanochat.device import Compute
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.plan import plan
from nanochat.tokenizer import Tokenizer

LENGTH = 2048  # tokens of a row, the default context
BATCH = 16  # rows of a pass
VOCABULARY = 32_768
MEDIAN = 2_700  # characters of a document
SIGMA = 0.95
SEED = 0
PASSES = 12  # how often the text is used; --quick uses a quarter of it, a third as often


@dataclass(frozen=True)
class Config:
    """Print what data costs as a table, and as one JSON object on the last line."""

    quick: bool = False
    """use less text and fewer steps, so that it ends within 50 seconds"""


def documents(text: str, passes: int) -> Iterator[str]:
    """Cut the text into documents `passes` times, at different places each time."""
    draw = np.random.default_rng(SEED)
    for _ in range(passes):
        start = 0
        while start < len(text):
            length = max(int(draw.lognormal(np.log(MEDIAN), SIGMA)), 1)
            yield text[start : start + length]
            start += length


def make_corpus(folder: Path, quick: bool) -> tuple[Corpus, Tokenizer]:
    """Write the corpus as four shards, and train a tokenizer on its text."""
    sources = standard_library().documents
    tokenizer = Tokenizer.train(sources, VOCABULARY)
    text = "\n".join(sources[:: 4 if quick else 1])
    texts = list(documents(text, PASSES // 3 if quick else PASSES))
    write_shards(folder, texts, rows_per_shard=len(texts) // 4 + 1)
    return Corpus(folder.name, folder), tokenizer


def loader_speed(rows: dataloader.Source, compute: Compute, batches: int) -> dict[str, float]:
    """Return one rank's tokens per CPU second, and the CPU seconds to its first step."""
    stream = dataloader.steps(rows, 0, BATCH, BATCH, compute)
    first_seconds = child.seconds_of(lambda: next(stream))

    def load() -> None:
        for _ in range(batches):
            next(stream)

    speed = batches * BATCH * LENGTH / child.seconds_of(load)
    return {"first_step_cpu_seconds": first_seconds, "loader_tokens_per_cpu_second": speed}


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure everything; files are written to `folder`."""
    corpus, tokenizer = make_corpus(folder / "web", quick)
    compute = device.compute_init("cpu")
    tokens, prepare_seconds = child.timed(
        lambda: prepare_documents(corpus, tokenizer, "train", processes=1)
    )
    packed, plan_seconds = child.timed(lambda: plan(tokens, LENGTH + 1, cut=True))
    rows = dataloader.Rows(tokens, packed, tokenizer.bos, SEED, masked=False)
    return {
        "tokens": tokens.tokens,
        "documents": tokens.documents,
        "prepare_tokens_per_cpu_second": tokens.tokens / prepare_seconds,
        "plan_tokens_per_cpu_second": tokens.tokens / plan_seconds,
        **loader_speed(rows, compute, 40 if quick else 200),
    }


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(cfg.quick, Path(folder))
    log(
        f"{result['documents']:,} documents, {result['tokens']:,} tokens; "
        f"rows of {LENGTH:,} tokens, {BATCH} rows a step"
    )
    rows = [
        ("prepare, tokens/CPU s", f"{result['prepare_tokens_per_cpu_second']:,.0f}"),
        ("packing plan, tokens/CPU s", f"{result['plan_tokens_per_cpu_second']:,.0f}"),
        ("loader, tokens/CPU s", f"{result['loader_tokens_per_cpu_second']:,.0f}"),
        ("first step, CPU seconds", f"{result['first_step_cpu_seconds']:.3f}"),
    ]
    tables.show(("", "ours"), rows)
    tables.finish("data", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

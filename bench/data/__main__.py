"""Measures the cost of data: tokenising, packing and loading it.

python -m bench.data --quick            # ends within 50 seconds
python -m bench.data

How: the text is Python's standard library, cut into documents as long as web pages: their lengths
come from a log-normal distribution with a median of 2,700 characters, about 900 tokens on average.
Times are CPU seconds of one run. Packing is measured by what it loses: tokens that are in no row,
documents that are cut. bench.data.evaluation and bench.data.checkpoint measure what a model's data
costs after training.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import child, tables
from bench.text import standard_library
from nanochat import dataloader, device
from nanochat.common import log, run
from nanochat.data.corpora import Corpus
from nanochat.data.shards import write_shards
from nanochat.device import Compute
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.plan import Plan, plan
from nanochat.prepare.token_files import TokenSet
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


@dataclass(frozen=True)
class Loss:
    """How much packing loses of the documents, each as a share from 0 to 1."""

    lost: float  # tokens that are in no row
    cut_documents: float  # documents that are in several rows or not whole
    padding: float  # cells that hold no token


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


def packing_loss(token_set: TokenSet, packed: Plan) -> Loss:
    """Return what a packing plan loses of its documents."""
    lengths = token_set.lengths()
    document_starts = np.cumsum(lengths) - lengths
    used = packed.packing.lengths > 0
    starts = packed.packing.starts[used]
    piece_lengths = packed.packing.lengths[used].astype(np.int64)
    has_start = np.isin(document_starts, starts)
    has_end = np.isin(document_starts + lengths, starts + piece_lengths)
    document_of_piece = np.searchsorted(document_starts, starts, side="right") - 1
    in_one_piece = np.bincount(document_of_piece, minlength=len(lengths)) == 1
    uncut = has_start & has_end & in_one_piece
    return Loss(
        lost=1 - int(piece_lengths.sum()) / int(lengths.sum()),
        cut_documents=1 - int(uncut.sum()) / len(lengths),
        padding=1 - int(packed.used.sum()) / (packed.rows * packed.row_tokens),
    )


def loader_speed(rows: dataloader.Source, compute: Compute, batches: int) -> dict[str, float]:
    """Return one rank's tokens per CPU second, and the CPU seconds to its first step."""
    start = time.process_time()
    stream = dataloader.steps(rows, 0, BATCH, BATCH, compute)
    next(stream)
    first = time.process_time() - start

    def load() -> None:
        for _ in range(batches):
            next(stream)

    speed = batches * BATCH * LENGTH / child.seconds_of(load)
    return {"first_cpu_seconds": first, "tokens_per_cpu_second": speed}


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Measure everything; files are written to `folder`."""
    corpus, tokenizer = make_corpus(folder / "web", quick)
    compute = device.compute_init("cpu")
    start = time.process_time()
    tokens = prepare_documents(corpus, tokenizer, "train", processes=1)
    prepare_seconds = time.process_time() - start
    start = time.process_time()
    packed = plan(tokens, LENGTH + 1, cut=True)
    plan_seconds = time.process_time() - start
    rows = dataloader.Rows(tokens, packed, tokenizer.bos, SEED, masked=False)
    return {
        "tokens": tokens.tokens,
        "documents": tokens.documents,
        "prepare": {"tokens_per_cpu_second": tokens.tokens / prepare_seconds},
        "plan_tokens_per_cpu_second": tokens.tokens / plan_seconds,
        "packing": asdict(packing_loss(tokens, packed)),
        "loader": loader_speed(rows, compute, 40 if quick else 200),
    }


def show(result: dict[str, Any]) -> None:
    """Print what was measured."""
    packing = result["packing"]
    loader = result["loader"]
    rows = [
        ("prepare, tokens/CPU s", f"{result['prepare']['tokens_per_cpu_second']:,.0f}"),
        ("packing plan, tokens/CPU s", f"{result['plan_tokens_per_cpu_second']:,.0f}"),
        ("tokens that are in no row", f"{packing['lost']:.2%}"),
        ("documents that are cut", f"{packing['cut_documents']:.2%}"),
        ("padding", f"{packing['padding']:.2%}"),
        ("loader, tokens/CPU s", f"{loader['tokens_per_cpu_second']:,.0f}"),
        ("first step, CPU seconds", f"{loader['first_cpu_seconds']:.3f}"),
    ]
    tables.show(("", "ours"), rows)


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(cfg.quick, Path(folder))
    log(
        f"{result['documents']:,} documents, {result['tokens']:,} tokens; "
        f"rows of {LENGTH:,} tokens, {BATCH} rows a step"
    )
    show(result)
    tables.finish("data", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

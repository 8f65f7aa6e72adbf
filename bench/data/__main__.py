"""Measures the cost of data: tokenising, packing and loading it, and how long training waits for it.

python -m bench.data --quick            # ends within 50 seconds, measures ours alone
python -m bench.data --upstream DIR     # DIR: a checkout of karpathy/nanochat; its loader reads the same shards

How: the text is Python's standard library, cut into documents as long as web pages: their lengths come from a log-normal
distribution with a median of 2,700 characters, about 900 tokens on average. Times are CPU seconds of one run. Packing is
measured by what it loses: tokens that are in no row, documents that are cut. bench.data.evaluation and
bench.data.checkpoint measure what a model's data costs after training.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench import child
from bench.processes import answer_of, check_upstream
from bench.text import standard_library
from bench.training import D4, Trainer, random_model
from nanochat import dataloader, device
from nanochat.common import log, run
from nanochat.data.corpora import Corpus
from nanochat.data.shards import write_shards
from nanochat.device import Compute
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.plan import Plan, plan
from nanochat.prepare.token_files import TokenSet
from nanochat.tokenizer import FILE_NAME, Tokenizer, cores

LENGTH, BATCH = 2048, 16  # what the loaders are measured at: the default context, and rows per pass
VOCABULARY = 32_768
MEDIAN, SIGMA, SEED = 2_700, 0.95, 0  # characters
PASSES = 12  # how often the text is used; --quick uses a quarter of the text, a third as often


@dataclass(frozen=True)
class Config:
    """Print what data costs as a table, and as one JSON object on the last line."""

    quick: bool = False
    """use less text and fewer steps and measure ours alone, so that it ends within 50 seconds"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat, whose loader is measured on the same shards; default: ours alone"""


@dataclass(frozen=True)
class Loss:
    """How much packing loses of the documents, each as a share from 0 to 1."""

    lost: float  # tokens that are in no row
    cut_documents: float  # documents that are in several rows or not whole
    longer_than_a_row: float  # documents that no plan could keep whole
    headless: float  # tokens in pieces that do not begin their document
    padding: float  # cells that hold no token


# --- text ------------------------------------------------------------------------------------------


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
    passes = max(PASSES // 3, 1) if quick else PASSES
    texts = list(documents(text, passes))
    write_shards(folder, texts, rows_per_shard=len(texts) // 4 + 1)
    return Corpus(folder.name, folder), tokenizer


# --- measuring -------------------------------------------------------------------------------------


def measure_preparation(
    corpus: Corpus, tokenizer: Tokenizer, processes: int
) -> tuple[TokenSet, dict[str, float]]:
    """Tokenise the corpus from scratch; return its tokens, and the tokens per CPU second and per second."""
    for folder in corpus.folder.glob("tokens-*"):
        shutil.rmtree(folder)
    start, cpu_start = time.perf_counter(), child.cpu_seconds()
    tokens = prepare_documents(
        corpus,
        tokenizer,
        "train",
        processes,
    )
    seconds, cpu_seconds = time.perf_counter() - start, child.cpu_seconds() - cpu_start
    return tokens, {
        "tokens_per_cpu_second": tokens.tokens / cpu_seconds,
        "tokens_per_second": tokens.tokens / seconds,
    }


def packing_loss(token_set: TokenSet, packed: Plan) -> Loss:
    """Return what a packing plan loses of its documents."""
    lengths = token_set.lengths()
    document_starts = np.cumsum(lengths) - lengths
    used = packed.packing.lengths > 0
    starts = packed.packing.starts[used]
    piece_lengths = packed.packing.lengths[used].astype(np.int64)
    ends = np.sort(starts + piece_lengths)
    begun_and_ended = np.isin(document_starts, starts) & np.isin(document_starts + lengths, ends)
    document_of_piece = np.searchsorted(document_starts, starts, side="right") - 1
    in_one_piece = np.bincount(document_of_piece, minlength=len(lengths)) == 1
    heads = np.isin(starts, document_starts)
    tokens = int(piece_lengths.sum())
    return Loss(
        lost=1 - tokens / int(lengths.sum()),
        cut_documents=1 - int((begun_and_ended & in_one_piece).sum()) / len(lengths),
        longer_than_a_row=int((lengths >= packed.row_tokens).sum()) / len(lengths),
        headless=int(piece_lengths[~heads].sum()) / tokens,
        padding=1 - int(packed.used.sum()) / (packed.rows * packed.row_tokens),
    )


def loader_speed(rows: dataloader.Source, compute: Compute, batches: int) -> dict[str, float]:
    """Return one rank's tokens per CPU second, and the CPU seconds to its first step."""
    start = time.process_time()
    stream = dataloader.steps(
        rows,
        0,
        BATCH * compute.world_size,
        BATCH,
        compute,
    )
    next(stream)
    first = time.process_time() - start

    def load() -> None:
        for _ in range(batches):
            next(stream)

    speed = batches * BATCH * LENGTH / child.seconds_of(load)
    return {"first_cpu_seconds": first, "tokens_per_cpu_second": speed}


def copy_speed(token_set: TokenSet) -> float:
    """Return the tokens per CPU second of copying the mapped files to int64: the limit of any loader."""

    def copy() -> None:
        for token_file in token_set.parts:
            token_file.tokens.astype(np.int64)

    return token_set.tokens / child.seconds_of(copy)


def waiting_share(
    token_set: TokenSet,
    tokenizer: Tokenizer,
    compute: Compute,
    steps: int,
) -> float:
    """Return the share of a training step that waits for its rows, with a small model; the median step."""
    packed = plan(token_set, D4.sequence_len + 1, cut=True)
    rows = dataloader.Rows(
        token_set,
        packed,
        tokenizer.bos,
        SEED,
        masked=False,
    )
    trainer = Trainer(random_model(D4, compute), compute)
    stream = dataloader.steps(
        rows,
        0,
        8,
        8,
        compute,
    )
    shares = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        inputs, targets = next(stream).micro_batches[0][:2]
        loaded = time.perf_counter()
        # The small model's vocabulary is smaller than the tokenizer's.
        small_targets = torch.where(targets < 0, targets, targets % D4.vocab_size)
        trainer.step([(inputs % D4.vocab_size, small_targets)])
        shares.append((loaded - start) / (time.perf_counter() - start))
    return median(shares[1:])  # nothing was computed while the first rows were loaded


def measure_upstream(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, upstream: Path, batches: int
) -> dict[str, Any]:
    """Measure upstream's loader on the same shards and vocabulary."""
    home = folder / "upstream"
    home.mkdir()
    (home / "base_data_climbmix").symlink_to(corpus.folder)
    tokenizer.save(folder)
    task = {
        "tokenizer": str(folder / FILE_NAME),
        "length": LENGTH,
        "batch": BATCH,
        "batches": batches,
    }
    module = "bench.data.upstream_side"
    return answer_of(
        "upstream",
        module,
        task,
        upstream,
        NANOCHAT_BASE_DIR=str(home),
    )


def measure(cfg: Config, folder: Path) -> dict[str, Any]:
    """Measure everything; files are written to `folder`."""
    corpus, tokenizer = make_corpus(folder / "web", cfg.quick)
    compute = device.compute_init("cpu")
    batches = 40 if cfg.quick else 200
    _, one_process = measure_preparation(corpus, tokenizer, 1)
    processes = 2 if cfg.quick else max(min(cores(), 4), 2)
    tokens, several_processes = measure_preparation(corpus, tokenizer, processes)
    start = time.process_time()
    packed = plan(tokens, LENGTH + 1, cut=True)
    plan_seconds = time.process_time() - start
    rows = dataloader.Rows(
        tokens,
        packed,
        tokenizer.bos,
        SEED,
        masked=False,
    )
    other_rows = dataloader.Rows(
        tokens,
        packed,
        tokenizer.bos,
        SEED + 1,
        masked=False,
    )
    mixed = dataloader.MixedRows([rows, other_rows], (7, 3))
    result: dict[str, Any] = {
        "tokens": tokens.tokens,
        "documents": tokens.documents,
        "prepare": one_process,
        "prepare_processes": several_processes,
        "plan_tokens_per_cpu_second": tokens.tokens / plan_seconds,
        "packing": asdict(packing_loss(tokens, packed)),
        "loader": loader_speed(rows, compute, batches),
        "loader_mixture": loader_speed(mixed, compute, batches),
        "copy_tokens_per_cpu_second": copy_speed(tokens),
        "waiting_share": waiting_share(
            tokens,
            tokenizer,
            compute,
            8 if cfg.quick else 30,
        ),
    }
    if cfg.upstream is not None:
        # It drops part of what it reads, and must not read anything twice.
        once = packed.rows // BATCH // 2
        result["upstream"] = measure_upstream(
            folder,
            corpus,
            tokenizer,
            cfg.upstream,
            once,
        )
    return result


# --- command line ----------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Return the lines of the table: what was measured of ours, and of upstream if it ran."""
    loss, loader, peer = result["packing"], result["loader"], result.get("upstream", {})
    speed, share = "{:,.0f}", "{:.2%}"
    several = result["prepare_processes"]
    mixture = result["loader_mixture"]
    peer_speed = peer.get("tokens_per_cpu_second")
    rows = [  # what, format, ours, upstream
        ("prepare, tokens/CPU s", speed, result["prepare"]["tokens_per_cpu_second"], None),
        ("  in several processes", speed, several["tokens_per_cpu_second"], None),
        ("  in several processes, tokens/s", speed, several["tokens_per_second"], None),
        ("packing plan, tokens/CPU s", speed, result["plan_tokens_per_cpu_second"], None),
        ("tokens that are in no row", share, loss["lost"], peer.get("lost")),
        ("documents that are cut", share, loss["cut_documents"], peer.get("cut_documents")),
        ("  longer than a row", share, loss["longer_than_a_row"], None),
        ("tokens in pieces without a beginning", share, loss["headless"], None),
        ("padding", share, loss["padding"], None),
        ("loader, tokens/CPU s", speed, loader["tokens_per_cpu_second"], peer_speed),
        ("  of a mixture", speed, mixture["tokens_per_cpu_second"], None),
        ("  limit: a bare copy", speed, result["copy_tokens_per_cpu_second"], None),
        (
            "first step, CPU seconds",
            "{:.3f}",
            loader["first_cpu_seconds"],
            peer.get("first_cpu_seconds"),
        ),
        ("waiting for data, share of a step", "{:.3%}", result["waiting_share"], None),
    ]
    lines = [f"{'':<40}{'ours':>14}{'upstream' if peer else '':>14}"]
    for title, form, ours, theirs in rows:
        peer_cell = "" if theirs is None else form.format(theirs)
        lines.append(f"{title:<40}{form.format(ours):>14}{peer_cell:>14}")
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """Return the same figures with four digits."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(cfg: Config) -> None:
    """Measure and print."""
    check_upstream(cfg.quick, ("upstream",) if cfg.upstream else (), cfg.upstream)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(cfg, Path(folder))
    log(
        f"{result['documents']:,} documents, {result['tokens']:,} tokens; rows of {LENGTH:,} tokens, "
        f"{BATCH} rows a step"
    )
    log(table(result))
    print(json.dumps({"benchmark": "data", **rounded(result)}), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

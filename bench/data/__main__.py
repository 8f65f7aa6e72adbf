"""Measures the cost of data: tokenising, packing and loading it, and how long training waits for it.

python -m bench.data --quick            # ends within 50 seconds, measures ours alone
python -m bench.data --upstream DIR     # DIR: a checkout of karpathy/nanochat; its loader reads the same shards

The text is Python's standard library, because every host has it. It is cut into documents as long as web pages: lengths
come from a log-normal distribution with a median of 2,700 characters and sigma 0.95, about 900 tokens on average.
Times are CPU seconds of one run.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.ranks.group import D4
from bench.train.rows import standard_library
from bench.updates import update
from nanochat import dataloader, device
from nanochat.common import UserError, log, run
from nanochat.data.corpora import Corpus
from nanochat.data.shards import write_shards
from nanochat.device import Compute
from nanochat.gpt import GPT
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.plan import Plan, plan
from nanochat.prepare.token_files import TokenSet
from nanochat.step import Safeguards
from nanochat.tokenizer import FILE_NAME, Tokenizer, cores
from nanochat.train.optim import Optimizers, Rates

SIDE = Path(__file__).resolve().parent / "upstream_side.py"
LENGTH, BATCH = 2048, 16  # what the loaders are measured at: the default context, and rows per pass
VOCABULARY = 32_768
MEDIAN, SIGMA, SEED = 2_700, 0.95, 0  # characters
PASSES = 12  # how often the text is used; --quick uses a quarter of the text, a third as often


@dataclass(frozen=True)
class Loss:
    """How much packing loses of the documents, each as a share from 0 to 1."""

    lost: float  # tokens that are in no row
    cut_documents: float  # documents that are not whole in one row
    longer_than_a_row: float  # documents that no plan could keep whole
    headless: float  # tokens in pieces that do not begin their document
    padding: float  # cells that hold no token


def documents(text: str, passes: int) -> Iterator[str]:
    """Cut the text into documents `passes` times, at different places each time."""
    draw = np.random.default_rng(SEED)
    for _ in range(passes):
        at = 0
        while at < len(text):
            length = max(int(draw.lognormal(np.log(MEDIAN), SIGMA)), 1)
            yield text[at : at + length]
            at += length


def make_corpus(folder: Path, quick: bool) -> tuple[Corpus, Tokenizer]:
    """Write the corpus as four shards, and train a tokenizer on its text."""
    some = standard_library().documents
    text = "\n".join(some[:: 4 if quick else 1])
    tokenizer = Tokenizer.train(some, VOCABULARY)
    every = list(documents(text, max(PASSES // 3, 1) if quick else PASSES))
    write_shards(folder, every, rows_per_shard=len(every) // 4 + 1)
    return Corpus(folder.name, folder), tokenizer


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (0, resource.RUSAGE_CHILDREN))
    )


def measure_preparation(
    corpus: Corpus, tokenizer: Tokenizer, processes: int
) -> tuple[TokenSet, dict[str, float]]:
    """Tokenise the corpus from scratch; return its tokens, and the tokens per CPU second and per second."""
    for folder in corpus.folder.glob("tokens-*"):
        shutil.rmtree(folder)
    wall, cpu = time.perf_counter(), cpu_seconds()
    tokens = prepare_documents(corpus, tokenizer, "train", processes)
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    return tokens, {
        "tokens_per_cpu_second": tokens.tokens / cpu,
        "tokens_per_second": tokens.tokens / wall,
    }


def packing_loss(token_set: TokenSet, plan: Plan) -> Loss:
    """Count what a packing plan loses of its documents."""
    lengths = token_set.lengths()
    begins = np.cumsum(lengths) - lengths
    real = plan.packing.lengths > 0
    starts, held = plan.packing.starts[real], plan.packing.lengths[real].astype(np.int64)
    order = np.argsort(starts)
    whole = np.isin(begins, starts) & np.isin(begins + lengths, (starts + held)[order])
    own = np.searchsorted(begins, starts, side="right") - 1
    single = np.bincount(own, minlength=len(lengths)) == 1
    heads = np.isin(starts, begins)
    cells = plan.rows * plan.row_tokens
    return Loss(
        lost=1 - int(held.sum()) / int(lengths.sum()),
        cut_documents=1 - int((whole & single).sum()) / len(lengths),
        longer_than_a_row=int((lengths >= plan.row_tokens).sum()) / len(lengths),
        headless=int(held[~heads].sum()) / int(held.sum()),
        padding=1 - int(plan.used.sum()) / cells,
    )


def loader_speed(rows: dataloader.Source, compute: Compute, batches: int) -> dict[str, float]:
    """One rank's loader: tokens per CPU second, and the time to its first step."""
    rows_per_step = BATCH * compute.world_size
    wall, cpu = time.perf_counter(), time.process_time()
    stream = dataloader.steps(rows, 0, rows_per_step, BATCH, compute)
    next(stream)
    first, first_cpu = time.perf_counter() - wall, time.process_time() - cpu
    cpu = time.process_time()
    for _ in range(batches):
        next(stream)
    return {
        "first_seconds": first,
        "first_cpu_seconds": first_cpu,
        "tokens_per_cpu_second": batches * BATCH * LENGTH / (time.process_time() - cpu),
    }


def copy_speed(token_set: TokenSet) -> float:
    """Tokens per CPU second of copying the mapped files to int64 and doing nothing else: the limit of any loader."""
    cpu = time.process_time()
    for _ in range(5):
        for part in token_set.parts:
            part.tokens.astype(np.int64)
    return 5 * token_set.tokens / (time.process_time() - cpu)


def waiting_share(rows: dataloader.Source, compute: Compute, steps: int) -> float:
    """The share of a training step spent waiting for its rows, with a small model on one thread; the median step."""
    model = GPT(D4, compute.dtype, operations=compute.operations)
    model.init_weights()
    optimizers = Optimizers(model, model.parameter_roles(), D4.n_embd, Rates(), 1.0, compute.dtype)
    safeguards = Safeguards(spikes=None)
    stream = dataloader.steps(rows, 0, 8, 8, compute)
    shares = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        step = next(stream)
        came = time.perf_counter()
        update(model, optimizers, step, safeguards, compute)
        shares.append((came - begin) / (time.perf_counter() - begin))
    return median(shares[1:])  # nothing was computed while the first rows were loaded


def small_rows(token_set: TokenSet, tokenizer: Tokenizer) -> dataloader.Rows:
    """Rows for waiting_share's model, whose vocabulary is smaller: token ids are taken modulo its size."""
    packed = plan(token_set, D4.sequence_len + 1, cut=True)

    class Folded(dataloader.Rows):
        def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = super().batch(plan_rows)
            return inputs % D4.vocab_size, torch.where(
                targets < 0, targets, targets % D4.vocab_size
            )

    return Folded(token_set, packed, tokenizer.bos, SEED, masked=False)


def upstream_side(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, peer: Path, batches: int
) -> dict[str, Any]:
    """Measure upstream's loader on the same shards and vocabulary; a failure is a UserError with its last lines."""
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
    alone = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment = {
        **alone,
        "PYTHONPATH": str(peer),
        "NANOCHAT_BASE_DIR": str(home),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(SIDE), json.dumps(task)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise UserError(
            f"upstream's loader ended with code {done.returncode}; its last lines:\n  {words}"
        )
    return json.loads(done.stdout.splitlines()[-1])


# --- command line -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Print what data costs as a table, and as one JSON object on the last line."""

    quick: bool = False
    """use less text and fewer steps and measure ours alone, so that it ends within 50 seconds"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat, whose loader is measured on the same shards; default: ours alone"""


def check(cfg: Config) -> None:
    """Raise UserError for flags that do not fit together."""
    if cfg.quick and cfg.upstream is not None:
        raise UserError(
            "--quick measures ours alone, so it cannot be used with --upstream; leave out --quick or --upstream",
            exit_code=2,
        )
    if cfg.upstream is not None and not (cfg.upstream / "nanochat" / "dataloader.py").is_file():
        raise UserError(
            f"--upstream must name a checkout of karpathy/nanochat, got {cfg.upstream}, which has no "
            "nanochat/dataloader.py. Clone the repository, and give the folder that holds its README.",
            exit_code=2,
        )


def measure(cfg: Config, folder: Path) -> dict[str, Any]:
    """Measure everything; files are written to `folder`."""
    corpus, tokenizer = make_corpus(folder / "web", cfg.quick)
    compute = device.compute_init("cpu")
    batches = 40 if cfg.quick else 200
    _, one = measure_preparation(corpus, tokenizer, 1)
    tokens, many = measure_preparation(
        corpus, tokenizer, 2 if cfg.quick else max(min(cores(), 4), 2)
    )
    cpu = time.process_time()
    packed = plan(tokens, LENGTH + 1, cut=True)
    plan_speed = tokens.tokens / (time.process_time() - cpu)
    rows = dataloader.Rows(tokens, packed, tokenizer.bos, SEED, masked=False)
    mixed = dataloader.MixedRows(
        [rows, dataloader.Rows(tokens, packed, tokenizer.bos, 1, masked=False)], (7, 3)
    )
    rank = Compute(compute.device, "cpu", "gloo", 3, 3, 4, compute.dtype, "rank 3 of 4")
    found: dict[str, Any] = {
        "tokens": tokens.tokens,
        "documents": tokens.documents,
        "prepare": one,
        "prepare_processes": many,
        "plan_tokens_per_cpu_second": plan_speed,
        "packing": asdict(packing_loss(tokens, packed)),
        "loader": loader_speed(rows, compute, batches),
        "loader_rank_of_4": loader_speed(rows, rank, batches),
        "loader_mixture": loader_speed(mixed, compute, batches),
        "copy_tokens_per_cpu_second": copy_speed(tokens),
        "waiting_share": waiting_share(
            small_rows(tokens, tokenizer), compute, 8 if cfg.quick else 30
        ),
    }
    if cfg.upstream is not None:
        once = (
            packed.rows // BATCH // 2
        )  # it drops part of what it reads, and must not read anything twice
        found["upstream"] = upstream_side(folder, corpus, tokenizer, cfg.upstream.resolve(), once)
    return found


def table(found: dict[str, Any]) -> Iterator[str]:
    """The lines of the table."""
    peer = found.get("upstream")

    def line(name: str, ours: str, goal: str = "", theirs: str = "") -> str:
        return f"{name:<44}{ours:>14}{goal:>16}" + (f"{theirs:>16}" if peer else "")

    def speed(value: float) -> str:
        return f"{value / 1e6:,.2f} M"

    yield line("", "ours", "goal", "upstream")
    yield line(
        "prepare, tokens per CPU second", speed(found["prepare"]["tokens_per_cpu_second"]), ">= 1 M"
    )
    many = found["prepare_processes"]
    yield line("  in several processes", speed(many["tokens_per_cpu_second"]), ">= 1 M")
    yield line("  in several processes, tokens per second", speed(many["tokens_per_second"]))
    yield line("packing plan, tokens per CPU second", speed(found["plan_tokens_per_cpu_second"]))
    lost = found["packing"]
    yield line(
        "tokens that are in no row",
        f"{lost['lost']:.2%}",
        "less",
        f"{peer['lost']:.2%}" if peer else "",
    )
    cut = f"{peer['cut_documents']:.2%}" if peer else ""
    yield line(
        "documents that are not whole in one row", f"{lost['cut_documents']:.2%}", "less", cut
    )
    yield line("  longer than a row", f"{lost['longer_than_a_row']:.2%}")
    yield line("tokens in pieces that begin no document", f"{lost['headless']:.2%}", "", "0.00%")
    yield line("padding", f"{lost['padding']:.2%}", "", "0.00%")
    theirs = speed(peer["tokens_per_cpu_second"]) if peer else ""
    yield line(
        "loader of a rank, tokens per CPU second",
        speed(found["loader"]["tokens_per_cpu_second"]),
        ">= 5 M",
        theirs,
    )
    yield line("  rank 3 of 4", speed(found["loader_rank_of_4"]["tokens_per_cpu_second"]), ">= 5 M")
    yield line("  of a mixture", speed(found["loader_mixture"]["tokens_per_cpu_second"]), ">= 5 M")
    yield line(
        "  limit: a bare copy of the mapped tokens", speed(found["copy_tokens_per_cpu_second"])
    )
    first = f"{peer['first_cpu_seconds']:.3f}" if peer else ""
    yield line("first step, CPU seconds", f"{found['loader']['first_cpu_seconds']:.3f}", "", first)
    yield line("waiting for data, share of a step", f"{found['waiting_share']:.3%}", "< 0.5 %")


def main(cfg: Config) -> None:
    """Measure and print."""
    check(cfg)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(cfg, Path(folder))
    log(
        f"{found['documents']:,} documents, {found['tokens']:,} tokens; rows of {LENGTH:,} tokens, {BATCH} rows a step"
    )
    for line in table(found):
        log(line)
    print(json.dumps({"benchmark": "data", **_rounded(found)}), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    run(main, Config, __doc__)

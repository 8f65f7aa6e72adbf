"""Compares split patterns by the bits per byte of small models on held-out English and Chinese text.

python -m bench.corpus DIR
python -m bench.patterns --corpus DIR                                # takes about an hour on one CPU core
python -m bench.patterns --corpus DIR --patterns nanochat han --seeds 1 2 3
python -m bench.patterns --corpus DIR --equal flops                  # equal training steps instead of equal text

For each pattern, a vocabulary is learned from the same documents, half English and half Chinese. Then base_train
trains one model per seed on the same number of bytes. Bits per byte do not depend on how long the tokens are.
"""

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean, variance
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from bench.corpus import draw
from bench.tokenizer.peers import GPT4, NANOCHAT
from nanochat import device, tokenizer
from nanochat.common import UserError, base_dir, log, read_json, run
from nanochat.data import bpe
from nanochat.data.corpora import Corpus
from nanochat.data.shards import write_shards
from nanochat.dataloader import Step
from nanochat.device import Compute
from nanochat.evals import loss as loss_eval
from nanochat.evals.loss import Loss
from nanochat.gpt import GPT, GPTConfig
from nanochat.platforms.layers import accelerate
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.plan import plan
from nanochat.runtime import parallel
from nanochat.tokenizer import ROLES, Tokenizer

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    **tokenizer.PATTERNS,
    "gpt4": GPT4,
    # The words of o200k, which break at a capital and include endings like 's; everything else is like nanochat's.
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    + NANOCHAT[NANOCHAT.index(r"|\p{N}") :],
}
LANGUAGES = ("english", "chinese")
PASS = 8  # rows per pass
MODEL = {"depth": 4, "max_seq_len": 512, "total_batch_size": 4096, "eval_every": 0}
QUICK = {
    **MODEL,
    "depth": 1,
    "model_dim": 32,
    "head_dim": 32,
    "max_seq_len": 64,
    "total_batch_size": 512,
    "compile": False,
}


@dataclass(frozen=True)
class Config:
    """Print bits per byte with each split pattern as a table, and as one JSON object on the last line."""

    corpus: Path
    """folder made by bench.corpus, with english.txt and chinese.txt"""
    patterns: tuple[str, ...] = ("nanochat", "o200k", "han", "han4")
    """names of the patterns; the first is what the others are compared with"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds for weights and row order; one model per pattern is trained for each, and more seeds shrink the error"""
    vocab_size: int = 8192
    """tokens in each vocabulary"""
    text_mb: float = 9.0
    """MB of documents in each language that the vocabularies and the models learn from"""
    held_out_mb: float = 0.5
    """MB of held-out documents in each language, which nothing is trained on"""
    train_mb: float = 6.0
    """MB of text that each model trains on"""
    equal: Literal["bytes", "flops"] = "bytes"
    """what is equal between patterns: bytes of text, or flops, where all take as many steps as the first pattern"""
    quick: bool = False
    """train tiny models, only to show that it works"""


@dataclass(frozen=True)
class Run:
    """One model with one pattern, and its loss on the held-out text of each language."""

    pattern: str
    seed: int
    steps: int
    flops_per_byte: float  # of training
    losses: dict[str, Loss]


# --- models ---------------------------------------------------------------------------------------------


def vocabulary(
    texts: Sequence[str], name: str, corpus: Corpus, folder: Path, cfg: Config
) -> Tokenizer:
    """Learn a pattern's vocabulary, and save it in a base folder of its own that shares the corpus."""
    ranks = bpe.train(iter(texts), cfg.vocab_size - len(ROLES), PATTERNS[name])
    if (size := len(ranks) + len(ROLES)) < cfg.vocab_size:
        raise UserError(
            f"the text gives at most {size:,} tokens, got --vocab_size {cfg.vocab_size:,}; lower --vocab_size",
            2,
        )
    learned = Tokenizer(ranks, name, PATTERNS[name])
    learned.save(folder / "tokenizer" / corpus.name)
    if not (folder / "base_data").is_symlink():
        (folder / "base_data").symlink_to(corpus.folder.parent.resolve(), target_is_directory=True)
    return learned


def bytes_per_step(corpus: Corpus, tokens: Tokenizer, model: dict[str, int]) -> float:
    """Bytes of text per training step, on average."""
    token_set = prepare_documents(corpus, tokens, "train")
    rows = plan(token_set, model["max_seq_len"] + 1, cut=True).rows
    return token_set.bytes / rows * (model["total_batch_size"] // model["max_seq_len"])


def train(base: Path, **flags: Any) -> Path:
    """Train a model unless it exists; return the folder of its last checkpoint."""
    tag = f"s{flags['seed']}-{flags['num_iterations']}"
    words = [f"--{name}={value}" for name, value in {**flags, "model_tag": tag}.items()]
    command = [sys.executable, "-m", "scripts.base_train", *words]
    done = subprocess.run(
        command, env={**os.environ, "NANOCHAT_BASE_DIR": str(base)}, stdout=subprocess.DEVNULL
    )
    if done.returncode:
        raise UserError(
            f"`{' '.join(command[1:])}` ended with code {done.returncode}; fix what it reports, and type the same "
            "command to resume",
            done.returncode,
        )
    return base / "base_checkpoints" / tag / f"step_{flags['num_iterations']:06d}"


def load(step: Path, compute: Compute) -> GPT:
    """Load the model of a checkpoint."""
    model = GPT(GPTConfig(**read_json(step / "meta.json")["model"]), dtype=compute.dtype)
    accelerate(model, compute.operations)
    parallel.load_whole(model, load_file(step / "model.safetensors"))
    return model.eval()


def batches(texts: Sequence[str], tokens: Tokenizer, length: int) -> Iterator[Step]:
    """All of the texts, in pieces of at most one row; each piece follows a begin-of-sequence token, as in training."""
    pieces = [
        ids[at : at + length]
        for ids in tokens.encode_batch(texts)
        for at in range(0, len(ids), length)
    ]
    for first in range(0, len(pieces), PASS):
        some = pieces[first : first + PASS]
        inputs, targets = (
            torch.full((len(some), length), tokens.bos),
            torch.full((len(some), length), -1),
        )
        for row, piece in enumerate(some):
            targets[row, : len(piece)] = torch.tensor(piece)
            inputs[row, 1 : len(piece)] = targets[row, : len(piece) - 1]
        yield Step(first, sum(map(len, some)), [(inputs, targets)])


def runs(cfg: Config, folder: Path) -> Iterator[Run]:
    """Train and evaluate every model: all patterns with one seed, then all with the next."""
    shape = QUICK if cfg.quick else MODEL
    parts = {kind: draw(cfg.corpus, kind, (cfg.held_out_mb, cfg.text_mb)) for kind in LANGUAGES}
    texts = [text for _, more in parts.values() for text in more]
    random.Random(0).shuffle(texts)
    corpus = Corpus("mixed", folder / "base_data" / "mixed")
    if not corpus.folder.exists():
        write_shards(corpus.folder, texts)
    learned = {name: vocabulary(texts, name, corpus, folder / name, cfg) for name in cfg.patterns}
    step_bytes = {name: bytes_per_step(corpus, tokens, shape) for name, tokens in learned.items()}
    steps = {name: max(round(cfg.train_mb * 1e6 / size), 1) for name, size in step_bytes.items()}
    if cfg.equal == "flops":
        steps = dict.fromkeys(steps, steps[cfg.patterns[0]])
    compute = device.compute_init()
    for seed in cfg.seeds:
        for name, tokens in learned.items():
            step = train(
                folder / name, data=corpus.name, seed=seed, num_iterations=steps[name], **shape
            )
            model, lengths, losses = load(step, compute), tokens.token_bytes(), {}
            for language, (held_out, _) in parts.items():
                rows = batches(held_out, tokens, shape["max_seq_len"])
                losses[language] = loss_eval.evaluate_loss(model, rows, lengths, compute)
            bits = [f"{language} {loss.bits_per_byte:.4f}" for language, loss in losses.items()]
            log(" | ".join([f"{name}, seed {seed}: {steps[name]} steps", *bits]))
            flops = model.flops_per_token() * shape["total_batch_size"] / step_bytes[name]
            yield Run(name, seed, steps[name], flops, losses)


# --- figures --------------------------------------------------------------------------------------------


def summary(found: Sequence[Run], first: str) -> dict[str, Any]:
    """For each pattern, the means over its seeds by language and for `both`, and their difference from the first's.

    `error` is the standard error of the difference, or None if there is only one seed.
    """

    def values(pattern: str, kind: str) -> list[float]:
        losses = [model.losses for model in found if model.pattern == pattern]
        asked = LANGUAGES if kind == "both" else (kind,)
        return [mean(each[language].bits_per_byte for language in asked) for each in losses]

    result = {}
    for model in {model.pattern: model for model in found}.values():
        pairs = {
            kind: (values(model.pattern, kind), values(first, kind))
            for kind in (*LANGUAGES, "both")
        }
        result[model.pattern] = {
            "bytes_per_token": {
                language: loss.bytes / loss.tokens for language, loss in model.losses.items()
            },
            "steps": model.steps,
            "flops_per_byte": model.flops_per_byte,
            "bits_per_byte": {kind: mean(own) for kind, (own, _) in pairs.items()},
            "difference": {kind: mean(own) - mean(other) for kind, (own, other) in pairs.items()},
            "error": {kind: standard_error(*pair) for kind, pair in pairs.items()},
        }
    return result


def standard_error(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The standard error of the difference between two means; None if either has fewer than two values."""
    if min(len(one), len(other)) < 2:
        return None
    return math.sqrt(variance(one) / len(one) + variance(other) / len(other))


def table(patterns: dict[str, Any]) -> Iterator[str]:
    """The lines of the table."""
    yield "bytes per token; then bits per byte, the difference from the first pattern, and its standard error"
    heads = (*LANGUAGES, "steps", "MFLOP/byte")
    yield (
        f"{'':<10}"
        + "".join(f"{head:>11}" for head in heads)
        + "".join(f"{k:>26}" for k in (*LANGUAGES, "both"))
    )
    for name, one in patterns.items():
        line = f"{name:<10}" + "".join(
            f"{value:>11.3f}" for value in one["bytes_per_token"].values()
        )
        line += f"{one['steps']:>11}{one['flops_per_byte'] / 1e6:>11.3f}"
        for kind, bits in one["bits_per_byte"].items():
            error = "" if one["error"][kind] is None else f" +-{one['error'][kind]:.4f}"
            line += f"{bits:.4f} {one['difference'][kind]:+.4f}{error}".rjust(26)
        yield line


def main(cfg: Config) -> None:
    """Train, measure, print."""
    if unknown := [name for name in cfg.patterns if name not in PATTERNS]:
        raise UserError(f"--patterns must be among {', '.join(PATTERNS)}, got {unknown[0]!r}", 2)
    if not cfg.patterns or not cfg.seeds:
        raise UserError("--patterns and --seeds need at least one value each", 2)
    shared = {
        name: str(getattr(cfg, name))
        for name in ("corpus", "vocab_size", "text_mb", "held_out_mb", "quick")
    }
    folder = base_dir() / "patterns" / sha256(json.dumps(shared).encode()).hexdigest()[:8]
    found = list(runs(cfg, folder))
    patterns = summary(found, cfg.patterns[0])
    log("\n".join(table(patterns)))
    models = [asdict(model) for model in found]
    print(
        json.dumps(
            {"benchmark": "patterns", "equal": cfg.equal, "patterns": patterns, "runs": models}
        )
    )


if __name__ == "__main__":
    run(main, Config, __doc__)

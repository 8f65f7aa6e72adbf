"""Measures training and encoding with the tokenizer beside its peers, in CPU seconds of one run.

python -m bench.tokenizer --quick                                            # ours alone
python -m bench.tokenizer --quick --against rustbpe tokenizers tiktoken      # ends within a minute on two quiet cores
python -m bench.tokenizer --against rustbpe tokenizers tiktoken gigatoken
python -m bench.tokenizer --corpus DIR                                       # text made by: python -m bench.corpus DIR

Each peer is installed into its own folder and runs in its own process. All sides make Python lists, and ours makes
numpy arrays too. A peer gets as much text as it can encode in a given time, and ours then gets the same text as often.
"Cold" includes the construction of the encoder. The last line is JSON.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import corpus
from bench.tokenizer import texts as made
from bench.tokenizer.measure import Beside, Size, encode, figures, train
from bench.tokenizer.peers import GPT4, NANOCHAT, Peer, Sides, Task
from bench.tokenizer.side import read_ranks
from nanochat.common import UserError, base_dir, log, read_json, run
from nanochat.data import bpe
from nanochat.tokenizer import cores

QUICK_MB = {"english": 12.0, "chinese": 6.0, "code": 4.0, "others": 3.0}  # of text to choose from
TRAINED_ON = ("english", "chinese", "code")
QUICK_TEXTS = (
    "mixed",
    "chinese",
    "russian",
    "adversarial",
)  # with --quick, beside all peers except tiktoken


@dataclass(frozen=True)
class Config:
    """Print speed and memory of training and encoding as a table, and as one JSON object on the last line."""

    quick: bool = False
    """use shorter measurements, less text and a smaller vocabulary, and put all adversarial texts into one"""
    against: tuple[Peer, ...] = ()
    """peers to measure beside ours; those that are missing are installed from the package index"""
    corpus: Path | None = None
    """folder made by `python -m bench.corpus`; default: make one in the base folder"""
    vocab_size: int | None = None
    """vocabulary size for the mixed text (default 65,536, with --quick 16,384); Chinese text and the comparison with
    gigatoken use half of it"""
    threads: int = 1
    """threads of every side"""
    seconds: float | None = None
    """CPU seconds for which a peer encodes each text (default 1, with --quick 0.12)"""
    repeats: int = 3
    """how often each side does each piece of work; the table has the median and the range"""

    def size(self) -> Size:
        """How much is measured, with the defaults filled in."""
        vocab_size, seconds = (16_384, 0.12) if self.quick else (65_536, 1.0)
        return Size(
            vocab_size=self.vocab_size or vocab_size,
            training_seconds=0.8 if self.quick else None,
            encoding_seconds=self.seconds or seconds,
            repeats=self.repeats,
        )


def texts(cfg: Config) -> Path:
    """The folder of the corpus, made if needed. With --quick, Python's sources replace a corpus that cannot be made."""
    if cfg.corpus is not None:
        if not (cfg.corpus / corpus.ABOUT).exists():
            raise UserError(
                f"there is no corpus in {cfg.corpus}; make one: python -m bench.corpus {cfg.corpus}",
                exit_code=2,
            )
        return cfg.corpus
    folder = base_dir() / "bench_corpus" / ("quick" if cfg.quick else "whole")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        corpus.main(corpus.Config(folder, **(QUICK_MB if cfg.quick else {})))
    except UserError as failure:
        if not cfg.quick:
            raise
        log(f"{failure}\nUsing the sources of Python's standard library instead: no prose")
        corpus.standard_library(folder, sum(QUICK_MB.values()))
    return folder


def measure(cfg: Config, folder: Path, work: Path) -> dict[str, Any]:
    """Measure everything, and return the figures for the JSON object."""
    sides, size = Sides(cfg.against, cfg.threads), cfg.size()
    files = {
        kind: [str(folder / f"{kind}.txt")]
        for kind in corpus.KINDS
        if filled(folder / f"{kind}.txt")
    }
    mixed = [file for kind in TRAINED_ON for file in files.get(kind, ())]
    ranks = work / "mixed.tiktoken"
    trained = training(sides, size, mixed, files.get("chinese", []), ranks)
    result: dict[str, Any] = {key: beside.ratio("cpu") for key, beside in trained.items()}
    if beside := trained.get("train_vs_rustbpe"):
        result["memory_vs_rustbpe"] = 1 / (beside.ratio("peak") or 1)

    generated = {
        kind: [str(file)] for kind, file in made.write(work, 0.5 if cfg.quick else 4).items()
    }
    if cfg.quick:
        formulaic = generated.pop("formulaic Chinese")
        generated = {
            "formulaic Chinese": formulaic,
            "adversarial": [file for some in generated.values() for file in some],
        }
    named = {"mixed": mixed, **files, **generated}
    task = {
        "vocab_size": size.vocab_size,
        "pattern": NANOCHAT,
        "ranks": str(ranks),
        "learned_from": trained[
            "train_vs_rustbpe" if "train_vs_rustbpe" in trained else "train"
        ].task,
    }
    if "tokenizers" in cfg.against:
        task["json"] = str(work / "tokenizer.json")
        (work / "tokenizer.json").write_text(
            bpe.huggingface_json(read_ranks(str(ranks)), NANOCHAT, {})
        )
    encoded = {}
    for peer in cfg.against or [None]:
        chosen = (
            named
            if peer is None or peer == "tiktoken" or not cfg.quick
            else {name: named[name] for name in QUICK_TEXTS if name in named}
        )
        if peer == "gigatoken":
            log("gigatoken encodes with GPT-4's pattern")
            found = encode(sides, size, {**task, "pattern": GPT4}, {"mixed": mixed}, peer)
        else:
            found = encode(sides, size, task, chosen, peer)
        encoded[peer or "none"] = found
        result[f"encode_vs_{peer}"] = found["mixed"].ratio("cold")
        if "chinese" in found:
            result[f"encode_zh_vs_{peer}"] = found["chinese"].ratio("cold")
    if "chinese" in files:
        run_of_han = sides.ask("ours", work="run_of_han", **task, files=files["chinese"])
        result["han_run_vs_text"] = run_of_han["ratio"]
        log(
            f"{run_of_han['letters']:,} Han letters in a row: {run_of_han['ratio']:.2f} times text's time per byte"
        )
    same = [beside.identical for key, beside in trained.items() if key.endswith("_rustbpe")]
    same += [beside.identical for found in encoded.values() for beside in found.values()]
    texts = {
        peer: {name: figures(beside) for name, beside in found.items()}
        for peer, found in encoded.items()
    }
    result = {key: value for key, value in result.items() if value is not None}
    return {**result, "texts": texts, "identical": all(same)}


def filled(file: Path) -> bool:
    """Whether a file has any text."""
    return file.exists() and file.stat().st_size > 0


def training(
    sides: Sides, size: Size, mixed: list[str], chinese: list[str], ranks: Path
) -> dict[str, Beside]:
    """Train with each side. The file `ranks` gets the tokens from mixed text, which encoding uses."""
    task: Task = {
        "files": mixed,
        "vocab_size": size.vocab_size,
        "pattern": NANOCHAT,
        "most_bytes": None,
        "ranks": "",
    }
    half = {**task, "vocab_size": size.vocab_size // 2}
    found = {}
    if "gigatoken" in sides.against:
        log("gigatoken trains only on whole files, and with its own split pattern")
        found["train_vs_gigatoken"] = train(
            sides, replace(size, training_seconds=None), half, "mixed", "gigatoken"
        )
    if "tokenizers" in sides.against:
        found["train_vs_tokenizers"] = train(sides, size, task, "mixed", "tokenizers")
    if chinese and "rustbpe" in sides.against:
        found["train_zh_vs_rustbpe"] = train(
            sides, size, {**half, "files": chinese}, "Chinese", "rustbpe"
        )
    with_ranks = {**task, "ranks": str(ranks)}
    if "rustbpe" in sides.against:
        found["train_vs_rustbpe"] = train(sides, size, with_ranks, "mixed", "rustbpe")
    else:
        found["train"] = train(sides, size, with_ranks, "mixed", None)
    return found


def rounded(value: Any) -> Any:
    """The same figures with four digits after the point."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main(cfg: Config) -> None:
    """Measure and print."""
    if (
        cfg.threads < 1
        or cfg.size().vocab_size < 1024
        or cfg.size().encoding_seconds <= 0
        or cfg.repeats < 1
    ):
        raise UserError(
            "--threads and --repeats must be at least 1, --vocab_size at least 1,024, and --seconds positive, got "
            f"--threads {cfg.threads}, --vocab_size {cfg.size().vocab_size:,}, --seconds {cfg.size().encoding_seconds} "
            f"and --repeats {cfg.repeats}",
            exit_code=2,
        )
    folder = texts(cfg)
    about = read_json(folder / corpus.ABOUT)["kinds"]
    log(
        ", ".join(f"{kind['bytes'] / 1e6:.1f} MB {name}" for name, kind in about.items())
        + f"; {cores()} cores"
    )
    with tempfile.TemporaryDirectory() as work:
        result = measure(cfg, folder, Path(work))
    print(
        json.dumps({"benchmark": "tokenizer", "threads": cfg.threads, **rounded(result)}),
        flush=True,
    )


if __name__ == "__main__":
    run(main, Config, __doc__)

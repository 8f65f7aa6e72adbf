"""Measures training and encoding with the tokenizer beside its peers, in CPU seconds of one run.

python -m bench.tokenizer --quick                                            # ours alone, in seconds
python -m bench.tokenizer --against rustbpe tokenizers tiktoken gigatoken
python -m bench.tokenizer --corpus DIR                                       # text made by: python -m bench.corpus DIR

Each peer is installed into its own folder and runs in its own process. The last line is JSON.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import corpus
from bench.tokenizer.peers import ENCODERS, GPT4, NANOCHAT, Answer, Peer, Sides, Task
from bench.tokenizer.side import read_ranks
from nanochat.common import UserError, base_dir, log, read_json, run
from nanochat.data import bpe
from nanochat.tokenizer import cores

# What --quick uses: MB of text, and tokens. On much less text, work that is done once per vocabulary would dominate.
QUICK_MB = {"english": 12.0, "chinese": 6.0, "code": 4.0}
QUICK_VOCAB_SIZE = 16_384


@dataclass(frozen=True)
class Config:
    """Print speed and memory of training and encoding as a table, and as one JSON object on the last line."""

    quick: bool = False
    """use 22 MB of text and a smaller vocabulary: seconds for ours, about a minute with three peers"""
    against: tuple[Peer, ...] = ()
    """peers to measure beside ours; those that are missing are installed from the package index"""
    corpus: Path | None = None
    """folder made by `python -m bench.corpus`; default: make one in the base folder"""
    vocab_size: int = 65_536
    """vocabulary size for the mixed text; Chinese text and the comparison with gigatoken use half of it"""
    threads: int = 1
    """threads of every side"""
    encode_mb: float = 60
    """most MB of each text to encode"""


def texts(cfg: Config) -> Path:
    """The folder of the corpus, made if needed. With --quick, Python's sources replace a corpus that cannot be made."""
    if cfg.corpus is not None:
        if not (cfg.corpus / corpus.ABOUT).exists():
            raise UserError(
                f"there is no corpus in {cfg.corpus}; make one: python -m bench.corpus {cfg.corpus}", exit_code=2
            )
        return cfg.corpus
    folder = base_dir() / "bench_corpus" / ("quick" if cfg.quick else "whole")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        corpus.main(corpus.Config(folder, **(QUICK_MB if cfg.quick else {})))
    except UserError as failure:
        if not cfg.quick:
            raise
        log(f"{failure}\nUsing the sources of Python's standard library instead: no Chinese, no English prose")
        corpus.standard_library(folder, sum(QUICK_MB.values()))
    return folder


# --- measurements -------------------------------------------------------------------------------------


def typical(measure: Callable[[], Answer], seconds: Callable[[Answer], float]) -> Answer:
    """The median of up to five answers, repeated until they have taken a second: short work varies most."""
    answers = [measure()]
    while len(answers) < 5 and sum(map(seconds, answers)) < 1:
        answers.append(measure())
    return sorted(answers, key=seconds)[len(answers) // 2]


def training(
    sides: Sides, files: Sequence[Path], vocab_size: int, name: str, keep: Path, peers: Sequence[str]
) -> dict[str, Answer]:
    """Train with each side on the same text and print a line for each. Ours writes its tokens to `keep`."""
    found = {}
    size = sum(file.stat().st_size for file in files) / 1e6
    for peer in ("ours", *(peer for peer in sides.against if peer in peers)):
        task = {"work": "train", "files": [str(file) for file in files], "vocab_size": vocab_size,
                "pattern": NANOCHAT, "ranks": str(keep) if peer == "ours" else ""}  # fmt: skip
        answer = found[peer] = typical(partial(sides.ask, peer, **task), lambda answer: answer["cpu"])
        log(
            f"train {name:<8}{vocab_size:>7,} {peer:<12}{answer['cpu']:>9.2f} CPU s{answer['wall']:>9.2f} s"
            f"{size / answer['cpu']:>9.1f} MB/CPU s{answer['peak'] / 1e6:>8.0f} MB"
        )
    return found


def encoding(sides: Sides, task: Task, name: str, peers: Sequence[str]) -> dict[str, Answer]:
    """Encode the same text with each side, cold and warm, and print a line for each."""
    found = {}
    for peer in ("ours", *(peer for peer in sides.against if peer in peers)):
        ask_peer = partial(sides.ask, peer, work="encode", **task)
        answer = found[peer] = typical(ask_peer, lambda answer: answer["cold"]["cpu"])
        size = answer["bytes"] / 1e6
        cold, warm = (size / answer[kind]["cpu"] for kind in ("cold", "warm"))
        log(
            f"encode {name:<13} {peer:<12}{cold:>9.1f} cold{warm:>9.1f} warm MB/CPU s"
            f"{answer['bytes'] / answer['tokens']:>7.2f} bytes a token{answer['peak'] / 1e6:>8.0f} MB"
        )
    return found


def ratio(found: dict[str, Answer], peer: str, *keys: str) -> float | None:
    """The peer's figure divided by ours; None if the peer was not measured."""
    values = []
    for side in (peer, "ours"):
        value: Any = found.get(side)
        for key in keys:
            value = value[key] if value is not None else None
        values.append(value)
    return None if values[0] is None else values[0] / values[1]


def measure(cfg: Config, folder: Path, work: Path) -> dict[str, Any]:
    """Measure everything, and return the figures for the JSON object."""
    sides = Sides(cfg.against, cfg.threads)
    vocab_size = QUICK_VOCAB_SIZE if cfg.quick else cfg.vocab_size
    files = {kind: folder / f"{kind}.txt" for kind in corpus.KINDS}
    mixed = [file for file in files.values() if file.stat().st_size]
    has_chinese = files["chinese"].stat().st_size > 0
    ranks, half, chinese = work / "mixed.tiktoken", work / "half.tiktoken", work / "chinese.tiktoken"

    counted = sides.ask("ours", work="train", files=[str(file) for file in mixed], vocab_size=256, pattern=NANOCHAT,
                        ranks="")  # fmt: skip
    size = sum(file.stat().st_size for file in mixed) / 1e6
    log(f"count {size / counted['cpu']:.1f} MB/CPU s, including reading the files")
    trained = training(sides, mixed, vocab_size, "mixed", ranks, ["rustbpe", "tokenizers"])
    result: dict[str, Any] = {"mb": round(size, 1), "counting_mb_per_cpu_second": size / counted["cpu"]}
    if "gigatoken" in cfg.against:
        log("gigatoken trains only with its own split pattern")
        smaller = training(sides, mixed, vocab_size // 2, "mixed", half, ["gigatoken"])
        result["train_vs_gigatoken"] = ratio(smaller, "gigatoken", "cpu")
    result |= {f"train_vs_{peer}": ratio(trained, peer, "cpu") for peer in ("rustbpe", "tokenizers")}
    result["memory_vs_rustbpe"] = None if "rustbpe" not in trained else 1 / (ratio(trained, "rustbpe", "peak") or 1)
    same = [trained["rustbpe"]["digest"] == trained["ours"]["digest"]] if "rustbpe" in trained else []

    task = {"vocab_size": vocab_size, "pattern": NANOCHAT, "ranks": str(ranks), "most_bytes": int(cfg.encode_mb * 1e6),
            "trained_on": [str(file) for file in mixed]}  # fmt: skip
    if "tokenizers" in cfg.against:
        task["json"] = str(work / "tokenizer.json")
        (work / "tokenizer.json").write_text(bpe.huggingface_json(read_ranks(str(ranks)), NANOCHAT, {}))
    chosen = [str(file) for file in mixed]
    encoded = encoding(sides, {**task, "files": chosen}, "mixed", [peer for peer in ENCODERS if peer != "gigatoken"])
    result |= {f"encode_vs_{peer}": ratio(encoded, peer, "cold", "cpu") for peer in ENCODERS if peer != "gigatoken"}
    same += [answer["digest"] == encoded["ours"]["digest"] for answer in encoded.values()]
    if "gigatoken" in cfg.against:
        beside = encoding(sides, {**task, "files": chosen, "pattern": GPT4}, "mixed, GPT-4", ["gigatoken"])
        for kind in ("cold", "warm"):
            result[f"encode_{kind}_vs_gigatoken"] = ratio(beside, "gigatoken", kind, "cpu")
        same.append(beside["gigatoken"]["digest"] == beside["ours"]["digest"])
    if has_chinese:
        trained = training(sides, [files["chinese"]], vocab_size // 2, "Chinese", chinese, ["rustbpe"])
        result["train_zh_vs_rustbpe"] = ratio(trained, "rustbpe", "cpu")
        if "rustbpe" in trained:
            same.append(trained["rustbpe"]["digest"] == trained["ours"]["digest"])
        encoded = encoding(sides, {**task, "files": [str(files["chinese"])]}, "Chinese", ["tiktoken"])
        result["encode_zh_vs_tiktoken"] = ratio(encoded, "tiktoken", "cold", "cpu")
        same += [answer["digest"] == encoded["ours"]["digest"] for answer in encoded.values()]
        run_of_han = sides.ask("ours", work="run_of_han", **task, files=[str(files["chinese"])])
        result["han_run_vs_text"] = run_of_han["ratio"]
        log(f"{run_of_han['letters']:,} Han letters in a row: {run_of_han['ratio']:.2f} times text's time per byte")
    return {**{name: value for name, value in result.items() if value is not None}, "identical": all(same)}


def main(cfg: Config) -> None:
    """Measure and print."""
    if cfg.threads < 1 or cfg.vocab_size < 1024:
        raise UserError(
            "--threads must be at least 1 and --vocab_size at least 1,024, "
            f"got --threads {cfg.threads} and --vocab_size {cfg.vocab_size:,}",
            exit_code=2,
        )
    folder = texts(cfg)
    about = read_json(folder / corpus.ABOUT)["kinds"]
    log(", ".join(f"{about[kind]['bytes'] / 1e6:.1f} MB {kind}" for kind in corpus.KINDS) + f"; {cores()} cores")
    with tempfile.TemporaryDirectory() as work:
        result = measure(cfg, folder, Path(work))
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}
    print(json.dumps({"benchmark": "tokenizer", "threads": cfg.threads, **rounded}), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

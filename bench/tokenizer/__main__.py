"""Measures training and encoding with the tokenizer beside its peers, in CPU seconds of one thread.

python -m bench.tokenizer --quick                                       # ours alone
python -m bench.tokenizer --quick --against rustbpe tokenizers tiktoken # a minute on quiet cores
python -m bench.tokenizer --corpus DIR    # text of: python -m bench.multiplier.corpus DIR

How: each peer is installed into a folder of its own and runs in a process of its own. All sides
make Python lists from the same documents, equally often, in turns: a peer gets as much text as it
can encode in a given time, and ours then gets the same text. "Cold" includes the construction of
the encoder; "warm" encodes the same text again. Besides real text there are texts that are hard for
fast tokenizers, made by seed.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench import tables
from bench.multiplier import corpus
from bench.processes import ROOT, answer_of
from bench.text import standard_library
from bench.tokenizer import texts
from bench.tokenizer.side import read_ranks
from nanochat.common import UserError, base_dir, log
from nanochat.data import bpe
from nanochat.data.command_line import run
from nanochat.tokenizer import PATTERNS

Peer = Literal["rustbpe", "tokenizers", "tiktoken"]
Answers = dict[str, list[dict[str, Any]]]  # of each side, one for each repeat
Files = dict[str, list[str]]  # the files of each text

VERSIONS = {"rustbpe": "0.1.0", "tokenizers": "0.23.3", "tiktoken": "0.14.0"}
TRAINERS = ("tokenizers", "rustbpe")  # peers that can train
PATTERN = PATTERNS["nanochat"]
MIXED = ("english", "chinese", "code")
REPEATS = 3
VOCABULARY = 65_536  # of the mixed text; Chinese text uses half of it
QUICK_VOCABULARY = 16_384
QUICK_MB = {"english": 12.0, "chinese": 6.0, "russian": 3.0}
QUICK_TRAINING = 1_500_000  # bytes
QUICK_CODE = 4_000_000  # characters of Python's standard library


@dataclass(frozen=True)
class Config:
    """Print the speed of training and encoding as a table, and as one JSON object."""

    quick: bool = False
    """use shorter measurements, less text and a smaller vocabulary, and put all adversarial texts
    into one"""
    against: tuple[Peer, ...] = ()
    """peers to measure beside ours; those that are missing are installed from the package index"""
    corpus: Path | None = None
    """folder made by `python -m bench.multiplier.corpus`; default: make one in the base folder"""


def peer_folder(peer: str) -> Path:
    """Return the folder of a peer, which is installed into it first if it is missing."""
    version = VERSIONS[peer]
    folder = base_dir() / "peers" / f"{peer}-{version}"
    if (folder / "done").exists():
        return folder
    target = ["--quiet", "--target", str(folder), f"{peer}=={version}"]
    words = ""
    for installer in (["uv", "pip", "install", "--python", sys.executable], ["pip", "install"]):
        command = [sys.executable, "-m", *installer, *target]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            (folder / "done").touch()
            return folder
        words = (result.stderr.strip().splitlines() or [""])[-1]
    raise UserError(
        f"{peer} {version} could not be installed into {folder}: {words}. Leave it out of --against"
    )


def ask(side: str, work: str, task: Mapping[str, Any]) -> Any:
    """Let a side `train` or `encode` on one thread."""
    home = ROOT if side == "ours" else peer_folder(side)
    variables = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
    own_task = {**task, "side": side, "work": work}
    return answer_of(side, "bench.tokenizer.side", own_task, home, **variables)


def typical(answers: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the median of a figure."""
    return median(answer[key] for answer in answers)


def speeds(answers: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the median and the range of MB per CPU second, for a table."""
    values = [answer["bytes"] / 1e6 / answer[key] for answer in answers]
    return f"{median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


def ratio(answers: Answers, peer: str, key: str) -> float:
    """Return the peer's median of a figure divided by ours."""
    return typical(answers[peer], key) / typical(answers["ours"], key)


def train(task: Mapping[str, Any], name: str, peer: str | None) -> Answers:
    """Train with a peer and with ours in turns."""
    sides = ("ours",) if peer is None else (peer, "ours")
    answers: Answers = {side: [] for side in sides}
    for _ in range(REPEATS):
        for side in sides:
            answers[side].append(ask(side, "train", task))
    title = f"train {name}, {task['vocab_size']:,}"
    rows = []
    for side, side_answers in answers.items():
        size = f"{side_answers[0]['bytes'] / 1e6:.2f}"
        rows.append([title, side, size, speeds(side_answers, "cpu")])
    tables.show(("", "side", "MB", "MB/CPU s"), rows)
    return answers


def encode(task: Mapping[str, Any], files: Files, peer: str | None) -> dict[str, Answers]:
    """Encode files with a peer for a given time, then the same documents with ours."""
    first = peer or "ours"
    task = {**task, "texts": files, "groups": {}}
    by_side = {first: ask(first, "encode", task)}
    if peer is not None:
        groups = {name: answers[0]["groups"] for name, answers in by_side[peer].items()}
        by_side["ours"] = ask("ours", "encode", {**task, "groups": groups})
    by_text = {}
    rows = []
    for name in files:
        by_text[name] = {side: answers[name] for side, answers in by_side.items()}
        for side, answers in by_text[name].items():
            row = [
                f"encode {name}",
                side,
                f"{answers[0]['bytes'] / 1e6:.2f}",
                speeds(answers, "cold"),
                speeds(answers, "warm"),
            ]
            rows.append(row)
    tables.show(("", "side", "MB", "cold MB/CPU s", "warm MB/CPU s"), rows)
    return by_text


def measure_training(
    cfg: Config, task: Mapping[str, Any], files: Files, result: dict[str, Any]
) -> None:
    """Train beside each peer that can, and note ratios. Ours writes the ranks to encode with."""
    peers = [peer for peer in TRAINERS if peer in cfg.against]
    works = [("mixed", "train", task, peer) for peer in peers or [None]]
    if "rustbpe" in peers and "chinese" in files:
        half = {**task, "files": files["chinese"], "vocab_size": task["vocab_size"] // 2}
        works.insert(0, ("Chinese", "train_zh", half, "rustbpe"))
    for name, key, own_task, peer in works:
        answers = train(own_task, name, peer)
        if peer is not None:
            result[f"{key}_vs_{peer}"] = ratio(answers, peer, "cpu")
        # Hugging Face's trainer breaks ties in another way, so only karpathy's tokens are compared.
        if peer == "rustbpe":
            result["identical"] &= are_identical(answers)


def measure(cfg: Config, work: Path) -> dict[str, Any]:
    """Measure everything, and return the figures for the JSON object."""
    files = real_texts(cfg, work)
    ranks = work / "mixed.tiktoken"
    exported = work / "tokenizer.json"
    task: dict[str, Any] = {
        "files": files["mixed"],
        "max_bytes": QUICK_TRAINING if cfg.quick else None,
        "vocab_size": QUICK_VOCABULARY if cfg.quick else VOCABULARY,
        "pattern": PATTERN,
        "ranks": str(ranks),
        "json": str(exported),
        "seconds": 0.12 if cfg.quick else 1.0,  # for which a peer encodes each text
        "repeats": REPEATS,
    }
    result: dict[str, Any] = {"identical": True, "texts": {}}
    measure_training(cfg, task, files, result)
    exported.write_text(bpe.huggingface_json(read_ranks(str(ranks)), PATTERN, {}))
    hard = texts.write(work, 0.5 if cfg.quick else 4)
    if cfg.quick:
        files["adversarial"] = [str(path) for path in hard.values()]
    else:
        files |= {kind: [str(path)] for kind, path in hard.items()}
    for peer in cfg.against or [None]:
        by_text = encode(task, files, peer)
        summary = {name: figures(answers, peer) for name, answers in by_text.items()}
        result["texts"][peer or "ours"] = summary
        for name, key in (("mixed", "encode"), ("chinese", "encode_zh")):
            if peer is not None and name in summary:
                result[f"{key}_vs_{peer}"] = summary[name]["cold"]
        result["identical"] &= all(map(are_identical, by_text.values()))
    return result


def are_identical(answers: Answers) -> bool:
    """Return whether all sides learned the same tokens, or made the same ids."""
    return len({side_answers[0]["digest"] for side_answers in answers.values()}) == 1


def figures(answers: Answers, peer: str | None) -> dict[str, Any]:
    """Return what the JSON object says about a text: its size, and ours beside the peer."""
    ours = answers["ours"][0]
    summary = {"bytes": ours["bytes"], "bytes_per_token": ours["bytes"] / max(1, ours["tokens"])}
    if peer is not None:
        summary["cold"] = ratio(answers, peer, "cold")
        summary["warm"] = ratio(answers, peer, "warm")
    return summary


def corpus_folder(cfg: Config) -> Path | None:
    """Return the folder of the corpus, made if needed; None if --quick cannot make it."""
    if cfg.corpus is not None:
        return cfg.corpus
    folder = base_dir() / "bench_corpus" / ("quick" if cfg.quick else "all")
    try:
        corpus.main(corpus.Config(folder, **(QUICK_MB if cfg.quick else {})))
    except UserError as failure:
        if not cfg.quick:
            raise
        log(f"{failure}\nUsing Python's standard library alone: no prose")
        return None
    return folder


def real_texts(cfg: Config, work: Path) -> Files:
    """Return the files of real text: the prose of the corpus, Python's sources, and all of it."""
    files: Files = {}
    folder = corpus_folder(cfg)
    if folder is not None:
        for kind in corpus.KINDS:
            if corpus.documents(folder, kind):
                files[kind] = [str(folder / f"{kind}.txt")]
    code = standard_library(QUICK_CODE if cfg.quick else None)
    path = work / "code.txt"
    path.write_text(corpus.SEPARATOR.join(code.documents), encoding="utf-8", newline="")
    files["code"] = [str(path)]
    mixed = [path for kind in MIXED for path in files.get(kind, [])]
    return {"mixed": mixed, **files}


def main(cfg: Config) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as work:
        result = measure(cfg, Path(work))
    tables.finish("tokenizer", result)


if __name__ == "__main__":
    run(main, Config, __doc__)

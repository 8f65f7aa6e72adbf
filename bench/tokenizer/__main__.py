"""Measures training and encoding with the tokenizer beside its peers, in CPU seconds.

python -m bench.tokenizer --quick                                            # ours alone
python -m bench.tokenizer --quick --against rustbpe tokenizers tiktoken      # within a minute on two quiet cores
python -m bench.tokenizer --corpus DIR    # text made by: python -m bench.multiplier.corpus DIR

How: each peer is installed into a folder of its own and runs in a process of its own. All sides make Python lists from
the same documents, equally often, in turns: a peer gets as much text as it can encode in a given time, and ours then
gets the same text. "Cold" includes the construction of the encoder; "warm" encodes the same text again. Besides real
text there are texts that are hard for fast tokenizers, made by seed.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.multiplier import corpus
from bench.processes import ROOT, answer_of, check_at_least
from bench.text import standard_library
from bench.tokenizer import texts
from bench.tokenizer.side import read_ranks
from nanochat.common import UserError, base_dir, log, run
from nanochat.data import bpe
from nanochat.tokenizer import PATTERNS

Peer = Literal["rustbpe", "tokenizers", "tiktoken"]
Answer = dict[str, Any]
Task = dict[str, Any]

VERSIONS = {
    "rustbpe": "0.1.0",
    "tokenizers": "0.23.3",
    "tiktoken": "0.14.0",
}
TRAINERS = ("tokenizers", "rustbpe")  # peers that can train
PATTERN = PATTERNS["nanochat"]
MIXED = ("english", "chinese", "code")
PROBE_BYTES = 1_000_000
QUICK_MB = {
    "english": 12.0,
    "chinese": 6.0,
    "russian": 3.0,
}
QUICK_CODE = 4_000_000  # characters of Python's standard library
QUICK_TEXTS = ("mixed", "chinese", "russian", "adversarial")  # beside all peers except tiktoken


@dataclass(frozen=True)
class Config:
    """Print speed and memory of training and encoding as a table, and as one JSON object on the last line."""

    quick: bool = False
    """use shorter measurements, less text and a smaller vocabulary, and put all adversarial texts into one"""
    against: tuple[Peer, ...] = ()
    """peers to measure beside ours; those that are missing are installed from the package index"""
    corpus: Path | None = None
    """folder made by `python -m bench.multiplier.corpus`; default: make one in the base folder"""
    vocab_size: int | None = None
    """vocabulary size for the mixed text (default 65,536, with --quick 16,384); Chinese text uses half of it"""
    threads: int = 1
    """threads of every side"""
    seconds: float | None = None
    """CPU seconds for which a peer encodes each text (default 1, with --quick 0.12)"""
    repeats: int = 3
    """how often each side does each piece of work; the table has the median and the range"""

    @property
    def vocabulary(self) -> int:
        """The vocabulary size for the mixed text."""
        return self.vocab_size or (16_384 if self.quick else 65_536)

    @property
    def encoding_seconds(self) -> float:
        """CPU seconds for which a peer encodes each text."""
        return self.seconds or (0.12 if self.quick else 1.0)


# --- sides -----------------------------------------------------------------------------------------


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


def check_ours() -> None:
    """Raise UserError where our rustbpe is missing, or only the published one is installed."""
    import rustbpe

    if not hasattr(rustbpe.Tokenizer, "from_ranks"):
        raise UserError(
            "the rustbpe of this repository is not installed, so there is nothing to measure. Install it with "
            "`pip install ./rustbpe`, which needs cargo"
        )


class Sides:
    """Ours and the peers, each of which answers in a process of its own."""

    def __init__(self, cfg: Config):
        check_ours()
        self.cfg = cfg
        self.folders = {"ours": ROOT, **{peer: peer_folder(peer) for peer in cfg.against}}

    def ask(
        self,
        side: str,
        work: str,
        task: Task,
    ) -> Any:
        """Let a side `train` or `encode`."""
        threads = self.cfg.threads
        task = {
            **task,
            "side": side,
            "work": work,
            "threads": threads,
        }
        variables = {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
        module = "bench.tokenizer.side"
        return answer_of(
            side,
            module,
            task,
            self.folders[side],
            **variables,
        )


# --- measuring -------------------------------------------------------------------------------------


def typical(answers: Sequence[Answer], key: str) -> float:
    """Return the median of a figure."""
    return median(answer[key] for answer in answers)


def speeds(answers: Sequence[Answer], key: str) -> str:
    """Return the median and the range of MB per CPU second, for a table."""
    values = [answer["bytes"] / 1e6 / answer[key] for answer in answers]
    return f"{median(values):7.1f} ({min(values):.1f}..{max(values):.1f})"


def ratio(answers: dict[str, list[Answer]], peer: str, key: str) -> float:
    """Return the peer's median of a figure divided by ours."""
    return typical(answers[peer], key) / typical(answers["ours"], key)


def train(
    sides: Sides, task: Task, name: str, peer: str | None
) -> tuple[Task, dict[str, list[Answer]]]:
    """Train with a peer and with ours in turns; return the task, with its limit of text, and the answers.

    Ours writes its tokens to task["ranks"].
    """
    quiet = {**task, "ranks": ""}
    if peer is not None and sides.cfg.quick:  # as much text as the peer trains on in 0.8 seconds
        probe = sides.ask(peer, "train", {**quiet, "max_bytes": PROBE_BYTES})
        limit = {"max_bytes": int(0.8 * probe["bytes"] / probe["cpu"])}
        task, quiet = {**task, **limit}, {**quiet, **limit}
    answers: dict[str, list[Answer]] = {"ours": []}
    if peer is not None:
        answers = {peer: [], "ours": []}
    for _ in range(sides.cfg.repeats):
        for side, of_side in answers.items():
            of_side.append(sides.ask(side, "train", task if side == "ours" else quiet))
    for side, of_side in answers.items():
        log(
            f"train {name:<8}{task['vocab_size']:>7,} {side:<12}{of_side[0]['bytes'] / 1e6:>7.2f} MB"
            f"{typical(of_side, 'cpu'):>9.3f} CPU s {speeds(of_side, 'cpu')} MB/CPU s"
            f"{typical(of_side, 'peak') / 1e6:>8.0f} MB of memory"
        )
    return task, answers


def encode(
    sides: Sides, task: Task, files: dict[str, list[str]], peer: str | None
) -> dict[str, dict[str, list[Answer]]]:
    """Encode files with a peer for a given time, then the same documents with ours; return answers by text."""
    cfg = sides.cfg
    task = {
        **task,
        "seconds": cfg.encoding_seconds,
        "repeats": cfg.repeats,
    }
    first = peer or "ours"
    chosen = {name: {"files": paths, "groups": None} for name, paths in files.items()}
    by_side = {first: sides.ask(first, "encode", {**task, "texts": chosen})}
    if peer is not None:
        for name, answers in by_side[peer].items():
            chosen[name]["groups"] = answers[0]["groups"]
        by_side["ours"] = sides.ask("ours", "encode", {**task, "texts": chosen})
    for name in files:
        for side, by_text in by_side.items():
            answers = by_text[name]
            log(
                f"encode {name:<18}{side:<12}{answers[0]['bytes'] / 1e6:>6.2f} MB"
                f"{speeds(answers, 'cold')} cold {speeds(answers, 'warm')} warm MB/CPU s"
                f"{1000 * typical(answers, 'construction'):>7.1f} ms to construct"
            )
    return {name: {side: by_text[name] for side, by_text in by_side.items()} for name in files}


def training_figures(
    sides: Sides, files: dict[str, list[str]], ranks: Path
) -> tuple[Task, dict[str, Any]]:
    """Train beside each peer that can; return the task that wrote `ranks`, and ratios."""
    cfg = sides.cfg
    mixed = {"files": files["mixed"], "vocab_size": cfg.vocabulary}
    shared = {
        "pattern": PATTERN,
        "max_bytes": None,
        "ranks": str(ranks),
    }
    mixed_task: Task = {**mixed, **shared}
    result: dict[str, Any] = {}
    same = []
    for peer in TRAINERS:
        if peer not in cfg.against:
            continue
        mixed_task, answers = train(
            sides,
            {**mixed, **shared},
            "mixed",
            peer,
        )
        result[f"train_vs_{peer}"] = ratio(answers, peer, "cpu")
        if peer == "rustbpe":
            result["memory_vs_rustbpe"] = 1 / ratio(answers, peer, "peak")
            # Hugging Face's trainer breaks ties in another way, so only karpathy's tokens are compared.
            same.append(answers["ours"][0]["digest"] == answers[peer][0]["digest"])
        if peer == "rustbpe" and "chinese" in files:
            half = {"files": files["chinese"], "vocab_size": cfg.vocabulary // 2}
            _, answers = train(
                sides,
                {
                    **half,
                    **shared,
                    "ranks": "",
                },
                "Chinese",
                peer,
            )
            result["train_zh_vs_rustbpe"] = ratio(answers, peer, "cpu")
            same.append(answers["ours"][0]["digest"] == answers[peer][0]["digest"])
    if not result:
        mixed_task, _ = train(
            sides,
            mixed_task,
            "mixed",
            None,
        )
    return mixed_task, {**result, "identical": all(same)}


def measure(cfg: Config, work: Path) -> dict[str, Any]:
    """Measure everything, and return the figures for the JSON object."""
    sides = Sides(cfg)
    files = real_texts(cfg, work)
    ranks = work / "mixed.tiktoken"
    learned_from, result = training_figures(sides, files, ranks)
    generated = texts.write(work, 0.5 if cfg.quick else 4)
    hard = {kind: [str(path)] for kind, path in generated.items()}
    if cfg.quick:
        formulaic = hard.pop("formulaic Chinese")
        adversarial = [path for paths in hard.values() for path in paths]
        hard = {"formulaic Chinese": formulaic, "adversarial": adversarial}
    files |= hard
    exported = work / "tokenizer.json"
    exported.write_text(bpe.huggingface_json(read_ranks(str(ranks)), PATTERN, {}))
    task: Task = {
        "vocab_size": cfg.vocabulary,
        "pattern": PATTERN,
        "ranks": str(ranks),
        "json": str(exported),
        "learned_from": learned_from,
    }
    result["texts"] = {}
    for peer in cfg.against or [None]:
        chosen = files
        if cfg.quick and peer not in (None, "tiktoken"):
            chosen = {name: files[name] for name in QUICK_TEXTS if name in files}
        by_text = encode(
            sides,
            task,
            chosen,
            peer,
        )
        result["texts"][peer or "ours"] = {
            name: figures(answers, peer) for name, answers in by_text.items()
        }
        if peer is None:
            continue
        for name, key in (("mixed", "encode"), ("chinese", "encode_zh")):
            if name in by_text:
                result[f"{key}_vs_{peer}"] = ratio(by_text[name], peer, "cold")
        for answers in by_text.values():
            same = answers["ours"][0]["digest"] == answers[peer][0]["digest"]
            result["identical"] &= same
    return result


def figures(answers: dict[str, list[Answer]], peer: str | None) -> dict[str, Any]:
    """Return what the JSON object says about a text: its bytes, and how many times as fast ours was."""
    ours = answers["ours"][0]
    summary = {"bytes": ours["bytes"], "bytes_per_token": ours["bytes"] / max(1, ours["tokens"])}
    if peer is not None:
        summary["cold"] = ratio(answers, peer, "cold")
        summary["warm"] = ratio(answers, peer, "warm")
    return summary


# --- command line ----------------------------------------------------------------------------------


def corpus_folder(cfg: Config) -> Path | None:
    """Return the folder of the corpus, made if needed; None with --quick where it cannot be made."""
    if cfg.corpus is not None:
        return cfg.corpus
    folder = base_dir() / "bench_corpus" / ("quick" if cfg.quick else "all")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        corpus.main(corpus.Config(folder, **(QUICK_MB if cfg.quick else {})))
    except UserError as failure:
        if not cfg.quick:
            raise
        log(f"{failure}\nUsing Python's standard library alone: no prose")
        return None
    return folder


def real_texts(cfg: Config, work: Path) -> dict[str, list[str]]:
    """Return the files of real text by kind: the prose of the corpus, Python's sources, and all of it."""
    files: dict[str, list[str]] = {}
    folder = corpus_folder(cfg)
    for kind in corpus.KINDS if folder is not None else ():
        assert folder is not None
        if corpus.documents(folder, kind):
            files[kind] = [str(folder / f"{kind}.txt")]
    code = standard_library(QUICK_CODE if cfg.quick else None)
    path = work / "code.txt"
    path.write_text(corpus.SEPARATOR.join(code.documents), encoding="utf-8", newline="")
    files["code"] = [str(path)]
    mixed = [path for kind in MIXED for path in files.get(kind, [])]
    return {"mixed": mixed, **files}


def rounded(value: Any) -> Any:
    """Return the same figures with four digits after the point."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, threads=cfg.threads, repeats=cfg.repeats)
    check_at_least(1024, vocab_size=cfg.vocabulary)
    with tempfile.TemporaryDirectory() as work:
        result = measure(cfg, Path(work))
    summary = {
        "benchmark": "tokenizer",
        "threads": cfg.threads,
        **rounded(result),
    }
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)

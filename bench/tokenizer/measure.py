"""Trains and encodes with one peer and with ours, on the same text and equally often, and prints a line for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from bench.tokenizer.peers import Answer, Peer, Sides, Task
from nanochat.common import log

PROBE_BYTES = 1_000_000


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    vocab_size: int
    training_seconds: float | None
    """CPU seconds that a peer should take to train once; None: it trains on all text"""
    encoding_seconds: float
    """CPU seconds that a peer encodes each text"""
    repeats: int


@dataclass(frozen=True)
class Beside:
    """A peer's answers and ours for the same text, one answer of each for every repeat."""

    peer: str | None
    task: Task
    answers: dict[str, list[Answer]]

    def ratio(self, key: str, ours: str = "ours") -> float | None:
        """The peer's median divided by ours; None if no peer was measured."""
        return (
            None
            if self.peer is None
            else typical(self.answers[self.peer], key) / typical(self.answers[ours], key)
        )

    @property
    def identical(self) -> bool:
        """Whether all sides gave the same tokens. Hugging Face's trainer breaks ties in another way."""
        return len({answers[0]["digest"] for answers in self.answers.values()}) == 1


def typical(answers: Sequence[Answer], key: str) -> float:
    """The median of a figure."""
    return median(answer[key] for answer in answers)


def spread(answers: Sequence[Answer], figure: Callable[[Answer], float]) -> str:
    """The median of a figure, and its range."""
    values = [figure(answer) for answer in answers]
    return f"{median(values):7.1f} ({min(values):.1f}..{max(values):.1f})"


def megabytes_per_second(key: str) -> Callable[[Answer], float]:
    """The speed in an answer, from the CPU seconds under a key."""
    return lambda answer: answer["bytes"] / 1e6 / answer[key]


def train(sides: Sides, size: Size, task: Task, name: str, peer: Peer | None) -> Beside:
    """Train with a peer and with ours in turns, and print a line for each. Ours writes its tokens to task["ranks"]."""
    ask = partial(sides.ask, work="train")
    if peer is not None and size.training_seconds is not None:
        probe = ask(peer, **{**task, "most_bytes": PROBE_BYTES, "ranks": ""})
        task = {**task, "most_bytes": int(probe["bytes"] * size.training_seconds / probe["cpu"])}
    both: tuple[str, ...] = ("ours",) if peer is None else (peer, "ours")
    answers: dict[str, list[Answer]] = {side: [] for side in both}
    for _ in range(size.repeats):
        for side in both:
            answers[side].append(
                ask(side, **{**task, "ranks": task["ranks"] if side == "ours" else ""})
            )
    for side in both:
        some = answers[side]
        log(
            f"train {name:<8}{task['vocab_size']:>7,} {side:<12}{some[0]['bytes'] / 1e6:>7.2f} MB"
            f"{typical(some, 'cpu'):>9.3f} CPU s {spread(some, megabytes_per_second('cpu'))} MB/CPU s"
            f"{typical(some, 'peak') / 1e6:>8.0f} MB of memory"
        )
    return Beside(peer, task, answers)


def encode(
    sides: Sides, size: Size, task: Task, texts: dict[str, list[str]], peer: Peer | None
) -> dict[str, Beside]:
    """Encode files with a peer for a given time, then the same documents with ours, and print a line for each.

    `texts` maps names to files. Ours also encodes into numpy arrays, once: beside tiktoken, or alone.
    """
    ask = partial(
        sides.ask, work="encode", seconds=size.encoding_seconds, repeats=size.repeats, **task
    )
    first = peer or "ours"
    answers = {
        first: ask(
            first, texts={name: {"files": files, "groups": None} for name, files in texts.items()}
        )
    }
    groups = {
        name: {"files": files, "groups": answers[first][name][0]["groups"]}
        for name, files in texts.items()
    }
    for side in ("ours",) if peer in ("rustbpe", "tokenizers") else ("ours", "numpy"):
        if side not in answers:
            answers[side] = ask(side, texts=groups)
    for name in texts:
        for side, of_side in answers.items():
            some = of_side[name]
            log(
                f"encode {name:<18}{'ours, numpy' if side == 'numpy' else side:<12}{some[0]['bytes'] / 1e6:>6.2f} MB"
                f"{spread(some, megabytes_per_second('cold'))} cold {spread(some, megabytes_per_second('warm'))} warm "
                f"MB/CPU s{1000 * typical(some, 'construction'):>7.1f} ms to construct"
            )
    return {
        name: Beside(peer, task, {side: of_side[name] for side, of_side in answers.items()})
        for name in texts
    }


def figures(beside: Beside) -> dict[str, Any]:
    """What the JSON object says about a text: its bytes, and how many times as fast ours was."""
    bytes_, tokens = (beside.answers["ours"][0][key] for key in ("bytes", "tokens"))
    ratios = {
        f"{key}{'' if side == 'ours' else '_numpy'}": beside.ratio(key, side)
        for side in ("ours", "numpy")
        if side in beside.answers
        for key in ("cold", "warm")
    }
    seconds = {side: typical(answers, "construction") for side, answers in beside.answers.items()}
    return {
        "bytes": bytes_,
        "bytes_per_token": bytes_ / max(1, tokens),
        **ratios,
        "construction": seconds,
    }

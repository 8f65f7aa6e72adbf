"""Measures how long replies wait for their next tokens while a long prompt is read.

python -m bench.serve.prompts
python -m bench.serve.prompts --model ./smol --tokens 8000 --dtype bfloat16

Some chats reply without an end while an engine, set up as the server's, reads one long prompt beside
them. Each step of the engine gives every chat one token, so the time of a step is what a chat waits.
All times are CPU seconds, also those by which the engine chooses how many tokens of the prompt it
reads in a step, because other work on the machine does not change them.
"""

import random
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Literal

import torch

from bench import tables
from bench.processes import check_at_least
from bench.serve import model
from bench.training import QWEN3
from nanochat import device, engine
from nanochat.common import log
from nanochat.data.command_line import run
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.serve.chosen import ModelFlags, choose
from scripts.chat_web import MOST_SECONDS

TEXT = 200_000  # characters that the vocabulary of the random model is trained on
SHORT = 20  # tokens of the prompts of the chats


@dataclass(frozen=True)
class Config:
    """Print the time of a step and of the whole prompt, and one JSON object on the last line."""

    model: Path | None = None
    """folder of a published model; default: one of 36 million random parameters"""
    tokens: int = 20_000
    """tokens of the long prompt"""
    chats: int = 4
    """replies beside it"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """number format of the computation"""


def measure(cfg: Config, folder: Path) -> list[float]:
    """Return the CPU seconds of each step in which a part of the long prompt is read."""
    compute = device.compute_init("cpu").in_format(cfg.dtype)
    flags = ModelFlags(model=folder, context=2 * cfg.tokens)
    loaded = choose(flags, compute).loaded
    served = Engine(
        loaded.model,
        loaded.tokenizer,
        slots=cfg.chats + 1,
        length=2 * cfg.tokens,
        most_seconds=MOST_SECONDS,
    )
    generator = random.Random(3)
    # No reply ends before the prompt is read, for that takes at most a step for every token.
    reply = Sampling(0.0, max_tokens=cfg.tokens, ignore_eos=True)

    def prompt(tokens: int) -> list[int]:
        return [generator.randrange(1000) for _ in range(tokens)]

    for _ in range(cfg.chats):
        served.submit(prompt(SHORT), reply)
    for _ in range(10):
        served.step()
    served.submit(prompt(cfg.tokens), reply)
    wanted = served.prompt_tokens_read + cfg.tokens - 1
    seconds = []
    while served.prompt_tokens_read < wanted:
        start = time.process_time()
        served.step()
        seconds.append(time.process_time() - start)
    return seconds


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(2, tokens=cfg.tokens)
    check_at_least(1, chats=cfg.chats)
    torch.set_num_threads(1)
    engine.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        folder = cfg.model
        if folder is None:
            shape = replace(QWEN3, sequence_len=2 * cfg.tokens)
            folder = model.make(Path(name), shape, text=TEXT).folder
        seconds = measure(cfg, folder)
    figures = {
        "median_ms": 1e3 * median(seconds),
        "p95_ms": 1e3 * quantiles(seconds, n=20)[-1],
        "steps": len(seconds),
        "total_seconds": sum(seconds),
    }
    log(f"a prompt of {cfg.tokens:,} tokens beside {cfg.chats} replies, one thread, CPU time")
    tables.show(
        ("", "median of a step, ms", "95th percentile, ms", "steps", "whole prompt, s"),
        [["ours", *(f"{value:.0f}" for value in figures.values())]],
    )
    tables.finish("prompts", figures)


if __name__ == "__main__":
    run(main, Config, __doc__)

"""Measures what drafts that agree with the model 70 % of the time save, in CPU seconds.

python -m bench.serve.drafts
python -m bench.serve.drafts --weights int8 --chats 1 2 4

The drafts come from the replies themselves, with three in ten tokens changed, so that they cost
nothing: what is measured is checking them. Replies with and without drafts take turns.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from bench import tables
from bench.serve import model
from nanochat import device
from nanochat.common import log
from nanochat.data.command_line import run
from nanochat.engine import Engine
from nanochat.generate.drafts import Drafts
from nanochat.generate.request import Request
from nanochat.generate.sampling import Sampling
from nanochat.serve.chosen import ModelFlags, choose

PROMPT = 100  # tokens
REPLY = 128
AGREE = 0.7


@dataclass(frozen=True)
class Config:
    """Print how many times as fast replies are with drafts, and one JSON object on the last line."""

    chats: tuple[int, ...] = (1,)
    """numbers of chats at once"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """number format of the computation"""
    weights: Literal["auto", "int8"] = "auto"
    """number format of the matrices"""
    rounds: int = 5
    """rounds of each configuration"""


class Oracle:
    """Guesses the tokens of known replies, of which a share is changed at random."""

    def __init__(self, replies: Sequence[Sequence[int]]):
        self._replies = replies
        self._random = random.Random(1)

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Implement Guesser.guess for requests that are numbered as their replies."""
        guesses = []
        for request, count in zip(requests, counts, strict=True):
            reply = self._replies[request.number % len(self._replies)]
            following = reply[request.generated : request.generated + count]
            agreed = [self._random.random() < AGREE for _ in following]
            guesses.append(
                [t if right else t ^ 1 for t, right in zip(following, agreed, strict=True)]
            )
        return guesses


def seconds_of(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Return the CPU seconds of a reply to each prompt."""
    start = time.process_time()
    engine.generate(prompts, Sampling(0.0, max_tokens=REPLY, ignore_eos=True))
    return time.process_time() - start


def gain(cfg: Config, folder: Path, chats: int) -> float:
    """Return how many times as fast so many replies are with drafts as without."""
    compute = device.compute_init("cpu").in_format(cfg.dtype)
    chosen = choose(ModelFlags(model=folder, weights=cfg.weights), compute)
    loaded = chosen.loaded
    generator = random.Random(2)
    prompts = [[generator.randrange(1000) for _ in range(PROMPT)] for _ in range(chats)]
    plain = Engine(loaded.model, loaded.tokenizer, chats)
    replies = plain.generate(prompts, Sampling(0.0, max_tokens=REPLY, ignore_eos=True))
    oracle = Drafts(Oracle([reply.tokens for reply in replies]))
    drafted = Engine(loaded.model, loaded.tokenizer, chats, drafts=oracle)
    seconds_of(drafted, prompts)
    ratios = [seconds_of(plain, prompts) / seconds_of(drafted, prompts) for _ in range(cfg.rounds)]
    return median(ratios)


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = model.make(Path(name)).folder
        gains = {str(chats): gain(cfg, folder, chats) for chats in cfg.chats}
    log(f"{REPLY} greedy tokens a chat, drafts agree {AGREE:.0%}, median of {cfg.rounds} rounds")
    tables.show(
        ("with drafts, times as fast", *(f"{chats} chats" for chats in gains)),
        [["ours", *(f"{ratio:.2f}" for ratio in gains.values())]],
    )
    tables.finish("drafts", {"times_as_fast": gains})


if __name__ == "__main__":
    run(main, Config, __doc__)

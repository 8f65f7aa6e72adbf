"""What the sides of bench.rl have in common: the shapes of a step, prompts, and rewards without a meaning."""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

VOCAB = 4096
MODEL = {
    "sequence_len": 512,
    "vocab_size": VOCAB,
    "n_layer": 4,
    "n_head": 3,
    "n_kv_head": 3,
    "n_embd": 192,
    "window_pattern": "L",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a step."""

    name: str
    problems: int
    samples: int
    prompt: int  # tokens of a prompt
    reply: int  # tokens of a reply; an untrained model rarely ends one
    sharpness: float  # deviation of the untrained model's logits; 0: all tokens are equally likely
    temperature: float  # of sampling
    pass_rows: int  # replies per training pass
    beginnings: int  # one reply in two is right, by this many first tokens

    @property
    def tokens(self) -> int:
        """Tokens of all replies of a step."""
        return self.problems * self.samples * self.reply


# Replies to TinyWorld's sums have three tokens, of which the first has most of the entropy. GSM8K's have some hundred,
# and no two of a problem are alike.
SUMS = Shape("sums", 32, 16, 14, 3, 4.0, 0.25, 128, 1)
GSM8K = Shape("gsm8k", 4, 16, 100, 128, 0.0, 1.0, 8, 4)


@cache
def prompts(shape: Shape, step: int) -> list[list[int]]:
    """The prompts of a step: random tokens, which stand for letters."""
    rng = random.Random(step)
    return [[rng.randrange(32, 127) for _ in range(shape.prompt)] for _ in range(shape.problems)]


def right(tokens: Sequence[int], shape: Shape) -> float:
    """A reward that depends on the first tokens of a reply alone."""
    return float(zlib.crc32(repr(list(tokens[: shape.beginnings])).encode()) % 2)

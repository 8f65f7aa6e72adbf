"""Rendered rows of TinyWorld that several tests read, made once per process."""

import functools
import re

from nanochat.data.conversation import Conversation
from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.tinyworld.problems import normalise as fold

MID, SFT = 4000, 2000


@functools.cache
def training() -> tuple[Conversation, ...]:
    """Rows of every stage that trains on questions."""
    rl = [problem.conversation for problem in tinyworld.rl_problems(1, 500)]
    return (*tinyworld.mid_conversations(1, MID), *tinyworld.sft_conversations(1, SFT), *rl)


@functools.cache
def corpus() -> tuple[str, ...]:
    """Two copies of the base corpus."""
    return tuple(tinyworld.documents(1, copies=2))


def normalise(text: str) -> str:
    """Folded as in grading, and without punctuation."""
    return re.sub(r"[\W_]+", " ", fold(text)).strip()

"""Rendered rows of TinyWorld for several tests, made once per process."""

import functools
import re

from nanochat.data.conversation import Conversation
from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.tinyworld.problems import normalise as fold

MID, SFT = 4000, 2000


@functools.cache
def training() -> tuple[Conversation, ...]:
    """Rows of all stages that train on questions."""
    rl = [problem.conversation for problem in tinyworld.rl_problems(1, 500)]
    return (*tinyworld.mid_conversations(1, MID), *tinyworld.sft_conversations(1, SFT), *rl)


@functools.cache
def corpus() -> tuple[str, ...]:
    """Two copies of the base corpus."""
    return tuple(tinyworld.documents(1, copies=2))


def normalise(text: str) -> str:
    """Normalise text as grading does, and remove punctuation."""
    return re.sub(r"[\W_]+", " ", fold(text)).strip()

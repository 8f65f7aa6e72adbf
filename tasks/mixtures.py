"""Which conversations each stage learns from: TinyWorld's own, or the published mixtures for other corpora."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from nanochat.common import UserError, sha256_of
from nanochat.data.conversation import Conversation, Task
from nanochat.data.tinyworld import world as tinyworld
from tasks.arc import ARC
from tasks.common import Mixture, Subset, Ungraded
from tasks.customjson import CustomJSON
from tasks.gsm8k import GSM8K
from tasks.mmlu import MMLU
from tasks.smoltalk import SmolTalk
from tasks.spellingbee import SimpleSpelling, SpellingBee
from tasks.tinyworld import TinyWorld, mental


class Identity(Ungraded):
    """Who the assistant is, in both languages."""

    name = "Identity"

    def __init__(self) -> None:
        self._conversations = tinyworld.identity_conversations()

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, i: int) -> Conversation:
        return self._conversations[i]


HELD_OUT = 50  # one conversation in so many is kept for validation


class Conversations(Protocol):
    """Conversations by number: a task, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Conversation: ...


@dataclass(frozen=True)
class Mix:
    """What a stage trains and validates on. `key` names the content; `load` is only called where it is not cached."""

    name: str
    key: str
    load: Callable[[], Conversations]

    @cached_property
    def conversations(self) -> Conversations:
        """All of them, made once."""
        return self.load()

    def train(self) -> Iterable[Conversation]:
        """All but every HELD_OUT-th conversation."""
        conversations = self.conversations
        return (conversations[i] for i in range(len(conversations)) if i % HELD_OUT)

    def val(self) -> Iterable[Conversation]:
        """Every HELD_OUT-th conversation."""
        conversations = self.conversations
        return (conversations[i] for i in range(0, len(conversations), HELD_OUT))


def mix(stage: str, corpus: str, seed: int, custom: str | None = None) -> Mix:
    """The conversations of stage mid or sft for a corpus; `custom` is a JSONL file of one's own instead."""
    if custom is not None:
        task = CustomJSON(custom)
        if len(task) < 2:
            raise UserError(f"{custom} must hold at least 2 conversations, one to validate on, got {len(task)}")
        return Mix(custom, f"{custom} {sha256_of(Path(custom).expanduser())}", lambda: task)
    if corpus == "tinyworld":
        make = {"mid": tinyworld.mid_conversations, "sft": tinyworld.sft_conversations}[stage]
        return Mix("TinyWorld", f"tinyworld {stage} {seed} {tinyworld.VERSION}", lambda: make(seed=seed))
    published = {"mid": _published_mid, "sft": _published_sft}[stage]
    return Mix("SmolTalk and tasks", f"published {stage} {seed} {tinyworld.VERSION}", lambda: published(seed))


def _published_mid(seed: int) -> Mixture:
    """Nov-2025's mixture: about 850 thousand conversations, identity twice."""
    return Mixture(
        [
            SmolTalk("train"),
            MMLU("auxiliary_train", "train"),
            GSM8K("train"),
            Identity(),
            Identity(),
            SimpleSpelling(200_000),
            SpellingBee(80_000),
        ],
        seed,
    )


def _published_sft(seed: int) -> Mixture:
    """Nov-2025's mixture: about 23 thousand conversations."""
    return Mixture(
        [
            ARC("ARC-Easy", "train"),
            ARC("ARC-Challenge", "train"),
            GSM8K("train"),
            Subset(SmolTalk("train"), stop=10_000),
            Identity(),
            SimpleSpelling(300),
            SpellingBee(300),
        ],
        seed,
    )


def rl_tasks(corpus: str) -> tuple[Task, Task]:
    """What RL trains on and what it is measured on: sums in the head for TinyWorld, else GSM8K."""
    if corpus == "tinyworld":
        return TinyWorld("mental", tinyworld.rl_problems()), mental()
    return GSM8K("train"), GSM8K("test")

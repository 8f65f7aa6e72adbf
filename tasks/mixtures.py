"""What each stage after pretraining learns from: TinyWorld's own conversations, or the published mixtures."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

from nanochat.common import UserError, sha256_of
from nanochat.data.conversation import Conversation, Task
from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.traits import traits
from tasks.arc import ARC
from tasks.common import Subset, TaskMixture, Ungraded
from tasks.customjson import CustomJSON
from tasks.gsm8k import GSM8K
from tasks.humaneval import HumanEval
from tasks.mmlu import MMLU
from tasks.smoltalk import SmolTalk
from tasks.spellingbee import SimpleSpelling, SpellingBee
from tasks.tinyworld import TinyWorld, measures, mental


class Identity(Ungraded):
    """Questions about who the assistant is, in both languages."""

    name = "Identity"

    def __init__(self) -> None:
        self._conversations = tinyworld.identity_conversations()

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, i: int) -> Conversation:
        return self._conversations[i]


Stage = Literal["mid", "sft"]
Measures = Mapping[str, Callable[[], Task]]  # by name; each task is read when it is called

HELD_OUT = 50  # one conversation in 50 is for validation


class Conversations(Protocol):
    """Conversations that can be counted and indexed: a task or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Conversation: ...


@dataclass(frozen=True)
class Mix:
    """The conversations of a stage. `key` names their content; `load` is called only if their tokens are not kept."""

    name: str
    key: str
    load: Callable[[], Conversations]

    @cached_property
    def conversations(self) -> Conversations:
        """All conversations, loaded once."""
        return self.load()

    def train(self) -> Iterable[Conversation]:
        """All but every HELD_OUT-th conversation."""
        conversations = self.conversations
        return (conversations[i] for i in range(len(conversations)) if i % HELD_OUT)

    def val(self) -> Iterable[Conversation]:
        """Every HELD_OUT-th conversation."""
        conversations = self.conversations
        return (conversations[i] for i in range(0, len(conversations), HELD_OUT))


def mix(stage: Stage, corpus: str, seed: int, custom: str | None = None) -> Mix:
    """The conversations of stage mid or sft for a corpus; `custom` names your own JSONL file to use instead."""
    if custom is not None:
        task = CustomJSON(custom)
        if len(task) < 2:
            raise UserError(
                f"{custom} must hold at least 2 conversations, since one is for validation, got {len(task)}; add more"
            )
        return Mix(custom, f"{custom} {sha256_of(Path(custom).expanduser())}", lambda: task)
    name = traits(corpus).curriculum
    make = CURRICULA[name].conversations[stage]
    return Mix(CURRICULA[name].title, f"{name} {stage} {seed} {tinyworld.VERSION}", lambda: make(seed))


def rl_tasks(corpus: str) -> tuple[Task, Task]:
    """The task that RL trains on for a corpus, and the task that RL is measured on."""
    return curriculum(corpus).rl()


# --- curricula -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curriculum:
    """What the stages after pretraining learn from, and what their models are measured on."""

    title: str
    conversations: Mapping[Stage, Callable[[int], Conversations]]  # of a seed
    rl: Callable[[], tuple[Task, Task]]  # RL trains on the first and is measured on the second
    measures: Callable[[bool], Measures]  # of `unsafe_exec`, see HumanEval


def curriculum(corpus: str | None) -> Curriculum:
    """The curriculum that fits a corpus."""
    return CURRICULA[traits(corpus).curriculum]


def _published_mid(seed: int) -> TaskMixture:
    """Upstream's mixture of November 2025: about 850 thousand conversations; those about identity come twice."""
    return TaskMixture(
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


def _published_sft(seed: int) -> TaskMixture:
    """Upstream's mixture of November 2025: about 23 thousand conversations."""
    return TaskMixture(
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


def _published_measures(unsafe_exec: bool) -> Measures:
    """The tasks of ChatCORE."""
    return {
        "ARC-Easy": lambda: ARC("ARC-Easy", "test"),
        "ARC-Challenge": lambda: ARC("ARC-Challenge", "test"),
        "MMLU": lambda: MMLU("all", "test"),
        "GSM8K": lambda: GSM8K("test"),
        "HumanEval": lambda: HumanEval(unsafe_exec=unsafe_exec),
        "SpellingBee": lambda: SpellingBee(256, "test"),
    }


def _published_rl() -> tuple[Task, Task]:
    return GSM8K("train"), GSM8K("test")


def _tinyworld_mid(seed: int) -> Conversations:
    return tinyworld.mid_conversations(seed=seed)


def _tinyworld_sft(seed: int) -> Conversations:
    return tinyworld.sft_conversations(seed=seed)


def _tinyworld_rl() -> tuple[Task, Task]:
    """Sums in the head."""
    return TinyWorld("mental", tinyworld.rl_problems()), mental()


def _tinyworld_measures(unsafe_exec: bool) -> Measures:
    """TinyWorld's own measures, which run no programs."""
    return measures()


CURRICULA: Mapping[str, Curriculum] = {
    "published": Curriculum(
        "SmolTalk and tasks", {"mid": _published_mid, "sft": _published_sft}, _published_rl, _published_measures
    ),
    "tinyworld": Curriculum(
        "TinyWorld", {"mid": _tinyworld_mid, "sft": _tinyworld_sft}, _tinyworld_rl, _tinyworld_measures
    ),
}

"""What each stage after pretraining learns from: TinyWorld's own conversations, or the published mixtures."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from nanochat.common import UserError, sha256_of
from nanochat.data.conversation import Conversation, Task
from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.traits import traits
from tasks import arc, gsm8k, humaneval, mmlu, smoltalk
from tasks.arc import ARC
from tasks.common import Published, Subset, TaskMixture, Ungraded, first_places
from tasks.customjson import CustomJSON
from tasks.gsm8k import GSM8K
from tasks.humaneval import HumanEval
from tasks.mmlu import MMLU
from tasks.preferences import read_pairs
from tasks.problems import Problems
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
OWN_HELD_OUT, MOST_HELD_OUT = (
    30,
    10,
)  # conversations of your own files, but of fewer than 300 one in 10
MOST_TIMES = 1000  # that the conversations of a file may be repeated
COPIES_TOGETHER = ", copies held out together"  # in the keys of mixtures with copies, which earlier versions trained on


Item = TypeVar("Item", covariant=True)


class Records(Protocol[Item]):
    """What can be counted and indexed: a task or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Item: ...


Conversations = Records[Conversation]


@runtime_checkable
class WithCopies(Protocol):
    """Items of which some may be there several times."""

    def originals(self) -> np.ndarray:  # (items,) int64
        """For each place a number that only copies of the same item share. Places are held out by these numbers."""
        ...


def _originals(items: Records[Item]) -> np.ndarray:
    return items.originals() if isinstance(items, WithCopies) else np.arange(len(items))


@dataclass(frozen=True)
class Numbered(Generic[Item]):
    """Items and what WithCopies.originals() says of them."""

    items: Sequence[Item]
    numbers: np.ndarray  # (items,) int64
    held_out_every: int = HELD_OUT

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Item:
        return self.items[i]

    def originals(self) -> np.ndarray:
        return self.numbers


@dataclass(frozen=True)
class Mix:
    """The conversations of a stage. `key` names their content; `load` is called only if their tokens are not kept.

    All copies of a conversation are held out or none, so that validation never reads what was trained.
    """

    name: str
    key: str
    load: Callable[[], Conversations]
    together: int = 1  # how many conversations in a row, such as the two of a pair, are held out together or not
    held_out_every: int = HELD_OUT  # one conversation, or pair, in so many is for validation

    @cached_property
    def conversations(self) -> Conversations:
        """All conversations, loaded once."""
        return self.load()

    @cached_property
    def _held_out(self) -> np.ndarray:  # (conversations,) bool
        return _originals(self.conversations) // self.together % self.held_out_every == 0

    def train(self) -> Iterable[Conversation]:
        """All conversations that are not held out."""
        conversations = self.conversations
        return (conversations[i] for i in np.flatnonzero(~self._held_out).tolist())

    def val(self) -> Iterable[Conversation]:
        """The conversations that are held out, without their copies."""
        conversations = self.conversations
        _, first = np.unique(_originals(conversations), return_index=True)
        return (conversations[i] for i in np.sort(first[self._held_out[first]]).tolist())


class WithYours:
    """A mixture with your own conversations added, repeated until one in ten is yours, all in a seeded order.

    Of yours that are repeated, every HELD_OUT-th is held out; if there are fewer, all are trained.
    """

    def __init__(self, mixture: Conversations, yours: Conversations, seed: int):
        self._mixture, self._yours = mixture, yours
        self._copies = max(round(len(mixture) / (9 * len(yours))), 1)
        numbers = np.concatenate(
            [np.arange(len(mixture)), -1 - np.tile(np.arange(len(yours)), self._copies)]
        )
        self._numbers = np.random.default_rng(seed).permutation(numbers)  # below zero: of yours

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Conversation:
        number = int(self._numbers[i])
        return self._mixture[number] if number >= 0 else self._yours[-1 - number]

    def originals(self) -> np.ndarray:
        """See WithCopies. The mixture's own conversations are held out as they are without yours."""
        behind = -(-len(self._mixture) // HELD_OUT) * HELD_OUT
        of_mixture = _originals(self._mixture)[np.maximum(self._numbers, 0)]
        numbers = np.where(self._numbers >= 0, of_mixture, behind - self._numbers)
        # What is not repeated is held out by place, as in earlier versions, whose runs may then be resumed.
        return numbers if self._copies > 1 else first_places(numbers)


def mix(
    stage: Stage, corpus: str, seed: int, custom: str | None = None, added: str | None = None
) -> Mix:
    """The conversations of stage mid or sft for a corpus.

    `custom` names your own JSONL file to use instead; `added` names one to add. UserError (code 2) for both.
    """
    if custom is not None and added is not None:
        raise UserError(
            "--conversations replaces the mixture and --mix adds to it: give one of them",
            exit_code=2,
        )
    if custom is not None:
        task = CustomJSON(custom)
        if len(task) < 2:
            raise UserError(
                f"{custom} must hold at least 2 conversations, since one is for validation, got {len(task)}; add more"
            )
        return Mix(custom, f"{custom} {_content(custom)}", lambda: task)
    name = traits(corpus).curriculum
    title, make = CURRICULA[name].title, CURRICULA[name].conversations[stage]
    key = f"{name} {stage} {seed} {tinyworld.VERSION}"
    if added is None:
        return Mix(
            title, key + COPIES_TOGETHER * (stage in CURRICULA[name].repeats), lambda: make(seed)
        )
    yours = CustomJSON(added)
    key = f"{key} + {_content(added)}{COPIES_TOGETHER}"
    return Mix(f"{title} and {added}", key, lambda: WithYours(make(seed), yours, seed))


def own_conversations(files: Sequence[str], held_out_every: int | None = None) -> Mix:
    """The conversations of your own files, one file after the other.

    FILE:2 takes the conversations of a file twice, FILE:0.5 every second one. UserError names the file that cannot be
    read, the line and the rule. One conversation in `held_out_every` is held out; None: as suits their number.
    """
    name, key, found = _weighted(files, CustomJSON, "conversations", held_out_every)
    return Mix(
        name, sha256(key.encode()).hexdigest(), lambda: found, held_out_every=found.held_out_every
    )


def own_pairs(files: Sequence[str], held_out_every: int | None = None) -> Mix:
    """The pairs of answers of your own files as conversations: the preferred one of a pair, then the other one.

    Weights and errors are as in own_conversations().
    """
    name, key, found = _weighted(files, read_pairs, "pairs", held_out_every)
    numbers = np.stack([2 * found.numbers, 2 * found.numbers + 1], axis=1).reshape(-1)
    answers = Numbered([one for pair in found.items for one in pair], numbers)
    return Mix(
        name, sha256(f"pairs {key}".encode()).hexdigest(), lambda: answers, 2, found.held_out_every
    )


def _weighted(
    files: Sequence[str],
    read: Callable[[str], Records[Item]],
    what: str,
    held_out_every: int | None,
) -> tuple[str, str, Numbered[Item]]:
    """The names of files, a key of their content, and what `read` finds in each, as often as the file's weight says.

    If anything is there twice, also because a file is, the items are numbered so that the last of every HELD_OUT
    different ones is held out, or the last of all if there are fewer: short files begin with what matters most. If
    nothing is there twice, OWN_HELD_OUT of fewer than 1,500 items are held out, since 6 of 300 measure little.
    """
    parts = [_with_weight(file) for file in files]
    found = [read(path) for path, _ in parts]
    contents = [_content(path) for path, _ in parts]
    chosen: list[Item] = []
    places: list[
        int
    ] = []  # for each chosen item, the place of its original among the different ones
    known: dict[tuple[str, int], int] = {}
    for items, content, (_, weight) in zip(found, contents, parts, strict=True):
        for i in range(max(int(len(items) * weight), 1)):
            number = int(i / weight) % len(items)
            chosen.append(items[number])
            places.append(known.setdefault((content, number), len(known)))
    if len(known) < 2:
        raise UserError(
            f"{files[0]} must hold at least 2 {what}, since one is for validation, got {len(known)}; add more"
        )
    key = " + ".join(
        f"{weight:g} {content}" for content, (_, weight) in zip(contents, parts, strict=True)
    )
    numbers = np.array(places)
    if len(known) < len(chosen):
        key, numbers, every = (
            key + COPIES_TOGETHER,
            numbers + 1 - min(len(known), HELD_OUT),
            HELD_OUT,
        )
    else:
        fitting = min(max(len(known) // OWN_HELD_OUT, MOST_HELD_OUT), HELD_OUT)
        every = held_out_every or fitting
        key += f", one in {every} held out" if every != HELD_OUT else ""
    return ", ".join(Path(path).name for path, _ in parts), key, Numbered(chosen, numbers, every)


def _with_weight(file: str) -> tuple[str, float]:
    """A path and its weight. UserError if the weight is not above 0."""
    path, colon, weight = file.rpartition(":")
    if not colon or Path(file).expanduser().exists():
        return file, 1.0
    try:
        value = float(weight)
    except ValueError:
        return file, 1.0  # a name with a colon, which CustomJSON will say is missing
    if not 0 < value <= MOST_TIMES:
        raise UserError(
            f"{file}: the weight of a file must be above 0 and at most {MOST_TIMES}, got {weight}",
            2,
        )
    return path, value


def _content(file: str) -> str:
    """What a file holds and how it is read. Files with keys that older versions passed over are tokenised again."""
    path = Path(file).expanduser()
    reads_keys = re.search(rb'"(system|weight|loss)"\s*:', path.read_bytes())
    return sha256_of(path) + (" with its system messages and weights" if reads_keys else "")


def rl_tasks(corpus: str, problems: str | None = None) -> tuple[Task, Task]:
    """The task that RL trains on for a corpus, and the task that RL is measured on.

    `problems` names your own JSONL file to use instead, of which every tenth problem is for measuring.
    """
    if problems is None:
        return curriculum(corpus).rl()
    own = Problems(problems)
    if len(own) < 2:
        raise UserError(
            f"{problems} must hold at least 2 problems, since one is held out, got {len(own)}; add more"
        )
    kept = [number for number in range(len(own)) if number % 10]
    return Subset(own, numbers=kept), Subset(own, step=10)


# --- curricula -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curriculum:
    """What the stages after pretraining learn from, and what their models are measured on."""

    title: str
    conversations: Mapping[Stage, Callable[[int], Conversations]]  # of a seed
    rl: Callable[[], tuple[Task, Task]]  # RL trains on the first and is measured on the second
    measures: Callable[[bool], Measures]  # of `unsafe_exec`, see HumanEval
    needs: Callable[[], tuple[Published, ...]] = tuple  # the data sets that all of these read
    repeats: tuple[Stage, ...] = ()  # the stages whose mixtures name a task twice


def curriculum(corpus: str | None) -> Curriculum:
    """The curriculum that fits a corpus."""
    return CURRICULA[traits(corpus).curriculum]


def _published_mid(seed: int) -> TaskMixture:
    """Upstream's mixture of November 2025: about 850 thousand conversations; those about identity come twice."""
    identity = Identity()
    return TaskMixture(
        [
            SmolTalk("train"),
            MMLU("auxiliary_train", "train"),
            GSM8K("train"),
            identity,
            identity,
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


def _published_needs() -> tuple[Published, ...]:
    return (
        smoltalk.source("train"),
        mmlu.source("auxiliary_train", "train"),
        mmlu.source("all", "test"),
        *(gsm8k.source(split) for split in ("train", "test")),
        *(
            arc.source(f"ARC-{level}", split)
            for level in ("Easy", "Challenge")
            for split in ("train", "test")
        ),
        humaneval.source(),
    )


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
        "SmolTalk and tasks",
        {"mid": _published_mid, "sft": _published_sft},
        _published_rl,
        _published_measures,
        _published_needs,
        repeats=("mid",),
    ),
    "tinyworld": Curriculum(
        "TinyWorld",
        {"mid": _tinyworld_mid, "sft": _tinyworld_sft},
        _tinyworld_rl,
        _tinyworld_measures,
    ),
}

"""The training data of each stage after pretraining.

It comes from TinyWorld's own conversations, from published data sets, or from your own files. The
stages call mix(), own_conversations(), own_pairs() and rl_tasks(). CURRICULA, at the end, defines
what they get by default.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from nanochat.common import UserError, required_appendix, sha256_of, tr
from nanochat.data.conversation import Conversation, Task
from nanochat.data.sources.listing import files_of
from nanochat.data.sources.records import ENDINGS
from nanochat.data.traits import traits
from tasks import arc, gsm8k, humaneval, mmlu, smoltalk
from tasks.arc import ARC
from tasks.common import Subset, TaskMixture, Ungraded, first_places
from tasks.customjson import CustomJSON
from tasks.gsm8k import GSM8K
from tasks.humaneval import HumanEval
from tasks.mmlu import MMLU
from tasks.preferences import Pair, read_pairs
from tasks.problems import Problems
from tasks.published import Published
from tasks.smoltalk import SmolTalk
from tasks.spellingbee import SimpleSpelling, SpellingBee

Stage = Literal["mid", "sft"]
Measures = Mapping[str, Callable[[], Task]]  # by name; a call reads the data of the task

HELD_OUT = 50  # one conversation in 50 is for validation
# About 30 conversations of your own files are held out, but at most one in 10.
OWN_HELD_OUT = 30
MOST_HELD_OUT = 10
MOST_TIMES = 1000  # how often the conversations of a file may be repeated
# Part of the key of a mixture with copies, because earlier versions trained on copies of held-out
# conversations.
COPIES_TOGETHER = ", copies held out together"
# Part of the key of your own conversations, because earlier versions held out the first of them.
LAST_HELD_OUT = ", the last held out"


# --- conversations, with their copies ------------------------------------------------------------

Item = TypeVar("Item", covariant=True)


class Records(Protocol[Item]):
    """Anything that has a length and items by index, such as a task or a list (Protocol)."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Item: ...


Conversations = Records[Conversation]


@runtime_checkable
class WithCopies(Protocol):
    """A collection in which an item may occur several times (Protocol)."""

    def originals(self) -> np.ndarray:  # (items,) int64
        """Return an integer ID for the item at each position.

        Copies of an item share its ID. The IDs decide which items are held out.
        """
        ...


def _originals(items: Records[Item]) -> np.ndarray:
    return items.originals() if isinstance(items, WithCopies) else np.arange(len(items))


@dataclass(frozen=True)
class Numbered(Generic[Item]):
    """Items, each with the ID that originals() returns for it."""

    items: Records[Item]
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
    """The conversations that a stage trains and validates on.

    `key` identifies their content. `load` is called only if their tokens are not saved. Copies of a
    conversation (see WithCopies) are either all held out or all trained, so that validation does
    not read what was trained.
    """

    name: str
    key: str
    load: Callable[[], Conversations]
    together: int = 1  # how many adjacent conversations stay together, such as the two of a pair
    held_out_every: int = HELD_OUT  # one conversation or pair out of this many is for validation

    @cached_property
    def conversations(self) -> Conversations:
        """All conversations, which are loaded on first use."""
        return self.load()

    @cached_property
    def _held_out(self) -> np.ndarray:  # (conversations,) bool
        numbers = _originals(self.conversations)
        return numbers // self.together % self.held_out_every == 0

    def train(self) -> Iterable[Conversation]:
        """Return the conversations that are not held out."""
        return self._at(np.flatnonzero(~self._held_out))

    def val(self) -> Iterable[Conversation]:
        """Return the conversations that are held out, without copies."""
        numbers = _originals(self.conversations)
        _, first_positions = np.unique(numbers, return_index=True)
        return self._at(np.sort(first_positions[self._held_out[first_positions]]))

    def _at(self, positions: np.ndarray) -> Iterable[Conversation]:
        conversations = self.conversations
        return (conversations[i] for i in positions.tolist())


# --- the conversations of mid and SFT ------------------------------------------------------------


def mix(
    stage: Stage,
    corpus: str,
    seed: int,
    custom: str | None = None,
    added: str | None = None,
    skip_bad_lines: bool = False,
) -> Mix:
    """Return the conversations of a corpus for the stage mid or sft.

    `custom` names a file of your own to use instead, and `added` names one to add. Of `custom`, the
    last of every 50 (HELD_OUT) is held out, or the last of all if there are fewer. Lines that
    cannot be used are left out with `skip_bad_lines`. Raises UserError if a file cannot be used,
    and UserError (exit code 2) if both are given.
    """
    if custom is not None and added is not None:
        raise UserError(
            tr("--conversations replaces the mixture and --mix adds to it: give one of them"),
            exit_code=2,
        )
    if custom is not None:
        task = CustomJSON(custom, skip_bad_lines=skip_bad_lines)
        if len(task) < 2:
            raise UserError(
                tr(
                    "{custom} must hold at least 2 conversations, since one is for "
                    "validation, got {count}; add more",
                    custom=custom,
                    count=len(task),
                )
            )
        # The first conversation often says who the model is, so it is trained.
        numbers = np.arange(len(task)) + 1 - min(len(task), HELD_OUT)
        key = f"{custom} {_content(custom)}{LAST_HELD_OUT}"
        return Mix(custom, key, lambda: Numbered(task, numbers))
    name = traits(corpus).curriculum
    stages = CURRICULA[name]
    make = stages.conversations[stage]
    key = f"{name} {stage} {seed} {_world().VERSION}"
    if added is not None:
        yours = CustomJSON(added, skip_bad_lines=skip_bad_lines)
        key = f"{key} + {_content(added)}{COPIES_TOGETHER}"
        return Mix(f"{stages.title} and {added}", key, lambda: WithYours(make(seed), yours, seed))
    if stage in stages.repeats:
        key += COPIES_TOGETHER
    return Mix(stages.title, key, lambda: make(seed))


class WithYours:
    """A mixture with your own conversations added, in an order that depends only on the seed.

    Your conversations are repeated until about one in ten is yours. If that repeats them, every
    50th (HELD_OUT) of them is held out, or none if there are fewer.
    """

    def __init__(
        self,
        mixture: Conversations,
        yours: Conversations,
        seed: int,
    ):
        self._mixture = mixture
        self._yours = yours
        self._copies = max(round(len(mixture) / (9 * len(yours))), 1)
        your_numbers = -1 - np.tile(np.arange(len(yours)), self._copies)
        numbers = np.concatenate([np.arange(len(mixture)), your_numbers])
        self._numbers = np.random.default_rng(seed).permutation(numbers)  # negative for yours

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Conversation:
        number = int(self._numbers[i])
        return self._mixture[number] if number >= 0 else self._yours[-1 - number]

    def originals(self) -> np.ndarray:
        """Return the IDs that decide what is held out, as WithCopies describes.

        If yours are repeated, the mixture's own conversations are held out exactly as they are
        without yours.
        """
        after_mixture = -(-len(self._mixture) // HELD_OUT) * HELD_OUT
        is_mixture = self._numbers >= 0
        of_mixture = _originals(self._mixture)[np.maximum(self._numbers, 0)]
        numbers = np.where(is_mixture, of_mixture, after_mixture - self._numbers)
        # If yours are not repeated, items are held out by position, as in earlier versions, so that
        # their runs can be resumed.
        return numbers if self._copies > 1 else first_places(numbers)


# --- the conversations of your own files ---------------------------------------------------------


def own_conversations(
    files: Sequence[str],
    skip_bad_lines: bool = False,
) -> Mix:
    """Return the conversations in your own files for a published model, one file after the other.

    In `files`, FILE:2 takes the conversations of a file twice, and FILE:0.5 takes every second one.
    A share that suits their number is held out. Raises UserError, naming the file, the line and the
    rule, if a file cannot be read.
    """

    def read(file: str) -> CustomJSON:
        return CustomJSON(file, own_format=False, skip_bad_lines=skip_bad_lines)

    least = tr("{count:,} conversations", count=2)
    name, key, conversations = _read_weighted(files, read, least)
    digest = sha256(key.encode()).hexdigest()
    every = conversations.held_out_every
    return Mix(name, digest, lambda: conversations, held_out_every=every)


def own_pairs(
    files: Sequence[str],
    skip_bad_lines: bool = False,
) -> Mix:
    """Return the pairs of answers in your own files as conversations.

    Each pair gives two conversations, first the one with the preferred answer. Weights and errors
    are as in own_conversations().
    """

    def read(file: str) -> list[Pair]:
        return read_pairs(file, skip_bad_lines)

    least = tr("{count:,} pairs", count=2)
    name, key, pairs = _read_weighted(files, read, least)
    digest = sha256(f"pairs {key}".encode()).hexdigest()
    numbers = np.stack([2 * pairs.numbers, 2 * pairs.numbers + 1], axis=1).reshape(-1)
    answers = Numbered([answer for pair in pairs.items for answer in pair], numbers)
    return Mix(name, digest, lambda: answers, together=2, held_out_every=pairs.held_out_every)


def _read_weighted(
    files: Sequence[str],
    read_records: Callable[[str], Records[Item]],
    least: str,
) -> tuple[str, str, Numbered[Item]]:
    """Read weighted files, and return their names, a key of their content, and their records.

    `read_records` reads a file, and each of its records is taken as often as the file's weight
    says. Of the different records, one in 50 (HELD_OUT) is held out, with all its copies; of fewer
    than 1,500 about 30 (OWN_HELD_OUT), but at most one in 10 (MOST_HELD_OUT). If a file is taken
    more than once, it is one in 50 again. The last of every so many records is held out, or the
    last of all if there are fewer, since files begin with what matters most.

    Raises UserError, with `least` as the words for 2 records, if there are fewer different ones.
    """
    items: list[Item] = []
    # For each item, the position of its first copy among the different ones.
    originals: list[int] = []
    original_of: dict[Item, int] = {}  # record -> its position among the different ones
    names = []
    weights = []
    contents = []
    for file in files:
        path, weight = split_weight(file)
        file_items = read_records(path)
        for i in range(max(int(len(file_items) * weight), 1)):
            item = file_items[int(i / weight) % len(file_items)]
            items.append(item)
            originals.append(original_of.setdefault(item, len(original_of)))
        names.append(Path(path).name)
        weights.append(weight)
        contents.append(_content(path))
    different = len(original_of)
    if different < 2:
        raise UserError(
            tr(
                "{files} must hold at least {least} that differ, since one is for validation, got "
                "{different}; add more",
                files=files[0],
                least=least,
                different=different,
            )
        )
    taken = zip(weights, contents, strict=True)
    key = " + ".join(f"{weight:g} {content}" for weight, content in taken)
    is_repeated = max(weights) > 1 or len(set(contents)) < len(contents)
    every = min(max(different // OWN_HELD_OUT, MOST_HELD_OUT), HELD_OUT)
    if is_repeated:
        every = HELD_OUT
    # The first number that `every` divides is that of the last record of the first `every`.
    numbers = np.array(originals) + 1 - min(different, every)
    key += f", the last of every {every} held out"
    if different < len(items):
        key += f", {different} different"
    return ", ".join(names), key, Numbered(items, numbers, every)


def split_weight(file: str) -> tuple[str, float]:
    """Return the path and the weight in FILE:WEIGHT; a FILE alone has weight 1.

    Raises UserError (exit code 2) if the weight is not above 0 and at most MOST_TIMES.
    """
    path, colon, weight = file.rpartition(":")
    if not colon or Path(file).expanduser().exists():
        return file, 1.0
    try:
        value = float(weight)
    except ValueError:
        return file, 1.0  # a name with a colon; CustomJSON will report that there is no such file
    if not 0 < value <= MOST_TIMES:
        raise UserError(
            tr(
                "{file}: the weight of a file must be above 0 and at most {most_times}, got "
                "{weight}",
                file=file,
                most_times=MOST_TIMES,
                weight=weight,
            ),
            2,
        )
    return path, value


def own_content(file: str | None) -> dict[str, str]:
    """Return what identifies the content of your file, folder or pattern, for RunSettings.

    It is empty without a file. A finished run whose file has changed since is not done.
    """
    if file is None:
        return {}
    return {"content": sha256(_content(file).encode()).hexdigest()[:16]}


def _content(file: str) -> str:
    """Return a key for the content of a file, folder or pattern and how it is read.

    If a file has JSON keys that older versions ignored, the key differs from the one that they
    made, so that the file is tokenised again.
    """
    contents = []
    for path in files_of(file, ENDINGS, say=False):
        reads_keys = re.search(rb'"(system|weight|loss)"\s*:', path.read_bytes())
        suffix = " with its system messages and weights" if reads_keys else ""
        contents.append(sha256_of(path) + suffix)
    return " and ".join(contents)


# --- the problems of RL --------------------------------------------------------------------------


def rl_tasks(
    corpus: str, problems: str | None = None, need_answers: bool = True
) -> tuple[Task, Task]:
    """Return two tasks for a corpus: one that RL trains on, and one that RL is measured on.

    `problems` names a JSONL file of your own to use instead. Every tenth different problem in it is
    for measuring, once, and no copy of it is trained. With `need_answers` each problem must have an
    answer. Raises UserError if the file has fewer than 2 different problems.
    """
    if problems is None:
        return curriculum(corpus).rl()
    task = Problems(problems, need_answers)
    train_numbers: list[int] = []
    held_out_numbers: list[int] = []
    position_of: dict[tuple[tuple[str, str], ...], int] = {}  # question -> position among them
    for number in range(len(task)):
        question = tuple((turn.role, turn.text) for turn in task[number].prompt.messages)
        is_copy = question in position_of
        if position_of.setdefault(question, len(position_of)) % 10:
            train_numbers.append(number)
        elif not is_copy:
            held_out_numbers.append(number)
    if len(position_of) < 2:
        raise UserError(
            tr(
                "{problems} must hold at least 2 different problems, since one is held out, got "
                "{count}; add more",
                problems=problems,
                count=len(position_of),
            )
        )
    return Subset(task, numbers=train_numbers), Subset(task, numbers=held_out_numbers)


# --- curricula -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curriculum:
    """The training data of the stages after pretraining, and the evaluations of their models."""

    title: str
    conversations: Mapping[Stage, Callable[[int], Conversations]]  # from a seed
    rl: Callable[[], tuple[Task, Task]]  # RL trains on the first and is measured on the second
    measures: Callable[[bool], Measures]  # from `unsafe_exec`, which HumanEval takes
    needs: Callable[[], tuple[Published, ...]] = tuple  # the data sets that all of these read
    repeats: tuple[Stage, ...] = ()  # the stages whose mixtures list a task twice


def curriculum(corpus: str | None) -> Curriculum:
    """Return the curriculum of a corpus, or the default one if the corpus is None."""
    return CURRICULA[traits(corpus).curriculum]


class Identity(Ungraded):
    """Questions about who the assistant is, in English and Chinese."""

    name = "Identity"

    def __init__(self) -> None:
        self._conversations = _world().identity_conversations()

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, i: int) -> Conversation:
        return self._conversations[i]


def _published_mid(seed: int) -> TaskMixture:
    """Return upstream's midtraining mixture of November 2025, with about 850,000 conversations.

    The conversations about identity come twice.
    """
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
    """Return upstream's SFT mixture of November 2025, with about 23,000 conversations."""
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
    """Return the tasks of ChatCORE, by name."""
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
        gsm8k.source("train"),
        gsm8k.source("test"),
        arc.source("ARC-Easy", "train"),
        arc.source("ARC-Easy", "test"),
        arc.source("ARC-Challenge", "train"),
        arc.source("ARC-Challenge", "test"),
        humaneval.source(),
    )


def _world() -> Any:
    """Return TinyWorld's module, or raise UserError if this copy of nanochat lacks it."""
    return required_appendix("nanochat.data.tinyworld.world", "a chat of nanochat")


def _tinyworld_tasks() -> Any:
    """Return the module of TinyWorld's tasks, or raise UserError as _world() does."""
    return required_appendix("tasks.tinyworld", "--data tinyworld")


def _tinyworld_mid(seed: int) -> Conversations:
    return _world().mid_conversations(seed=seed)


def _tinyworld_sft(seed: int) -> Conversations:
    return _world().sft_conversations(seed=seed)


def _tinyworld_rl() -> tuple[Task, Task]:
    """Return two tasks of mental sums: one to train on, and one to measure on."""
    tasks = _tinyworld_tasks()
    return tasks.TinyWorld("mental", _world().rl_problems()), tasks.mental()


def _tinyworld_measures(unsafe_exec: bool) -> Measures:
    """Return TinyWorld's own evaluations, none of which runs a program that a model wrote."""
    return _tinyworld_tasks().measures()


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

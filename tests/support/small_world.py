"""A corpus, a tokenizer and settings, all so small that a stage of twenty steps takes a second."""

import contextlib
import hashlib
import itertools
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch

from nanochat.data.conversation import Conversation, Task
from nanochat.data.corpora import MAKE_TINYWORLD, Corpus
from nanochat.data.shards import write_shards
from nanochat.data.tinyworld import world as tinyworld
from nanochat.device import Compute
from nanochat.run import AlreadyDone
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from nanochat.train import replay
from scripts import base_train, chat_rl, chat_sft, mid_train
from tasks.mixtures import rl_tasks
from tests.support.flags import configured
from tests.support.tiny_model import on_cpu

VOCABULARY = 320
STAGES = ("base", "mid", "sft", "rl")
SCRIPTS: dict[str, ModuleType] = {"base": base_train, "mid": mid_train, "sft": chat_sft, "rl": chat_rl}
FOLDERS = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl"}
# Without samples: the replies to four prompts take half of the time of a run this short.
EVERY_STAGE: dict[str, Any] = {
    "num_iterations": 20, "eval_every": 10, "save_seconds": 0.0, "samples": 0, "model_tag": "d2",
}  # fmt: skip
FLAGS: dict[str, dict[str, Any]] = {
    "base": {"depth": 2, "model_dim": 64, "head_dim": 32, "window_pattern": "L", "max_seq_len": 128,
             "total_batch_size": 1024, "device_batch_size": 4, "eval_tokens": 2048, "compile": False},
    # Without ChatCORE, which a run this short never measures: its problems take two seconds to make.
    "mid": {"total_batch_size": 1024, "device_batch_size": 4, "core_every": 0, "compile": False},
    "sft": {"target_examples_per_step": 8, "device_batch_size": 4, "init_lr_frac": 0.2, "core_every": 0,
            "compile": False},
    "rl": {"examples_per_step": 4, "num_samples": 4, "max_new_tokens": 32, "eval_examples": 8},
}  # fmt: skip


@dataclass(frozen=True)
class Even:
    """Problems for RL: a model this small never adds correctly, but half of its replies have an even length."""

    problems: tuple[tinyworld.Problem, ...]
    name: str = "even"
    kind: Literal["generative"] = "generative"

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, i: int) -> Conversation:
        return self.problems[i].conversation

    def letters(self, i: int) -> tuple[str, ...]:
        return ()

    def grade(self, i: int, reply: str) -> float:
        return float(len(reply) % 2 == 0)


def even_tasks(corpus: str, problems: str | None = None, need_answers: bool = True) -> tuple[Task, Task]:
    assert corpus == "tinyworld"
    if problems is not None:
        return rl_tasks(corpus, problems, need_answers)
    return Even(tuple(tinyworld.rl_problems(0, 40))), Even(tuple(tinyworld.rl_evaluation(0, 20)))


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Use fewer conversations, and RL problems that the model sometimes solves."""
    for name in ("mid_conversations", "sft_conversations"):
        make = getattr(tinyworld, name)
        patch.setattr(tinyworld, name, lambda seed=0, make=make: make(seed, 1500))
    patch.setattr(chat_rl, "rl_tasks", even_tasks)


def make_corpus(base: Path, vocabulary: int = VOCABULARY) -> None:
    """Write a part of TinyWorld's documents, and a tokenizer for them, to a base folder."""
    os.environ["NANOCHAT_BASE_DIR"] = str(base)
    corpus = Corpus("tinyworld", base / "base_data" / "tinyworld")
    some = random.Random(0).sample(list(tinyworld.documents(0, copies=1)), 1500)
    about = {"kind": "tinyworld", "make": MAKE_TINYWORLD, "fingerprint": tinyworld.VERSION}
    write_shards(corpus.folder, some, about=about)
    Tokenizer.train(itertools.islice(some, 400), vocabulary).save(tokenizer_dir("tinyworld"))


def config(stage: str, **changes: Any) -> Any:
    return configured(SCRIPTS[stage].Config, **{**EVERY_STAGE, **FLAGS[stage], **changes})


def run_stage(stage: str, compute: Compute | None = None, **changes: Any) -> None:
    """Train a stage in this process, in the base folder of the environment, as launch() does."""
    compute = compute or on_cpu()
    with contextlib.suppress(AlreadyDone), compute.ending:
        SCRIPTS[stage].train(config(stage, **changes), compute)


def few_own_words(patch: pytest.MonkeyPatch) -> None:
    """Let fine-tuning with --replay_every write a fiftieth of the words: all of them take half a minute."""
    patch.setattr(replay, "MOST_TOKENS", 1200)


@contextlib.contextmanager
def small_chain(base: Path, compute: Compute | None = None, **changes: Any) -> Iterator[Path]:
    """`base` as the base folder, in which every stage has run at test size. `changes` are flags of all stages."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        make_corpus(base)
        for stage in STAGES:
            run_stage(stage, compute, **changes)
        yield base


def words(stage: str, **changes: Any) -> list[str]:
    """The configuration as words of a command line."""
    given = {**EVERY_STAGE, **FLAGS[stage], **changes}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def in_bf16() -> Compute:
    return replace(on_cpu(), dtype=torch.bfloat16)


def stage_folder(base: Path, stage: str) -> Path:
    return base / f"{FOLDERS[stage]}_checkpoints" / "d2"


def up_to(stage: str, source: Path, target: Path) -> None:
    """Copy a base folder without the checkpoints of this stage and of later stages."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for later in STAGES[STAGES.index(stage) :]:
        shutil.rmtree(stage_folder(target, later), ignore_errors=True)
        (target / "report" / "sections" / f"{later}_train.json").unlink(missing_ok=True)


def tensors(base: Path, stage: str, step: int = 20) -> dict[str, str]:
    """SHA-256 of the files of the model and the optimizer."""
    folder = stage_folder(base, stage) / f"step_{step:06d}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def files(base: Path) -> dict[str, tuple[int, str]]:
    """Every file's modification time and a hash of its content."""
    found = (path for path in sorted(base.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(base)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in found
    }

"""Where the checkpoints of a stage lie, and which one a stage and a tag mean."""

import re
import reprlib
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.families import family_of
from nanochat.checkpoint_manager.files import latest_step, read_meta, step_dir, steps, weights_hash
from nanochat.common import CONTROL, UserError, base_dir, visible

STAGES = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl", "tune": "tuned"}
MADE_BY = {
    "base": "scripts.base_train",
    "mid": "scripts.mid_train",
    "sft": "scripts.chat_sft",
    "rl": "scripts.chat_rl",
    "tune": "scripts.finetune",
}

LONGEST_TAG = 200  # bytes, of the 255 that a file's name may have: other names are made from tags

_IDENTITY = re.compile(f"({'|'.join(STAGES)}) (.+) step ([0-9]+) [0-9a-f]+")  # of a Parent


def checked_tag(tag: str) -> str:
    """The tag itself. UserError (code 2) unless it can be the name of a folder on any file system."""
    one_line = tag.splitlines() == [tag] and "\t" not in tag and not CONTROL.search(tag)
    short = len(tag.encode(errors="replace")) <= LONGEST_TAG
    if not (one_line and short) or tag.startswith(".") or "/" in tag or "\\" in tag:
        raise UserError(
            f"the tag of a model (--model_tag, --out_tag) must be a name of 1 to {LONGEST_TAG} bytes, "
            "without slashes, tabs, line breaks and control characters, that does not begin with a "
            f"dot, got {reprlib.repr(tag)}. Give another name, such as d20",
            exit_code=2,
        )
    return tag


def checkpoint_dir(stage: str, tag: str) -> Path:
    """The folder of a stage's checkpoints under a tag such as d4. UserError as in checked_tag()."""
    return base_dir() / f"{STAGES[stage]}_checkpoints" / checked_tag(tag)


def _candidates(stage: str | None, tag: str | None) -> Iterator[tuple[str, Path]]:
    """(stage, folder) in order of preference: later stages first, then newer checkpoints. UserError
    as in checked_tag()."""
    for name in ("rl", "sft", "mid", "base", "tune") if stage is None else (stage,):
        parent = base_dir() / f"{STAGES[name]}_checkpoints"
        folders = sorted(parent.glob("*"), key=_age) if tag is None else [checkpoint_dir(name, tag)]
        yield from ((name, folder) for folder in folders if latest_step(folder) is not None)


def _age(folder: Path) -> float:
    newest = latest_step(folder)
    return 0.0 if newest is None else -(step_dir(folder, newest) / "meta.json").stat().st_mtime


def find(stage: str | None, tag: str | None) -> tuple[str, Path]:
    """The stage and folder to use: by default the latest of rl, sft, mid, base and tune, and the newest tag."""
    if stage is not None and stage not in STAGES:
        raise UserError(f"the stage must be one of {', '.join(STAGES)}, got {stage!r}", exit_code=2)
    for name, folder in _candidates(stage, tag):
        return name, folder
    raise _none(stage, tag)


def _none(stage: str | None, tag: str | None) -> UserError:
    what = f"no checkpoint of stage {stage}" if stage else "no checkpoint of any stage"
    under = f" with tag {tag}" if tag else ""
    maker = MADE_BY[stage or "base"]
    known = [f"{name} {visible(folder.name)}" for name, folder in _candidates(None, None)]
    there = (
        f", which holds {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}" if known else ""
    )
    return UserError(
        f"{what}{under} in {base_dir()}{there}. Make one with `python -m {maker}`, or run the whole pipeline with "
        "`bash speedrun.sh`.",
        exit_code=2,
    )


@dataclass(frozen=True)
class Trained:
    """A model to chat with: its stage and tag, its last step, and when that step was saved, in seconds since 1970."""

    stage: str
    tag: str
    step: int
    saved_at: float

    @property
    def flags(self) -> str:
        """The flags that choose this model on a command line."""
        return f"-i {self.stage} -g {shlex.quote(self.tag)}"

    @property
    def saved(self) -> str:
        """When the step was saved, to the minute, in this machine's time."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved_at))

    def others(self, most: int = 8) -> list[str]:
        """The flags of all other models, newest first; +N stands for those beyond `most`."""
        flags = [model.flags for model in trained() if model != self]
        return flags if len(flags) <= most else [*flags[:most], f"+{len(flags) - most}"]


def trained(stage: str | None = None, tag: str | None = None) -> list[Trained]:
    """Every model of a stage and a tag (None: of any), the one that was trained last first; UserError if none is there.

    Chats offer the first. `find` prefers later stages instead, which for a chat would be the RL model of an old run.
    """
    models = []
    for name, folder in _candidates(stage, tag):
        step = latest_step(folder)
        assert step is not None  # _candidates gives no other folders
        models.append(Trained(name, folder.name, step, _saved_at(folder, step)))
    if not models:
        raise _none(stage, tag)
    return sorted(models, key=lambda model: -model.saved_at)


def _saved_at(folder: Path, step: int) -> float:
    """When a step was saved: as its meta.json says, because a copy of the folder has later times of change."""
    try:
        told = read_meta(folder, step).get("saved_at")
    except UserError:  # loading the step will say what is wrong
        told = None
    return (
        told
        if isinstance(told, int | float)
        else (step_dir(folder, step) / "meta.json").stat().st_mtime
    )


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a stage starts from; `identity` names its parameters: other parameters, another identity."""

    stage: str
    tag: str
    step: int
    identity: str
    corpus: str


def find_parent(stage: str, tag: str | None, step: int | None) -> Parent:
    """The newest checkpoint of an earlier stage, or its step `step`; UserError (code 2) if missing or unfinished."""
    _, folder = find(stage, tag)
    newest = latest_step(folder)
    if step is None and newest is not None:
        step = newest
        meta = read_meta(folder, step)
        if step < meta["steps"]:
            raise UserError(
                f"{folder} is at step {step:,} of {meta['steps']:,}: finish it with `python -m {MADE_BY[stage]}`, or "
                "name one of its steps to start from there",
                exit_code=2,
            )
    if step is None or step not in steps(folder):
        raise UserError(
            f"{folder} has steps {', '.join(map(str, steps(folder)))}, not {step}; name one of them",
            exit_code=2,
        )
    meta = read_meta(folder, step)
    digest = weights_hash(meta)
    return Parent(
        stage,
        folder.name,
        step,
        f"{stage} {folder.name} step {step} {digest[:16]}",
        meta["config"]["corpus"],
    )


def updates(meta: dict[str, Any]) -> int:
    """How many optimizer updates have made the model of a meta.json: those of its stage and of the stages before it, as
    far back as their checkpoints still tell."""
    count = meta["step"]
    while found := _IDENTITY.fullmatch(meta["config"].get("parent", "")):
        stage, tag, step = found[1], found[2], int(found[3])
        count += step
        try:
            meta = read_meta(checkpoint_dir(stage, tag), step)
        except (OSError, UserError):  # it has been deleted, or is damaged
            break
    return count


def make_meta(
    stage: str,
    model: Any,  # the configuration of a model family, such as GPTConfig
    settings: dict[str, Any],
    steps: int,
    state: dict[str, Any],
) -> dict[str, Any]:
    """What a stage says of a step: its name, the model's family and shape, the settings (parent and corpus among them),
    the steps of the whole run, and the state to resume from (figures, row of the data)."""
    return {
        "stage": stage,
        "family": family_of(model),
        "model": asdict(model),
        "config": settings,
        "steps": steps,
        "state": state,
    }

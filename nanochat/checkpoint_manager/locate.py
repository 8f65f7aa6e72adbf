"""Finds the folder for a stage and a tag, and reads what meta.json says about a run.

The folder of a run is X_checkpoints/TAG in the base folder, where STAGES maps the stage to X. A tag
is a name such as d20.
"""

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
from nanochat.common import CONTROL, UserError, base_dir, tr, visible

# Stage -> X in the name of its folder, X_checkpoints.
STAGES = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl", "tune": "tuned"}
# Stage -> the script that trains it.
MADE_BY = {
    "base": "scripts.base_train",
    "mid": "scripts.mid_train",
    "sft": "scripts.chat_sft",
    "rl": "scripts.chat_rl",
    "tune": "scripts.finetune",
}
PREFERRED_STAGES = ("rl", "sft", "mid", "base", "tune")  # in this order, if no stage is given
# Runs of these tags only show that something works: no default chooses one of them before others.
TRIALS = ("smoke", "smoke-qwen3", "test")
NAMED = 8  # models that a message lists at most
MAX_TAG_BYTES = 200  # a file name may have 255, and some names add to the tag
_IDENTITY = re.compile(f"({'|'.join(STAGES)}) (.+) step ([0-9]+) [0-9a-f]+")  # Parent.identity


def checked_tag(tag: str) -> str:
    """Return `tag` if it can name the folder of a run.

    Raises UserError (exit code 2), whose message states the rules, if it cannot.
    """
    one_line = tag.splitlines() == [tag] and "\t" not in tag and not CONTROL.search(tag)
    is_short = len(tag.encode(errors="replace")) <= MAX_TAG_BYTES
    one_folder = not tag.startswith(".") and "/" not in tag and "\\" not in tag
    if not (one_line and is_short and one_folder):
        raise UserError(
            tr(
                "the tag of a model (--model_tag, --out_tag) must be a name of 1 to "
                "{max_tag_bytes} bytes, without slashes, tabs, line breaks and control "
                "characters, that does not begin with a dot, got {tag}. Give another name, "
                "such as d20",
                max_tag_bytes=MAX_TAG_BYTES,
                tag=reprlib.repr(tag),
            ),
            exit_code=2,
        )
    return tag


def checkpoint_dir(stage: str, tag: str) -> Path:
    """Return the path of the checkpoint folder for a stage and a tag.

    Raises UserError (exit code 2) if the tag is invalid.
    """
    return base_dir() / f"{STAGES[stage]}_checkpoints" / checked_tag(tag)


# --- which checkpoint ----------------------------------------------------------------------------


def _candidates(stage: str | None, tag: str | None) -> Iterator[tuple[str, Path]]:
    """Yield (stage, folder) for each run with a checkpoint that matches the stage and the tag.

    A `stage` or `tag` of None matches any. The stages come in the order of PREFERRED_STAGES, and
    within a stage the run with the newest checkpoint comes first. Without a tag, the runs of TRIALS
    come after those of every other tag.
    """
    stages = PREFERRED_STAGES if stage is None else (stage,)
    runs: list[tuple[str, Path]] = []
    for name in stages:
        if tag is None:
            parent = base_dir() / f"{STAGES[name]}_checkpoints"
            folders = sorted(parent.glob("*"), key=_age)
        else:
            folders = [checkpoint_dir(name, tag)]
        runs += [(name, folder) for folder in folders if latest_step(folder) is not None]
    # The sort is stable, so that the order above stays among trials and among other runs.
    yield from sorted(runs, key=lambda run: tag is None and run[1].name in TRIALS)


def _changed_at(folder: Path, step: int) -> float:
    """Return the modification time of a step's meta.json, in seconds since 1970."""
    return (step_dir(folder, step) / "meta.json").stat().st_mtime


def _age(folder: Path) -> float:
    """Return a sort key that puts runs with newer checkpoints first, and runs without any last."""
    newest = latest_step(folder)
    return 0.0 if newest is None else -_changed_at(folder, newest)


def find(stage: str | None, tag: str | None) -> tuple[str, Path]:
    """Return the stage and the folder of the run that a stage and a tag select.

    If `stage` is None, the first of rl, sft, mid, base and tune with a matching checkpoint is used.
    If `tag` is None, the stage's run with the newest checkpoint is used. Raises UserError (exit
    code 2) if no checkpoint matches, or if the stage or the tag is invalid.
    """
    if stage is not None and stage not in STAGES:
        raise UserError(
            tr(
                "the stage must be one of {stages}, got {stage!r}",
                stages=", ".join(STAGES),
                stage=stage,
            ),
            exit_code=2,
        )
    for name, folder in _candidates(stage, tag):
        return name, folder
    raise _none(stage, tag)


def _none(stage: str | None, tag: str | None) -> UserError:
    """Return an error which says that no checkpoint matches, and lists models that do exist."""
    missing = tr("no checkpoint of any stage")
    if stage:
        missing = tr("no checkpoint of stage {stage}", stage=stage)
    under = tr(" with tag {tag}", tag=tag) if tag else ""
    names = [f"{name} {visible(folder.name)}" for name, folder in _candidates(None, None)]
    existing = ""
    if names:
        more = ", ..." if len(names) > NAMED else ""
        existing = tr(", which holds {names}{more}", names=", ".join(names[:NAMED]), more=more)
    return UserError(
        tr(
            "{missing}{under} in {base_dir}{existing}. Make one with `python -m {made_by}`, "
            "or run the whole pipeline with `bash speedrun.sh`.",
            missing=missing,
            under=under,
            base_dir=base_dir(),
            existing=existing,
            made_by=MADE_BY[stage or "base"],
        ),
        exit_code=2,
    )


@dataclass(frozen=True)
class Trained:
    """A trained model that a chat can use, with its newest step."""

    stage: str
    tag: str
    step: int
    saved_at: float  # seconds since 1970
    steps: int | None  # steps of the whole run; None if meta.json does not say

    @property
    def unfinished(self) -> bool:
        """Whether the run has steps left: it crashed, was stopped or is running."""
        return self.steps is not None and (self.step < self.steps or self.step == 0)

    @property
    def state(self) -> str:
        """A clause that says how far an unfinished run is, or "" for a finished one."""
        if not self.unfinished:
            return ""
        return tr("unfinished, step {step:,} of {steps:,}", step=self.step, steps=self.steps)

    @property
    def flags(self) -> str:
        """The command-line flags that select this model."""
        return f"-i {self.stage} -g {shlex.quote(self.tag)}"

    @property
    def saved(self) -> str:
        """The local time at which the step was saved, to the minute."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved_at))

    def alternatives(self, limit: int = NAMED) -> list[str]:
        """Return a list of the flags of all other models, in the order of trained().

        If there are more than `limit`, a last item +N replaces the N models beyond `limit`.
        """
        flags = [model.flags for model in trained() if model != self]
        if len(flags) <= limit:
            return flags
        return [*flags[:limit], f"+{len(flags) - limit}"]


def trained(stage: str | None = None, tag: str | None = None) -> list[Trained]:
    """Return the models of a stage and a tag in the order in which a chat prefers them.

    A `stage` or `tag` of None matches any. Finished runs come first, and without a tag those of
    TRIALS come after the others; among equals, the most recently saved model comes first. Chats use
    the first model, whereas find() would prefer, for example, the RL model of an old run. Raises
    UserError (exit code 2) if no model matches, or if the tag is invalid.
    """
    models = []
    for name, folder in _candidates(stage, tag):
        step = latest_step(folder)
        assert step is not None  # _candidates yields no other folders
        models.append(_trained(name, folder, step))
    if not models:
        raise _none(stage, tag)

    def order(model: Trained) -> tuple[bool, bool, float]:
        return model.unfinished, tag is None and model.tag in TRIALS, -model.saved_at

    return sorted(models, key=order)


def _trained(stage: str, folder: Path, step: int) -> Trained:
    """Return what the meta.json of a step says about the model.

    If that has no time or is damaged, the file's modification time is used, which copying may have
    changed.
    """
    try:
        meta = read_meta(folder, step)
    except UserError:  # loading the step will say what is wrong
        meta = {}
    saved_at = meta.get("saved_at")
    if not isinstance(saved_at, int | float):
        saved_at = _changed_at(folder, step)
    steps_of_run = meta.get("steps")
    if not isinstance(steps_of_run, int):
        steps_of_run = None
    return Trained(stage, folder.name, step, saved_at, steps_of_run)


# --- which parent --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a stage starts from.

    `identity` names the checkpoint and contains a hash of its parameters.
    """

    stage: str
    tag: str
    step: int
    identity: str
    corpus: str


def find_parent(stage: str, tag: str | None, step: int | None) -> Parent:
    """Return the checkpoint of stage `stage` that the next stage starts from.

    If `tag` is None, find() chooses it; if `step` is None, the newest step is used. Raises
    UserError (exit code 2) if there is no such checkpoint, or if `step` is None and the run is not
    finished.
    """
    _, folder = find(stage, tag)
    newest = latest_step(folder)
    if step is None and newest is not None:
        step = newest
        meta = read_meta(folder, step)
        if step < meta["steps"]:
            raise UserError(
                tr(
                    "{folder} is at step {step:,} of {steps:,}: finish it with `python -m "
                    "{made_by}`, or name one of its steps to start from there",
                    folder=folder,
                    step=step,
                    steps=meta["steps"],
                    made_by=MADE_BY[stage],
                ),
                exit_code=2,
            )
    if step is None or step not in steps(folder):
        listed = ", ".join(map(str, steps(folder)))
        raise UserError(
            tr(
                "{folder} has steps {steps}, not {step}; name one of them",
                folder=folder,
                steps=listed,
                step=step,
            ),
            exit_code=2,
        )
    meta = read_meta(folder, step)
    identity = f"{stage} {folder.name} step {step} {weights_hash(meta)[:16]}"
    return Parent(stage, folder.name, step, identity, meta["config"]["corpus"])


def parent_tag(identity: str) -> str:
    """Return the tag in a Parent's `identity`, or "" if the text is none."""
    parent = _IDENTITY.fullmatch(identity)
    return parent[2] if parent else ""


def shown_parent(identity: str, name: str) -> str:
    """Return a Parent's `identity` in the user's words, or `name` if the text is none."""
    parent = _IDENTITY.fullmatch(identity)
    if parent is None:
        return name
    stage, tag, step = parent.groups()
    return tr(
        "the model {tag} of stage {stage}, step {step:,}", tag=tag, stage=stage, step=int(step)
    )


def updates(meta: dict[str, Any]) -> int:
    """Return how many optimizer updates led to the model that a meta.json describes.

    Earlier stages are counted too, back to and including the first one whose checkpoint can no
    longer be read.
    """
    count = meta["step"]
    parent = _IDENTITY.fullmatch(meta["config"].get("parent", ""))
    while parent:
        stage, tag, step = parent[1], parent[2], int(parent[3])
        count += step
        try:
            meta = read_meta(checkpoint_dir(stage, tag), step)
        except (OSError, UserError):  # it has been deleted, or is damaged
            break
        parent = _IDENTITY.fullmatch(meta["config"].get("parent", ""))
    return count


# --- what a stage writes -------------------------------------------------------------------------


def make_meta(
    stage: str,
    model: Any,  # the configuration of a model family, such as GPTConfig
    settings: dict[str, Any],
    steps: int,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Return the entries of a step's meta.json that the stage provides.

    `steps` is the number of steps of the whole run, and `state` is what it needs to resume.
    """
    return {
        "stage": stage,
        "family": family_of(model),
        "model": asdict(model),
        "config": settings,
        "steps": steps,
        "state": state,
    }

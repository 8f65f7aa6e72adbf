"""A run resumes only with the settings, the data and the code it started with."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanochat.common import FREE, OldFlags, UserError, flags_of, settings, tr, warn
from nanochat.device import Compute
from nanochat.runtime import fingerprint

NAMED = 4  # differences that a refusal names
# Flags by the names that upstream or earlier versions gave them, and what they are called now. A command
# line that has an old name works, and so does a saved run.
RENAMED = {
    "batch_size": "device_batch_size",
    "eval_steps": "eval_every",
    "resume_from_step": "resume",
    "save_steps": "save_every",
}
# Flags that are gone, and what to type instead
REMOVED = {
    "aspect_ratio": "--model_dim=N sets the number of channels",
    "core_metric_every": "`python -m scripts.base_eval` measures CORE after training",
    "core_metric_max_per_task": "`python -m scripts.base_eval --max_per_task=N` limits it",
    "gradient_checkpointing": "--checkpoint_activations of scripts.finetune does it",
    "sample_every": "replies are kept at each validation; --samples=N sets how many",
}
OLD_FLAGS = OldFlags(RENAMED, REMOVED)
# What runs did before a flag or a fact existed, where runs do something else by default now
BEFORE_FLAGS = {
    "bigram_rows": 0,
    "offset_layers": 0,
    "held out": "one in 50",
    "automatic learning rate": "1e-4 for an adapter, 1e-5 for every parameter",
}
CODE = ("code", "other_code")  # hashes of the files that a program has loaded, and of the others


def free_flags(config: type[Any]) -> frozenset[str]:
    """The names of a configuration's flags that do not change what is learned: those of type Free[...]."""
    return frozenset(flag.name for flag in flags_of(config) if FREE in flag.marks)


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run: the values of its flags, and facts that no flag names, such as corpus or parent.

    `free` flags do not change what is learned: a run may resume with other values. `defaults` and BEFORE_FLAGS are what
    a run used that was saved before a flag existed.
    """

    values: dict[str, Any]
    free: frozenset[str] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(flags: Any, **facts: Any) -> "RunSettings":
        """The settings of a configuration: a dataclass in which flags of type Free[...] are free."""
        defaults = {
            flag.name: flag.default for flag in flags_of(flags) if flag.default is not MISSING
        }
        return RunSettings({**settings(flags), **facts}, free_flags(type(flags)), defaults)

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        """What differs from the settings that a checkpoint keeps, in words, without free flags."""
        saved = {
            RENAMED.get(name, name): value for name, value in saved.items() if name not in REMOVED
        }
        names = sorted(({*saved, *self.values}) - self.free)
        then = {
            name: saved.get(name, BEFORE_FLAGS.get(name, self.defaults.get(name))) for name in names
        }
        now = {name: self.values.get(name, self.defaults.get(name)) for name in names}
        return [
            f"{'--' + name if name in self.defaults else name}: {then[name]} before, {now[name]} now"
            for name in names
            if then[name] != now[name]
        ]


def made_with(compute: Compute) -> dict[str, Any]:
    """What a checkpoint keeps of the program that wrote it."""
    return {
        "code": fingerprint.loaded(),
        "other_code": fingerprint.not_loaded(),
        "torch": torch.__version__,
        "device": compute.device_type,
        "number format": str(compute.dtype).removeprefix("torch."),
    }


def check_settings(folder: Path, meta: Mapping[str, Any], wanted: RunSettings) -> None:
    """Refuse to resume with settings other than those the run started with."""
    if changed := wanted.changes(meta["config"]):
        raise UserError(
            tr(
                "{folder} was begun with other settings ({changes}). Give the same settings to resume, {instead}",
                folder=folder,
                changes="; ".join(changed),
                instead=_instead(meta),
            )
        )


def check_data(folder: Path, meta: Mapping[str, Any], data: str) -> None:
    """Refuse to resume on rows other than those the run started on, as after a corpus was replaced under its name."""
    known = meta["state"].get("data", data)
    if known != data and meta["step"] < meta["steps"]:
        corpus = meta["config"].get("corpus")
        raise UserError(
            tr(
                "{folder} was begun on other data: the rows of corpus {corpus} were {before} and are {now} now, so step "
                "{step:,} of {steps:,} would mix the two. Put the old corpus back to resume, {instead}",
                folder=folder,
                corpus=corpus,
                before=known,
                now=data,
                step=meta["step"],
                steps=meta["steps"],
                instead=_instead(meta),
            )
        )


def check_plan(folder: Path, meta: Mapping[str, Any], steps: int, per_step: int) -> None:
    """Refuse to resume with another number of steps, or of rows or problems in a step: the run would repeat or skip
    data, and its learning rate would jump."""
    row = meta["state"].get("row")
    then = (
        row / meta["step"] if type(row) is int else per_step
    )  # checkpoints of early versions have no row
    if (meta["steps"], then) != (steps, per_step):
        raise UserError(
            tr(
                "{folder} was begun with {steps:,} steps of {then:,.10g} rows or problems, but this start would make "
                "{steps_now:,} steps of {now:,}. Resume on the number of devices and with the version of nanochat that "
                "the run began with, {instead}",
                folder=folder,
                steps=meta["steps"],
                then=then,
                steps_now=steps,
                now=per_step,
                instead=_instead(meta),
            )
        )


def _instead(meta: Mapping[str, Any]) -> str:
    """How to start without the checkpoints that are there."""
    flag = "--model_tag" if meta["stage"] == "base" else "--out_tag"
    return tr(
        "give another name with {flag} to start a run beside it, or give --resume=none to start again, which "
        "moves these checkpoints aside.",
        flag=flag,
    )


def check_code(folder: Path, meta: Mapping[str, Any], accepted: bool, compute: Compute) -> None:
    """Refuse to resume with code other than the code that wrote the checkpoint, unless that is `accepted`.

    Every file counts that either program has loaded, so a file that was added, removed or renamed is a change too.
    Another torch, device or number format only gets a warning that the run will not repeat bit for bit.
    """
    if meta["step"] >= meta["steps"]:
        return  # nothing is left to compute
    before, now = meta.get("made_with", {}), made_with(compute)
    changed = _changed_files(before, now) if "code" in before else []
    if changed and not accepted:
        more = (
            tr("; and {count} more files", count=len(changed) - NAMED)
            if len(changed) > NAMED
            else ""
        )
        raise UserError(
            tr(
                "the code has changed since {folder} was saved at step {step:,} ({changes}), so the run would not be "
                "the same. Put the files back to resume exactly, give --other_code to resume with the code as it is "
                "now, {instead}",
                folder=folder,
                step=meta["step"],
                changes="; ".join(changed[:NAMED]) + more,
                instead=_instead(meta),
            )
        )
    others = [
        f"{name} {before[name]} before, {value} now"
        for name, value in now.items()
        if name not in CODE and before.get(name, value) != value
    ]
    if changed:
        others.insert(0, f"{len(changed)} changed files")
    if others:
        warn(
            f"{folder} resumes with {'; '.join(others)}: the rest of the run will not repeat bit for bit"
        )


def _changed_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The files that either program has loaded and that are not the same, with both hashes."""
    then, here = ({**made.get("other_code", {}), **made["code"]} for made in (before, now))
    return [
        f"{name} {then.get(name, 'missing')} before, {here.get(name, 'missing')} now"
        for name in sorted({*before["code"], *now["code"]})
        if then.get(name) != here.get(name)
    ]

"""Refuses to resume a run whose settings, data or code differ from its checkpoint's."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanochat.common import UserError, tr, warn
from nanochat.data.command_line import FREE, OldFlags, flags_of, plain, settings
from nanochat.device import Compute
from nanochat.platforms.base import dtype_name
from nanochat.runtime import fingerprint

NAMED = 4  # changed files that an error message lists
# Name of a flag in upstream or in earlier versions -> its name today. The old names still work on a
# command line and in a saved run.
RENAMED = {
    "batch_size": "device_batch_size",
    "core_metric_every": "core_every",
    "core_metric_max_per_task": "core_examples",
    "eval_steps": "eval_every",
    "resume_from_step": "resume",
    "save_steps": "save_every",
}
# Removed switch -> the flag and its value that replace it
REPLACED = {"fp8": ("matmul", "fp8")}
# Facts that version 1.0.0 recorded of a fine-tuning; its rules are still the only ones.
FORMER_FACTS = ("held out", "automatic learning rate")
# A hash of the settings and the chat format of a published model. Version 1.0.0 did not record it.
BASE_FACT = "config.json and chat template"
PARENT = "parent"
# A hash of the user's own files. In version 1.0.0 only fine-tuning recorded it.
CONTENT = "content"
MATMUL = "matmul"
# Names in made_with(): hashes of the files that the program has loaded, and of all other files.
CODE = ("code", "other_code")


def removed_flags() -> dict[str, str]:
    """Return a dict from each removed flag to what to use instead."""
    return {
        "aspect_ratio": tr("--model_dim=N sets the number of channels"),
        "gradient_accumulation_steps": tr(
            "the passes of a step follow from the rows of a step and --device_batch_size"
        ),
        "gradient_checkpointing": tr("--checkpoint_activations of scripts.finetune does it"),
        "sample_every": tr("replies are kept at each validation; --samples=N sets how many"),
    }


OLD_FLAGS = OldFlags(RENAMED, removed_flags, REPLACED)


def free_flags(config: type[Any]) -> frozenset[str]:
    """Return the names of a config's Free[...] flags, which do not change what is learned."""
    return frozenset(flag.name for flag in flags_of(config) if FREE in flag.marks)


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run: the values of its flags, and facts without a flag, such as the corpus.

    A run may resume with other values of its `free` flags, because they do not change what is
    learned. For a checkpoint that was saved before a flag existed, `defaults` gives the value that
    its run used.
    """

    values: dict[str, Any]
    free: frozenset[str] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(flags: Any, **facts: Any) -> "RunSettings":
        """Return the settings of a run from its config dataclass and from further facts.

        Flags of type Free[...] become free flags.
        """
        defaults = {
            flag.name: flag.default for flag in flags_of(flags) if flag.default is not MISSING
        }
        values = {**settings(flags), **facts}
        return RunSettings(values, free_flags(type(flags)), plain(defaults))

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        """Return a list with a phrase for each setting whose value differs from that in `saved`.

        Free and removed flags and FORMER_FACTS are ignored, and of BASE_FACT and CONTENT those that
        `saved` lacks. Old names of flags are translated. The parent of a run of version 1.0.0 ends
        with a shorter mark of the published model, with which today's mark begins.
        """
        removed = {*removed_flags(), *FORMER_FACTS}
        renamed = {
            RENAMED.get(name, name): value for name, value in saved.items() if name not in removed
        }
        for switch, (flag, setting) in REPLACED.items():
            if renamed.pop(switch, False):
                renamed[flag] = setting
        ignored = {*self.free, *{BASE_FACT, CONTENT}.difference(renamed)}
        changes = []
        for name in sorted({*renamed, *self.values}.difference(ignored)):
            default = self.defaults.get(name)
            value_before = renamed.get(name, default)
            value_now = self.values.get(name, default)
            if name == PARENT and value_before and str(value_now).startswith(value_before):
                continue
            if value_before != value_now:
                label = f"--{name}" if name in self.defaults else name
                if name == PARENT:
                    label = tr("the model that it starts from")
                elif name == CONTENT:
                    label = tr("the content of your files")
                changes.append(
                    tr(
                        "{label}: {value_before} before, {value_now} now",
                        label=label,
                        value_before=value_before,
                        value_now=value_now,
                    )
                )
        return changes


def made_with(compute: Compute) -> dict[str, Any]:
    """Return a dict of the code hashes, torch version, device and number format, for meta.json."""
    return {
        "code": fingerprint.loaded(),
        "other_code": fingerprint.not_loaded(),
        "torch": torch.__version__,
        "device": compute.device_type,
        "number format": dtype_name(compute.dtype),
    }


def check_settings(folder: Path, meta: Mapping[str, Any], settings_now: RunSettings) -> None:
    """Raise UserError if settings other than free flags differ from those of a checkpoint.

    If it is unknown in which format the run multiplied matrices, any --matmul is accepted.
    """
    saved = dict(meta["config"])
    if _is_matmul_unknown(meta, settings_now):
        saved[MATMUL] = settings_now.values[MATMUL]
    changes = settings_now.changes(saved)
    if changes:
        raise UserError(
            tr(
                "{folder} was begun with other settings ({changes}). Give the same settings to "
                "resume, {instead}",
                folder=folder,
                changes=tr("; ").join(changes),
                instead=_instead(meta),
            )
        )


def warn_of_unknown_matmul(
    folder: Path, meta: Mapping[str, Any], settings_now: RunSettings
) -> None:
    """Warn if it is unknown in which number format an unfinished run has multiplied matrices."""
    if meta["step"] < meta["steps"] and _is_matmul_unknown(meta, settings_now):
        warn(
            tr(
                "{folder} does not say in which format it has multiplied: before there was "
                "--matmul, a GPT trained in int8 on CPUs with AVX512-VNNI and without AMX, "
                "elsewhere in bf16. It resumes with --matmul={matmul}; --matmul=int8 continues in "
                "int8, and --matmul=auto in bf16",
                folder=folder,
                matmul=settings_now.values[MATMUL],
            )
        )


def _is_matmul_unknown(meta: Mapping[str, Any], settings_now: RunSettings) -> bool:
    """Return whether a checkpoint leaves open whether its run multiplied matrices in bf16 or int8.

    Before --matmul existed, an uncompiled GPT on a CPU could use int8 without recording it.
    """
    saved = meta["config"]
    if MATMUL in saved or saved.get("fp8") or MATMUL not in settings_now.values:
        return False
    if meta.get("state", {}).get("compiled"):
        return False
    program = meta.get("made_with", {})
    is_gpt = meta.get("family", "gpt") == "gpt"
    return is_gpt and program.get("device") == "cpu" and program.get("number format") == "bfloat16"


def check_data(folder: Path, meta: Mapping[str, Any], data: str) -> None:
    """Raise UserError if `data`, the identity of the training rows, differs from a checkpoint's.

    For example, a corpus may have been replaced by another one of the same name. A finished run is
    not checked, nor is one without a record of its data.
    """
    data_before = meta["state"].get("data", data)
    if data_before != data and meta["step"] < meta["steps"]:
        raise UserError(
            tr(
                "{folder} was begun on other data: the rows of corpus {corpus} were {before} and "
                "are {now} now, so step {step:,} of {steps:,} would mix the two. Put the old "
                "corpus back to resume, {instead}",
                folder=folder,
                corpus=meta["config"].get("corpus"),
                before=data_before,
                now=data,
                step=meta["step"],
                steps=meta["steps"],
                instead=_instead(meta),
            )
        )


def check_plan(folder: Path, meta: Mapping[str, Any], steps: int, per_step: int) -> None:
    """Raise UserError if `steps` or `per_step` (rows or problems) differs from a checkpoint's.

    With another plan, the run would repeat or skip data, and its learning rate would jump.
    `per_step` is not compared if the checkpoint does not record it.
    """
    rows_done = meta["state"].get("row")  # checkpoints of early versions do not have it
    per_step_before = rows_done / meta["step"] if type(rows_done) is int else per_step
    if meta["steps"] != steps or per_step_before != per_step:
        raise UserError(
            tr(
                "{folder} was begun with {steps:,} steps of {then:,.10g} rows or problems, but "
                "this start would make {steps_now:,} steps of {now:,}. Resume on the number of "
                "devices and with the version of nanochat that the run began with, {instead}",
                folder=folder,
                steps=meta["steps"],
                then=per_step_before,
                steps_now=steps,
                now=per_step,
                instead=_instead(meta),
            )
        )


def _instead(meta: Mapping[str, Any]) -> str:
    """Return the end of an error message: how to start a run that does not resume this one."""
    flag = "--model_tag" if meta["stage"] == "base" else "--out_tag"
    return tr(
        "give another name with {flag} to start a run beside it, or give --resume=none to start "
        "again, which moves these checkpoints aside.",
        flag=flag,
    )


def check_code(folder: Path, meta: Mapping[str, Any], accepted: bool, compute: Compute) -> None:
    """Raise UserError if the code has changed since the checkpoint was written.

    If the change is `accepted`, or if only torch, the device or the number format has changed,
    there is just a warning that the run will not repeat bit for bit. All files that this process or
    the earlier one has loaded are compared, so an added, removed or renamed file is a change. A
    finished run is not checked, nor is code whose hashes the checkpoint lacks.
    """
    if meta["step"] >= meta["steps"]:
        return  # nothing is left to compute
    program_before = meta.get("made_with", {})
    program_now = made_with(compute)
    changed_files = _changed_files(program_before, program_now) if "code" in program_before else []
    if changed_files and not accepted:
        raise UserError(
            tr(
                "the code has changed since {folder} was saved at step {step:,} ({changes}), so "
                "the run would not be the same. Put the files back to resume exactly, give "
                "--other_code to resume with the code as it is now, {instead}",
                folder=folder,
                step=meta["step"],
                changes=_shortened(changed_files),
                instead=_instead(meta),
            )
        )
    differences = []
    if changed_files:
        differences.append(tr("{count} changed files", count=len(changed_files)))
    for name, value in program_now.items():
        if name not in CODE and program_before.get(name, value) != value:
            differences.append(
                tr(
                    "{name} {before} before, {now} now",
                    name=name,
                    before=program_before[name],
                    now=value,
                )
            )
    if differences:
        warn(
            tr(
                "{folder} resumes with {differences}: the rest of the run will not repeat "
                "bit for bit",
                folder=folder,
                differences="; ".join(differences),
            )
        )


def _shortened(changes: list[str]) -> str:
    """Return the first few changes as one string, which ends with the number of others, if any."""
    text = "; ".join(changes[:NAMED])
    if len(changes) > NAMED:
        text += tr("; and {count} more files", count=len(changes) - NAMED)
    return text


def _changed_files(program_before: Mapping[str, Any], program_now: Mapping[str, Any]) -> list[str]:
    """Return a list of phrases, one per file whose hash differs between two made_with() dicts.

    Files that neither of the two programs had loaded are ignored.
    """
    hashes_before = {**program_before.get("other_code", {}), **program_before["code"]}
    hashes_now = {**program_now.get("other_code", {}), **program_now["code"]}
    changes = []
    for name in sorted({*program_before["code"], *program_now["code"]}):
        hash_before = hashes_before.get(name, tr("missing"))
        hash_now = hashes_now.get(name, tr("missing"))
        if hash_before != hash_now:
            changes.append(
                tr("{name} {before} before, {now} now", name=name, before=hash_before, now=hash_now)
            )
    return changes

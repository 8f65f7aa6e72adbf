"""A run goes on only as it was begun: with its settings, its data and its code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanochat.common import UserError, warn
from nanochat.device import Compute
from nanochat.runtime import fingerprint

# Flags that do not change what is learned: a run may go on with other values of these.
# Which model a run starts from is told by its parent's identity, however it was named.
FREE_FLAGS = ("run", "device_type", "save_every", "save_seconds", "stop_at", "compile", "kernels", "device_batch_size",
              "gradient_accumulation_steps", "eval_every", "eval_tokens", "eval_examples", "data", "model_tag",
              "source", "source_step", "base_step", "shard", "profile", "keep", "resume", "other_code",
              "hang_seconds")  # fmt: skip
ADDED_FLAGS = {"matrix_optimizer": "muon"}  # what runs did that were begun before there was a flag
NOT_FLAGS = ("parent", "corpus", "tokenizer")  # settings that no flag names
NAMED = 4  # differences that a refusal names


def made_with(compute: Compute) -> dict[str, Any]:
    """What a checkpoint keeps of the program that wrote it."""
    return {"code": fingerprint.loaded(), "torch": torch.__version__, "device": compute.device_type,
            "number format": str(compute.dtype).removeprefix("torch.")}  # fmt: skip


def check_settings(folder: Path, meta: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings than a run was begun with."""
    known = {key: value for key, value in {**ADDED_FLAGS, **meta["config"]}.items() if key not in FREE_FLAGS}
    asked = {key: value for key, value in {**ADDED_FLAGS, **settings}.items() if key not in FREE_FLAGS}
    changed = [f"{key if key in NOT_FLAGS else '--' + key}: {known.get(key)} before, {asked.get(key)} now"
               for key in sorted({*known, *asked}) if known.get(key) != asked.get(key)]  # fmt: skip
    if changed:
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(changed)}). Give the same ones to go on, {_anew(meta)}"
        )


def check_data(folder: Path, meta: Mapping[str, Any], data: str) -> None:
    """Refuse to go on with other rows than a run was begun with, which a corpus made anew under its name would give."""
    known = meta["state"].get("data", data)
    if known != data and meta["step"] < meta["steps"]:
        corpus = meta["config"].get("corpus")
        raise UserError(
            f"{folder} was begun on other data: the rows of corpus {corpus} were {known}, they are {data} now, and "
            f"step {meta['step']:,} of {meta['steps']:,} would mix them. Put the corpus back to go on, {_anew(meta)}"
        )


def _anew(meta: Mapping[str, Any]) -> str:
    """How to begin without the checkpoints that are there; a later stage has the tag of its parent."""
    beside = "another --model_tag to begin beside it, " if meta["stage"] == "base" else ""
    return f"{beside}or delete the folder to begin anew."


def check_code(folder: Path, meta: Mapping[str, Any], accepted: bool, compute: Compute) -> None:
    """Refuse to go on with other code than wrote the checkpoint, unless that is `accepted`; warn of another torch,
    device or number format, with which a run is not repeated bit for bit."""
    if meta["step"] >= meta["steps"]:
        return  # nothing is left to compute
    before, now = meta.get("made_with", {}), made_with(compute)
    known, here = before.get("code", {}), now["code"]
    changed = [f"{name} {known[name]} before, {here[name]} now" for name in sorted(known.keys() & here.keys())
               if known[name] != here[name]]  # fmt: skip
    if changed and not accepted:
        more = f"; and {len(changed) - NAMED} more files" if len(changed) > NAMED else ""
        raise UserError(
            f"the code was changed since {folder} was saved at step {meta['step']:,} ({'; '.join(changed[:NAMED])}"
            f"{more}), so that the run would not be the same. Put the files back to go on exactly, give --other_code "
            f"to go on with them as they are, {_anew(meta)}"
        )
    others = [f"{name} {before[name]} before, {value} now" for name, value in now.items()
              if name != "code" and before.get(name, value) != value]  # fmt: skip
    if changed:
        others.insert(0, f"{len(changed)} changed files")
    if others:
        warn(f"{folder} goes on with {'; '.join(others)}: not bit for bit the run that it was")

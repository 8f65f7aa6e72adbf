"""Checkpoints: a folder a step, written whole or not at all, readable by any number of ranks.

`<base>/{base,mid,chatsft,chatrl}_checkpoints/<tag>/step_NNNNNN/` holds `model.safetensors` (fp32 masters, whole),
`optim-RR-of-NN.safetensors` (each rank's part, with the whole shape and first row of every tensor in its metadata),
`tokenizer.json` and `meta.json` (configuration, step, data row, loop state, SHA-256 of every file).
All randomness of a stage is a function of its seed and step, so that no generator state needs to be kept.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import load_file
from tyro.conf import Positional

from nanochat import fingerprint, parallel, same_run, upstream
from nanochat.common import UserError, log, run, warn
from nanochat.device import Compute, barrier
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizers
from nanochat.saving import save as save  # what the scripts ask this module for
from nanochat.stages import MADE_BY, find
from nanochat.stages import Parent as Parent
from nanochat.stages import checkpoint_dir as checkpoint_dir
from nanochat.stages import find_parent as find_parent
from nanochat.stages import make_meta as make_meta
from nanochat.step_files import (
    read_meta,
    set_aside,
    step_dir,
    steps,
    sweep,
    verify,
)
from nanochat.tokenizer import Tokenizer
from nanochat.tracking import read_metrics

Start = int | Literal["auto", "none"]  # a step, the newest, or anew


# --- reading -------------------------------------------------------------------------------------


def newest_whole(folder: Path, compute: Compute, training: bool = True) -> int | None:
    """The newest step whose files are whole; damaged newer ones are named and passed over. Rank 0 decides for all."""
    found = -1
    if compute.main:
        for step in reversed(steps(folder)):
            problem = verify(step_dir(folder, step), training)
            if not problem:
                found = step
                break
            warn(f"{step_dir(folder, step)} is damaged: {problem}; falling back to the step before it")
    found = parallel.agree(found, compute)
    return None if found < 0 else found


def finished(
    folder: Path, settings: dict[str, Any], compute: Compute, reported: bool = True, start: Start = "auto"
) -> bool:
    """Whether this stage was trained and measured to its end with these settings, and `reported`; says so.

    Rank 0 decides for all. A run that is to `start` elsewhere than where it ended is not finished. UserError if the
    settings differ.
    """
    if start != "auto":
        return False
    step = newest_whole(folder, compute, training=False)
    if step is None:
        return False
    meta = read_meta(folder, step)
    same_run.check_settings(folder, meta, settings)
    if step < meta["steps"]:
        return False
    lines = [line["step"] for line in read_metrics(folder)] if "line" in meta["state"] else [step]
    if not parallel.agree(int(step in lines and reported), compute):
        return False  # stopped after the last save
    if compute.main:
        log(f"already done: {folder} has all {step:,} steps")
    return True


@dataclass(frozen=True)
class Resumed:
    """Where a stage goes on."""

    step: int
    state: dict[str, Any]  # what the script gave to save()


def resume(
    folder: Path, model: nn.Module, optimizers: Optimizers, settings: dict[str, Any], compute: Compute, data: str = "",
    start: Start = "auto", other_code: bool = False,
) -> Resumed:  # fmt: skip
    """Load a whole step into model and optimizers: the newest ("auto"), or the one that `start` names; step 0 and no
    state where there is none, or for "none". Later steps are then set aside.

    `data` names the rows trained on, which the script keeps as "data" in its state. UserError if they, the settings or
    (unless `other_code` is accepted) the code differ from those that the run was begun with, or are not the same on
    all ranks, or if the step that was named is missing or damaged.
    """
    fingerprint.check({"the data": data}, compute)
    if compute.main:
        sweep(folder)
    barrier(compute)
    step = newest_whole(folder, compute) if start == "auto" else _named(folder, start, compute)
    meta = read_meta(folder, step) if step else {"state": {}}
    if step:
        same_run.check_settings(folder, meta, settings)
        same_run.check_data(folder, meta, data)
        same_run.check_code(folder, meta, other_code, compute)
    if start != "auto" and compute.main and (place := set_aside(folder, step or 0)):
        log(f"the steps after {step or 0:,} lie in {place} now; delete it when they are not needed")
    barrier(compute)
    if not step:
        return Resumed(0, {})
    meta = restore(folder, step, model, optimizers)
    if compute.main:
        log(f"going on from step {step:,} of {folder}")
    return Resumed(step, meta["state"])


def _named(folder: Path, start: int | str, compute: Compute) -> int:
    """The step that was asked for, 0 for "none". UserError if it cannot be gone on from."""
    if start == "none":
        return 0
    there = steps(folder)
    if start not in there:
        raise UserError(f"--resume={start}: {folder} has steps {', '.join(map(str, there)) or 'none'}", exit_code=2)
    problem = [verify(step_dir(folder, int(start))) if compute.main else ""]
    if compute.world_size > 1:
        dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise UserError(f"--resume={start}: {step_dir(folder, int(start))} is damaged: {problem[0]}. Name another step")
    return int(start)


def restore(folder: Path, step: int, model: nn.Module, optimizers: Optimizers | None) -> dict[str, Any]:
    """Load parameters, and optimizer state where given, into a model of any sharding; return meta."""
    where = step_dir(folder, step)
    parallel.load_whole(model, load_file(where / "model.safetensors"))
    if optimizers is not None:
        _restore_optimizer(where, optimizers)
    return read_meta(folder, step)


@torch.no_grad()
def _restore_optimizer(folder: Path, optimizers: Optimizers) -> None:
    """Fill each tensor this rank holds from whichever parts of any number of ranks overlap its rows."""
    wanted = optimizers.state()
    missing = {name: value.shape[0] for name, (value, _, _) in wanted.items()}
    for path in sorted(folder.glob("optim-*.safetensors")):
        with safe_open(path, "pt") as part:
            layout = json.loads(part.metadata()["layout"])
            for name in set(layout) & set(wanted):
                target, _, first = wanted[name]
                begin = layout[name][1]
                held = part.get_tensor(name)
                low, high = max(begin, first), min(begin + held.shape[0], first + target.shape[0])
                if low < high:
                    target[low - first : high - first] = held[low - begin : high - begin].to(target.device)
                    missing[name] -= high - low
    holes = [name for name, rows in missing.items() if rows > 0]
    if holes:
        raise UserError(f"{folder} holds no complete optimizer state: {holes[0]} and {len(holes) - 1} more lack rows")


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, and where it came from."""

    model: GPT
    tokenizer: Tokenizer
    meta: dict[str, Any]
    stage: str
    tag: str
    step: int

    @property
    def corpus(self) -> str | None:
        """The corpus the model was trained on, None if its meta.json does not say."""
        return self.meta.get("config", {}).get("corpus")


def load_model(
    stage: str | None, tag: str | None, step: int | None, compute: Compute, dtype: torch.dtype | None = None
) -> Loaded:
    """A whole model for inference or to start the next stage from, on this rank's device, in eval mode.

    `dtype` is the format matrices and tables are held in: default the compute dtype; training asks for float32.
    """
    name, folder = find(stage, tag)
    if step is None:
        step = newest_whole(folder, compute, training=False)
        if step is None:
            raise UserError(f"every checkpoint in {folder} is damaged; train stage {name} again")
    elif step not in steps(folder):
        raise UserError(f"{folder} has steps {', '.join(map(str, steps(folder)))}, not {step}", exit_code=2)
    elif problem := verify(step_dir(folder, step), training=False):
        raise UserError(
            f"{step_dir(folder, step)} is damaged: {problem}. `python -m {MADE_BY[name]}` makes it again from the step "
            "before, or name another step"
        )
    where, meta = step_dir(folder, step), read_meta(folder, step)
    model = GPT(GPTConfig(**meta["model"]), dtype=compute.dtype)
    tokenizer = Tokenizer.load(where)
    if tokenizer.vocab_size != model.config.vocab_size or tokenizer.hash != meta["tokenizer_hash"]:
        raise UserError(
            f"the tokenizer beside {where} has {tokenizer.vocab_size:,} tokens and hash {tokenizer.hash[:8]}, the "
            f"model was made with {model.config.vocab_size:,} and {meta['tokenizer_hash'][:8]}: the folder was changed"
        )
    parallel.load_whole(model, load_file(where / "model.safetensors"))
    held_in(model, dtype or compute.dtype)
    return Loaded(model.to(compute.device).eval(), tokenizer, meta, name, folder.name, step)


def held_in(model: GPT, dtype: torch.dtype) -> None:
    """Hold matrices and tables in a format, in place; the few scalars stay fp32, as in training."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.to(dtype)


# --- checkpoints of others ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Take over a checkpoint of karpathy/nanochat's HEAD: `convert` and its folder, such as base_checkpoints/d20."""

    verb: Positional[Literal["convert"]]
    """what to do"""
    folder: Positional[Path]
    """a tag's folder; the one above it tells the stage"""
    step: int | None = None
    """which step; default the newest"""
    tokenizer: Path | None = None
    """folder of tokenizer.pkl; default `tokenizer` of the same base folder"""
    corpus: str = "fineweb"
    """name of the corpus it was trained on, for later stages"""


def main(cfg: Config) -> None:
    """Convert, and say what to type next."""
    theirs = upstream.read(cfg.folder.expanduser(), cfg.step, cfg.tokenizer)
    where = upstream.convert(theirs, cfg.corpus)
    log(f"converted: {where}. Next: python -m scripts.chat_cli -i {theirs.stage} -g {theirs.tag}")


if __name__ == "__main__":
    run(main, Config, "python -m nanochat.checkpoint_manager convert DIR")

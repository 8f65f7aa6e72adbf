"""Loads checkpoints: finds the newest whole step, and builds a model that is ready to use."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from nanochat.checkpoint_manager.families import build
from nanochat.checkpoint_manager.files import read_meta, step_dir, steps, verify
from nanochat.checkpoint_manager.locate import MADE_BY, find
from nanochat.checkpoint_manager.tensors import read_tensors
from nanochat.common import UserError, warn
from nanochat.device import Compute
from nanochat.gpt import GPT
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer


def newest_whole(folder: Path, compute: Compute, training: bool = True) -> int | None:
    """The newest step whose files are whole, or None. Warns about damaged newer steps. Rank 0 decides for all ranks."""
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


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to use, and the checkpoint that it came from."""

    model: GPT
    tokenizer: Tokenizer
    meta: dict[str, Any]
    stage: str
    tag: str
    step: int

    @property
    def corpus(self) -> str | None:
        """The name of the corpus that the model was trained on, or None if meta.json does not say."""
        return self.meta.get("config", {}).get("corpus")


def load_model(
    stage: str | None, tag: str | None, step: int | None, compute: Compute, dtype: torch.dtype | None = None
) -> Loaded:
    """Load a whole model, on this rank's device and in eval mode, for inference or as the start of the next stage.

    None for `stage`, `tag` or `step` means the latest. `dtype` is the number format of matrices and tables (default:
    the compute dtype); training asks for float32. UserError if the checkpoint is missing or damaged.
    """
    name, folder = find(stage, tag)
    if step is None:
        step = newest_whole(folder, compute, training=False)
        if step is None:
            raise UserError(
                f"every checkpoint in {folder} is damaged; train stage {name} again with `python -m {MADE_BY[name]}`"
            )
    elif step not in steps(folder):
        there = ", ".join(map(str, steps(folder)))
        raise UserError(f"{folder} has steps {there}, not {step}: name one of them", exit_code=2)
    elif problem := verify(step_dir(folder, step), training=False):
        raise UserError(
            f"{step_dir(folder, step)} is damaged: {problem}. Name another step, or run `python -m {MADE_BY[name]}` to "
            "make it again from the step before it"
        )
    where, meta = step_dir(folder, step), read_meta(folder, step)
    values = read_tensors(where / "model.safetensors")
    model = build(meta, values, compute, str(where / "meta.json"))
    tokenizer = Tokenizer.load(where)
    if tokenizer.vocab_size != model.config.vocab_size or tokenizer.hash != meta["tokenizer_hash"]:
        raise UserError(
            f"the tokenizer in {where} has {tokenizer.vocab_size:,} tokens and hash {tokenizer.hash[:8]}, but the "
            f"model was trained with {model.config.vocab_size:,} and {meta['tokenizer_hash'][:8]}: the folder was "
            "changed. Put the original tokenizer.json back, or name another step"
        )
    parallel.load_whole(model, values)
    del values
    held_in(model, dtype or compute.dtype)
    return Loaded(model.to(compute.device).eval(), tokenizer, meta, name, folder.name, step)


def held_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert matrices and tables to a number format, in place; the few scalars stay fp32, as in training."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)

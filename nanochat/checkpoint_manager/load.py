"""Reading checkpoints: the newest whole step, and a model from it, ready to use."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import load_file

from nanochat.checkpoint_manager.files import read_meta, step_dir, steps, verify
from nanochat.checkpoint_manager.locate import MADE_BY, find
from nanochat.common import UserError, warn
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer


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
    model = GPT(GPTConfig(**meta["model"]), dtype=compute.dtype, operations=compute.operations)
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

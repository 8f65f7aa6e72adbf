"""Loads checkpoints: finds the newest whole step, and builds a model that is ready to use."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from nanochat.checkpoint_manager.families import build, held_in
from nanochat.checkpoint_manager.files import (
    ADAPTER,
    MODEL,
    read_meta,
    step_dir,
    steps,
    verify,
    weights_hash,
)
from nanochat.checkpoint_manager.huggingface.adapter import load_adapter
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import folder_mark, load_qwen
from nanochat.checkpoint_manager.locate import MADE_BY, find
from nanochat.checkpoint_manager.parts.rows import read_parameters
from nanochat.common import UserError, read_json, sha256_of, warn
from nanochat.device import Compute
from nanochat.models.lora import LoraConfig, add_adapters, merge
from nanochat.models.qwen.model import Qwen
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

PUBLISHED = "published"  # the stage of a model that was not trained here


def newest_whole(folder: Path, compute: Compute, training: bool = True) -> int | None:
    """The newest step whose files are whole, or None. Warns about damaged newer steps. Rank 0 decides for all ranks."""
    found = -1
    if compute.main:
        for step in reversed(steps(folder)):
            problem = verify(step_dir(folder, step), training)
            if not problem:
                found = step
                break
            warn(
                f"{step_dir(folder, step)} is damaged: {problem}; falling back to the step before it"
            )
    found = parallel.agree(found, compute)
    return None if found < 0 else found


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in a folder: our own, or that of a published model whose embedding has `vocab_size` rows."""
    path = folder / "tokenizer.json"
    if path.is_file() and "added_tokens" in read_json(path):
        return cast(
            Tokenizer, FolderTokenizer(folder, vocab_size)
        )  # it has the members that a model's user needs
    return Tokenizer.load(folder)


def _over_base(
    meta: dict[str, Any], where: Path, compute: Compute, dtype: torch.dtype | None
) -> Qwen:
    """The published model that an adapter was trained on, in `dtype`, with an adapter that has no values yet. UserError
    if that model is gone or is not the one it was."""
    base = Path(meta["base"]["folder"])
    if not (base / "config.json").is_file() or folder_mark(base) != meta["base"]["mark"]:
        raise UserError(
            f"{where} is an adapter of the model in {base}, which is {'another one now' if base.is_dir() else 'gone'}. "
            "Put that model back, or train the adapter again with `python -m scripts.finetune`"
        )
    model = load_qwen(base, compute, dtype)
    add_adapters(model, LoraConfig(**{**meta["lora"], "targets": tuple(meta["lora"]["targets"])}))
    return model


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to use, and the checkpoint that it came from."""

    model: Any  # of any family
    tokenizer: Tokenizer
    meta: dict[str, Any]
    stage: str
    tag: str
    step: int

    @property
    def corpus(self) -> str | None:
        """The name of the corpus that the model was trained on, or None if meta.json does not say."""
        return self.meta.get("config", {}).get("corpus")

    @property
    def weights(self) -> str:
        """The SHA-256 of its parameters."""
        return weights_hash(self.meta)


def load_published(
    folder: Path, adapter: Path | None, compute: Compute, dtype: torch.dtype | None = None
) -> Loaded:
    """Load a model as its publisher gives it, with the adapter of a folder merged into it, ready for inference.

    `dtype` is the number format of matrices and tables (default: the compute dtype). UserError if files are missing,
    damaged, of an unknown kind, or do not fit each other.
    """
    folder = folder.expanduser().resolve()
    model = load_qwen(folder, compute, dtype)
    tag, mark = folder.name, folder_mark(folder)
    if adapter is not None:
        adapter = adapter.expanduser().resolve()
        load_adapter(model, adapter)
        merge(model)
        tag, mark = f"{tag} + {adapter.name}", f"{mark} {sha256_of(adapter / ADAPTER)}"
    meta = {"files": {MODEL: {"sha256": mark}}, "config": {"corpus": None}}
    return Loaded(
        model.eval(), load_tokenizer(folder, model.config.vocab_size), meta, PUBLISHED, tag, 0
    )


def load_model(
    stage: str | None,
    tag: str | None,
    step: int | None,
    compute: Compute,
    dtype: torch.dtype | None = None,
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
    values = read_parameters(where)
    model: Any  # of any family
    if "base" in meta:
        model = _over_base(meta, where, compute, dtype)
    else:
        model = build(meta, values, compute, str(where / "meta.json"))
    tokenizer = load_tokenizer(where, model.config.vocab_size)
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

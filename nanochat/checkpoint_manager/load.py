"""Loads models that are ready to use, from a step of a run or from a published folder."""

import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from nanochat.checkpoint_manager.families import build, cast_matrices
from nanochat.checkpoint_manager.files import (
    ADAPTER,
    MODEL,
    read_meta,
    step_dir,
    steps,
    verify,
    weights_hash,
)
from nanochat.checkpoint_manager.locate import MADE_BY, find
from nanochat.checkpoint_manager.parts.model import read_parameters
from nanochat.common import UserError, read_json, sha256_of, tr, warn
from nanochat.device import Compute
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanochat.models.lora import LoraConfig

PUBLISHED = "published"  # `stage` of a model that was not trained here
# The most tokens of a row on which a published model is measured. Its context may be so long that a
# row of that length would fill the memory.
PUBLISHED_ROW = 2048


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to use, its tokenizer, and where they came from."""

    model: Any  # a model of any family
    tokenizer: Tokenizer
    meta: dict[str, Any]
    stage: str
    tag: str
    step: int

    @property
    def corpus(self) -> str | None:
        """The name of the corpus that the model was trained on, or None if it is unknown."""
        return self.meta.get("config", {}).get("corpus")

    @property
    def from_folder(self) -> bool:
        """Whether the model is a published one, or was fine-tuned or trained by RL from one."""
        return self.stage in (PUBLISHED, "tune") or self.tokenizer.takes_options

    @property
    def row_tokens(self) -> int:
        """The number of tokens in a row on which the model is measured: its context.

        For models of published folders, it is at most 2,048 (PUBLISHED_ROW).
        """
        context = self.model.config.sequence_len
        return min(context, PUBLISHED_ROW) if self.from_folder else context

    @property
    def weights(self) -> str:
        """A hash that identifies the model's parameters and, for an adapter, its base model."""
        own_hash = weights_hash(self.meta)
        if "base" not in self.meta:
            return own_hash
        # The base's config.json may change beside the same weights.
        content = f"{own_hash} {self.meta['base']['mark']} {self.model.config!r}"
        return sha256(content.encode()).hexdigest()


def newest_whole(folder: Path, compute: Compute, training: bool = True) -> int | None:
    """Return the newest undamaged step in the folder of a run, or None if there is none.

    Rank 0 decides for all ranks, and warns about damaged newer steps. If `training` is false, the
    optimizer files are not checked.
    """
    newest = _newest_undamaged(folder, training) if compute.main else -1
    newest = parallel.agree(newest, compute)
    return None if newest < 0 else newest


def _newest_undamaged(folder: Path, training: bool) -> int:
    """Return the newest undamaged step, or -1 if there is none, and warn about each newer step."""
    for step in reversed(steps(folder)):
        path = step_dir(folder, step)
        problem = verify(path, training)
        if not problem:
            return step
        warn(
            tr(
                "{path} is damaged: {problem}; falling back to the step before it",
                path=path,
                problem=problem,
            )
        )
    return -1


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in a folder: one of our own, or that of a published model.

    `vocab_size`, the number of rows of the model's embedding, matters only for a published model.
    """
    path = folder / "tokenizer.json"
    is_published = (folder / "config.json").is_file()
    if not is_published and path.is_file():  # the step of an adapter has no config.json
        is_published = "added_tokens" in read_json(path)
    if is_published:
        from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer

        # It has all the members of Tokenizer that the callers need.
        return cast(Tokenizer, FolderTokenizer(folder, vocab_size))
    return Tokenizer.load(folder)


def load_published(
    folder: Path,
    adapter: Path | None,
    compute: Compute,
    dtype: torch.dtype | None = None,
    bits: int = 16,
) -> Loaded:
    """Load a published model for inference, and return it with its tokenizer.

    `folder` is one that published_folder() finds, and so is `adapter`, an adapter to merge. `dtype`
    is the number format of matrices and tables, by default the compute dtype. If `bits` is 4, the
    matrices in layers are in NF4, and the adapter is not merged but added to their products. Raises
    UserError if files are missing, damaged, unsupported or do not fit each other.
    """
    from nanochat.checkpoint_manager.huggingface.adapter import (
        SETTINGS,
        attach_adapter,
        merge_adapter,
    )
    from nanochat.checkpoint_manager.huggingface.folders import model_name, published_folder
    from nanochat.checkpoint_manager.huggingface.weights import folder_mark, load_qwen

    folder = published_folder(folder)
    model = load_qwen(folder, compute, dtype, bits=bits)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    tag = model_name(folder)
    # config.json, the chat template and an adapter change answers beside the same weights.
    marks = [folder_mark(folder), repr(model.config), tokenizer.chat_hash]
    if adapter is not None:
        adapter = published_folder(adapter, SETTINGS)
        if bits == 16:
            merge_adapter(model, adapter, compute)
        else:
            attach_adapter(model, adapter)
        tag = f"{tag} + {_adapter_name(adapter)}"
        marks += [sha256_of(adapter / name) for name in (ADAPTER, SETTINGS)]
    digest = sha256(" ".join(marks).encode()).hexdigest()
    meta = {"files": {MODEL: {"sha256": digest}}, "config": {"corpus": None}}
    return Loaded(model.eval(), tokenizer, meta, PUBLISHED, tag, 0)


def _adapter_name(folder: Path) -> str:
    """Return the name of an adapter: that of its folder or, for a step of a run, the run and step."""
    from nanochat.checkpoint_manager.huggingface.folders import model_name

    step = re.fullmatch(r"step_(\d+)", folder.name)
    return f"{folder.parent.name} step {int(step[1])}" if step else model_name(folder)


def adapter_without_base() -> UserError:
    """Return the error (exit code 2) for an adapter that is named without its base model."""
    return UserError(
        tr("--adapter belongs to a published model: name its folder with --model"), exit_code=2
    )


def load_named(
    model: Path | None,
    adapter: Path | None,
    stage: str | None,
    tag: str | None,
    step: int | None,
    compute: Compute,
    dtype: torch.dtype | None = None,
) -> Loaded:
    """Load the model that flags name: the published `model`, or one that was trained here.

    `adapter` is merged into the published model; the other arguments are those of load_model().
    Raises UserError (exit code 2) if the flags contradict each other, and as load_published() and
    load_model() do.
    """
    if model is None and adapter is not None:
        raise adapter_without_base()
    if model is None:
        return load_model(stage, tag, step, compute, dtype)
    if stage is not None or tag is not None or step is not None:
        raise UserError(
            tr(
                "--model names a published model, and --source, --model_tag and --step one "
                "that was trained here: give either"
            ),
            exit_code=2,
        )
    return load_published(model, adapter, compute, dtype)


def load_model(
    stage: str | None,
    tag: str | None,
    step: int | None,
    compute: Compute,
    dtype: torch.dtype | None = None,
    bits: int = 16,
) -> Loaded:
    """Load the whole model of a checkpoint onto this rank's device, and return it in eval mode.

    If `stage` or `tag` is None, find() chooses it; if `step` is None, the newest undamaged step is
    loaded. `dtype` is the number format of matrices and tables, by default the compute dtype;
    training asks for float32. If `bits` is 4, the model is an adapter whose base is held in NF4.
    Raises UserError if the checkpoint is missing or damaged, or (exit code 2) no adapter with
    `bits` of 4.
    """
    found_stage, folder = find(stage, tag)
    step = _usable_step(found_stage, folder, step, compute)
    where = step_dir(folder, step)
    meta = read_meta(folder, step)
    values = read_parameters(where)
    model: Any  # a model of any family
    if "base" in meta:
        model = _load_base(meta, where, compute, dtype, bits)
    elif bits != 16:
        raise UserError(
            tr(
                "--weights nf4 is for published models and their adapters, and {where} is a whole "
                "model that was trained here. Leave --weights out",
                where=where,
            ),
            exit_code=2,
        )
    else:
        model = build(meta, values, compute, str(where / "meta.json"))
    tokenizer = _matching_tokenizer(where, model.config.vocab_size, meta["tokenizer_hash"])
    parallel.load_whole(model, values)
    del values
    cast_matrices(model, dtype or compute.dtype)
    return Loaded(model.to(compute.device).eval(), tokenizer, meta, found_stage, folder.name, step)


def _usable_step(stage: str, folder: Path, step: int | None, compute: Compute) -> int:
    """Return `step`, or the newest undamaged step if `step` is None.

    Raises UserError if `step` is missing (exit code 2) or damaged, or if it is None and every step
    is damaged.
    """
    maker = f"python -m {MADE_BY[stage]}"
    if step is None:
        step = newest_whole(folder, compute, training=False)
        if step is None:
            raise UserError(
                tr(
                    "every checkpoint in {folder} is damaged; train stage {stage} again with "
                    "`{maker}`",
                    folder=folder,
                    stage=stage,
                    maker=maker,
                )
            )
        return step
    complete_steps = steps(folder)
    if step not in complete_steps:
        listed = ", ".join(map(str, complete_steps))
        raise UserError(
            tr(
                "{folder} has steps {steps}, not {step}: name one of them",
                folder=folder,
                steps=listed,
                step=step,
            ),
            exit_code=2,
        )
    problem = verify(step_dir(folder, step), training=False)
    if problem:
        raise UserError(
            tr(
                "{step_dir} is damaged: {problem}. Name another step, or run `{maker}` to "
                "make it again from the step before it",
                step_dir=step_dir(folder, step),
                problem=problem,
                maker=maker,
            )
        )
    return step


def _load_base(
    meta: dict[str, Any],
    where: Path,
    compute: Compute,
    dtype: torch.dtype | None,
    bits: int,
) -> Any:
    """Load and return the published model that an adapter was trained on, with unfilled adapters.

    Raises UserError if that model is missing or has changed.
    """
    from nanochat.checkpoint_manager.huggingface.adapter import base_bits, tell_base_bits
    from nanochat.checkpoint_manager.huggingface.weights import load_qwen
    from nanochat.models.lora import add_adapters

    base, lora = base_of_adapter(meta, where)
    model = load_qwen(base, compute, dtype, bits=bits)
    tell_base_bits(base_bits(meta), model, where)
    add_adapters(model, lora)
    return model


def base_of_adapter(meta: dict[str, Any], where: Path) -> tuple[Path, "LoraConfig"]:
    """Return the folder of the model that an adapter was trained on, and the adapter's shape.

    `meta` is the meta.json of the step in the folder `where`. Raises UserError if the model is
    missing or has changed.
    """
    from nanochat.checkpoint_manager.huggingface.weights import is_marked
    from nanochat.models.lora import LoraConfig

    base = Path(meta["base"]["folder"])
    if not (base / "config.json").is_file() or not is_marked(base, meta["base"]["mark"]):
        state = tr("another one now") if base.is_dir() else tr("gone")
        raise UserError(
            tr(
                "{where} is an adapter of the model in {base}, which is {state}. Put that "
                "model back, or train the adapter again with `python -m scripts.finetune`",
                where=where,
                base=base,
                state=state,
            )
        )
    shape = dict(meta["lora"])
    shape["targets"] = tuple(shape["targets"])
    return base, LoraConfig(**shape)


def _matching_tokenizer(where: Path, vocab_size: int, expected_hash: str) -> Tokenizer:
    """Return the tokenizer of a step.

    Raises UserError if it is not the one that the model was trained with.
    """
    tokenizer = load_tokenizer(where, vocab_size)
    if tokenizer.vocab_size != vocab_size or tokenizer.hash != expected_hash:
        raise UserError(
            tr(
                "the tokenizer in {where} has {vocab_size:,} tokens and hash {hash}, but the "
                "model was trained with {expected_size:,} and {expected_hash}: the folder was "
                "changed. Put the original tokenizer.json back, or name another step",
                where=where,
                vocab_size=tokenizer.vocab_size,
                hash=tokenizer.hash[:8],
                expected_size=vocab_size,
                expected_hash=expected_hash[:8],
            )
        )
    return tokenizer

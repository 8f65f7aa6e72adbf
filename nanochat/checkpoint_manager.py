"""Checkpoints: a folder a step, written whole or not at all, readable by any number of ranks.

`<base>/{base,mid,chatsft,chatrl}_checkpoints/<tag>/step_NNNNNN/` holds `model.safetensors` (fp32 masters, whole),
`optim-RR-of-NN.safetensors` (each rank's part, with the whole shape and first row of every tensor in its metadata),
`tokenizer.json` and `meta.json` (configuration, step, data row, loop state, SHA-256 of every file).
All randomness of a stage is a function of its seed and step, so that no generator state needs to be kept.
"""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import load_file

from nanochat import fingerprint, parallel
from nanochat.common import UserError, base_dir, log, warn, write_json
from nanochat.device import Compute, barrier
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizers
from nanochat.step_files import (
    FORMAT,
    delete,
    latest_step,
    publish,
    read_meta,
    seal,
    step_dir,
    steps,
    sweep,
    verify,
    write_tensors,
)
from nanochat.tokenizer import Tokenizer
from nanochat.tracking import read_metrics

STAGES = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl"}
MADE_BY = {"base": "scripts.base_train", "mid": "scripts.mid_train", "sft": "scripts.chat_sft", "rl": "scripts.chat_rl"}
# Flags that do not change what is learned: a run may go on with other values of these.
# Which model a run starts from is told by its parent's identity, however it was named.
FREE_FLAGS = ("run", "device_type", "save_every", "save_seconds", "stop_at", "compile", "kernels", "device_batch_size",
              "eval_every", "eval_tokens", "eval_examples", "data", "model_tag", "source", "source_step",
              "base_step", "shard", "profile")  # fmt: skip
ADDED_FLAGS = {"matrix_optimizer": "muon"}  # what runs did that were begun before there was a flag
NOT_FLAGS = ("parent", "corpus", "tokenizer")  # settings that no flag names
KEEP = 2  # newest steps kept of a running stage


def checkpoint_dir(stage: str, tag: str) -> Path:
    """The folder of a stage's checkpoints under a tag such as d4."""
    return base_dir() / f"{STAGES[stage]}_checkpoints" / tag


# --- writing -------------------------------------------------------------------------------------


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: Optimizers,
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    compute: Compute,
) -> float:
    """Write step `step` (the count of updates done) and return the seconds it took; every rank must call it.

    Everything goes to a temporary folder, is synced, and only then takes its name. Older steps beyond KEEP go.
    """
    start = time.monotonic()
    temporary = folder / f".tmp-step_{step:06d}"
    if compute.main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier(compute)
    try:
        hashes = _write_files(temporary, model, optimizers, tokenizer, compute)
        if compute.main:
            record = {"format": FORMAT, "step": step, "saved_at": time.time(), "world_size": compute.world_size,
                      "tokenizer_hash": tokenizer.hash, "files": hashes, **meta}  # fmt: skip
            write_json(temporary / "meta.json", record)
            publish(temporary, step_dir(folder, step))
    except BaseException:  # a full disk must not be left fuller
        if compute.main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if compute.main:
        for old in steps(folder)[:-KEEP]:
            delete(step_dir(folder, old))
    barrier(compute)
    return time.monotonic() - start


def _write_files(
    folder: Path, model: nn.Module, optimizers: Optimizers, tokenizer: Tokenizer, compute: Compute
) -> dict[str, dict[str, Any]]:
    """Write and sync this rank's files; return the hashes and sizes of all ranks'."""
    name = f"optim-{compute.rank:02d}-of-{compute.world_size:02d}.safetensors"
    state = optimizers.saved()
    layout = {key: [list(shape), first] for key, (_, shape, first) in state.items()}
    tensors = {key: value.detach() for key, (value, _, _) in state.items()}
    write_tensors(tensors, folder / name, {"layout": json.dumps(layout)})
    files, whole = [name], {}
    for key, value in parallel.whole_parameters(model):
        if compute.main:  # the other ranks only help to gather
            whole[key] = value.cpu()
    if compute.main:
        write_tensors(whole, folder / "model.safetensors")
        tokenizer.save(folder)
        files += ["model.safetensors", "tokenizer.json"]
    hashes = {name: seal(folder / name) for name in files}
    if compute.world_size == 1:
        return hashes
    parts: list[dict[str, Any]] = [{} for _ in range(compute.world_size)]
    dist.all_gather_object(parts, hashes)
    return {name: value for part in parts for name, value in part.items()}


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


def finished(folder: Path, settings: dict[str, Any], compute: Compute, reported: bool = True) -> bool:
    """Whether this stage was trained and measured to its end with these settings, and `reported`; says so.

    Rank 0 decides for all. UserError if the settings differ.
    """
    step = newest_whole(folder, compute, training=False)
    if step is None:
        return False
    meta = read_meta(folder, step)
    _same(folder, meta, settings)
    if step < meta["steps"]:
        return False
    lines = [line["step"] for line in read_metrics(folder)] if "line" in meta["state"] else [step]
    if not parallel.agree(int(step in lines and reported), compute):
        return False  # stopped after the last save
    if compute.main:
        log(f"already done: {folder} has all {step:,} steps")
    return True


def _same(folder: Path, meta: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to go on with other settings than a run was begun with."""
    known = {key: value for key, value in {**ADDED_FLAGS, **meta["config"]}.items() if key not in FREE_FLAGS}
    asked = {key: value for key, value in {**ADDED_FLAGS, **settings}.items() if key not in FREE_FLAGS}
    changed = [f"{key if key in NOT_FLAGS else '--' + key}: {known.get(key)} before, {asked.get(key)} now"
               for key in sorted({*known, *asked}) if known.get(key) != asked.get(key)]  # fmt: skip
    if changed:
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(changed)}). Give the same ones to go on, {_anew(meta)}"
        )


def _same_data(folder: Path, meta: dict[str, Any], data: str) -> None:
    """Refuse to go on with other rows than a run was begun with, which a corpus made anew under its name would give."""
    known = meta["state"].get("data", data)
    if known != data and meta["step"] < meta["steps"]:
        corpus = meta["config"].get("corpus")
        raise UserError(
            f"{folder} was begun on other data: the rows of corpus {corpus} were {known}, they are {data} now, and "
            f"step {meta['step']:,} of {meta['steps']:,} would mix them. Put the corpus back to go on, {_anew(meta)}"
        )


def _anew(meta: dict[str, Any]) -> str:
    """How to begin without the checkpoints that are there; a later stage has the tag of its parent."""
    beside = "another --model_tag to begin beside it, " if meta["stage"] == "base" else ""
    return f"{beside}or delete the folder to begin anew."


@dataclass(frozen=True)
class Resumed:
    """Where a stage goes on."""

    step: int
    state: dict[str, Any]  # what the script gave to save()


def resume(
    folder: Path, model: nn.Module, optimizers: Optimizers, settings: dict[str, Any], compute: Compute, data: str = ""
) -> Resumed:
    """Load the newest whole step into model and optimizers; step 0 and no state where there is none.

    `data` names the rows trained on, which the script keeps as "data" in its state. UserError if they or the
    settings differ from those that the run was begun with, or are not the same on all ranks.
    """
    fingerprint.check({"the data": data}, compute)
    if compute.main:
        sweep(folder)
    barrier(compute)
    step = newest_whole(folder, compute)
    if step is None:
        return Resumed(0, {})
    meta = read_meta(folder, step)
    _same(folder, meta, settings)
    _same_data(folder, meta, data)
    meta = restore(folder, step, model, optimizers)
    if compute.main:
        log(f"going on from step {step:,} of {folder}")
    return Resumed(step, meta["state"])


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


def _candidates(stage: str | None, tag: str | None) -> Iterator[tuple[str, Path]]:
    """(stage, folder) in order of preference: later stages first, then newer checkpoints."""
    for name in ("rl", "sft", "mid", "base") if stage is None else (stage,):
        parent = base_dir() / f"{STAGES[name]}_checkpoints"
        folders = [parent / tag] if tag else sorted(parent.glob("*"), key=_age)
        yield from ((name, folder) for folder in folders if latest_step(folder) is not None)


def _age(folder: Path) -> float:
    newest = latest_step(folder)
    return 0.0 if newest is None else -(step_dir(folder, newest) / "meta.json").stat().st_mtime


def find(stage: str | None, tag: str | None) -> tuple[str, Path]:
    """The stage and folder that were asked for: None means the latest of rl > sft > mid > base, the newest tag."""
    if stage is not None and stage not in STAGES:
        raise UserError(f"the stage must be one of {', '.join(STAGES)}, got {stage!r}", exit_code=2)
    for name, folder in _candidates(stage, tag):
        return name, folder
    what = f"no checkpoint of stage {stage}" if stage else "no checkpoint of any stage"
    under = f" with tag {tag}" if tag else ""
    maker = MADE_BY[stage or "base"]
    raise UserError(
        f"{what}{under} in {base_dir()}. Make one with `python -m {maker}`, or run the whole pipeline with "
        "`bash speedrun.sh`.",
        exit_code=2,
    )


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a stage starts from; `identity` differs where its parameters do."""

    tag: str
    step: int
    identity: str
    corpus: str


def find_parent(stage: str, tag: str | None, step: int | None) -> Parent:
    """The newest checkpoint of an earlier stage, or the one named; UserError (code 2) if missing or unfinished."""
    _, folder = find(stage, tag)
    newest = latest_step(folder)
    if step is None and newest is not None:
        step = newest
        meta = read_meta(folder, step)
        if step < meta["steps"]:
            raise UserError(
                f"{folder} is at step {step:,} of {meta['steps']:,}: finish it with `python -m {MADE_BY[stage]}`, or "
                f"name a step of it",
                exit_code=2,
            )
    if step is None or step not in steps(folder):
        raise UserError(f"{folder} has steps {', '.join(map(str, steps(folder)))}, not {step}", exit_code=2)
    meta = read_meta(folder, step)
    digest = meta["files"]["model.safetensors"]["sha256"]
    return Parent(folder.name, step, f"{stage} {folder.name} step {step} {digest[:16]}", meta["config"]["corpus"])


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


def make_meta(
    stage: str,
    model: GPTConfig,
    settings: dict[str, Any],
    steps: int,
    state: dict[str, Any],
) -> dict[str, Any]:
    """What a training script says of a step: stage, shape, settings (parent and corpus among them), steps of the
    whole run, and its own state (loop figures, row of the data)."""
    return {
        "stage": stage,
        "model": asdict(model),
        "config": settings,
        "steps": steps,
        "state": state,
    }

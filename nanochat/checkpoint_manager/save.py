"""Writes a checkpoint to a temporary folder, which is renamed once all files are on disk.

Every rank writes files of its own. If one rank cannot write, the save fails on all ranks.
"""

import contextlib
import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from nanochat.checkpoint_manager import same_run
from nanochat.checkpoint_manager.files import (
    ADAPTER,
    ADAPTER_PREFIX,
    FORMAT,
    MODEL,
    prune,
    publish,
    seal,
    step_dir,
    write_meta,
)
from nanochat.checkpoint_manager.parts import model as parameter_files
from nanochat.checkpoint_manager.parts.model import Files, Seals
from nanochat.checkpoint_manager.parts.rank_state import Optimizers, RankState
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError, tr
from nanochat.device import Compute
from nanochat.tokenizer import Tokenizer

KEEP = 3  # how many of its newest steps a run keeps by default


@dataclass(frozen=True)
class Step:
    """The description of a step to write, without its tensors. It is the same on every rank."""

    folder: Path  # the folder of the run
    number: int  # optimizer updates done
    tokenizer: Tokenizer
    meta: dict[str, Any]
    keep: int  # how many of the newest steps to keep; 0 keeps all
    files: Files
    facts: dict[str, str]  # metadata for the file of an adapter

    @staticmethod
    def of(
        folder: Path,
        number: int,
        model: nn.Module,
        tokenizer: Tokenizer,
        meta: dict[str, Any],
        keep: int,
        files: Files,
    ) -> "Step":
        """Return the description of a step, with a copy of `meta`. Every rank must call this."""
        facts: dict[str, str] = {}
        if meta.get("lora"):
            from nanochat.checkpoint_manager.huggingface import adapter

            facts = adapter.facts(model)
        return Step(folder, number, tokenizer, copy.deepcopy(meta), keep, files, facts)

    @property
    def temporary(self) -> Path:
        """The folder that holds the step until all its files are on disk."""
        return self.folder / f".tmp-step_{self.number:06d}"


def refuse_parts_of_adapter(files: Files) -> None:
    """Raise UserError (exit code 2) if `files` is "per_rank": an adapter is always one file."""
    if files == "per_rank":
        raise UserError(
            tr(
                "--checkpoint_files=per_rank is for whole models, but this run trains an adapter, "
                "which is small and which other programs read as one file. Leave "
                "--checkpoint_files out"
            ),
            exit_code=2,
        )


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: Optimizers,
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    compute: Compute,
    keep: int = KEEP,
    files: Files = "auto",
) -> float:
    """Write a checkpoint, and return how many seconds this took. Every rank must call this.

    `step` is the number of optimizer updates done. Training waits until the files are on disk,
    whereas parts.background.Saver writes them during training. Raises OSError as write_step() does.
    """
    start = time.monotonic()
    description = Step.of(folder, step, model, tokenizer, meta, keep, files)
    write_step(description, RankState.of(model, optimizers), compute)
    return time.monotonic() - start


def write_step(step: Step, state: RankState, compute: Compute, group: Any = None) -> None:
    """Write the states of all ranks as one step. Every rank must call this.

    The ranks communicate over `group`. All files go to a temporary folder, which is renamed only
    after they have been synced to disk. Then prune() removes old steps. Raises OSError on every
    rank if a file of any rank cannot be written.
    """
    with _together(step.temporary, compute, group):
        if compute.main:
            shutil.rmtree(step.temporary, ignore_errors=True)
            step.temporary.mkdir(parents=True)
    with _together(step.temporary, compute, group):
        rank_seals = _write_files(step, state, compute, group)
    seals: Seals = {}
    for seals_of_a_rank in _gathered(rank_seals, compute, group):
        seals |= seals_of_a_rank
    with _together(step.temporary, compute, group):
        if compute.main:
            record = {
                "format": FORMAT,
                "step": step.number,
                "saved_at": time.time(),
                "world_size": compute.world_size,
                "tokenizer_hash": step.tokenizer.hash,
                "files": seals,
                "made_with": same_run.made_with(compute),
                **step.meta,
            }
            write_meta(step.temporary, record)
            publish(step.temporary, step_dir(step.folder, step.number))
    if compute.main:
        prune(step.folder, step.keep, step.number)
    _gathered(None, compute, group)  # no rank continues before the folder is renamed


@contextlib.contextmanager
def _together(temporary: Path, compute: Compute, group: Any) -> Iterator[None]:
    """Raise OSError on every rank if any rank raises it inside the `with` block.

    Without this, the other ranks would wait for that rank forever. After an error, rank 0 also
    removes the temporary folder, to free a full disk.
    """
    failure: OSError | None = None
    try:
        yield
    except OSError as refusal:
        failure = refusal
    except BaseException:
        if compute.main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    arguments = (failure.errno, failure.strerror, failure.filename) if failure else None
    failures = [failed for failed in _gathered(arguments, compute, group) if failed]
    if failures:
        if compute.main:
            shutil.rmtree(temporary, ignore_errors=True)
        _gathered(None, compute, group)
        raise failure or OSError(*failures[0])


def _gathered(value: Any, compute: Compute, group: Any) -> list[Any]:
    """Return a list of the values that the ranks pass, ordered by rank."""
    values = [value] * compute.world_size
    if compute.world_size > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def _write_files(step: Step, state: RankState, compute: Compute, group: Any) -> Seals:
    """Write and sync this rank's files, and return their hashes and sizes, by file name.

    Rank 0 also writes the tokenizer and, for an adapter, the settings file that peft expects, which
    is not hashed.
    """
    folder = step.temporary
    parameters = state.parameters
    lora = step.meta.get("lora")
    optimizer_file = f"optim-{compute.rank:02d}-of-{compute.world_size:02d}.safetensors"
    # One thread hashes a file more slowly than a fast disk writes it, so two files are written at a
    # time.
    with ThreadPoolExecutor(1) as helper:
        beat = compute.pulse.beat
        optimizer_seal = helper.submit(_write_optimizer, folder / optimizer_file, state, beat)
        if lora:
            seals = parameter_files.write_whole(
                folder / ADAPTER, parameters, compute, group, ADAPTER_PREFIX, step.facts
            )
        elif parameter_files.in_one_file(parameters, step.files):
            seals = parameter_files.write_whole(folder / MODEL, parameters, compute, group, "", {})
        else:
            seals = parameter_files.write_rows(folder, parameters, compute)
    seals[optimizer_file] = optimizer_seal.result()
    if compute.main:
        step.tokenizer.save(folder)
        seals["tokenizer.json"] = seal(folder / "tokenizer.json")
        if lora:
            from nanochat.checkpoint_manager.huggingface import adapter
            from nanochat.models.qwen.config import QwenConfig

            base = step.meta["base"]["folder"]
            adapter.write_settings(folder, lora, QwenConfig(**step.meta["model"]), base)
    return seals


def _write_optimizer(path: Path, state: RankState, beat: Callable[[], None]) -> dict[str, Any]:
    """Write this rank's optimizer state, and return the file's hash and size.

    `beat` is called before each tensor, since the last save of a run may take longer than a rank
    may stand still.
    The file's metadata has each tensor's whole shape and the index of this rank's first row.
    """
    tensors = {}
    layout = {}
    for name, (tensor, shape, first_row) in state.optimizer.items():
        tensors[name] = tensor.detach()
        layout[name] = [list(shape), first_row]
    return write_tensors(tensors, path, {"layout": json.dumps(layout)}, beat)

"""Writes a checkpoint: every rank its part, under a temporary name until all is on disk; all ranks fail if one does."""

import contextlib
import copy
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from nanochat.checkpoint_manager import same_run
from nanochat.checkpoint_manager.files import (
    ADAPTER,
    FORMAT,
    MODEL,
    prune,
    publish,
    seal,
    step_dir,
    write_meta,
)
from nanochat.checkpoint_manager.huggingface import adapter
from nanochat.checkpoint_manager.parts import model as parameter_files
from nanochat.checkpoint_manager.parts.held import Held, Optimizers
from nanochat.checkpoint_manager.parts.model import Files, Hashes
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError, tr
from nanochat.device import Compute
from nanochat.tokenizer import Tokenizer

KEEP = 3  # newest steps kept of a stage


@dataclass(frozen=True)
class Step:
    """What is written of a step besides the tensors, and where; every rank describes the same."""

    folder: Path  # of the run
    number: int  # the count of updates done
    tokenizer: Tokenizer
    meta: dict[str, Any]
    keep: int  # newest steps to keep; 0: all
    files: Files
    facts: dict[str, str]  # what the file of an adapter says about itself

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
        """A step as it is now: what training does to `meta` from here on does not count. Every rank must call this."""
        facts = adapter.facts(model) if meta.get("lora") else {}
        return Step(folder, number, tokenizer, copy.deepcopy(meta), keep, files, facts)

    @property
    def temporary(self) -> Path:
        """The name of its folder until all is on disk."""
        return self.folder / f".tmp-step_{self.number:06d}"


def refuse_parts_of_adapter(files: Files) -> None:
    """UserError (code 2) if an adapter is asked to be written by every rank."""
    if files == "per_rank":
        raise UserError(
            tr(
                "--checkpoint_files=per_rank is for whole models, but this run trains an adapter, which is small and "
                "which other programs read as one file. Leave --checkpoint_files out"
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
    """Write step `step` (the count of updates done) and return how many seconds that took; every rank must call it.

    Training stands still meanwhile; parts.background.Saver writes beside it. See write_step().
    """
    start = time.monotonic()
    write_step(
        Step.of(folder, step, model, tokenizer, meta, keep, files),
        Held.of(model, optimizers),
        compute,
    )
    return time.monotonic() - start


def write_step(step: Step, held: Held, compute: Compute, group: Any = None) -> None:
    """Write what all ranks hold of a step; every rank must call it. The ranks talk over `group`.

    All files go to a temporary folder, which gets its name only after they are synced. Then steps older than the `keep`
    newest are removed. OSError on every rank if the disk refuses a file of one rank.
    """
    with _together(step.temporary, compute, group):
        if compute.main:
            shutil.rmtree(step.temporary, ignore_errors=True)
            step.temporary.mkdir(parents=True)
    with _together(step.temporary, compute, group):
        mine = _write_files(step, held, compute, group)
    hashes = {
        name: value for part in _gathered(mine, compute, group) for name, value in part.items()
    }
    with _together(step.temporary, compute, group):
        if compute.main:
            record = {
                "format": FORMAT,
                "step": step.number,
                "saved_at": time.time(),
                "world_size": compute.world_size,
                "tokenizer_hash": step.tokenizer.hash,
                "files": hashes,
                "made_with": same_run.made_with(compute),
                **step.meta,
            }
            write_meta(step.temporary, record)
            publish(step.temporary, step_dir(step.folder, step.number))
    if compute.main:
        prune(step.folder, step.keep, step.number)
    _gathered(None, compute, group)  # no rank goes on before the step has its name


@contextlib.contextmanager
def _together(temporary: Path, compute: Compute, group: Any) -> Iterator[None]:
    """Work inside this block fails on every rank if the disk fails one rank; otherwise the others would wait for it.

    What was written is removed then: a full disk must not be left fuller.
    """
    failure: OSError | None = None
    try:
        yield
    except OSError as refused:
        failure = refused
    except BaseException:
        if compute.main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    found = [(failure.errno, failure.strerror, failure.filename) if failure else None]
    found = _gathered(found[0], compute, group)
    if any(found):
        if compute.main:
            shutil.rmtree(temporary, ignore_errors=True)
        _gathered(None, compute, group)
        raise failure or OSError(*next(filter(None, found)))


def _gathered(value: Any, compute: Compute, group: Any) -> list[Any]:
    """Every rank's value, by rank."""
    values = [value] * compute.world_size
    if compute.world_size > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def _write_files(step: Step, held: Held, compute: Compute, group: Any) -> Hashes:
    """Write and sync this rank's files, the optimizer state at the same time as the model; return hashes and sizes.

    Where meta.json describes an adapter, the folder becomes one of peft's.
    """
    folder, lora = step.temporary, step.meta.get("lora")
    name = f"optim-{compute.rank:02d}-of-{compute.world_size:02d}.safetensors"
    with ThreadPoolExecutor(
        1
    ) as beside:  # one thread hashes each file, and hashing is slower than a fast disk
        state = beside.submit(_write_state, folder / name, held)
        if lora:
            whole = folder / ADAPTER
            hashes = parameter_files.write_whole(
                whole, held.parameters, compute, group, adapter.PREFIX, step.facts
            )
        elif parameter_files.in_one_file(held.parameters, step.files):
            hashes = parameter_files.write_whole(
                folder / MODEL, held.parameters, compute, group, "", {}
            )
        else:
            hashes = parameter_files.write_rows(folder, held.parameters, compute)
    hashes[name] = state.result()
    if compute.main:
        step.tokenizer.save(folder)
        hashes["tokenizer.json"] = seal(folder / "tokenizer.json")
        if lora:
            adapter.write_settings(folder, lora, step.meta["base"]["folder"])
    return hashes


def _write_state(path: Path, held: Held) -> dict[str, Any]:
    layout = {key: [list(shape), first] for key, (_, shape, first) in held.state.items()}
    tensors = {key: value.detach() for key, (value, _, _) in held.state.items()}
    return write_tensors(tensors, path, {"layout": json.dumps(layout)})

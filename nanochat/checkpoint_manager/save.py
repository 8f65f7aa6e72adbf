"""Writes a checkpoint: every rank its part, under a temporary name until all is on disk; all ranks fail if one does."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from nanochat.checkpoint_manager import same_run
from nanochat.checkpoint_manager.files import ADAPTER, FORMAT, MODEL, prune, publish, seal, step_dir, write_meta
from nanochat.checkpoint_manager.huggingface import adapter
from nanochat.checkpoint_manager.tensors import TensorFile, shapes_of, write_tensors
from nanochat.device import Compute, barrier
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

KEEP = 3  # newest steps kept of a stage

State = dict[str, tuple[Tensor, tuple[int, ...], int]]  # name -> (tensor held here, whole shape, its first row)


class Optimizers(Protocol):
    """What a checkpoint needs of the optimizers; train/optim.py has them."""

    def state(self) -> State:
        """Every tensor that a resume needs, as this rank holds it; filled in place when a checkpoint is read."""
        ...

    def saved(self) -> State:
        """The part of state() that this rank writes."""
        ...


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: Optimizers,
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    compute: Compute,
    keep: int = KEEP,
) -> float:
    """Write step `step` (the count of updates done) and return how many seconds that took; every rank must call it.

    All files go to a temporary folder, which gets its name only after they are synced. Then steps older than the `keep`
    newest are removed; 0 keeps all. OSError on every rank if the disk refuses a file of one rank.
    """
    start = time.monotonic()
    temporary = folder / f".tmp-step_{step:06d}"
    with _together(temporary, compute):
        if compute.main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    with _together(temporary, compute):
        mine = _write_files(temporary, model, optimizers, tokenizer, meta, compute)
    hashes = _of_all_ranks(mine, compute)
    with _together(temporary, compute):
        if compute.main:
            record = {"format": FORMAT, "step": step, "saved_at": time.time(), "world_size": compute.world_size,
                      "tokenizer_hash": tokenizer.hash, "files": hashes, "made_with": same_run.made_with(compute),
                      **meta}  # fmt: skip
            write_meta(temporary, record)
            publish(temporary, step_dir(folder, step))
    if compute.main:
        prune(folder, keep, step)
    barrier(compute)
    return time.monotonic() - start


@contextlib.contextmanager
def _together(temporary: Path, compute: Compute) -> Iterator[None]:
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
    found = _gathered(found[0], compute)
    if any(found):
        if compute.main:
            shutil.rmtree(temporary, ignore_errors=True)
        barrier(compute)
        raise failure or OSError(*next(filter(None, found)))


def _gathered(value: Any, compute: Compute) -> list[Any]:
    """Every rank's value, by rank."""
    values = [value] * compute.world_size
    if compute.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def _of_all_ranks(hashes: dict[str, Any], compute: Compute) -> dict[str, Any]:
    return {name: value for part in _gathered(hashes, compute) for name, value in part.items()}


def _write_files(
    folder: Path, model: nn.Module, optimizers: Optimizers, tokenizer: Tokenizer, meta: dict[str, Any], compute: Compute
) -> dict[str, dict[str, Any]]:
    """Write and sync this rank's files, the optimizer state at the same time as the model; return hashes and sizes.

    Where meta.json describes an adapter, the folder becomes one of peft's.
    """
    lora = meta.get("lora")
    place, prefix, facts = folder / MODEL, "", {}
    if lora:
        place, prefix, facts = folder / ADAPTER, adapter.PREFIX, adapter.facts(model)
    name = f"optim-{compute.rank:02d}-of-{compute.world_size:02d}.safetensors"
    with ThreadPoolExecutor(1) as beside:  # one thread hashes each file, and hashing is slower than a fast disk
        state = beside.submit(_write_state, folder / name, optimizers)
        hashes = _write_model(place, model, compute, prefix, facts)
    hashes[name] = state.result()
    if compute.main:
        tokenizer.save(folder)
        hashes["tokenizer.json"] = seal(folder / "tokenizer.json")
        if lora:
            adapter.write_settings(folder, lora, meta["base"]["folder"])
    return hashes


def _write_state(path: Path, optimizers: Optimizers) -> dict[str, Any]:
    state = optimizers.saved()
    layout = {key: [list(shape), first] for key, (_, shape, first) in state.items()}
    tensors = {key: value.detach() for key, (value, _, _) in state.items()}
    return write_tensors(tensors, path, {"layout": json.dumps(layout)})


def _write_model(
    path: Path, model: nn.Module, compute: Compute, prefix: str, facts: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Write the parameters on rank 0 as they arrive from all ranks; the other ranks only help to gather them.

    Every name gets a prefix, and the file says the facts about itself.
    """
    file, failure = None, None
    for key, rows in parallel.parameter_rows(model):
        compute.pulse.beat()
        if compute.main and failure is None:
            try:
                if file is None:
                    named = ((prefix + name, value) for name, value in parallel.trained(model))
                    file = TensorFile(path, shapes_of(named), facts)
                file.add(prefix + key, rows)
            except OSError as refused:  # the other ranks must still gather
                failure = refused
    if file is None:
        if failure is not None:
            raise failure
        return {}
    if failure is not None:
        file.abandon()
        raise failure
    return {path.name: file.close()}

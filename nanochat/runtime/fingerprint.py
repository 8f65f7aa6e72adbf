"""Refuses ranks that were started differently, before the first step: they would hang, or train different models."""

import functools
import hashlib
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat.common import UserError, base_dir, tr
from nanochat.device import Compute

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("nanochat", "scripts", "tasks")
NAMED = 4  # number of differences that the refusal names


def code() -> dict[str, str]:
    """A hash of every Python file of this project's packages, by the file's name."""
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): _digest(path) for path in files}


@functools.lru_cache(maxsize=1)
def loaded() -> dict[str, str]:
    """A hash of every file of those packages that this process has loaded, by its name, as of the first call."""
    names = {
        Path(file).resolve()
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None))
    }
    folders = [ROOT / package for package in PACKAGES]
    ours = [path for path in sorted(names) if any(folder in path.parents for folder in folders)]
    return {
        path.relative_to(ROOT).as_posix(): _digest(path) for path in ours if path.suffix == ".py"
    }


@functools.lru_cache(maxsize=1)
def not_loaded() -> dict[str, str]:
    """A hash of every other file of those packages, by its name, as of the first call."""
    return {name: digest for name, digest in code().items() if name not in loaded()}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def check_start(settings: Mapping[str, Any], compute: Compute) -> None:
    """Refuse ranks whose flags (with the seed), tokenizer, code, torch, number format or base folder differ.

    Every rank must call it. The code is hashed now, for checkpoints, since files may be edited while the run trains.
    """
    loaded()
    not_loaded()
    if compute.world_size == 1:
        return
    started = {
        "torch": torch.__version__,
        "device": compute.device_type,
        "number format": str(compute.dtype),
        "ranks on its host": os.environ.get("LOCAL_WORLD_SIZE"),
    }
    flags = {f"setting {name}": value for name, value in settings.items()}
    check({**flags, **started, **code()}, compute)
    _check_folder(compute)


def check(facts: Mapping[str, Any], compute: Compute) -> None:
    """Raise a UserError on every rank that names the ranks whose facts differ from those of rank 0."""
    if compute.world_size == 1:
        return
    mine = {name: str(value) for name, value in facts.items()}
    ranks: list[dict[str, str]] = [{} for _ in range(compute.world_size)]
    dist.all_gather_object(ranks, mine)
    differences = [
        f"{name} is {other.get(name, 'missing')} on rank {rank}, {ranks[0].get(name, 'missing')} on rank 0"
        for rank, other in enumerate(ranks)
        for name in sorted({*other, *ranks[0]})
        if other.get(name) != ranks[0].get(name)
    ]
    if differences:
        more = (
            tr("; and {count} more", count=len(differences) - NAMED)
            if len(differences) > NAMED
            else ""
        )
        raise UserError(
            tr(
                "the ranks were not started alike: {differences}. Start all of them with the same command, code and "
                "data.",
                differences="; ".join(differences[:NAMED]) + more,
            )
        )


def _check_folder(compute: Compute) -> None:
    """UserError if a rank does not see the base folder of rank 0, in which all ranks write checkpoints."""
    names = [f".start-{uuid.uuid4().hex}"]
    token = base_dir() / names[0]
    if compute.main:
        token.touch()
    try:
        dist.broadcast_object_list(names, src=0)
        seen = [False] * compute.world_size
        dist.all_gather_object(seen, (base_dir() / names[0]).exists())
    finally:
        token.unlink(missing_ok=True)
    if blind := [rank for rank, sees in enumerate(seen) if not sees]:
        raise UserError(
            tr(
                "rank(s) {ranks} do not see the base folder of rank 0. Set NANOCHAT_BASE_DIR to a folder on a disk that "
                "all hosts share; on rank {rank} it is {folder}.",
                ranks=", ".join(map(str, blind)),
                rank=compute.rank,
                folder=base_dir(),
            )
        )

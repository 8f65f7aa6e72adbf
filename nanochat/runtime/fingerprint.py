"""Refuses to run ranks that were started differently, since they would hang or diverge."""

import functools
import hashlib
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat.common import UserError, base_dir, tr
from nanochat.device import Compute
from nanochat.runtime import parallel

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("nanochat", "scripts", "tasks")
NAMED = 4  # the largest number of differences that the error message lists


def code() -> dict[str, str]:
    """Return a dict from the path of every Python file in this project's packages to its hash."""
    hashes = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            hashes[path.relative_to(ROOT).as_posix()] = _digest(path)
    return hashes


@functools.lru_cache(maxsize=1)
def loaded() -> dict[str, str]:
    """Return the hashes, by path, of this project's files that this process has loaded.

    Later calls return the same dict as the first, whatever has been loaded since.
    """
    folders = [ROOT / package for package in PACKAGES]
    paths = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file:
            paths.add(Path(file).resolve())
    hashes = {}
    for path in sorted(paths):
        is_ours = any(folder in path.parents for folder in folders)
        if is_ours and path.suffix == ".py":
            hashes[path.relative_to(ROOT).as_posix()] = _digest(path)
    return hashes


@functools.lru_cache(maxsize=1)
def not_loaded() -> dict[str, str]:
    """Return the hashes, by path, of this project's files that loaded() does not contain.

    Later calls return the same dict as the first.
    """
    return {name: digest for name, digest in code().items() if name not in loaded()}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def check_start(settings: Mapping[str, Any], compute: Compute) -> None:
    """Raise UserError if the ranks differ in settings, code, torch, number format or base folder.

    The kind of device and the number of ranks on each host must agree, too. Every rank must call
    this. It also hashes the code now, for later checkpoints, since files may be edited while the
    run trains.
    """
    loaded()
    not_loaded()
    if compute.world_size == 1:
        return
    facts = {f"setting {name}": value for name, value in settings.items()}
    facts |= {
        "torch": torch.__version__,
        "device": compute.device_type,
        "number format": str(compute.dtype),
    }
    _check_hosts(compute)
    check({**facts, **code()}, compute)
    _check_folder(compute)


def _check_hosts(compute: Compute) -> None:
    """Raise UserError on every rank if hosts have different numbers of ranks.

    They would split the model over the ranks in different ways.
    """
    counts = [0] * compute.world_size
    dist.all_gather_object(counts, parallel.ranks_per_host(compute))
    if len(set(counts)) > 1:
        raise UserError(
            tr(
                "every host must start the same number of ranks, but some start {least} and others "
                "{most}. Start the command on every host with NPROC_PER_NODE={least} (the scripts in "
                "runs/) or --nproc_per_node={least} (torchrun)",
                least=min(counts),
                most=max(counts),
            ),
            exit_code=2,
        )


def check(facts: Mapping[str, Any], compute: Compute) -> None:
    """Raise UserError on every rank if any rank's facts differ from those of rank 0."""
    if compute.world_size == 1:
        return
    facts_of_rank = {name: str(value) for name, value in facts.items()}
    ranks: list[dict[str, str]] = [{} for _ in range(compute.world_size)]
    dist.all_gather_object(ranks, facts_of_rank)
    differences = _differences(ranks)
    if differences:
        text = "; ".join(differences[:NAMED])
        if len(differences) > NAMED:
            text += tr("; and {count} more", count=len(differences) - NAMED)
        raise UserError(
            tr(
                "the ranks were not started alike: {differences}. Start all of them with the same "
                "command, code and data.",
                differences=text,
            )
        )


def _differences(ranks: list[dict[str, str]]) -> list[str]:
    """Return a phrase for each fact in which a rank differs from rank 0."""
    differences = []
    for rank, facts in enumerate(ranks):
        for name in sorted({*facts, *ranks[0]}):
            value = facts.get(name, "missing")
            value_of_rank_0 = ranks[0].get(name, "missing")
            if value != value_of_rank_0:
                difference = tr(
                    "{name} is {value} on rank {rank}, {value_of_rank_0} on rank 0",
                    name=name,
                    value=value,
                    rank=rank,
                    value_of_rank_0=value_of_rank_0,
                )
                differences.append(difference)
    return differences


def _check_folder(compute: Compute) -> None:
    """Raise UserError on every rank if any rank does not see the base folder of rank 0.

    Checkpoints are written to that folder.
    """
    names = [f".start-{uuid.uuid4().hex}"]
    token = base_dir() / names[0]
    if compute.main:
        token.touch()
    try:
        dist.broadcast_object_list(names, src=0)
        sees_token = [False] * compute.world_size
        dist.all_gather_object(sees_token, (base_dir() / names[0]).exists())
    finally:
        token.unlink(missing_ok=True)
    blind_ranks = [str(rank) for rank, sees in enumerate(sees_token) if not sees]
    if blind_ranks:
        raise UserError(
            tr(
                "rank(s) {ranks} do not see the base folder of rank 0. Set NANOCHAT_BASE_DIR to a "
                "folder on a disk that all hosts share; on rank {rank} it is {folder}.",
                ranks=", ".join(blind_ranks),
                rank=compute.rank,
                folder=base_dir(),
            )
        )

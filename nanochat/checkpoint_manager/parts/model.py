"""Writes the parameters of a step: rank 0 one file with all rows, or each rank a file with the rows that it holds."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.checkpoint_manager.files import seal
from nanochat.checkpoint_manager.parts.index import INDEX, Places, part_name, write_index
from nanochat.checkpoint_manager.tensors import TensorFile, write_tensors
from nanochat.device import Compute
from nanochat.runtime.parallel import Part

Files = Literal["auto", "one", "per_rank"]
Hashes = dict[str, dict[str, Any]]  # file -> its SHA-256 and size

# Bytes of parameters up to which `auto` writes one file. Hugging Face splits larger models too; and as rank 0 takes all
# rows of the one file over the network and hashes them with one thread, 5 GB take it several seconds.
ONE_FILE = 5_000_000_000


def in_one_file(parameters: Mapping[str, Part], asked: Files) -> bool:
    """Whether the parameters go to one file: as asked, or for `auto` by their size and by how many ranks hold them."""
    if asked != "auto":
        return asked == "one"
    size = sum(part.size for part in parameters.values())
    return size <= ONE_FILE or len(_writers(parameters)) == 1


def _writers(parameters: Mapping[str, Part]) -> list[int]:
    """The ranks that hold rows of a copy, in the order of the rows; rank 0 is one of them."""
    return sorted({rank for part in parameters.values() for rank, rows in part.owners if rows})


def write_rows(folder: Path, parameters: Mapping[str, Part], compute: Compute) -> Hashes:
    """Write the rows that this rank holds to a file of its own, and on rank 0 the index of all files too."""
    writers = _writers(parameters)
    names = {rank: part_name(number, len(writers)) for number, rank in enumerate(writers)}
    if compute.rank not in names:
        return {}
    mine = names[compute.rank]
    held = {name: part.here for name, part in parameters.items() if len(part.here)}
    hashes = {mine: write_tensors(held, folder / mine, {"format": "pt"}, compute.pulse.beat)}
    if compute.main:
        places: Places = {}
        for name, part in parameters.items():
            end = 0
            for rank, rows in part.owners:
                if rows:
                    places.setdefault(name, []).append((names[rank], end, end + rows))
                    end += rows
        write_index(folder, places, sum(part.size for part in parameters.values()))
        hashes[INDEX] = seal(folder / INDEX)
    return hashes


def write_whole(
    path: Path,
    parameters: Mapping[str, Part],
    compute: Compute,
    group: Any,
    prefix: str,
    facts: dict[str, str],
) -> Hashes:
    """Write the parameters on rank 0 as they arrive from their owners; the other ranks only send what they hold.

    Every name gets a prefix, and the file says the facts about itself. Rank 0 holds at most one rank's rows of one
    parameter besides its own.
    """
    file, failure = None, None
    shapes = {prefix + name: (part.here.dtype, part.shape) for name, part in parameters.items()}
    for name, part in sorted(parameters.items(), key=lambda item: -item[1].here.dtype.itemsize):
        compute.pulse.beat()
        for rows in _arriving(part, compute, group):
            try:
                if failure is None:
                    file = file or TensorFile(path, shapes, facts)
                    file.add(prefix + name, rows)
            except OSError as refused:  # the other ranks must still send
                failure = refused
    if failure is not None:
        if file is not None:
            file.abandon()
        raise failure
    return {path.name: file.close()} if file is not None else {}


def _arriving(part: Part, compute: Compute, group: Any) -> Iterator[Tensor]:
    """On rank 0 the rows of every owner, in order; another owner sends its rows, and gets none."""
    for owner, rows in part.owners:
        if owner == compute.rank == 0 and rows:
            yield part.here
        elif compute.main and rows:
            arrived = torch.empty((rows, *part.shape[1:]), dtype=part.here.dtype)
            dist.recv(_bytes(arrived), src=owner, group=group)
            yield arrived
        elif owner == compute.rank and rows:
            dist.send(_bytes(part.here.cpu().contiguous()), dst=0, group=group)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)

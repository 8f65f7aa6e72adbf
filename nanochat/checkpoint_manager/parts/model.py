"""Reads and writes the parameters of a step, in a single file or in one file per rank.

Rank 0 writes the single file. Otherwise each rank that holds rows of rank 0's copy of the model
writes them to a file of its own. Files are mapped into memory for reading, so that a rank reads
only the rows that it needs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.checkpoint_manager.files import ADAPTER, ADAPTER_PREFIX, MODEL, seal
from nanochat.checkpoint_manager.parts.index import (
    INDEX,
    Piece,
    part_name,
    read_index,
    write_index,
)
from nanochat.checkpoint_manager.tensors import TensorFile, read_tensors, write_tensors
from nanochat.common import UserError, tr
from nanochat.data.library_words import in_words
from nanochat.device import Compute
from nanochat.runtime.parallel import ParameterShard, Rows

Files = Literal["auto", "one", "per_rank"]
Shards = Mapping[str, ParameterShard]  # by the name of the parameter
Seals = dict[str, dict[str, Any]]  # file -> its SHA-256 and size

# The largest size of parameters, in bytes, that `auto` writes to a single file. Hugging Face splits
# larger models too. Rank 0 receives all rows of a single file over the network and hashes them in
# one thread, which takes several seconds for 5 GB.
ONE_FILE = 5_000_000_000


# --- writing -------------------------------------------------------------------------------------


def in_one_file(shards: Shards, files: Files) -> bool:
    """Return whether the parameters go into a single file.

    If `files` is "auto", they do if they take at most 5 GB or if a single rank holds them all.
    """
    if files != "auto":
        return files == "one"
    size = sum(shard.size for shard in shards.values())
    return size <= ONE_FILE or len(_writers(shards)) == 1


def _writers(shards: Shards) -> list[int]:
    """Return the ranks that together hold rank 0's copy of the model, in ascending order."""
    owners = [owner for shard in shards.values() for owner in shard.owners]
    return sorted({rank for rank, row_count in owners if row_count})


def write_rows(folder: Path, shards: Shards, compute: Compute) -> Seals:
    """Write this rank's rows to a file, and return the hash and size of each file written, by name.

    Rank 0 also writes the index of all files. A rank that holds no rows of rank 0's copy of the
    model writes nothing, and returns {}.
    """
    writers = _writers(shards)
    file_names = {}
    for number, rank in enumerate(writers):
        file_names[rank] = part_name(number, len(writers))
    if compute.rank not in file_names:
        return {}
    file_name = file_names[compute.rank]
    rows = {name: shard.rows for name, shard in shards.items() if len(shard.rows)}
    path = folder / file_name
    seals = {file_name: write_tensors(rows, path, {"format": "pt"}, compute.pulse.beat)}
    if compute.main:
        places = {name: _places(shard, file_names) for name, shard in shards.items()}
        size = sum(shard.size for shard in shards.values())
        write_index(folder, places, size)
        seals[INDEX] = seal(folder / INDEX)
    return seals


def _places(shard: ParameterShard, file_names: Mapping[int, str]) -> list[Piece]:
    """Return the pieces of a parameter, one per file that holds rows of it."""
    pieces = []
    first = 0
    for rank, row_count in shard.owners:
        if row_count:
            end = first + row_count
            pieces.append(Piece(file_names[rank], first, end))
            first = end
    return pieces


def write_whole(
    path: Path,
    shards: Shards,
    compute: Compute,
    group: Any,
    prefix: str,
    facts: dict[str, str],
) -> Seals:
    """Write all parameters to a single file on rank 0, and return its hash and size, by file name.

    The other ranks send the rows that rank 0 lacks, and return {}. `prefix` begins every name in
    the file, and `facts` are its metadata. Rank 0 receives the rows of one rank and one parameter
    at a time. Raises OSError on rank 0 if the disk refuses a write.
    """
    file: TensorFile | None = None
    failure: OSError | None = None
    shapes = {}
    for name, shard in shards.items():
        shapes[prefix + name] = (shard.rows.dtype, shard.shape)
    widest_first = sorted(shards, key=lambda name: -shards[name].rows.dtype.itemsize)
    for name in widest_first:
        shard = shards[name]
        compute.pulse.beat()
        for rows in _gathered_rows(shard, compute, group):
            try:
                if failure is None:
                    file = file or TensorFile(path, shapes, facts)
                    file.add(prefix + name, rows)
            except OSError as refusal:  # the other ranks still send, so rank 0 must still receive
                failure = refusal
    if failure is not None:
        if file is not None:
            file.abandon()
        raise failure
    return {path.name: file.close()} if file is not None else {}


def _gathered_rows(shard: ParameterShard, compute: Compute, group: Any) -> Iterator[Tensor]:
    """Yield a parameter's rows on rank 0, rank by rank. Other owners send theirs and yield none."""
    for owner, row_count in shard.owners:
        if not row_count:
            continue
        if owner == compute.rank == 0:
            yield shard.rows
        elif compute.main:
            shape = (row_count, *shard.shape[1:])
            received = torch.empty(shape, dtype=shard.rows.dtype)
            dist.recv(_bytes(received), src=owner, group=group)
            yield received
        elif owner == compute.rank:
            rows = shard.rows.cpu().contiguous()
            dist.send(_bytes(rows), dst=0, group=group)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitParameter:
    """A parameter whose rows are in several files, which are mapped into memory."""

    pieces: tuple[Tensor, ...]  # in the order of the rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        rows = sum(len(piece) for piece in self.pieces)
        return (rows, *self.pieces[0].shape[1:])

    def __getitem__(self, rows: slice) -> Tensor:
        """Return a range of rows, reading only these from the files."""
        first, end, _ = rows.indices(self.shape[0])
        selected_rows = []
        start = 0
        for piece in self.pieces:
            first_here = max(first - start, 0)
            end_here = max(end - start, 0)
            selected_rows.append(piece[first_here:end_here])
            start += len(piece)
        return torch.cat(selected_rows)


def read_parameters(folder: Path) -> Mapping[str, Rows]:
    """Return the parameters in the folder of a step under our names, mapped into memory.

    They are those of an adapter if the folder holds one, else those of a whole model. Raises
    UserError if a file is missing or damaged.
    """
    if (folder / ADAPTER).is_file():
        tensors = read_tensors(folder / ADAPTER)
        return {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in tensors.items()}
    if (folder / INDEX).is_file():
        return _read_all_files(folder)
    return read_tensors(folder / MODEL)


def _read_all_files(folder: Path) -> dict[str, Rows]:
    """Return the parameters of a step that has one file per rank.

    Raises UserError if the index is damaged, or if a file is missing or damaged.
    """
    try:
        places = read_index(folder)
        files = {piece.file for pieces in places.values() for piece in pieces}
        contents = {file: read_tensors(folder / file) for file in sorted(files)}
        return {name: _joined(name, pieces, contents) for name, pieces in places.items()}
    except UserError:
        raise
    except ValueError as failure:
        raise UserError(
            tr(
                "{folder}: {failure}. Delete this folder to use the step before it, or copy "
                "it again",
                folder=folder,
                failure=in_words(failure),
            )
        ) from failure


def _joined(
    name: str,
    pieces: list[Piece],
    contents: Mapping[str, dict[str, Tensor]],  # file -> its tensors
) -> Rows:
    """Return a parameter joined from its pieces.

    Raises ValueError if a file lacks the parameter, or if several pieces hold other rows than the
    index names, or differ in number format or in the shape of a row.
    """
    tensors = []
    for piece in pieces:
        content = contents[piece.file]
        if name not in content:
            raise ValueError(
                tr(
                    "{index} names {file} for {name}, which that file does not hold",
                    index=INDEX,
                    file=piece.file,
                    name=name,
                )
            )
        tensors.append(content[name])
    if len(tensors) == 1:
        return tensors[0]
    kinds = {(tensor.shape[1:], tensor.dtype) for tensor in tensors}
    row_counts = [len(tensor) for tensor in tensors]
    ends = [piece.first + rows for piece, rows in zip(pieces, row_counts, strict=True)]
    if len(kinds) > 1 or ends != [piece.end for piece in pieces]:
        raise ValueError(
            tr("the files hold other rows of {name} than {index} says", name=name, index=INDEX)
        )
    return SplitParameter(tuple(tensors))

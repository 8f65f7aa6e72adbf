"""Reads the parameters of a step in any of its forms, and of them only the rows that are asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanochat.checkpoint_manager.files import ADAPTER, MODEL
from nanochat.checkpoint_manager.huggingface.adapter import PREFIX
from nanochat.checkpoint_manager.parts.index import INDEX, read_index
from nanochat.checkpoint_manager.tensors import read_tensors
from nanochat.common import UserError
from nanochat.runtime.parallel import Rows


@dataclass(frozen=True)
class Split:
    """A parameter whose rows lie in several files, mapped into memory."""

    pieces: tuple[Tensor, ...]  # in the order of the rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return (sum(len(piece) for piece in self.pieces), *self.pieces[0].shape[1:])

    def __getitem__(self, rows: slice) -> Tensor:
        """Some rows; only they are read."""
        first, end, _ = rows.indices(self.shape[0])
        found, start = [], 0
        for piece in self.pieces:
            found.append(piece[max(first - start, 0) : max(end - start, 0)])
            start += len(piece)
        return torch.cat(found)


def read_parameters(folder: Path) -> Mapping[str, Rows]:
    """The parameters of a step under our names: of the whole model, from one file or from those of all ranks, or of the
    adapter alone. They are mapped into memory. UserError if a file is missing or damaged."""
    if (folder / ADAPTER).is_file():
        return {
            name.removeprefix(PREFIX): value
            for name, value in read_tensors(folder / ADAPTER).items()
        }
    if (folder / INDEX).is_file():
        return _of_all_ranks(folder)
    return read_tensors(folder / MODEL)


def _of_all_ranks(folder: Path) -> dict[str, Rows]:
    try:
        places = read_index(folder)
        files = sorted({file for pieces in places.values() for file, _, _ in pieces})
        held = {file: read_tensors(folder / file) for file in files}
        return {name: _joined(name, pieces, held) for name, pieces in places.items()}
    except ValueError as failure:
        if isinstance(failure, UserError):
            raise
        raise UserError(
            f"{folder}: {failure}. Delete this folder to use the step before it, or copy it again"
        ) from failure


def _joined(
    name: str, pieces: list[tuple[str, int, int | None]], held: Mapping[str, dict[str, Tensor]]
) -> Rows:
    """The pieces of a parameter as one. ValueError if they are not what the index says, or do not fit each other."""
    if lacking := [file for file, _, _ in pieces if name not in held[file]]:
        raise ValueError(f"{INDEX} names {lacking[0]} for {name}, which that file does not hold")
    found = tuple(held[file][name] for file, _, _ in pieces)
    if len(found) == 1:
        return found[0]
    ends = [first + len(piece) for piece, (_, first, _) in zip(found, pieces, strict=True)]
    if (
        ends != [end for _, _, end in pieces]
        or len({(piece.shape[1:], piece.dtype) for piece in found}) > 1
    ):
        raise ValueError(f"the files hold other rows of {name} than {INDEX} says")
    return Split(found)

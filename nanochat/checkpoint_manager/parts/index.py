"""The index of a step that is split into several files: which file holds which rows.

The format is Hugging Face's index, extended by the rows of the parameters that are split:

    {"metadata": {"total_size": 4096,
                  "rows": {"wte.weight": {"model-00001-of-00002.safetensors": [0, 128],
                                          "model-00002-of-00002.safetensors": [128, 256]}}},
     "weight_map": {"wte.weight": "model-00001-of-00002.safetensors"}}

As in Hugging Face's format, `weight_map` names one file for each parameter: the file with the first
rows. For a parameter that is in several files, `rows` gives the range of rows [first, end) in each.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import parse_json, tr, write_json

INDEX = "model.safetensors.index.json"


class Piece(NamedTuple):
    """The rows of a parameter that one file holds."""

    file: str
    first: int
    end: int | None  # None: one file holds the whole parameter


Places = dict[str, list[Piece]]  # parameter -> its pieces, in the order of the rows


def part_name(number: int, count: int) -> str:
    """Return the name of the parameter file at index `number`, out of `count` files.

    Indices begin at 0, but the numbers in the names begin at 1.
    """
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, places: Places, size: int) -> None:
    """Write the index file atomically; `size` is the total size of the parameters in bytes."""
    rows: dict[str, dict[str, list[Any]]] = {}
    weight_map = {}
    for name, pieces in places.items():
        weight_map[name], _, _ = pieces[0]
        if len(pieces) > 1:
            rows[name] = {}
            for file, first, end in pieces:
                rows[name][file] = [first, end]
    metadata = {"total_size": size, "rows": rows}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def read_index(folder: Path) -> Places:
    """Read the index in a folder, and return a dict with the pieces of each parameter.

    Raises ValueError, with the reason, if the index is damaged or names a file that is missing.
    """
    try:
        content = parse_json((folder / INDEX).read_bytes())
        rows = content["metadata"].get("rows", {})
        places = {}
        for name, file in content["weight_map"].items():
            places[name] = _pieces(file, rows.get(name))
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ValueError(
            tr(
                "{index} is not an index of safetensors files ({failure!r})",
                index=INDEX,
                failure=failure,
            )
        ) from failure
    for name, pieces in places.items():
        _check_pieces(folder, name, pieces)
    return places


def _pieces(file: Any, rows: Mapping[str, Any] | None) -> list[Piece]:
    """Return the pieces of a parameter from its entries in `weight_map` and `rows`.

    Raises TypeError if an entry has the wrong form.
    """
    if not isinstance(file, str):
        raise TypeError(f"{file!r} is not the name of a file")
    if rows is None:
        return [Piece(file, 0, None)]
    pieces = []
    for part, (first, end) in rows.items():
        if type(first) is not int or type(end) is not int:
            raise TypeError(f"{rows!r} is not a list of rows")
        pieces.append(Piece(part, first, end))
    if not pieces:
        raise TypeError(f"{rows!r} is not a list of rows")
    return sorted(pieces, key=lambda piece: piece.first)


def _check_pieces(folder: Path, name: str, pieces: list[Piece]) -> None:
    """Raise ValueError if a file is missing or outside `folder`, or if rows are not contiguous."""
    next_row: int | None = 0
    for file, first, end in pieces:
        if Path(file).name != file:
            raise ValueError(
                tr(
                    "{index} names {file}, which lies outside its folder",
                    index=INDEX,
                    file=json.dumps(file),
                )
            )
        if not (folder / file).is_file():
            raise ValueError(
                tr(
                    "{index} names {file} for {name}, and that file is missing",
                    index=INDEX,
                    file=file,
                    name=name,
                )
            )
        if first != next_row:
            raise ValueError(
                tr("{index} has a gap between the rows of {name}", index=INDEX, name=name)
            )
        next_row = end

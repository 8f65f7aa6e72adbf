"""Which file of a step holds which rows of which parameter: Hugging Face's index, with the rows of parameters that
several ranks hold.

    {"metadata": {"total_size": 4096, "rows": {"wte.weight": {"model-00001-of-00002.safetensors": [0, 128],
                                                              "model-00002-of-00002.safetensors": [128, 256]}}},
     "weight_map": {"wte.weight": "model-00001-of-00002.safetensors"}}

weight_map names one file for each parameter, as Hugging Face has it: the file with the first rows. A parameter that
lies whole in that file needs nothing else; `rows` has an entry [first, end) for each file of any other.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.common import parse_json, write_json

INDEX = "model.safetensors.index.json"

Places = dict[
    str, list[tuple[str, int, int]]
]  # parameter -> (file, first row, end), in the order of the rows


def part_name(number: int, count: int) -> str:
    """The name of the file of part `number` of `count`, counted from 0 here and from 1 in the name."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, places: Places, size: int) -> None:
    """Write the index of files that hold `size` bytes of parameters, atomically."""
    rows = {
        name: {file: [first, end] for file, first, end in pieces}
        for name, pieces in places.items()
        if len(pieces) > 1
    }
    weight_map = {name: pieces[0][0] for name, pieces in places.items()}
    write_json(
        folder / INDEX, {"metadata": {"total_size": size, "rows": rows}, "weight_map": weight_map}
    )


def read_index(folder: Path) -> dict[str, list[tuple[str, int, int | None]]]:
    """The files of each parameter with their rows; the end is None where one file has the whole parameter. ValueError,
    which says why, if the index is damaged or names a file that is not there."""
    try:
        content = parse_json((folder / INDEX).read_bytes())
        rows = content["metadata"].get("rows", {})
        places = {
            name: _pieces(file, rows.get(name)) for name, file in content["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ValueError(f"{INDEX} is no index of safetensors files ({failure!r})") from failure
    for name, pieces in places.items():
        for file, _, _ in pieces:
            if Path(file).name != file:
                raise ValueError(f"{INDEX} names {json.dumps(file)}, which lies outside its folder")
            if not (folder / file).is_file():
                raise ValueError(f"{INDEX} names {file} for {name}, and that file is missing")
        ends = [0, *(end for _, _, end in pieces)]
        if any(first != before for (_, first, _), before in zip(pieces, ends, strict=False)):
            raise ValueError(f"{INDEX} has a gap between the rows of {name}")
    return places


def _pieces(file: Any, rows: Mapping[str, Any] | None) -> list[tuple[str, int, int | None]]:
    if not isinstance(file, str):
        raise TypeError(f"{file!r} is no name of a file")
    if rows is None:
        return [(file, 0, None)]
    if not rows or any(type(row) is not int for pair in rows.values() for row in pair):
        raise TypeError(f"{rows!r} are no rows")
    return sorted(
        ((name, first, end) for name, (first, end) in rows.items()), key=lambda piece: piece[1]
    )

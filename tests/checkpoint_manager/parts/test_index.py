"""The index of a step whose ranks wrote a file each: what it says, and what is wrong with a damaged one."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.parts.index import INDEX, part_name, read_index, write_index

ONE, TWO = (part_name(number, 2) for number in range(2))
PLACES = {"wte.weight": [(ONE, 0, 3), (TWO, 3, 5)], "gate": [(TWO, 0, 3)]}


def written(folder: Path, **changes: Any) -> Path:
    """A folder with an index of two files, changed by hand."""
    for name in (ONE, TWO):
        (folder / name).touch()
    write_index(folder, PLACES, 4096)
    if changes:
        content = json.loads((folder / INDEX).read_text())
        content["weight_map"] |= changes.pop("weight_map", {})
        content["metadata"]["rows"] |= changes.pop("rows", {})
        (folder / INDEX).write_text(json.dumps(content | changes))
    return folder


def test_the_index_is_hugging_faces_with_the_rows_of_split_parameters(tmp_path: Path) -> None:
    assert (ONE, TWO) == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    content = json.loads((written(tmp_path) / INDEX).read_text())
    assert content == {
        "metadata": {"total_size": 4096, "rows": {"wte.weight": {ONE: [0, 3], TWO: [3, 5]}}},
        "weight_map": {"wte.weight": ONE, "gate": TWO},
    }
    assert read_index(tmp_path) == {"wte.weight": [(ONE, 0, 3), (TWO, 3, 5)], "gate": [(TWO, 0, None)]}


def test_an_index_of_another_program_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    (tmp_path / INDEX).write_text('{"metadata": {"total_size": 8}, "weight_map": {"a": "x.safetensors"}}')
    assert read_index(tmp_path) == {"a": [("x.safetensors", 0, None)]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metadata": 3}, "not an index of safetensors files"),
        ({"weight_map": {"gate": 3}}, "not an index of safetensors files"),
        ({"rows": {"wte.weight": {ONE: [0, "x"]}}}, "not an index of safetensors files"),
        ({"rows": {"wte.weight": {}}}, "not an index of safetensors files"),
        ({"rows": {"wte.weight": [ONE]}}, "not an index of safetensors files"),
        ({"weight_map": {"gate": "../x"}}, r'names "../x", which lies outside its folder'),
        ({"weight_map": {"gate": "gone"}}, "names gone for gate, and that file is missing"),
        ({"rows": {"wte.weight": {ONE: [0, 3], TWO: [4, 5]}}}, "a gap between the rows of wte.weight"),
        ({"rows": {"wte.weight": {ONE: [1, 3], TWO: [3, 5]}}}, "a gap between the rows of wte.weight"),
    ],
)
def test_a_damaged_index_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_index(written(tmp_path, **changes))


def test_an_index_that_is_not_json(tmp_path: Path) -> None:
    (written(tmp_path) / INDEX).write_text('{"metadata"')
    with pytest.raises(ValueError, match="not an index of safetensors files"):
        read_index(tmp_path)

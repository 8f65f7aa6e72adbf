"""The parameters of a step: the form that ranks write, and rows read from one file or from the files of all ranks.

tests/checkpoint_manager/test_ranks.py reads what ranks write.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanochat.checkpoint_manager.parts.index import part_name, write_index
from nanochat.checkpoint_manager.parts.model import ONE_FILE, Files, SplitParameter, in_one_file, read_parameters
from nanochat.checkpoint_manager.save import refuse_parts_of_adapter
from nanochat.common import UserError
from nanochat.runtime.parallel import ParameterShard

FILES = [part_name(number, 3) for number in range(3)]
WHOLE = torch.arange(35.0).view(7, 5)


def shards(size: int, *rows: int) -> dict[str, ParameterShard]:
    """A parameter of so many bytes, whose rows so many ranks hold."""
    local_rows = torch.empty(rows[0], 1, device="meta")
    return {"wte.weight": ParameterShard(local_rows, (size // 4, 1), tuple(enumerate(rows)))}


@pytest.mark.parametrize(
    ("size", "rows", "asked", "one"),
    [
        (ONE_FILE, (5, 5), "auto", True),
        (ONE_FILE + 4, (5, 5), "auto", False),
        (ONE_FILE + 4, (5,), "auto", True),
        (ONE_FILE + 4, (5, 0), "auto", True),
        (ONE_FILE + 4, (5, 5), "one", True),
        (40, (5, 5), "per_rank", False),
        (40, (5,), "per_rank", False),
    ],
)
def test_auto_splits_what_is_large_and_held_by_many(size: int, rows: tuple[int, ...], asked: Files, one: bool) -> None:
    assert in_one_file(shards(size, *rows), asked) is one


def test_an_adapter_is_one_file() -> None:
    refuse_parts_of_adapter("one")
    refuse_parts_of_adapter("auto")
    with pytest.raises(
        UserError, match=r"--checkpoint_files=per_rank is for whole models.*Leave --checkpoint_files out"
    ):
        refuse_parts_of_adapter("per_rank")


def written(folder: Path, pieces: list[Tensor]) -> Path:
    """A folder with rows 0-3, 3-6 and 6-7 of one parameter, as the index says whatever the files hold."""
    for name, piece in zip(FILES, pieces, strict=True):
        save_file({"a": piece.contiguous()}, folder / name)
    ends = [0, 3, 6, 7]
    write_index(folder, {"a": list(zip(FILES, ends, ends[1:], strict=False))}, WHOLE.nbytes)
    return folder


def test_any_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    found = read_parameters(written(tmp_path, list(WHOLE.split(3))))["a"]
    assert isinstance(found, SplitParameter) and found.shape == (7, 5)
    for first in range(8):
        for end in range(first, 9):
            assert torch.equal(found[first:end], WHOLE[first:end])
    assert torch.equal(found[:], WHOLE)


@pytest.mark.parametrize(
    "pieces",
    [
        [WHOLE[:3], WHOLE[3:5], WHOLE[5:]],
        [WHOLE[:3], WHOLE[3:6, :4], WHOLE[6:]],
        [WHOLE[:3], WHOLE[3:6].bfloat16(), WHOLE[6:]],
    ],
)
def test_files_that_hold_other_rows_are_refused(tmp_path: Path, pieces: list[Tensor]) -> None:
    with pytest.raises(UserError, match=r"the files hold other rows of a than model.safetensors.index.json says.*the"):
        read_parameters(written(tmp_path, pieces))


def test_a_file_that_lacks_the_parameter_is_refused(tmp_path: Path) -> None:
    written(tmp_path, list(WHOLE.split(3)))
    save_file({"b": WHOLE[3:6]}, tmp_path / FILES[1])
    with pytest.raises(UserError, match=f"names {FILES[1]} for a, which that file does not hold"):
        read_parameters(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    (written(tmp_path, list(WHOLE.split(3))) / FILES[2]).unlink()
    with pytest.raises(UserError, match=f"{FILES[2]} for a, and that file is missing. Delete this folder"):
        read_parameters(tmp_path)

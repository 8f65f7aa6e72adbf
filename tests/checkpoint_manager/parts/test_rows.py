"""Parameters of a step read by rows, from the files of all ranks as from one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanochat.checkpoint_manager.parts.index import part_name, write_index
from nanochat.checkpoint_manager.parts.rows import Split, read_parameters
from nanochat.common import UserError

FILES = [part_name(number, 3) for number in range(3)]
WHOLE = torch.arange(35.0).view(7, 5)


def written(folder: Path, pieces: list[Tensor]) -> Path:
    """A folder with rows 0-3, 3-6 and 6-7 of one parameter, as the index says whatever the files hold."""
    for name, piece in zip(FILES, pieces, strict=True):
        save_file({"a": piece.contiguous()}, folder / name)
    ends = [0, 3, 6, 7]
    write_index(folder, {"a": list(zip(FILES, ends, ends[1:], strict=False))}, WHOLE.nbytes)
    return folder


def test_any_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    found = read_parameters(written(tmp_path, list(WHOLE.split(3))))["a"]
    assert isinstance(found, Split) and found.shape == (7, 5)
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

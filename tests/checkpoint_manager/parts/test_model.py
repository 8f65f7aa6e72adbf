"""Which form the parameters of a step take. tests/checkpoint_manager/test_ranks.py reads what ranks write."""

import pytest
import torch

from nanochat.checkpoint_manager.parts.model import ONE_FILE, Files, in_one_file
from nanochat.checkpoint_manager.save import refuse_parts_of_adapter
from nanochat.common import UserError
from nanochat.runtime.parallel import Part


def part(size: int, *rows: int) -> dict[str, Part]:
    """A parameter of so many bytes, whose rows so many ranks hold."""
    here = torch.empty(rows[0], 1, device="meta")
    return {"wte.weight": Part(here, (size // 4, 1), tuple(enumerate(rows)))}


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
    assert in_one_file(part(size, *rows), asked) is one


def test_an_adapter_is_one_file() -> None:
    refuse_parts_of_adapter("one")
    refuse_parts_of_adapter("auto")
    with pytest.raises(
        UserError, match=r"--checkpoint_files=per_rank is for whole models.*Leave --checkpoint_files out"
    ):
        refuse_parts_of_adapter("per_rank")

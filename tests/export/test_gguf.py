"""GGUF files, read back by a reader that shares no code with the writer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.common import UserError
from nanochat.export.gguf import PlannedTensor, write
from tests.export.gguf_reader import Reader


def planned(name: str, value: torch.Tensor) -> PlannedTensor:
    return PlannedTensor(name, tuple(value.shape), str(value.dtype).removeprefix("torch."), lambda: value)


def test_every_kind_of_value_and_tensor_comes_back(tmp_path: Path) -> None:
    values = {"yes": True, "count": 2**32 - 1, "size": 0.5, "name": "通义 \n", "empty": "", "words": ["a", "", "猫"],
              "signed": [-1, 2**31 - 1], "flags": [True, False]}  # fmt: skip
    tensors = {
        "a": torch.arange(7, dtype=torch.float32),
        "b.weight": torch.randn(3, 5).bfloat16(),
        "c": torch.randn(2, 3, 4).half(),
        "turned": torch.randn(4, 6).T,
    }
    write(tmp_path / "x.gguf", values, [planned(*item) for item in tensors.items()])
    read = Reader(tmp_path / "x.gguf")
    assert read.metadata == values
    assert list(read.tensors) == list(tensors)
    for name, value in tensors.items():
        assert read.tensors[name].dtype == value.dtype and torch.equal(read.tensors[name], value)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    def fails() -> Any:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x.gguf", {"a": 1}, [PlannedTensor("t", (1,), "float32", fails)])
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))
    (tmp_path / "x.gguf").write_bytes(b"mine")
    with pytest.raises(UserError, match="exists already"):
        write(tmp_path / "x.gguf", {}, [])
    assert (tmp_path / "x.gguf").read_bytes() == b"mine"

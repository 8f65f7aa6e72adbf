"""Tensor files: safetensors reads them, and hashes are computed during the write, one tensor at a time."""

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nanochat.checkpoint_manager import tensors as tensor_files
from nanochat.common import sha256_of


def test_the_published_library_reads_the_file_and_its_metadata(tmp_path: Path) -> None:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tensors = {
        "whole numbers": torch.arange(5), "bytes": torch.arange(3, dtype=torch.uint8), "one": torch.tensor(3.0),
        "bf16": torch.ones(7).bfloat16(), "fp16": torch.ones(2).half(), "none": torch.zeros(0, 4),
        "row 0": rows[0], "row 1": rows[1], "transposed": rows.T,
    }  # fmt: skip
    tensor_files.write_tensors(tensors, tmp_path / "x.safetensors", {"layout": "猫"})
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"layout": "猫"}
        assert set(file.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            loaded = file.get_tensor(name)
            assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor), name


def test_the_hash_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 1000)  # many blocks, and flushes between them
    tensors = {str(i): torch.randn(999, generator=torch.Generator().manual_seed(i)) for i in range(20)}
    sealed = tensor_files.write_tensors(tensors, tmp_path / "x.safetensors")
    path = tmp_path / "x.safetensors"
    assert sealed == {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def test_what_the_disk_says_in_between_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush reports an error only once, and the last flush then succeeds."""
    calls: Iterator[int] = iter(range(1000))

    def flush(fd: int) -> None:
        if next(calls) == 0:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tensor_files.os, "fsync", flush)
    with pytest.raises(OSError, match="Input/output error"):
        tensor_files.write_tensors({"a": torch.ones(10)}, tmp_path / "x.safetensors")


def test_tensors_may_come_one_by_one_in_the_order_that_is_told(tmp_path: Path) -> None:
    values = {"small": torch.ones(3).bfloat16(), "wide": torch.ones(2, 2)}
    file = tensor_files.TensorFile(tmp_path / "x.safetensors", tensor_files.shapes_of(values.items()))
    assert file.names == ["wide", "small"]
    with pytest.raises(AssertionError):
        file.add("small", values["small"])
    for name in file.names:
        file.add(name, values[name])
    file.close()
    assert load_file(tmp_path / "x.safetensors").keys() == values.keys()


def test_a_tensor_may_come_by_its_rows(tmp_path: Path) -> None:
    values = {"a": torch.randn(7, 3), "empty": torch.zeros(0, 3), "one": torch.tensor(2.0), "b": torch.arange(5.0)}
    file = tensor_files.TensorFile(tmp_path / "x.safetensors", tensor_files.shapes_of(values.items()))
    for rows in values["a"].split([4, 3]):
        file.add("a", rows)
    for name in ("empty", "one"):
        file.add(name, values[name])
    file.add("b", values["b"][:2])
    with pytest.raises(AssertionError):  # more rows than the tensor has
        file.add("b", values["b"])
    file.add("b", values["b"][2:])
    file.close()
    back = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(back[name], value) for name, value in values.items())


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o775])
def test_files_may_be_read_by_those_who_may_read_their_folder(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    folder.chmod(mode)
    tensor_files.write_tensors({"a": torch.ones(2)}, folder / "x.safetensors")
    assert (folder / "x.safetensors").stat().st_mode & 0o777 == mode & 0o666


def test_a_disk_that_refuses_is_an_os_error_with_its_number(tmp_path: Path) -> None:
    """A limit on the file size makes the same call fail as a full disk would, with EFBIG instead of ENOSPC."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            tensor_files.write_tensors({"a": torch.ones(10_000)}, tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert refused.value.errno == errno.EFBIG
    assert refused.value.filename == str(tmp_path / "x.safetensors")

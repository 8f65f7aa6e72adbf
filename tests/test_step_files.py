"""Folders of steps on disk: named only when whole, damage found, disks that refuse, files that others may read."""

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanochat import step_files
from nanochat.common import UserError


def make_step(folder: Path, step: int) -> Path:
    """A step of two small files, sealed and published."""
    temporary = folder / ".tmp-x"
    temporary.mkdir(parents=True)
    step_files.write_tensors({"a": torch.arange(6.0)}, temporary / "model.safetensors")
    step_files.write_tensors({"m": torch.ones(6)}, temporary / "optim-00-of-01.safetensors", {"layout": "{}"})
    files = {path.name: step_files.seal(path) for path in temporary.iterdir()}
    (temporary / "meta.json").write_text(json.dumps({"format": step_files.FORMAT, "step": step, "files": files}))
    step_files.publish(temporary, step_files.step_dir(folder, step))
    return step_files.step_dir(folder, step)


def test_steps_are_the_published_folders_in_order(tmp_path: Path) -> None:
    assert step_files.steps(tmp_path / "nothing") == []
    assert step_files.latest_step(tmp_path) is None
    for step in (20, 1_000_000, 3):
        make_step(tmp_path, step)
    (tmp_path / "step_000099").mkdir()  # without meta.json
    (tmp_path / ".tmp-step_000100").mkdir()
    (tmp_path / "step_old").mkdir()
    (tmp_path / "step_old" / "meta.json").write_text("{}")
    assert step_files.steps(tmp_path) == [3, 20, 1_000_000]
    assert step_files.latest_step(tmp_path) == 1_000_000


def test_a_whole_step_has_nothing_wrong(tmp_path: Path) -> None:
    where = make_step(tmp_path, 3)
    assert step_files.verify(where) == ""
    assert torch.equal(load_file(where / "model.safetensors")["a"], torch.arange(6.0))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 4
    path.write_bytes(data)


def rewrite(meta: Any) -> Any:
    return lambda where: (where / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda where: flip_a_bit(where / "model.safetensors"), "model.safetensors has a wrong SHA-256"),
        (
            lambda where: flip_a_bit(where / "optim-00-of-01.safetensors"),
            "optim-00-of-01.safetensors has a wrong SHA-256",
        ),
        (lambda where: os.truncate(where / "model.safetensors", 10), "model.safetensors has 10 bytes, not "),
        (lambda where: (where / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda where: os.truncate(where / "meta.json", 30), "meta.json cannot be read"),
        (lambda where: (where / "meta.json").write_bytes(b"\xff\xfe"), "meta.json cannot be read"),
        (rewrite({}), "meta.json cannot be read"),
        (rewrite([]), "meta.json cannot be read"),
        (rewrite({"files": {"model.safetensors": 3}}), "meta.json cannot be read"),
        (lambda where: (where / "meta.json").unlink(), "meta.json cannot be read"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: Any, says: str) -> None:
    where = make_step(tmp_path, 3)
    damage(where)
    assert says in step_files.verify(where)


def test_the_optimizer_s_files_matter_only_for_training(tmp_path: Path) -> None:
    where = make_step(tmp_path, 3)
    (where / "optim-00-of-01.safetensors").unlink()
    assert step_files.verify(where) == "optim-00-of-01.safetensors is missing"
    assert step_files.verify(where, training=False) == ""


def test_meta_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    where = make_step(tmp_path, 3)
    assert step_files.read_meta(tmp_path, 3)["step"] == 3
    (where / "meta.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="has checkpoint format 99, this version reads 1"):
        step_files.read_meta(tmp_path, 3)
    (where / "meta.json").write_text('{"for')
    with pytest.raises(UserError, match=r"meta.json is damaged .* delete .*step_000003"):
        step_files.read_meta(tmp_path, 3)


def test_publishing_replaces_a_step_of_the_same_number(tmp_path: Path) -> None:
    flip_a_bit(make_step(tmp_path, 3) / "model.safetensors")
    assert step_files.verify(make_step(tmp_path, 3)) == ""
    assert [path.name for path in tmp_path.glob("*step*")] == ["step_000003"]


def test_a_deletion_cut_short_leaves_no_half_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = make_step(tmp_path, 3)
    real = step_files.shutil.rmtree

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt
        real(folder, ignore_errors)

    monkeypatch.setattr(step_files.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        step_files.delete(where)
    assert step_files.steps(tmp_path) == []
    monkeypatch.undo()
    (tmp_path / ".tmp-step_000004").mkdir()
    step_files.sweep(tmp_path)
    assert list(tmp_path.glob(".*")) == []


def test_tensors_come_back_as_they_were_with_views_and_empty_ones(tmp_path: Path) -> None:
    whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tensors = {
        "row0": whole[0],
        "row1": whole[1],
        "turned": whole.T,
        "none": torch.zeros(0, 4),
        "half": whole.bfloat16(),
    }
    step_files.write_tensors(tensors, tmp_path / "x.safetensors")
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors)


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o775])
def test_files_may_be_read_by_those_who_may_read_their_folder(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    folder.chmod(mode)
    step_files.write_tensors({"a": torch.ones(2)}, folder / "x.safetensors")
    assert (folder / "x.safetensors").stat().st_mode & 0o777 == mode & 0o666


def test_a_disk_that_refuses_is_an_os_error_with_its_number(tmp_path: Path) -> None:
    """safetensors raises an error of its own; the edge of the scripts knows a full disk by its number.

    The limit on a file's size makes the same call fail as a full disk does, with EFBIG in place of ENOSPC.
    """
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            step_files.write_tensors({"a": torch.ones(10_000)}, tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert refused.value.errno == errno.EFBIG
    assert refused.value.filename == str(tmp_path / "x.safetensors")

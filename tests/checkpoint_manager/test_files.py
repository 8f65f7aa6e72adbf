"""Step folders on disk: named only when whole, damage is found, and old steps are pruned or set aside."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError
from tests.support.tiny_training import flip_a_bit


def make_step(folder: Path, step: int) -> Path:
    """A step with two small files, sealed and published."""
    temporary = folder / ".tmp-x"
    temporary.mkdir(parents=True)
    write_tensors({"a": torch.arange(6.0)}, temporary / "model.safetensors")
    write_tensors({"m": torch.ones(6)}, temporary / "optim-00-of-01.safetensors", {"layout": "{}"})
    files = {path.name: step_files.seal(path) for path in temporary.iterdir()}
    meta = {"format": step_files.FORMAT, "step": step, "steps": 100, "stage": "base", "tokenizer_hash": "t",
            "files": files, "model": {}, "config": {"corpus": "c"}, "state": {}}  # fmt: skip
    (temporary / "meta.json").write_text(json.dumps(meta))
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


def test_the_optimizers_files_matter_only_for_training(tmp_path: Path) -> None:
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


def test_what_is_no_step_is_neither_taken_for_one_nor_in_the_way_of_one(tmp_path: Path) -> None:
    """A plain file, a link to a step elsewhere, and names that no save gives."""
    elsewhere = tmp_path / "elsewhere"
    kept = make_step(elsewhere, 7)
    run = tmp_path / "run"
    run.mkdir()
    (run / "step_000003").write_text("a file")
    (run / "step_000004").symlink_to(kept)
    (run / ".deleted-step_000003").write_text("a file")
    for name in ("step_5", "step_٠٠٠٠٠٥", "step_x"):
        make_step(tmp_path, 5).rename(run / name)
    assert step_files.steps(run) == [4]
    for step in (3, 4):
        made = make_step(tmp_path, step)
        step_files.publish(made, step_files.step_dir(run, step))
    assert step_files.steps(run) == [3, 4] and step_files.steps(elsewhere) == [7]
    (run / ".tmp-step_000009").write_text("a file")
    step_files.sweep(run)
    assert list(run.glob(".*")) == []


def test_what_is_set_aside_is_no_step_any_more_and_keeps_the_figures(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        make_step(tmp_path, step)
    (tmp_path / "metrics.jsonl").write_text("the figures")
    (tmp_path / "samples.jsonl").write_text("the samples")
    assert step_files.set_aside(tmp_path, 15) is None
    place = step_files.set_aside(tmp_path, 5)
    assert place is not None and place.parent == tmp_path
    assert step_files.steps(tmp_path) == [5] and step_files.steps(place) == [10, 15]
    assert (place / "metrics.jsonl").read_text() == (tmp_path / "metrics.jsonl").read_text() == "the figures"
    assert (place / "samples.jsonl").read_text() == "the samples"
    make_step(tmp_path, 6)
    again = step_files.set_aside(tmp_path, 5)
    assert again is not None and again != place and step_files.steps(again) == [6]


def test_pruning_keeps_the_newest_and_counts_no_damaged_later_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 9):
        make_step(tmp_path, step)
    step_files.prune(tmp_path, 0, 4)
    assert step_files.steps(tmp_path) == [1, 2, 3, 4, 9]
    step_files.prune(tmp_path, 2, 4)  # a run that fell back from 9 has just saved 4
    assert step_files.steps(tmp_path) == [3, 4, 9]


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = make_step(tmp_path, 3)

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(step_files, "sha256_of", broken)
    assert "safetensors cannot be read (reading or writing failed (input/output error))" in step_files.verify(where)

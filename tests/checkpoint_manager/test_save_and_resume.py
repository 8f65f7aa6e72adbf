"""Checkpoints: exact over stops and kills, whole or not there, other settings refused."""

from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager import save as saving
from nanochat.checkpoint_manager.load import newest_whole
from nanochat.checkpoint_manager.locate import make_meta
from nanochat.checkpoint_manager.resume import LOCK, Resumed, finished, hold, restore, resume_stage
from nanochat.checkpoint_manager.same_run import RunSettings
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.common import UserError
from nanochat.gpt import GPTConfig
from nanochat.runtime.tracking import Tracker
from nanochat.tokenizer import Tokenizer
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tiny_training import CPU, SETTINGS, WANTED, equal, everything, flip_a_bit, make, save, train


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


# --- going on ------------------------------------------------------------------------------------


def test_a_run_stopped_and_gone_on_is_bit_equal_to_one_that_was_not(tmp_path: Path, tokenizer: Tokenizer) -> None:
    straight = make()
    train(*straight, 0, 6)
    begun = make()
    train(*begun, 0, 3)
    assert save(tmp_path / "run", 3, *begun, tokenizer) > 0
    gone_on = make(seed=2)  # other values, all overwritten
    resumed = resume_stage(tmp_path / "run", *gone_on, WANTED, CPU)
    assert (resumed.step, resumed.state) == (3, {"row": 12})
    assert equal(everything(*gone_on), everything(*begun))
    train(*gone_on, 3, 6)
    assert equal(everything(*gone_on), everything(*straight))


def test_without_a_checkpoint_a_run_begins(tmp_path: Path) -> None:
    pair = make()
    before = everything(*pair)
    assert resume_stage(tmp_path / "run", *pair, WANTED, CPU) == Resumed(0, {})
    assert equal(before, everything(*pair))


def test_a_checkpoint_says_what_it_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = make()
    save(tmp_path / "run", 3, *pair, tokenizer)
    meta = step_files.read_meta(tmp_path / "run", 3)
    assert (meta["step"], meta["steps"], meta["stage"], meta["world_size"]) == (3, 100, "base", 1)
    assert meta["config"] == SETTINGS
    assert GPTConfig(**meta["model"]) == pair[0].config
    assert meta["tokenizer_hash"] == tokenizer.hash
    names = {path.name for path in (tmp_path / "run" / "step_000003").iterdir()}
    assert names == {"model.safetensors", "optim-00-of-01.safetensors", "tokenizer.json", "meta.json"}
    assert names - {"meta.json"} == set(meta["files"])


def test_a_save_shows_progress_with_every_tensor(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Ranks ended as hanging if the optimizer's state, two thirds of a save, took longer than --hang_seconds."""
    model, optimizers = make()
    before = CPU.pulse.moments
    save(tmp_path / "run", 1, model, optimizers, tokenizer)
    assert CPU.pulse.moments - before == len(list(model.parameters())) + len(optimizers.saved())


# --- damage --------------------------------------------------------------------------------------


def test_with_every_step_damaged_a_run_starts_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = make()
    save(tmp_path / "run", 1, *pair, tokenizer)
    flip_a_bit(tmp_path / "run" / "step_000001" / "model.safetensors")
    assert resume_stage(tmp_path / "run", *pair, WANTED, CPU).step == 0


def test_optimizer_state_that_lacks_rows_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = make()
    save(tmp_path / "run", 1, *pair, tokenizer)
    (tmp_path / "run" / "step_000001" / "optim-00-of-01.safetensors").unlink()
    with pytest.raises(UserError, match="holds no complete optimizer state"):
        restore(tmp_path / "run", 1, *pair)


# --- saves that do not end -----------------------------------------------------------------------

PHASES = [
    (saving.parameter_files, "_gathered_rows"),
    (saving, "write_tensors"),
    (Tokenizer, "save"),
    (saving, "write_meta"),
    (step_files, "fsync_path"),
    (step_files.os, "rename"),
]


@pytest.mark.parametrize(("place", "name"), PHASES)
def test_a_save_that_fails_leaves_the_old_step_and_nothing_else(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    folder, pair = tmp_path / "run", make()
    save(folder, 1, *pair, tokenizer)
    old = everything(*pair)
    train(*pair, 0, 1)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, name, full)
    with pytest.raises(OSError, match="No space left"):
        save(folder, 2, *pair, tokenizer)
    monkeypatch.undo()
    assert [path.name for path in folder.iterdir()] == ["step_000001"]
    other = make(seed=2)
    assert resume_stage(folder, *other, WANTED, CPU).step == 1
    assert equal(everything(*other), old)


def test_old_steps_that_cannot_be_removed_do_not_end_a_run(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pair = tmp_path / "run", make()

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(step_files, "delete", fails)
    for step in (1, 2, 3, 4):
        save(folder, step, *pair, tokenizer)
    assert newest_whole(folder, CPU) == 4
    assert (
        "step_000001 could not be removed (reading or writing failed (input/output error))" in capsys.readouterr().err
    )


# --- the same run, or another --------------------------------------------------------------------


def test_a_stage_is_finished_at_its_last_step(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pair = tmp_path / "run", make()
    assert not finished(folder, WANTED, CPU)
    save(folder, 99, *pair, tokenizer)
    assert not finished(folder, WANTED, CPU)
    save(folder, 100, *pair, tokenizer)
    assert finished(folder, WANTED, CPU)
    assert f"already done: {folder} has all 100 steps" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "meta.json"])
def test_a_stage_whose_last_step_is_damaged_is_not_finished(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    folder, pair = tmp_path / "run", make()
    save(folder, 99, *pair, tokenizer)
    save(folder, 100, *pair, tokenizer)
    flip_a_bit(folder / "step_000100" / name)
    assert not finished(folder, WANTED, CPU)
    assert resume_stage(folder, *pair, WANTED, CPU).step == 99
    save(folder, 100, *pair, tokenizer)  # made again, in the place of the damaged one
    assert finished(folder, WANTED, CPU)


@pytest.mark.parametrize("step", [50, 100])
def test_other_settings_are_refused_and_named(tmp_path: Path, tokenizer: Tokenizer, step: int) -> None:
    folder, pair = tmp_path / "run", make()
    save(folder, step, *pair, tokenizer)
    other = RunSettings({**SETTINGS, "depth": 3, "new": True}, WANTED.free, {**WANTED.defaults, "new": None})
    for ask in (
        lambda: finished(folder, other, CPU),
        lambda: resume_stage(folder, *pair, other, CPU),
    ):
        with pytest.raises(UserError, match=r"--depth: 2 before, 3 now; --new: None before, True now.*--model_tag"):
            ask()


def test_other_data_is_refused_until_the_last_step(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pair = make()
    for stage, step in (("base", 50), ("sft", 50), ("base", 100)):
        meta = make_meta(stage, pair[0].config, SETTINGS, 100, {"row": 200, "data": "a1"})
        save_checkpoint(tmp_path / f"{stage}{step}", step, *pair, tokenizer, meta, CPU)
    resumed = resume_stage(tmp_path / "base50", *pair, WANTED, CPU, "a1")
    assert resumed == Resumed(50, {"row": 200, "data": "a1"})
    with pytest.raises(UserError, match=r"were a1 and are b2 now.* 50 of 100 .*--model_tag.*--resume=none"):
        resume_stage(tmp_path / "base50", *pair, WANTED, CPU, "b2")
    with pytest.raises(UserError, match=r"are b2 now.*--out_tag.*--resume=none") as refused:
        resume_stage(tmp_path / "sft50", *pair, WANTED, CPU, "b2")
    assert "--model_tag" not in str(refused.value)  # there it would name another parent
    assert resume_stage(tmp_path / "base100", *pair, WANTED, CPU, "b2").step == 100


def test_a_stage_whose_last_measurement_was_not_logged_is_not_finished(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model, optimizers = make()
    line = {"step": 4, "loss": 1.0}
    meta = make_meta("base", model.config, SETTINGS, 4, {"line": line})
    save_checkpoint(tmp_path, 4, model, optimizers, tokenizer, meta, CPU)
    assert not finished(tmp_path, WANTED, CPU)
    tracker = Tracker(tmp_path, "dummy", {}, 4, main=True)
    tracker.log(**line)
    tracker.close()
    assert finished(tmp_path, WANTED, CPU)


def test_a_link_planted_in_place_of_the_lock_is_refused_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="is a link"):
        hold(tmp_path / "run", CPU)
    assert not (tmp_path / "victim").exists()

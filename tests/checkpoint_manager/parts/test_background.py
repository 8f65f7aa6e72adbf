"""Saves beside training: what is written is the step as it was, and no failed write stays unnoticed."""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager.locate import make_meta
from nanochat.checkpoint_manager.parts import background, rank_state
from nanochat.checkpoint_manager.parts.background import Saver
from nanochat.checkpoint_manager.parts.model import Files
from nanochat.checkpoint_manager.resume import resume_stage
from nanochat.checkpoint_manager.save import write_step
from nanochat.common import UserError
from nanochat.device import Compute
from tests.support.ranks import Pool
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tiny_training import CPU, SETTINGS, WANTED, equal, everything, make, parameters, state, train

FULL = OSError(errno.ENOSPC, "No space left on device", "/data/model.safetensors")
FORMS: tuple[Files, ...] = ("one", "per_rank")


def begin(saver: Saver, folder: Path, step: int, pair: Any, figures: list[float] | None = None) -> None:
    """Begin to save, as a stage does."""
    meta = make_meta("base", pair[0].config, SETTINGS, 100, {"row": 4 * step, "norms": figures or []})
    model, optimizers = pair
    saver.save(folder, step, model, optimizers, tiny_tokenizer(), meta)
    optimizers.before_step = saver.settle


class Held:
    """Holds the thread at a gate, so that a test knows what happens first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Any, name: str):
        self.reached, self.gate, real = threading.Event(), threading.Event(), getattr(place, name)

        def waits(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self.gate.wait(60)
            return real(*args, **kwargs)

        monkeypatch.setattr(place, name, waits)


@pytest.mark.parametrize("files", FORMS)
def test_training_goes_on_while_the_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    writing, pair, figures = Held(monkeypatch, background, "write_step"), make(), [1.0]
    train(*pair, 0, 1)
    then = everything(*pair)
    with Saver(CPU, files=files) as saver:
        begin(saver, tmp_path, 1, pair, figures)
        train(*pair, 1, 3)  # settles before each update
        figures.append(2.0)
        assert writing.reached.wait(60) and saver.busy and step_files.steps(tmp_path) == []
        writing.gate.set()
    assert not saver.busy and step_files.steps(tmp_path) == [1] and step_files.verify(tmp_path / "step_000001") == ""
    other = make(seed=2)
    assert resume_stage(tmp_path, *other, WANTED, CPU).state == {"row": 4, "norms": [1.0]}
    assert equal(everything(*other), then)
    train(*other, 1, 3)
    assert equal(everything(*other), everything(*pair))  # a save changes nothing that is learned


def test_an_update_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, pair = Held(monkeypatch, rank_state.HostMemory, "copy"), make()
    then, changed = everything(*pair), threading.Event()
    with Saver(CPU) as saver:
        begin(saver, tmp_path, 0, pair)
        trainer = threading.Thread(target=lambda: (train(*pair, 0, 1), changed.set()))
        trainer.start()
        assert copying.reached.wait(60) and not changed.wait(0.2) and equal(everything(*pair), then)
        copying.gate.set()
        trainer.join(60)
        assert changed.is_set()
    other = make(seed=2)
    resume_stage(tmp_path, *other, WANTED, CPU, start=0)
    assert step_files.verify(tmp_path / "step_000000") == ""


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def noted(step: Any, *args: Any) -> None:
        order.append(("begins", step.number))
        write_step(step, *args)
        order.append(("ends", step.number))

    monkeypatch.setattr(background, "write_step", noted)
    pair = make()
    with Saver(CPU) as saver:
        for step in (1, 2, 3):
            begin(saver, tmp_path, step, pair)
    assert order == [(what, step) for step in (1, 2, 3) for what in ("begins", "ends")]
    assert step_files.steps(tmp_path) == [1, 2, 3]


def fails(*_: Any, **__: Any) -> None:
    raise FULL


def test_a_failed_write_is_raised_by_the_next_save_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "write_step", fails)
    pair, costs = make(), []
    with pytest.raises(OSError, match="No space left"), Saver(CPU, ended=costs.append) as saver:
        begin(saver, tmp_path, 1, pair)
    saver = Saver(CPU, ended=costs.append)
    begin(saver, tmp_path, 1, pair)
    while saver.busy:
        threading.Event().wait(0.01)
    assert saver.failed and len(costs) == 2
    with pytest.raises(OSError, match="No space left"):
        begin(saver, tmp_path, 2, pair)
    assert not saver.failed  # it was told once


def test_an_error_of_the_run_is_not_hidden_by_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background, "write_step", fails)
    with pytest.raises(UserError, match="the loss is wrong"), Saver(CPU) as saver:
        begin(saver, tmp_path, 1, make())
        raise UserError("the loss is wrong")
    said = capsys.readouterr().err
    assert "the last checkpoint could not be written" in said and "/data/model.safetensors" in said


def test_an_error_of_the_run_waits_for_the_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the loss is wrong"), Saver(CPU) as saver:
        begin(saver, tmp_path, 1, make())
        raise UserError("the loss is wrong")
    assert step_files.verify(tmp_path / "step_000001") == ""


def test_without_memory_for_a_copy_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_state.host, "memory_free", lambda: 1000)
    with Saver(CPU) as saver:
        begin(saver, tmp_path, 1, make())
        assert not saver.busy and step_files.steps(tmp_path) == [1]
    assert "training waits while step 1 is written, since the host has no memory for a copy" in capsys.readouterr().out


def test_a_copy_uses_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, memory = make(), rank_state.HostMemory(CPU)
    first, copy = rank_state.RankState.of(*pair), memory.copy(rank_state.RankState.of(*pair))
    before = {name: value.data_ptr() for name, value in copy.tensors().items()}
    assert all(before[name] != value.data_ptr() for name, value in first.tensors().items())
    train(*pair, 0, 1)
    again = memory.copy(rank_state.RankState.of(*pair)).tensors()
    assert {name: value.data_ptr() for name, value in again.items()} == before
    assert equal(again, rank_state.RankState.of(*pair).tensors())
    monkeypatch.setattr(rank_state.host, "memory_free", lambda: 0)
    assert memory.has_room(first)


# --- two ranks -------------------------------------------------------------------------------------


@contextmanager
def disk_full_on(compute: Compute, rank: int) -> Iterator[None]:
    """A disk that refuses the optimizer state of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        if compute.rank == rank:
            patch.setattr("nanochat.checkpoint_manager.save.write_tensors", fails)
        yield


def saves_beside_training(compute: Compute, folder: Path, files: Files) -> dict[str, Any]:
    """Steps with saves between them, of which the disk refuses the second on rank 1, and what was loaded again."""
    pair = make(1, compute, mode="full")
    train(*pair, 0, 1, compute)
    then = parameters(pair[0]), state(pair[1])
    with Saver(compute, files=files) as saver:
        begin(saver, folder, 1, pair)
        train(*pair, 1, 3, compute)  # its collectives run beside those of the threads
        saver.wait()
        with disk_full_on(compute, 1):
            begin(saver, folder, 3, pair)
            train(*pair, 3, 4, compute)
            with pytest.raises(OSError, match="No space left"):
                saver.wait()
    end = parameters(pair[0])
    other = make(2, compute, mode="full")
    step = resume_stage(folder, *other, WANTED, compute).step
    loaded = parameters(other[0]), state(other[1])
    train(*other, 1, 4, compute)
    return {"then": then, "end": end, "step": step, "loaded": loaded, "again": parameters(other[0])}


def check(ranks: list[dict[str, Any]], folder: Path) -> None:
    """The ranks of saves_beside_training() saved and loaded the first step bit for bit, and left nothing else."""
    for rank in ranks:
        (values, kept), (loaded, has) = rank["then"], rank["loaded"]
        assert rank["step"] == 1 and equal(loaded, values)
        assert equal({name: v[0] for name, v in has.items()}, {name: v[0] for name, v in kept.items()})
        assert equal(rank["again"], rank["end"])
    assert [path.name for path in folder.iterdir()] == ["step_000001"]


@pytest.mark.ranks
@pytest.mark.parametrize("files", FORMS)
def test_two_ranks_save_beside_training_and_fail_together(tmp_path: Path, pool: Pool, files: Files) -> None:
    check(pool.run(2, saves_beside_training, tmp_path / "run", files), tmp_path / "run")

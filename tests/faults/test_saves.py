"""Faults T5, T6, T7, T9 and T18: kills, damage and a full disk around the files of a checkpoint."""

import builtins
import contextlib
import errno
import functools
import io
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager import tensors as tensor_files
from nanochat.checkpoint_manager.parts.index import INDEX
from nanochat.checkpoint_manager.parts.model import Files
from nanochat.checkpoint_manager.resume import resume_stage
from nanochat.checkpoint_manager.save import KEEP
from nanochat.checkpoint_manager.tensors import TensorFile
from nanochat.device import Compute, barrier
from tests.support.ranks import Pool
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tiny_training import (
    CPU,
    WANTED,
    equal,
    everything,
    flip_a_bit,
    make,
    parameters,
    save,
    state,
    train,
)

pytestmark = pytest.mark.ranks

KILLS = 30
FORMS: tuple[Files, ...] = ("one", "per_rank")


def begun(folder: Path, steps: int = 1, files: Files = "one") -> dict[int, dict[str, Tensor]]:
    """A run of one rank with a save after each of so many steps; what was saved."""
    pair, held = make(), {}
    for step in range(1, steps + 1):
        train(*pair, step - 1, step)
        save(folder, step, *pair, tiny_tokenizer(), files=files)
        held[step] = everything(*pair)
    return held


def resumed(folder: Path) -> tuple[int, dict[str, Tensor]]:
    """The step a new start resumes from, and the state it loads."""
    pair = make(seed=2)
    step = resume_stage(folder, *pair, WANTED, CPU).step
    return step, everything(*pair)


def killed_saves(compute: Compute, folder: Path, kills: int, files: Files) -> list[Path]:
    """Folders in which the second step was being saved when a process was killed, each at another moment."""
    pair, tokenizer, moments = make(seed=2), tiny_tokenizer(), random.Random(6)
    resume_stage(folder, *pair, WANTED, compute)
    train(*pair, 1, 2)
    found: list[Path] = []

    def run(kill_at: int) -> tuple[Path, int, int]:
        """In a process of its own save a copy of the run; its folder, what ended it, how many events there were."""
        copy, events = folder.with_name(f"{folder.name}-{len(found)}-{kill_at}"), 0
        shutil.copytree(folder, copy)
        read, write = os.pipe()
        child = os.fork()
        if child:
            os.close(write)
            _, status = os.waitpid(child, 0)
            with os.fdopen(read) as pipe:
                return copy, os.WTERMSIG(status), int(pipe.read() or 0)

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal events
            events += 1
            if events == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        save(copy, 2, *pair, tokenizer, files=files)
        sys.setprofile(None)
        os.write(write, str(events).encode())
        os._exit(0)

    _, _, events = run(-1)
    while len(found) < kills:
        copy, killed_by, _ = run(moments.randint(1, events))
        if killed_by == signal.SIGKILL:  # not where this save had fewer events
            found.append(copy)
    return found


@pytest.mark.parametrize("files", FORMS)
def test_a_kill_at_any_moment_of_a_save_loses_no_step(tmp_path: Path, pool: Pool, files: Files) -> None:
    """T5. Injects: kill -9 at 30 random moments of a save, with the parameters in one file or in a file per rank. Must
    follow: the next start loads the previous step, or the new one if its folder already has its final name, bit for
    bit, and no half-written file is left.

    注入：在保存过程中的 30 个随机时刻 kill -9，参数存成一个文件和每个进程一个文件两种情况都试。必须：下次启动逐位读入
    前一步，如果新一步的目录已有最终名称，就逐位读入新一步；不留下写了一半的文件。
    """
    folder = tmp_path / "run"
    held = begun(folder, files=files)
    pair = make()
    train(*pair, 0, 2)
    held[2] = everything(*pair)
    (copies,) = pool.run(1, killed_saves, folder, KILLS, files)
    assert len(copies) == KILLS
    assert any(list(copy.glob(".tmp-*")) for copy in copies), "no kill hit a half-written step"
    for copy in copies:
        step, values = resumed(copy)
        assert equal(values, held[step])
        assert not list(copy.glob(".*"))


def killed_at_its_name(compute: Compute, folder: Path, files: Files) -> None:
    """A step and its save, of which rank 0 is killed just before the folder gets its name."""
    pair = make(1, compute)
    resume_stage(folder, *pair, WANTED, compute)
    train(*pair, 1, 2, compute)
    if compute.main:
        step_files.os = _Os(step_files.os)  # type: ignore[attr-defined]
    save(folder, 2, *pair, tiny_tokenizer(), compute=compute, files=files)


class _Os:
    """The module os, but for `rename`."""

    def __init__(self, real: Any):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def rename(self, source: Path, target: Path) -> None:
        assert source.name.startswith(".tmp-") and (source / "meta.json").exists()
        os.kill(os.getpid(), signal.SIGKILL)


def first_step(compute: Compute, folder: Path) -> dict[str, Tensor]:
    """A run of many ranks with a save after its first step; the parameters saved."""
    pair = make(1, compute)
    train(*pair, 0, 1, compute)
    save(folder, 1, *pair, tiny_tokenizer(), compute=compute)
    return parameters(pair[0])


def go_on(compute: Compute, folder: Path) -> tuple[int, dict[str, Tensor], Any, str]:
    """The step the ranks resume from, the parameters and optimizer state they load, and their warnings."""
    pair, said = make(2, compute), io.StringIO()
    with contextlib.redirect_stderr(said):
        step = resume_stage(folder, *pair, WANTED, compute).step
    return step, parameters(pair[0]), state(pair[1]), said.getvalue()


@pytest.mark.parametrize("files", FORMS)
def test_a_kill_between_the_files_and_their_name(tmp_path: Path, pool: Pool, files: Files) -> None:
    """T6. Injects: kill -9 of rank 0 of two, after all files are written but before their folder has its final name.
    Must follow: the other rank exits too; the next start resumes from the previous step, and removes the unfinished
    one.

    注入：两个进程中的 0 号进程在文件都已写好、目录尚未定名时被 kill -9。必须：另一个进程也结束；
    下次启动从前一步继续，并清除残留。
    """
    folder = tmp_path / "run"
    (held, _) = pool.run(2, first_step, folder)
    outcomes = pool.outcomes(2, killed_at_its_name, folder, files)
    assert outcomes[0].killed_by == signal.SIGKILL and not outcomes[1].fine
    assert (folder / ".tmp-step_000002" / "meta.json").exists() and not (folder / "step_000002").exists()
    for step, values, _, _ in pool.run(2, go_on, folder):
        assert step == 1 and equal(values, held)
    assert [path.name for path in folder.iterdir()] == ["step_000001"]


def flip_a_digit(path: Path) -> None:
    """One bit of the last digit: of a number in JSON, which stays valid."""
    data = bytearray(path.read_bytes())
    place = max(data.rfind(digit) for digit in b"0123456789")
    data[place] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def removed(path: Path) -> None:
    path.unlink()


STATES = ["optim-00-of-02.safetensors", "optim-01-of-02.safetensors"]
PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FILES: dict[Files, list[str]] = {
    "one": ["model.safetensors", *STATES, "tokenizer.json", "meta.json"],
    "per_rank": [*PARTS, INDEX, *STATES],
}


def two_steps(compute: Compute, folder: Path, files: Files) -> Any:
    """Two steps, each saved; the first."""
    pair = make(1, compute)
    train(*pair, 0, 1, compute)
    save(folder, 1, *pair, tiny_tokenizer(), compute=compute, files=files)
    held = parameters(pair[0]), state(pair[1])
    train(*pair, 1, 2, compute)
    save(folder, 2, *pair, tiny_tokenizer(), compute=compute, files=files)
    return held


@pytest.fixture(scope="module")
def twice(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Files, Path], Any]:
    """Copies a run of two_steps(), made once for each form, to a folder, and returns what the run saved first."""

    @functools.cache
    def made(files: Files) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(files)
        return folder, pool.run(2, two_steps, folder, files)

    def copied(files: Files, target: Path) -> Any:
        folder, held = made(files)
        shutil.copytree(folder, target)
        return held

    return copied


def damages(files: Files, name: str) -> list[Callable[[Path], None]]:
    """What may happen to a file: lower tests damage one file in every way."""
    flip = flip_a_bit if name.endswith(".safetensors") else flip_a_digit
    if files == "per_rank":
        return [flip, truncated]
    return [flip] if name == "meta.json" else [flip, removed]  # a folder without meta.json is no step


DAMAGE = [(files, name, damage) for files in FORMS for name in FILES[files] for damage in damages(files, name)]


@pytest.mark.parametrize(("files", "name", "damage"), DAMAGE)
def test_damage_to_any_file_falls_back_one_step(
    tmp_path: Path, pool: Pool, twice: Callable[[Files, Path], Any], files: Files, name: str,
    damage: Callable[[Path], None],
) -> None:  # fmt: skip
    """T7. Injects: one bit of one file of the newest step is flipped, half of it is cut off, or it is removed, for each
    file of two ranks, with the parameters in one file or in a file per rank. Must follow: both ranks resume from the
    previous step, bit for bit, and a message names the damaged file.

    注入：两个进程最新一步的每个文件（参数合为一个文件，或每个进程一个），翻转一个比特，截去一半，或整个删除。必须：两个进程都从前一步逐位继续，
    并指出损坏的文件。
    """
    held = twice(files, tmp_path / "run")
    damage(tmp_path / "run" / "step_000002" / name)
    found = pool.run(2, go_on, tmp_path / "run")
    for (values, kept), (step, loaded, has, _) in zip(held, found, strict=True):
        assert step == 1 and equal(loaded, values)
        assert equal({n: v[0] for n, v in has.items()}, {n: v[0] for n, v in kept.items()})
    said = found[0][3]
    assert f"step_000002 is damaged: {name} " in said and "falling back to the step before it" in said


def killed_while_writing(compute: Compute, folder: Path, files: Files, name: str) -> None:
    """A step and its save, of which the rank that writes a file is killed when half of that file is written."""
    pair = make(1, compute)
    resume_stage(folder, *pair, WANTED, compute)
    train(*pair, 1, 2, compute)

    def half(self: TensorFile, data: memoryview) -> None:
        if self._path.name == name and len(data) > 10_000:
            self._file.write(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, data)

    with pytest.MonkeyPatch.context() as patch:
        write = TensorFile._write
        patch.setattr(TensorFile, "_write", half)
        save(folder, 2, *pair, tiny_tokenizer(), compute=compute, files=files)


@pytest.mark.parametrize(
    ("files", "name"), [("one", "model.safetensors"), ("one", STATES[1]), *(("per_rank", name) for name in PARTS)]
)
def test_a_kill_while_a_file_is_written(tmp_path: Path, pool: Pool, files: Files, name: str) -> None:
    """T6. Injects: kill -9 of one of two ranks while it writes a file, when half of the file is written. Must follow:
    the other rank exits too; the next start resumes from the previous step, and removes the unfinished one.

    注入：两个进程之一写文件写到一半时被 kill -9。必须：另一个进程也结束；下次启动从前一步继续，
    并清除残留。
    """
    folder = tmp_path / "run"
    (held, _) = pool.run(2, first_step, folder)
    outcomes = pool.outcomes(2, killed_while_writing, folder, files, name)
    assert signal.SIGKILL in [outcome.killed_by for outcome in outcomes] and not any(one.fine for one in outcomes)
    assert not (folder / "step_000002").exists()
    for step, values, _, _ in pool.run(2, go_on, folder):
        assert step == 1 and equal(values, held)
    assert [path.name for path in folder.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("sealed", [False, True])
def test_an_index_that_names_a_missing_file(
    tmp_path: Path, pool: Pool, twice: Callable[[Files, Path], Any], sealed: bool
) -> None:
    """T7. Injects: the index of the newest step names a file that no rank wrote, and the recorded hash of the index is
    either wrong or right. Must follow: both ranks resume from the previous step, and a message names the index, or the
    missing file.

    注入：最新一步的索引指向一个并不存在的文件，其哈希不符，或者相符。必须：两个进程都从前一步继续，
    并指出是索引有误，或缺少哪个文件。
    """
    twice("per_rank", tmp_path / "run")
    step = tmp_path / "run" / "step_000002"
    (step / INDEX).write_text((step / INDEX).read_text().replace("model-00002-of", "model-00007-of"))
    if sealed:
        meta = step_files.read_meta(step.parent, 2)
        meta["files"][INDEX] = step_files.seal(step / INDEX)
        step_files.write_meta(step, {name: value for name, value in meta.items() if name != "sha256"})
    found = pool.run(2, go_on, tmp_path / "run")
    assert [step for step, *_ in found] == [1, 1]
    reason = "model-00007-of-00002.safetensors for " if sealed else f"{INDEX} has a wrong SHA-256"
    assert "step_000002 is damaged: " in found[0][3] and reason in found[0][3]


def on_a_full_disk(compute: Compute, folder: Path, files: Files, name: str) -> list[str]:
    """A save while the disk has no room for one of the files, then one with room; what was left in between."""
    pair = make(1, compute)
    resume_stage(folder, *pair, WANTED, compute)
    train(*pair, 1, 2, compute)

    def full(path: Any, mode: str = "r", **rest: Any) -> Any:
        if Path(path).name != name:
            return builtins.open(path, mode, **rest)
        Path(path).touch()
        return builtins.open("/dev/full", mode, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "open", full, raising=False)
        with pytest.raises(OSError) as refused:
            save(folder, 2, *pair, tiny_tokenizer(), compute=compute, files=files)
        assert refused.value.errno == errno.ENOSPC and str(refused.value.filename).endswith(name)
    barrier(compute)  # rank 0 removes what was written, and the other rank does not wait for that
    left = sorted(path.name for path in folder.iterdir())
    barrier(compute)
    save(folder, 2, *pair, tiny_tokenizer(), compute=compute, files=files)
    return left


@pytest.mark.parametrize(
    ("files", "name"), [(files, name) for files in FORMS for name in FILES[files] if name.endswith("safetensors")]
)
def test_a_full_disk_ends_the_save_on_all_ranks(tmp_path: Path, pool: Pool, files: Files, name: str) -> None:
    """T9. Injects: the disk is full when one of two ranks writes its file. Must follow: the save fails on both ranks
    with a message that names the file, the files written so far are removed, and the previous step stays; once there is
    room, the next save works.

    注入：两个进程之一写文件时磁盘已满。必须：保存在两个进程上都失败并指出文件名，已写的部分被清除，前一步仍在；
    有空间之后下一次保存成功。
    """
    folder = tmp_path / "run"
    pool.run(2, first_step, folder)
    assert pool.run(2, on_a_full_disk, folder, files, name) == [["step_000001"]] * 2
    assert step_files.verify(folder / "step_000002") == ""


def killed_while_removing(compute: Compute, folder: Path) -> None:
    """One more step and its save, killed when one file of the oldest step is gone."""
    pair = make(seed=2)
    step = resume_stage(folder, *pair, WANTED, compute).step
    train(*pair, step, step + 1)

    def partly(doomed: Path, ignore_errors: bool = False) -> None:
        if doomed.exists() and not ignore_errors:
            assert step_files.steps(folder)[-1] == step + 1, "the new step must have its name first"
            next(doomed.glob("model*")).unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_files.shutil, "rmtree", partly)
        save(folder, step + 1, *pair, tiny_tokenizer())


def test_a_kill_while_old_steps_are_removed(tmp_path: Path, pool: Pool) -> None:
    """T18. Injects: kill -9 in the middle of removing an old step. Must follow: the new step is complete, and the run
    resumes from it, bit for bit; what remains of the old step does not count as a step and is removed.

    注入：正在删除旧的一步时 kill -9。必须：新的一步完整，并由它逐位继续；旧的一步剩下的一半不算检查点，并被清除。
    """
    folder = tmp_path / "run"
    begun(folder, KEEP)
    (outcome,) = pool.outcomes(1, killed_while_removing, folder)
    assert outcome.killed_by == signal.SIGKILL
    assert [path.name for path in folder.glob(".*")] == [".deleted-step_000001"]
    straight = make()
    train(*straight, 0, KEEP + 1)
    step, values = resumed(folder)
    assert step == KEEP + 1 and equal(values, everything(*straight))
    assert step_files.steps(folder) == [2, 3, 4] and not list(folder.glob(".*"))

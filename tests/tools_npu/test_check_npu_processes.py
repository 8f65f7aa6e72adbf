"""check_npu.py --processes: which processes it lists, and that it ends the picked processes and no others."""

import io
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import pytest

import check_npu
from tests.tools_npu.test_check_npu import run
from tools_npu import host, processes


@pytest.fixture
def trainer(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process whose command line looks like training: `python -m scripts.base_train`."""
    package = tmp_path / "scripts"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base_train.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen([sys.executable, "-m", "scripts.base_train"], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"up\n"
    return process


def test_your_training_processes_are_listed_and_ended_by_id(trainer: subprocess.Popen[bytes]) -> None:
    listed = {process.pid: process for process in processes.list_own({})}
    assert "-m scripts.base_train" in listed[trainer.pid].command
    assert os.getpid() not in listed and os.getppid() not in listed
    said: list[str] = []
    assert processes.end([trainer.pid], list(listed.values()), force=False, language="zh", say=said.append)
    assert trainer.wait(timeout=20) == -15
    assert said == [f"{trainer.pid}: 已结束"]


def test_an_id_that_is_not_listed_is_left_alone(trainer: subprocess.Popen[bytes]) -> None:
    said: list[str] = []
    assert not processes.end([trainer.pid], [], force=True, say=said.append)
    assert trainer.poll() is None and "left alone" in said[0]
    trainer.kill()
    trainer.wait()


def test_force_ends_a_process_that_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.3)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    deaf = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert deaf.stdout and deaf.stdout.readline() == b"up\n"
    listed = [processes.Process(deaf.pid, 0.0, (), 0, "deaf")]
    said: list[str] = []
    assert not processes.end([deaf.pid], listed, force=False, say=said.append)
    assert "--force" in said[0] and deaf.poll() is None
    assert processes.end([deaf.pid], listed, force=True, say=said.append)
    assert deaf.wait(timeout=20) == -9


def test_a_process_that_holds_a_card_open_is_found_by_the_card(tmp_path: Path) -> None:
    card = tmp_path / "dev/davinci3"
    card.parent.mkdir()
    card.touch()
    code = "import sys, time; f = open(sys.argv[1]); print('up', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(card)], stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdout.readline() == b"up\n"
    try:
        held = [host.Holder(3, 0, holder.pid, "", 100), host.Holder(3, 1, holder.pid, "", 20)]
        found = {process.pid: process for process in processes.list_own({"ASCEND_ROOT_PREFIX": str(tmp_path)}, held)}
        assert found[holder.pid].cards == ("davinci3",)
        assert found[holder.pid].used_mb == 120
        assert 0 <= found[holder.pid].minutes < 10
    finally:
        holder.kill()
        holder.wait()


def test_a_launcher_and_its_ranks_are_one_job_and_another_job_is_not_named_with_them(tmp_path: Path) -> None:
    parents = {10: 1, 11: 10, 12: 10, 20: 1}  # a launcher, its two ranks, and a job of the same user
    for pid, parent in parents.items():
        (tmp_path / str(pid)).mkdir()
        fields = ["S", str(parent), *["0"] * 30]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (python) {' '.join(fields)}")
        (tmp_path / str(pid) / "cmdline").write_text("python\0-m\0scripts.base_train\0")
    assert {process.pid: process.job for process in processes.list_own({}, (), tmp_path)} == {
        10: 10,
        11: 10,
        12: 10,
        20: 20,
    }


@pytest.mark.parametrize(
    ("words", "is_listed"),
    [
        (["bash", "runs/supervise.sh", "scripts.base_train", "--depth=20"], True),
        (["bash", "/repo/runs/train_with_fineweb.sh"], True),
        (["/bin/bash", "./speedrun_npu.sh", "--data", "tinyworld"], True),
        (["python", "-m", "runs.miniseries", "--quick"], True),
        (["vim", "runs/supervise.sh"], False),
        (["less", "speedrun.sh"], False),
    ],
)
def test_a_script_that_would_go_on_is_part_of_the_job(words: list[str], is_listed: bool) -> None:
    assert bool(processes.TRAINING.search("".join(f"{word}\0" for word in words))) == is_listed


def test_ctrl_d_at_the_question_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert check_npu.ask_for_pids(False) == []
    monkeypatch.setattr(sys, "stdin", io.StringIO("12 none 34\n"))
    assert check_npu.ask_for_pids(True) == [12, 34]


def test_where_all_work_as_root_the_login_tells_whose_process_it_is(tmp_path: Path) -> None:
    (tmp_path / "loginuid").write_text("54321")
    assert processes.user_of(tmp_path) == "54321"
    (tmp_path / "loginuid").write_text(str(2**32 - 1))  # no login started it
    assert processes.user_of(tmp_path) == pwd.getpwuid(tmp_path.stat().st_uid).pw_name


def test_the_list_is_printed_with_the_command_that_ends(trainer: subprocess.Popen[bytes], tmp_path: Path) -> None:
    code, out, _ = run("--processes", "--lang", "en", ASCEND_ROOT_PREFIX=str(tmp_path))
    assert code == 0
    named = [
        line for line in out.splitlines() if line.endswith(f" python check_npu.py --processes --end {trainer.pid}")
    ]
    assert len(named) == 1 and "-m scripts.base_train" in named[0], "a line that ends this job and no other"
    assert re.search("memory +user +command", out), "the columns have names"
    assert pwd.getpwuid(os.getuid()).pw_name in named[0] and str(tmp_path) in named[0], "whose job it is, and where"
    code, out, _ = run("--processes", "--lang", "zh", ASCEND_ROOT_PREFIX=str(tmp_path), PYTHONIOENCODING="ascii")
    assert code == 0 and "\\u547d\\u4ee4" in out, "a terminal without Chinese gets escape sequences, no traceback"
    code, out, _ = run("--processes", "--end", str(trainer.pid), "1", ASCEND_ROOT_PREFIX=str(tmp_path))
    assert code == 1, "process 1 is not a training process"
    assert f"{trainer.pid}: ended" in out and "1: not among your training processes" in out
    assert trainer.wait(timeout=20) == -15

"""Worker processes: they do all tasks, the parent raises their errors, and no worker outlives its parent."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.prepare import workers
from nanochat.prepare.workers import ROOT, work

CHILD = """
import os, signal, time
from pathlib import Path
from nanochat.common import UserError
from nanochat.prepare.workers import serve

def begin(setup):
    def do(task, say):
        print("a word that is none of the messages")
        if task["name"] == "mistake":
            raise UserError("fix this", 2)
        if task["name"] == "full":
            raise OSError(28, "No space left on device", "/disk/file")
        if task["name"] == "bug":
            raise KeyError("bug")
        if task["name"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if task["name"] == "long":
            Path(setup["folder"], str(os.getpid())).touch()
            time.sleep(600)
        say({"half": task["name"]})
        return {"name": task["name"], "pid": os.getpid(), "prefix": setup["folder"]}
    return do

if __name__ == "__main__":
    serve(begin)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "child_of_test.py").write_text(CHILD, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "child_of_test"


def do(module: str, folder: Path, names: list[str], processes: int = 2) -> list[tuple[int, dict]]:
    tasks = [{"name": name} for name in names]
    with contextlib.closing(work(module, {"folder": str(folder)}, tasks, processes)) as messages:
        return list(messages)


def test_every_task_is_done_once_and_says_things_before_its_result(module, tmp_path):
    names = [f"第{i}" for i in range(7)]
    messages = do(module, tmp_path, names, 3)
    for number, name in enumerate(names):
        half, result = (message for n, message in messages if n == number)
        assert half == {"half": name} and result["result"]["name"] == name
        assert result["result"]["prefix"] == str(tmp_path)
    pids = {message["result"]["pid"] for _, message in messages if "result" in message}
    assert 1 <= len(pids) <= 3 and os.getpid() not in pids


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("mistake", UserError, "fix this"),
        ("full", OSError, r"No space left on device: '/disk/file'"),
        ("bug", RuntimeError, r"worked on bug failed:\n(.|\n)*KeyError: 'bug'"),
        ("killed", UserError, "that worked on killed was killed by signal 9"),
    ],
)
def test_what_a_process_raises_is_raised_here(module, tmp_path, name, kind, text):
    with pytest.raises(kind, match=text) as raised:
        do(module, tmp_path, ["a", name, "b"])
    assert getattr(raised.value, "exit_code", 2 if name == "mistake" else 1) == (2 if name == "mistake" else 1)
    assert getattr(raised.value, "errno", 28) == 28


def test_only_shards_that_are_worth_it_get_a_process(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 2)
    pay = workers.BYTES_THAT_PAY
    assert [workers.processes_for(size, 3, None) for size in (pay - 1, pay, 2 * pay, 9 * pay)] == [0, 1, 2, 2]
    assert workers.processes_for(9 * pay, 1, None) == workers.processes_for(pay, 1, 8) == 1


def test_a_process_that_cannot_start_is_said_and_not_waited_for(tmp_path):
    with pytest.raises(UserError, match=r"worked on [ab] ended with code 1"):
        do("no_such_module", tmp_path, ["a", "b"])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def eventually(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "this did not happen within a minute"
        time.sleep(0.02)


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def test_leaving_early_ends_the_processes(module, tmp_path):
    tasks = [{"name": "long"}, {"name": "a"}]
    messages = work(module, {"folder": str(tmp_path)}, tasks, 2)
    assert next(messages) == (1, {"half": "a"})
    eventually(lambda: pids_in(tmp_path))
    messages.close()
    assert not any(map(is_running, pids_in(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_end_when_the_one_that_started_them_is_killed(module, tmp_path):
    given = f"{module!r}, {{'folder': {str(tmp_path)!r}}}, [{{'name': 'long'}}], 1"
    code = f"from nanochat.prepare.workers import work; next(work({given}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    eventually(lambda: pids_in(tmp_path))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    eventually(lambda: not any(map(is_running, pids_in(tmp_path))))

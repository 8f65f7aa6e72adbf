"""The costs of a command: which processes count, which signals are forwarded, and what a kill leaves on disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nanochat.runtime import cost as measure

ROOT = Path(__file__).resolve().parent.parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="costs are read from /proc")

# A child that starts a grandchild; each burns CPU time, the grandchild also memory that it touches.
FAMILY = """
import subprocess, sys, time
def burn(seconds):
    while time.process_time() < seconds:
        pass
if sys.argv[1] == "parent":
    child = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[2], "child", ""])
    burn(0.6)
    sys.exit(child.wait())
held = bytes(range(256)) * (200 * 4096)
burn(0.9)
"""


def started(name: str, *command: str) -> subprocess.Popen[str]:
    """Start measure() in a separate process."""
    words = [sys.executable, "-m", "nanochat.runtime.cost", name, "--", *command]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-u", "-c", code]


def within(seconds: float, happened: Callable[[], bool]) -> bool:
    """Whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(autouse=True)
def keep_handlers():
    """measure() sets signal handlers, so it runs in a separate process."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@linux
def test_grandchildren_count(monkeypatch):
    monkeypatch.setattr(measure, "EVERY_SECONDS", 0.1)
    assert measure.measure("family", [*python(FAMILY), "parent", FAMILY]) == 0
    cost = measure.read_stages()["family"]
    assert 1.4 <= 60 * cost["cpu_minutes"] <= 4
    assert 0.2 <= cost["memory_gb"] <= 0.5
    assert 60 * cost["minutes"] >= 0.9 and cost["runs"] == 1


@linux
def test_cpu_time_of_processes_that_live_between_two_samples_counts(monkeypatch):
    monkeypatch.setattr(measure, "EVERY_SECONDS", 30.0)
    measure.measure("brief", python("import time\nwhile time.process_time() < 0.5: pass"))
    assert 60 * measure.read_stages()["brief"]["cpu_minutes"] >= 0.5


def test_runs_of_a_stage_add_up_and_stages_keep_their_order():
    for name in ("second", "first", "second"):
        measure.measure(name, python("pass"))
    stages = measure.read_stages()
    assert list(stages) == ["second", "first"]
    assert (stages["second"]["runs"], stages["first"]["runs"]) == (2, 1)
    before = stages["second"]
    measure.measure("second", python("pass"))
    after = measure.read_stages()["second"]
    assert after["minutes"] > before["minutes"]
    assert after["cpu_minutes"] >= before["cpu_minutes"] and after["memory_gb"] >= before["memory_gb"]


@pytest.mark.parametrize("code", [0, 77])
def test_the_exit_code_is_the_command_s(code):
    assert measure.measure("coded", python(f"raise SystemExit({code})")) == code
    assert measure.read_stages()["coded"]["runs"] == 1


def test_a_command_that_a_signal_ended_gives_the_code_a_shell_gives():
    assert measure.main(["killed", "--", *python("import os; os.kill(os.getpid(), 9)")]) == 137


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [(["name", "command"], 2, "usage"), (["x", "--", "no-such-command"], 127, "no-such-command")],
)
def test_a_command_line_that_cannot_run_is_one_line(words: list[str], code: int, named: str):
    command = [sys.executable, "-m", "nanochat.runtime.cost", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and named in done.stderr and done.stderr.count("\n") == 1


HANDLED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
print("ready", flush=True)
while True: time.sleep(0.05)
"""


def test_signals_are_passed_on_and_costs_are_kept():
    process = started("signalled", *python(HANDLED))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "heard\n"
    process.send_signal(signal.SIGINT)  # measure() ignores it and waits, as a terminal also sends it to the command
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 9
    assert measure.read_stages()["signalled"]["runs"] == 1


@linux
def test_kill_9_leaves_a_valid_file_with_the_costs_so_far(base_folder: Path):
    code = f"""
from nanochat.runtime import cost as measure
import sys
measure.EVERY_SECONDS = measure.WRITE_SECONDS = 0.02
measure.measure("long", {[sys.executable, "-S", "-c", "import time; time.sleep(60)"]!r})
"""
    path = measure.stages_file()
    for run in (1, 2):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
        try:
            assert within(30, lambda run=run: path.exists() and json.loads(path.read_text())["long"]["runs"] == run)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert json.loads(path.read_text())["long"]["minutes"] > 0
    assert measure.measure("long", python("pass")) == 0
    assert measure.read_stages()["long"]["runs"] == 3

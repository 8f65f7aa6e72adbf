"""A program passes only if it reaches its last line, and it can do no harm to the machine."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.evals import sandbox as execution

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is for Linux")
Run = Callable[..., execution.ProgramResult]


def run_in(tier: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Give a function that runs programs in one of the two tiers."""
    if tier == "limits":
        monkeypatch.setattr(execution, "_no_namespaces", lambda: "switched off by a test")
    elif reason := execution._no_namespaces():
        pytest.skip(f"no namespaces here: {reason}")
    execution.tier.cache_clear()
    assert execution.tier(unsafe_exec=True) == tier
    yield lambda program, **options: execution.run_program(textwrap.dedent(program), unsafe_exec=True, **options)
    execution.tier.cache_clear()


@pytest.fixture(params=["namespaces", "limits"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield from run_in(request.param, monkeypatch)


@pytest.fixture
def caged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield from run_in("namespaces", monkeypatch)


def test_a_program_that_reaches_its_end_passes_with_its_output(run: Run) -> None:
    outcome = run("import math\nassert math.gcd(12, 18) == 6\nprint('好')")
    assert outcome == execution.ProgramResult(passed=True, timed_out=False, output="好\n")


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import sys; sys.exit()",
        "import os; os._exit(0)",
        "assert 1 == 2",
        "def f(:",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV); os.abort()",
        "import os; os.close(1)",
        "import sys; sys.stdout.close()",
        "x = 'nul\\0'; import nothing_of_this_name",
        "quit()",
    ],
)
def test_leaving_before_the_last_line_does_not_pass(run: Run, program: str) -> None:
    outcome = run(f"{program}\nassert False, 'the test itself'")
    assert not outcome.passed
    assert not outcome.timed_out


def test_printing_what_a_success_looks_like_does_not_pass(run: Run) -> None:
    assert not run("import os\nfor n in range(9): print('passed', '0' * 32)\nos._exit(0)").passed


def test_an_infinite_loop_is_stopped(run: Run) -> None:
    outcome = run("while True: pass", seconds=0.5)
    assert not outcome.passed
    assert outcome.timed_out


def test_sleeping_and_ignoring_signals_is_stopped(run: Run) -> None:
    program = "import signal, time\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)"
    assert run(program, seconds=0.5).timed_out


def test_a_flood_of_output_is_bounded_and_a_program_may_still_pass(run: Run) -> None:
    outcome = run("print('x' * (20 << 20))")
    assert outcome.passed
    assert len(outcome.output) == execution.OUTPUT
    endless = run("import sys\nwhile True: sys.stdout.write('x' * 65536)", seconds=0.5)
    assert endless.timed_out
    assert len(endless.output) == execution.OUTPUT


def test_a_memory_bomb_fails_alone(run: Run) -> None:
    outcome = run("x = bytearray(1 << 20)\nwhile True: x += x", memory=256 << 20)
    assert not outcome.passed
    assert not outcome.timed_out


def test_a_large_file_cannot_be_written(run: Run) -> None:
    outcome = run("open('large', 'wb').write(bytes(2 << 20))")
    assert not outcome.passed
    assert "File too large" in outcome.output
    assert run("open('small', 'w').write('a'); assert open('small').read() == 'a'").passed


def test_the_folder_of_a_program_is_gone_afterwards(run: Run) -> None:
    before = set(Path(tempfile.gettempdir()).glob("nanochat-exec-*"))
    outcome = run("import os; open('left', 'w').write('a'); print(os.getcwd())")
    assert outcome.passed
    left = set(Path(tempfile.gettempdir()).glob("nanochat-exec-*")) - before
    assert not any((folder / "left").exists() for folder in left)


def test_the_environment_is_empty(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os; assert not set(os.environ) - {'LC_CTYPE'}, dict(os.environ)").passed


def test_input_is_empty_and_does_not_hold_the_program(run: Run) -> None:
    assert run("import sys; assert sys.stdin.read() == ''").passed


def named(name: str) -> list[int]:
    """The process numbers of running processes that gave themselves this name."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("escape", ["pass", "os.setsid()", "os.setsid(); os.fork()"])
def test_forked_children_die_with_the_program(run: Run, escape: str) -> None:
    name = f"nx{os.getpid()}"
    outcome = run(
        f"""
        import ctypes, os, time
        ctypes.CDLL(None).prctl(15, b"{name}")
        try:
            child = os.fork()
        except OSError:
            print("no forks")
        else:
            if child == 0:
                {escape}
                time.sleep(60)
        """,
        seconds=10,
    )
    assert outcome.passed, outcome.output
    assert named(name) == []


def test_a_fork_bomb_is_over_when_the_time_is(caged: Run) -> None:
    name = f"ny{os.getpid()}"
    caged(
        f"""
        import ctypes, os
        ctypes.CDLL(None).prctl(15, b"{name}")
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        seconds=0.5,
    )
    assert named(name) == []


def test_the_network_is_out_of_reach(caged: Run) -> None:
    outcome = caged("import socket; socket.create_connection(('127.0.0.1', 1), 1)")
    assert not outcome.passed
    assert "Network is unreachable" in outcome.output


def test_the_files_of_the_machine_are_out_of_reach(caged: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    outcome = caged(
        f"""
        import os, sys
        assert not os.path.exists({str(tmp_path / "mine")!r})
        assert not os.path.exists({str(Path(execution.__file__))!r})
        assert not os.path.exists("/etc/passwd") and not os.path.exists("/proc/self")
        for folder in ("/usr", sys.base_prefix, os.path.dirname(os.__file__)):
            try:
                open(os.path.join(folder, "written"), "w")
            except OSError:
                continue
            raise AssertionError(folder)
        """
    )
    assert outcome.passed, outcome.output


def test_scratch_space_is_bounded(caged: Run) -> None:
    outcome = caged("for n in range(40): open(str(n), 'wb').write(bytes(1000000))")
    assert not outcome.passed
    assert "No space left" in outcome.output


def test_rights_cannot_be_won_back(caged: Run) -> None:
    outcome = caged(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == -1
        assert libc.mount(b"none", b"/usr", None, 32 | 4096, None) == -1
        assert libc.chroot(b"/tmp") == -1
        assert libc.prctl(39, 0, 0, 0, 0) == 1  # no new privileges
        """
    )
    assert outcome.passed, outcome.output


@pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/usr/bin/python3"), reason="for root only")
def test_a_plain_user_gets_the_same_cage_from_a_user_namespace(caged: Run, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as given:
        os.chmod(folder, 0o777)
        child = shutil.copy(execution._CHILD, folder)
        os.mkdir(f"{folder}/root")
        os.chown(f"{folder}/root", 65534, 65534)
        given.write(b"secret\nimport os; print(os.getpid(), os.path.exists('/etc'), os.path.exists('/proc/1'))")
        given.seek(0)
        wish = {"isolated": True, "seconds": 5, "memory": 1 << 29, "root": f"{folder}/root", "parent": os.getpid()}
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-S", child, json.dumps(wish)],
            stdin=given,
            capture_output=True,
            text=True,
            env={},
            user=65534,
            group=65534,
        )
    if done.returncode == 125 and "unshare" in done.stdout:
        pytest.skip(f"no user namespaces for plain users here: {done.stdout}")
    assert (done.returncode, done.stdout) == (0, "1 False False\n\nsecret\n"), done.stderr


def test_without_namespaces_code_is_refused_unless_the_user_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_no_namespaces", lambda: "unshare: Operation not permitted")
    execution.tier.cache_clear()
    with pytest.raises(UserError, match=r"unshare: Operation not permitted.*--unsafe-exec"):
        execution.run_program("print('must not run')")
    assert execution.run_program("pass", unsafe_exec=True).passed
    execution.tier.cache_clear()


def test_the_active_tier_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(execution, "_no_namespaces", lambda: "none")
    execution.tier.cache_clear()
    for _ in range(3):
        execution.run_program("pass", unsafe_exec=True)
    assert capsys.readouterr().out.count("code execution: limits only") == 1
    execution.tier.cache_clear()

"""A program passes only if it reaches its last line, and it can do no harm to the machine."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.evals import sandbox as execution
from tests.support.sandboxes import CROSSED, KINDS, Run, sandboxed

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is for Linux")


@pytest.fixture(params=CROSSED)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield from sandboxed(request.param, monkeypatch)


@pytest.fixture(params=[kind for kind in KINDS if "namespaces" in kind])
def caged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield from sandboxed(request.param, monkeypatch)


def test_a_program_that_reaches_its_end_passes_with_its_output(run: Run) -> None:
    outcome = run("import math\nassert math.gcd(12, 18) == 6\nprint('好')")
    assert outcome == execution.ProgramResult(passed=True, timed_out=False, output="好\n")


def test_leaving_before_the_last_line_does_not_pass(run: Run) -> None:
    for program in (
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "def f(:",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV); os.abort()",
        "import os; os.close(1)",
        "import sys; sys.stdout.close()",
        "x = 'nul\\0'; import nothing_of_this_name",
    ):
        outcome = run(f"{program}\nassert False, 'the test itself'")
        assert not outcome.passed, program
        assert not outcome.timed_out, program


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


def test_deep_folders_closed_folders_and_links_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").touch()
    top = tmp_path / "top"
    (top / "closed" / "inside").mkdir(parents=True)
    (top / "closed" / "inside" / "file").touch()
    (top / "closed" / "inside" / "link").symlink_to(tmp_path / "outside")
    inner = os.open(top, os.O_RDONLY)
    for _ in range(2_500):  # more than Python's recursion, than open files, and than the length of a path allow
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)
    for folder in (top / "d", top / "closed" / "inside", top / "closed", top):
        folder.chmod(0)
    execution._remove(str(top))
    assert not top.exists() and (tmp_path / "outside" / "mine").exists()
    assert not capsys.readouterr().err


def test_a_folder_that_cannot_be_removed_does_not_end_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "top").mkdir()
    monkeypatch.setattr(execution.os, "rmdir", refuse)
    execution._remove(str(tmp_path / "top"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(tmp_path / "top") in said


def test_the_environment_is_empty(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os; assert not set(os.environ) - {'LC_CTYPE'}, dict(os.environ)").passed


def test_input_is_empty_and_does_not_hold_the_program(run: Run) -> None:
    assert run("import sys; assert sys.stdin.read() == ''").passed


def test_the_whole_library_can_be_imported(run: Run) -> None:
    """Also what is imported late from a package that the sandbox itself uses."""
    assert run("import ctypes.util, email.message, encodings.idna, json.tool, sqlite3; 'é'.encode('idna')").passed


def test_an_event_loop_needs_no_network(run: Run) -> None:
    assert run("import asyncio; assert asyncio.run(asyncio.sleep(0, 3)) == 3").passed


def test_the_files_of_the_machine_are_out_of_reach(caged: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    outcome = caged(
        f"""
        import os, sys
        assert not os.path.exists({str(tmp_path / "mine")!r})
        assert not os.path.exists({str(Path(execution.__file__))!r})
        assert not os.path.exists("/etc/passwd") and not os.path.exists("/proc/self") and os.getpid() == 1
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

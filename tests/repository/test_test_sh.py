"""test.sh and .ci/run with stubs for all tools: what would otherwise fail in silence."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TOOL = """#!/bin/bash
name=$(basename "$0")
echo "$name $*" >>"$CALLS"
case "$*" in *sched_getaffinity*) echo 2; exit ;; esac
if [[ " $FAIL " == *" $name "* ]]; then echo "what $name says"; exit 1; fi
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "test.sh", tmp_path)
    (tmp_path / "setup_env.sh").write_text('setup_env() { echo "setup $*" >>"$CALLS"; }\n')
    for folder in ("bin", ".ci", "dev", "rustbpe"):
        (tmp_path / folder).mkdir()
    (tmp_path / "rustbpe" / "Cargo.toml").touch()
    for tool in ("ruff", "pyright", "shellcheck", "cargo", "python"):
        path = tmp_path / "bin" / tool
        path.write_text(TOOL)
        path.chmod(0o755)
    return tmp_path


def run(clone: Path, *flags: str, fail: str = "", ci: str = "") -> tuple[int, str, str]:
    """Run test.sh; returns its exit code, its output and the calls of the tools."""
    calls = clone / "calls"
    calls.write_text("")
    path = f"{clone / 'bin'}:/usr/bin:/bin"
    environment = os.environ | {"PATH": path, "CALLS": str(calls), "FAIL": fail, "CI": ci}
    done = subprocess.run(["bash", "test.sh", *flags], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout, calls.read_text()


def test_a_failure_is_shown_and_the_other_checks_run(clone: Path) -> None:
    code, out, calls = run(clone, fail="ruff pyright")
    assert code == 1
    assert "what pyright says" in out
    assert "test.sh: 5 checks passed, 3 FAILED (ruff format, ruff check, pyright) in " in out.splitlines()[-1]
    assert "python -m pytest" in calls


UNSTEADY = """#!/bin/bash
echo "python $*" >>"$CALLS"
case "$*" in *sched_getaffinity*) echo 2; exit ;; esac
[[ $* == *--last-failed* ]] && exit "$ALONE"
[[ $* =~ cache_dir=([^ ]*) ]] && cache=${BASH_REMATCH[1]}/v/cache && mkdir -p "$cache"
for ((i = 0; i < FAILED; i++)); do echo "  \\"tests/test_a.py::test_b[$i, c]\\": true,"; done >"$cache/lastfailed"
exit 1
"""


@pytest.mark.parametrize(("failed", "alone", "code"), [(2, 0, 0), (2, 1, 1), (4, 0, 1)])
def test_a_few_failed_tests_run_again_alone_and_are_named(clone: Path, monkeypatch, failed, alone, code) -> None:
    monkeypatch.setenv("FAILED", str(failed))
    monkeypatch.setenv("ALONE", str(alone))
    (clone / "bin" / "python").write_text(UNSTEADY)
    done, out, calls = run(clone, "tests/test_a.py")
    assert done == code
    assert ("--last-failed" in calls) == (failed < 4)
    assert ("unsteady" in out) == (code == 0)
    if not code:
        assert "tests/test_a.py::test_b[1, c]\n" in out
        again = next(line for line in calls.splitlines() if "--last-failed" in line)
        assert again.endswith(" tests/test_a.py") and "-n 2" not in again


def test_in_ci_a_skipped_check_fails(clone: Path) -> None:
    (clone / "bin" / "cargo").unlink()
    code, out, _ = run(clone, ci="true")
    assert code == 1
    assert "FAILED (cargo fmt, clippy and test)" in out.splitlines()[-1]


@pytest.fixture
def ci_machine(tmp_path: Path) -> Path:
    """A machine that has only what .ci/run itself needs; its test.sh prints whether CI is set."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "test.sh").write_text('echo "tests with CI=$CI and $# arguments"\n')
    for command in ("bash", "dirname", "mktemp", "tail", "rm"):
        (tmp_path / "bin" / command).symlink_to(shutil.which(command) or "")
    return tmp_path


def run_ci(machine: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine / "bin"), "CALLS": str(machine / "calls")}
    return subprocess.run(["bash", ".ci/run"], cwd=machine, env=environment, capture_output=True, text=True)


def test_ci_installs_what_is_missing_and_calls_test_sh(ci_machine: Path) -> None:
    apt = ci_machine / "bin" / "apt-get"
    apt.write_text('#!/bin/bash\necho "$*" >>"$CALLS"\n')
    apt.chmod(0o755)
    done = run_ci(ci_machine)
    assert done.stdout.endswith("tests with CI=true and 0 arguments\n")
    update, install = (ci_machine / "calls").read_text().splitlines()
    assert update == "update"
    assert {"chromium", "g++", "python3-dev"} < set(install.split())

"""conftest.py gives each test an empty base folder, and in CI turns skips of the tests that matter into failures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat import common

TESTS = """
import pytest

def test_plain():
    pytest.skip("no reason to worry")

@pytest.mark.browser
def test_page():
    pytest.skip("no chromium here")

@pytest.mark.npu
@pytest.mark.skipif(True, reason="no compiler here")
def test_device():
    pass

@pytest.mark.contract
@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""
MODULE = """
import pytest
pytest.importorskip("a_module_that_is_not_there")
"""


def run_tests(folder: Path, ci: str, *flags: str) -> str:
    shutil.copy(Path(__file__).parent.parent / "conftest.py", folder)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_module.py").write_text(MODULE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    browser\n    contract\n    npu\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags, "."],
        cwd=folder,
        env=os.environ | {"CI": ci},
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_in_ci_a_skipped_browser_npu_or_contract_test_fails(tmp_path: Path) -> None:
    out = run_tests(tmp_path, "true", "-n", "1")
    assert "1 failed, 1 skipped, 1 xfailed, 2 errors" in out, out
    assert "skipped, which in CI is a failure: Skipped: no chromium here" in out
    assert "skipped, which in CI is a failure: Skipped: no compiler here" in out
    assert "skipped, which in CI is a failure: Skipped: could not import 'a_module_that_is_not_there'" in out


def test_elsewhere_a_skip_is_a_skip(tmp_path: Path) -> None:
    assert "4 skipped, 1 xfailed" in run_tests(tmp_path, "")


@pytest.mark.parametrize("call", [1, 2])
def test_each_test_has_an_empty_base_folder(call: int, tmp_path: Path) -> None:
    folder = common.base_dir()
    assert folder.is_relative_to(tmp_path)
    assert not list(folder.iterdir())
    (folder / str(call)).touch()

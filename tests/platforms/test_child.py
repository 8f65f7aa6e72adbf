"""A child process answers many questions, each with its own limits, and it never outlives its parent for long."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanochat.platforms import child
from nanochat.platforms.child import Child

BURN = """
import os, resource, time
def begin(setup):
    def answer(seconds):
        start = time.process_time()
        while seconds < 0 or time.process_time() < start + seconds:
            pass
        return setup, os.getpid(), time.process_time(), resource.getrlimit(resource.RLIMIT_CPU)[0]
    return answer
"""
FAIL = """
def begin(setup):
    if setup != "good":
        raise KeyError(setup)
    return lambda question: bytearray(question) and 1 / 0
"""


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str, Any], Child]:
    def made(source: str, setup: Any) -> Child:
        (tmp_path / "script.py").write_text(source)
        return Child(tmp_path / "script.py", setup)

    return made


@pytest.mark.slow
def test_each_question_has_its_own_processor_time(made: Callable[[str, Any], Child]) -> None:
    """Tokenising millions of conversations takes hours of it, and one process answers all of them."""
    asked = made(BURN, "x")
    answers = [asked.ask(seconds, 5) for seconds in (0, 1.2, 1.2, 0)]
    assert {answer[0] for answer in answers} == {"x"} and len({answer[1] for answer in answers}) == 1
    assert all(used < limit <= used + 5 + 2 for _, _, used, limit in answers)
    assert answers[-1][3] > answers[0][3]


def test_a_question_that_takes_too_long_ends_the_process_and_the_next_one_starts_another(
    made: Callable[[str, Any], Child],
) -> None:
    asked = made(BURN, 1)
    first = asked.ask(0, 5)
    start = time.monotonic()
    assert asked.ask(-1, 0.2) is None
    assert time.monotonic() - start < 4
    second = asked.ask(0, 5)
    assert first[1] != second[1]
    process = asked._process
    assert process is not None and process.poll() is None
    del asked
    assert process.poll() is not None


def test_a_question_without_an_end_ends_without_its_parent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BURN)
    command = [sys.executable, "-I", child.__file__, str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdin is not None
        alone.stdin.write(f"null\n{json.dumps([0, -1])}\n")
        alone.stdin.flush()
        assert alone.wait(60) == -signal.SIGXCPU


def test_what_a_script_raises_is_told(made: Callable[[str, Any], Child]) -> None:
    assert made(FAIL, "bad").ask(1, 5) == {"error": "KeyError: 'bad'"}
    good = made(FAIL, "good")
    assert good.ask(1, 5) == {"error": "ZeroDivisionError: division by zero"}
    assert good.ask(1 << 30, 5) == {"error": "MemoryError: "}


def test_a_script_that_does_not_start_is_a_fault(made: Callable[[str, Any], Child]) -> None:
    with pytest.raises(RuntimeError, match=r"script\.py did not start \(exit code 3\)"):
        made("raise SystemExit(3)", None).ask(1, 5)

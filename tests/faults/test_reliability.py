"""The table of faults: read from docstrings, written only by a whole run, and never older than the tests."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.reliability import FAILED, PASSED, ROOT, Tally, faults, key_of, page, read, write


def test_a_docstring_is_read_in_both_languages() -> None:
    fault = read(
        "T5. Injects: a kill\nof all. Must follow: nothing\nis lost.\n\n注入：杀掉\n    全部。必须：什么\n    都不丢。"
    )
    assert fault is not None and fault.number == 5
    assert fault.injects == ("a kill of all.", "杀掉全部。") and fault.follows == ("nothing is lost.", "什么都不丢。")
    only = read("T4. Injects: x. Must follow: y.")
    assert only is not None and only.injects == ("x.", "x.") and only.follows == ("y.", "y.")
    assert read("Something else.") is None and read(None) is None


def test_every_fault_test_says_what_it_injects_and_what_must_follow() -> None:
    """In the two sentences that are read, and in Chinese."""
    for path in (
        path for path in sorted((ROOT / "tests" / "faults").glob("test_*.py")) if path.name != Path(__file__).name
    ):
        said = [ast.get_docstring(node) or "" for node in ast.parse(path.read_text(encoding="utf-8")).body
                if isinstance(node, ast.FunctionDef)]  # fmt: skip
        numbered = [text for text in said if re.match(r"T\d", text)]
        assert numbered and all(read(text) and "注入：" in text for text in numbered), path.name


def test_parametrised_tests_are_one_row() -> None:
    assert key_of("tests/faults/test_x.py::test_a[model.safetensors-1]") == "test_x.py::test_a"


def test_only_a_run_of_all_faults_is_written(tmp_path: Path) -> None:
    results = {key: Tally(ran=3) for key in faults()}
    results[next(iter(results))].failed = 1
    some = dict(list(results.items())[1:])
    assert not write(some, tmp_path) and not list(tmp_path.glob("*.md"))
    assert write(results, tmp_path)
    for name, language in (("reliability.md", 0), ("reliability.zh.md", 1)):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text.count(f"| {FAILED[language]}") == 1 and text.count(f"| {PASSED[language]}") == len(results) - 1


@pytest.mark.parametrize(("name", "language"), [("reliability.md", 0), ("reliability.zh.md", 1)])
def test_the_page_is_that_of_the_tests_and_all_passed(name: str, language: int) -> None:
    """If this fails, run all fault tests: they write the page."""
    there = (ROOT / "docs" / name).read_text(encoding="utf-8")
    expected = page({key: Tally(ran=1) for key in faults()}, language)
    cases = re.compile(r" \(\d+ cases\)|（\d+ 例）")
    assert cases.sub("", there) == expected
    assert f"| {FAILED[language]}" not in there

"""The table of faults: every fault test says what it injects, and the pages are those of the tests."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.reliability import FAILED, ROOT, Tally, faults, page, read


def test_every_fault_test_says_what_it_injects_and_what_must_follow() -> None:
    """In the two sentences that are read, and in Chinese."""
    for path in (
        path for path in sorted((ROOT / "tests" / "faults").glob("test_*.py")) if path.name != Path(__file__).name
    ):
        said = [ast.get_docstring(node) or "" for node in ast.parse(path.read_text(encoding="utf-8")).body
                if isinstance(node, ast.FunctionDef)]  # fmt: skip
        numbered = [text for text in said if re.match(r"T\d", text)]
        assert numbered and all(read(text) and "注入：" in text for text in numbered), path.name


@pytest.mark.parametrize(("name", "language"), [("reliability.md", 0), ("reliability.zh.md", 1)])
def test_the_page_is_that_of_the_tests_and_all_passed(name: str, language: int) -> None:
    """If this fails, run all fault tests: they write the page."""
    there = (ROOT / "docs" / name).read_text(encoding="utf-8")
    expected = page({key: Tally(ran=1) for key in faults()}, language)
    cases = re.compile(r" \(\d+ cases\)|（\d+ 例）")
    assert cases.sub("", there) == expected
    assert f"| {FAILED[language]}" not in there

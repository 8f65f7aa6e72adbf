"""Writes docs/reliability.md and its Chinese twin from the docstrings and the results of the fault tests.

The docstring of a fault test says `T5. Injects: ... Must follow: ...`, and the same in Chinese after `注入：` and
`必须：`. A run of pytest writes both documents only if every fault test ran.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENGLISH = re.compile(r"T(\d+)\.\s+Injects:\s+(.*?)\s+Must\s+follow:\s+(.*?)\s*(?=\Z|注入：)", re.S)
CHINESE = re.compile(r"注入：(.*?)必须：(.*)", re.S)


@dataclass(frozen=True)
class Fault:
    """What a test function injects and what must follow, each in English and Chinese."""

    number: int
    injects: tuple[str, str]
    follows: tuple[str, str]


@dataclass
class Tally:
    """How often a test function ran, and how often it failed."""

    ran: int = 0
    failed: int = 0


def _joined(text: str) -> str:
    """A Chinese sentence in one line: where a line breaks between Chinese and Latin letters stands a space."""
    text = re.sub(r"(?<=[A-Za-z0-9])\n\s*(?=[\u4e00-\u9fff])|(?<=[\u4e00-\u9fff])\n\s*(?=[A-Za-z0-9])", " ", text)
    return re.sub(r"\n\s*", "", text)


def read(docstring: str | None) -> Fault | None:
    """Read the docstring of a fault test, or return None for any other. Without Chinese, English is used for both."""
    english = ENGLISH.match(docstring or "")
    if english is None:
        return None
    injects, follows = (" ".join(text.split()) for text in english.groups()[1:])
    chinese = CHINESE.search(docstring or "")
    theirs = [_joined(text.strip()) for text in chinese.groups()] if chinese else [injects, follows]
    return Fault(int(english[1]), (injects, theirs[0]), (follows, theirs[1]))


def faults() -> dict[str, Fault]:
    """All fault tests by `file::function`, sorted by number, then by file."""
    found = {}
    for path in sorted((ROOT / "tests" / "faults").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (fault := read(ast.get_docstring(node))):
                found[f"{path.name}::{node.name}"] = fault
    return dict(sorted(found.items(), key=lambda item: item[1].number))


def key_of(nodeid: str) -> str:
    """The `file::function` in a pytest node id."""
    return nodeid.partition("[")[0].rpartition("/")[2]


TEXT = (
    """# Reliability

[中文](reliability.zh.md)

This page lists faults that can hit a run, and what must happen after each of them. Each row is a test that injects the fault.
Running all of these tests writes this page, so do not edit it by hand:

```bash
bash test.sh tests/faults
```

| fault | injected | must follow | result |
| --- | --- | --- | --- |
""",
    """# 可靠性

[English](reliability.md)

本页列出训练可能遇到的故障，以及每种故障之后必须出现的结果。每一行都是一个真正注入故障的测试。全部测试运行一遍就会生成本页，请不要手工修改：

```bash
bash test.sh tests/faults
```

| 编号 | 注入 | 必须 | 结果 |
| --- | --- | --- | --- |
""",
)
PASSED, FAILED = ("passed", "通过"), ("FAILED", "失败")
CASES = (" ({} cases)", "（{} 例）")


def page(results: Mapping[str, Tally], language: int) -> str:
    """The document in English (0) or Chinese (1)."""
    lines = []
    for key, fault in faults().items():
        tally = results[key]
        result = (FAILED if tally.failed else PASSED)[language]
        cases = CASES[language].format(tally.ran) if tally.ran > 1 else ""
        lines.append(f"| T{fault.number} | {fault.injects[language]} | {fault.follows[language]} | {result}{cases} |")
    return TEXT[language] + "\n".join(lines) + "\n"


def write(results: Mapping[str, Tally], folder: Path = ROOT / "docs") -> bool:
    """Write both documents if every fault test ran, and return whether they were written."""
    if not faults() or not faults().keys() <= results.keys():
        return False
    for name, language in (("reliability.md", 0), ("reliability.zh.md", 1)):
        (folder / name).write_text(page(results, language), encoding="utf-8")
    return True

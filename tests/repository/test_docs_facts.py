"""The lists in the documents are those of the code: every room and file, and every environment variable."""

import ast
import re
from collections.abc import Iterator

import pytest

from dev.house import FLOOR
from tests.repository.test_docs import NAME, ROOT, documents, read


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/zh/architecture.md"])
def test_the_tree_has_every_room_on_its_floor_and_no_file_that_is_gone(name: str) -> None:
    tree = read((ROOT / name).read_text(encoding="utf-8")).blocks[0][1].partition("\nscripts/")[0]
    told: dict[str, int] = {}
    floor, room = -1, ""
    for line in tree.splitlines()[1:]:
        depth, words = (len(line) - len(line.lstrip())) // 2, line.split()
        if words[0] == "floor":
            floor = int(words[1])
            continue
        assert words[1] == "#" and len(words) > 2, f"{name} does not say what {words[0]} is for"
        room = words[0] if depth == 2 else room
        told[words[0] if depth == 2 else room + words[0]] = floor
    files = {path.relative_to(ROOT / "nanochat").as_posix() for path in (ROOT / "nanochat").glob("**/*.py")}
    seen = {path for path in files if path.count("/") < 2 and not path.endswith("__init__.py")}
    folders = {path.rpartition("/")[0] + "/" for path in files if "/" in path}
    expected = {*seen, *(folder for folder in folders if folder.count("/") <= 2), "serve/web/"}
    assert {path.split("/")[0].removesuffix(".py") for path in told} == set(FLOOR)
    assert told.keys() <= expected, "the page names files that are gone"
    assert {path: FLOOR[path.split("/")[0].removesuffix(".py")] for path in told} == told


def test_the_page_of_variables_has_every_variable_that_is_read() -> None:
    """What nanochat, its scripts and the set-up ask the environment for, and every variable of our own."""
    folders = ("nanochat", "scripts", "tasks", "tools_npu", "runs")
    python = [*ROOT.glob("*.py"), *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    shell = [*ROOT.glob("speedrun*.sh"), ROOT / "setup_ascend.sh", ROOT / "runs/common.sh", ROOT / "runs/supervise.sh"]
    sources = [file.read_text(encoding="utf-8") for file in [*python, *shell]]
    found = {name for text in sources for name in re.findall(r"NANOCHAT_[A-Z0-9_]+", text)}
    for file in python:
        found |= set(asked_for(ast.parse(file.read_text(encoding="utf-8"))))
    for file in shell:
        found |= set(re.findall(rf"\$\{{({NAME}):?[-+=]", file.read_text(encoding="utf-8")))
    assert {"NANOCHAT_BASE_DIR", "HF_TOKEN", "LOCAL_RANK", "NPROC_PER_NODE", "SUPERVISE_TRIES"} <= found
    # What a shell or a user's account has by itself.
    found -= {"PATH", "PYTHONPATH", "HOME", "ZSH_VERSION", "BASH_VERSION", "ZSH_EVAL_CONTEXT"}
    for name in ("docs/environment.md", "docs/zh/environment.md"):
        told = read((ROOT / name).read_text(encoding="utf-8")).inline
        assert found - set(told) == set(), name


PLACES = (  # in English and in Chinese
    r"`(?P<name>\w+)`\s+in\s+`(?P<file>[\w/]+\.py)`",
    r"`(?P<file>[\w/]+\.py)`\s?(?:里|中)?的?\s?`(?P<name>\w+)`",
)


def test_what_a_page_says_is_in_a_file_is_defined_there() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in documents()}
    found = [(name, place) for name, text in texts.items() for where in PLACES for place in re.finditer(where, text)]
    assert len(found) > 8
    assert [(name, place[0]) for name, place in found if not defines(place["file"], place["name"])] == []


def defines(file: str, name: str) -> bool:
    """Whether a file has a function, a class or a variable of this name."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return bool(re.search(rf"^\s*(def|class) {name}\b|^\s*{name}\b.* =|^\s*{name}:", text, re.MULTILINE))


def asked_for(tree: ast.Module) -> Iterator[str]:
    """The variables that code asks an environment for, by their names as constants."""
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "setdefault", "getenv", "pop"):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            key = node.args[0] if node.args and is_environment(owner) else None
        elif isinstance(node, ast.Subscript) and is_environment(node.value):
            key = node.slice
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            key = node.left
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", key.value):
            yield key.value


def is_environment(node: ast.expr | None) -> bool:
    """Whether an expression is os.environ, os itself, or a mapping that stands for the environment."""
    return getattr(node, "attr", getattr(node, "id", "")) in ("environ", "environment", "env", "os")

"""The rules of DESIGN.md and the style guide that a machine can check."""

import ast
from collections.abc import Callable, Iterator

import pytest

from dev import house
from dev.house import FLOOR, FOR_TASKS, ROOT, imports, nodes, room_of
from tests.support.device_rules import check_comparisons, check_state, check_vendors

MAY_WORK_ON_IMPORT = {"nanochat/device.py", "nanochat/__init__.py", "scripts/__init__.py", "tasks/__init__.py"}
MAY_EXEC = {"nanochat/evals/sandbox_child.py"}  # runs the model's programs, in a process of its own with limits

FUNCTION_LINES, TRAIN_LINES = 120, 160
# What a module-level value may call: things that only compute, and constructors (capitalised names).
PURE_CALLS = """
    bytes cast chr compile dict enumerate field float frozenset fromkeys getLogger int items join keys len list local
    lower map max min namedtuple ord range replace resolve round set sorted split splitlines str strip sum tuple
    upper values with_name zip
"""


def package_of(path: str) -> str:
    return path.split("/")[0]


def check_floors(path: str, tree: ast.Module) -> Iterator[str]:
    """Who may import whom."""
    package = package_of(path)
    known = package != "nanochat" or path == "nanochat/__init__.py" or room_of(path) in FLOOR
    if not known:
        yield f"{path}: {room_of(path)} has no floor; give it one in FLOORS of dev/house.py"
        return
    for line, name in imports(path, tree):
        target, _, rest = name.partition(".")
        room = rest.split(".")[0]
        place = f"{path}:{line}: imports {name}"
        if package in ("nanochat", "tasks", "scripts") and target in ("bench", "tests", "dev"):
            yield f"{place}: {package} does not depend on {target}"
        if package == "nanochat" and target in ("tasks", "scripts"):
            yield f"{place}: nanochat never imports {target}"
        if package == "tasks" and target == "scripts":
            yield f"{place}: tasks never import scripts"
        if package == "scripts" and target == "scripts":
            yield f"{place}: scripts never import scripts; shared code belongs into nanochat"
        if target != "nanochat" or not room or package not in ("nanochat", "tasks", "scripts"):
            continue
        if room not in FLOOR:
            yield f"{place}: {room} has no floor; give it one in FLOORS of dev/house.py"
        elif package == "tasks" and not rest.startswith(FOR_TASKS):
            yield f"{place}: tasks import only {', '.join(FOR_TASKS)} of nanochat"
        elif package == "nanochat" and path != "nanochat/__init__.py":
            own = room_of(path)
            if room != own and FLOOR[room] >= FLOOR[own]:
                yield f"{place}: floor {FLOOR[room]} from floor {FLOOR[own]}; only lower floors"


def check_forbidden(path: str, tree: ast.Module) -> Iterator[str]:
    """No global, exec, eval, bare except, pickle."""
    for node in nodes(tree):
        if isinstance(node, ast.Global):
            yield f"{path}:{node.lineno}: global; pass the value, or keep it in an object"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{path}:{node.lineno}: bare except; name the exception"
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id in ("exec", "eval") and path not in MAY_EXEC:
            yield f"{path}:{node.lineno}: {node.func.id}"
    for line, name in imports(path, tree):
        if name.split(".")[0] in ("pickle", "cPickle", "dill", "marshal", "shelve") and package_of(path) != "tests":
            yield f"{path}:{line}: imports {name}; files are JSON, parquet or safetensors"


def check_size(path: str, tree: ast.Module, source: str) -> Iterator[str]:
    """File and function lengths."""
    lines = source.count("\n")
    if lines > house.MOST_LINES:
        yield f"{path}: {lines} lines, at most {house.MOST_LINES}"
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = TRAIN_LINES if package_of(path) == "scripts" and node.name == "train" else FUNCTION_LINES
            size = (node.end_lineno or 0) - node.lineno + 1
            if size > limit:
                yield f"{path}:{node.lineno}: {node.name} has {size} lines, at most {limit}"


def is_pure(value: ast.AST) -> bool:
    """Whether a module-level value only computes: no call but of constructors and of a few known functions."""
    for node in run_at_once(value):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in PURE_CALLS.split() and not name.lstrip("_")[:1].isupper():
                return False
        if isinstance(node, ast.Attribute) and node.attr == "environ":
            return False
    return True


def run_at_once(value: ast.expr) -> Iterator[ast.AST]:
    """The nodes of an expression that its evaluation runs, which those in a lambda are not."""
    yield value
    for child in ast.iter_child_nodes(value):
        if not isinstance(child, ast.Lambda):
            yield from run_at_once(child)  # type: ignore[arg-type]


def is_guard(test: ast.expr) -> bool:
    return "__name__" in ast.dump(test) or "TYPE_CHECKING" in ast.dump(test)


def check_import_work(path: str, tree: ast.Module) -> Iterator[str]:
    """Importing a module does nothing."""
    if path in MAY_WORK_ON_IMPORT:
        return
    harmless = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in tree.body:
        fine = isinstance(node, harmless)
        fine = fine or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        fine = fine or (isinstance(node, ast.If) and is_guard(node.test))
        fine = fine or (isinstance(node, ast.Assign | ast.AnnAssign) and (node.value is None or is_pure(node.value)))
        if not fine:
            yield f"{path}:{node.lineno}: works on import: {ast.unparse(node)[:60]}"


def missing_annotations(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> list[str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    if method and arguments and not any(getattr(d, "id", "") == "staticmethod" for d in function.decorator_list):
        arguments = arguments[1:]
    missing = [a.arg for a in arguments if a.annotation is None]
    if function.returns is None and function.name != "__init__":
        missing.append("return")
    return missing


def check_public(path: str, tree: ast.Module) -> Iterator[str]:
    """Public functions and classes of nanochat: a docstring, and annotations, on public methods too."""
    if package_of(path) != "nanochat":
        return
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield f"{path}:{node.lineno}: {node.name} has no docstring"
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in functions:
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if function.name.startswith("_") and function.name != "__init__":
                continue
            if missing := missing_annotations(function, method=function is not node):
                yield f"{path}:{function.lineno}: {function.name} has no annotation for {', '.join(missing)}"


def check_docstring(path: str, tree: ast.Module) -> Iterator[str]:
    """Every module says in its first line what it is for, and an __init__.py does nothing else."""
    if tree.body and not ast.get_docstring(tree):
        yield f"{path}: no module docstring"
    if path.endswith("__init__.py") and len(tree.body) > 1 and path not in MAY_WORK_ON_IMPORT and "stub" not in path:
        yield f"{path}: holds more than its docstring"


FOLDERS = ("nanochat", "scripts", "tasks", "tools_npu", "bench", "tests", "dev", "runs")

Check = Callable[[str, ast.Module], Iterator[str]]
IN_PACKAGES: list[Check] = [
    check_floors, check_vendors, check_comparisons, check_state, check_import_work, check_public,
]  # fmt: skip
EVERYWHERE: list[Check] = [check_forbidden, check_docstring]


def problems(path: str, source: str) -> list[str]:
    """All that is wrong with one file, each as `path:line: what`."""
    tree = ast.parse(source)
    found = [line for check in EVERYWHERE for line in check(path, tree)]
    found += check_size(path, tree, source)
    if package_of(path) in ("nanochat", "scripts", "tasks"):
        found += [line for check in IN_PACKAGES for line in check(path, tree)]
    return found


def python_files(folder: str) -> list[str]:
    files = ROOT.glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py")
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_files_follow_the_rules(folder: str) -> None:
    found: list[str] = []
    for path in python_files(folder):
        found += problems(path, (ROOT / path).read_text(encoding="utf-8"))
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nanochat/gpt.py", "import nanochat.engine"),
        ("nanochat/gpt.py", "def f() -> None:\n    from nanochat.train import optim"),
        ("nanochat/gpt.py", "import torch\ndef _f():\n    torch.cuda.synchronize()"),
        ("nanochat/gpt.py", "SEEN = {}\ndef _f(x): SEEN[x] = 1"),
        ("tests/train/__init__.py", "import torch"),
    ],
)
def test_a_rule_that_nothing_breaks_today_still_bites(path: str, source: str) -> None:
    assert problems(path, f'"""Doc."""\n{source}')


def test_no_room_has_two_floors() -> None:
    assert len(FLOOR) == sum(map(len, house.FLOORS))


def test_the_house_has_no_circles_few_entries_in_a_folder_and_short_files() -> None:
    measures = house.measure()
    assert measures.circles == []
    for folder, count in measures.entries.items():
        limit = house.MOST_ENTRIES_AT_THE_TOP if folder == house.PACKAGE else house.MOST_ENTRIES
        assert count <= limit, f"{folder} has {count} entries, at most {limit}"
    assert measures.median_lines <= house.MEDIAN_LINES

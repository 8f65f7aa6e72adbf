"""Measures the house: its floors, the arrows between its rooms, and how long and how well typed its files are.

python -m dev.house

FLOORS is the one list of what may import what; tests/repository/test_architecture.py and dev/floorplan.py read it too.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "nanochat"

# From the ground up. A room is a folder or a file of nanochat/. It imports rooms of lower floors only.
FLOORS = (
    ("common",),
    ("data", "nn", "schedule"),
    ("context",),
    ("model",),
    ("models", "platforms"),
    ("device", "tokenizer"),
    ("runtime", "gpt", "generate"),
    ("prepare", "engine", "dataset", "report", "checkpoint_manager"),
    ("dataloader", "serve", "export"),
    ("evals",),
    ("train", "rl"),
    ("step", "planner"),
    ("meter",),
    ("run",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FOR_TASKS = ("common", "data", "evals.sandbox")  # what tasks/ may import

MOST_ENTRIES = 12  # files and folders in a folder
MOST_ENTRIES_AT_THE_TOP = 32  # the book and its appendices
MOST_LINES = 600
MEDIAN_LINES = 180


def room_of(path: str) -> str:
    """The room of a file: `nn` for nanochat/nn/loss.py, `gpt` for nanochat/gpt.py."""
    return path.split("/")[1].removesuffix(".py")


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported dotted name and its line, inside functions too, relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*path.split("/")[: -node.level], *base.split(".")]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(
            node.func, "attr", getattr(node.func, "id", "")
        ) in (
            "import_module",
            "__import__",
        ):
            yield from ((node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant))


def sources(*folders: str) -> dict[str, str]:
    """Path and text of every Python file below some folders of the repository."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def arrows(files: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """(importing room, imported room) -> how many imports there are, between different rooms of the package."""
    found: dict[tuple[str, str], int] = {}
    for path, text in files.items():
        if path == f"{PACKAGE}/__init__.py":
            continue
        for _, name in imports(path, ast.parse(text)):
            package, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if package == PACKAGE and target and target != room_of(path):
                found[room_of(path), target] = found.get((room_of(path), target), 0) + 1
    return found


def circles(files: Mapping[str, str]) -> list[list[str]]:
    """Groups of files that import each other in a circle; empty in a house that stands."""
    names = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files
    }
    needs: dict[str, set[str]] = {}
    for path, text in files.items():
        wanted = {name for _, name in imports(path, ast.parse(text))}
        wanted |= {name.rpartition(".")[0] for name in wanted}
        needs[path] = {names[name] for name in wanted if name in names} - {path}
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(path: str, trail: list[str]) -> None:
        if path in trail:
            found.append(trail[trail.index(path) :])
        elif path not in done:
            for target in sorted(needs[path]):
                visit(target, [*trail, path])
            done.add(path)

    for path in sorted(needs):
        visit(path, [])
    return found


def entries(folder: Path) -> int:
    """How many files and folders a folder shows, `__init__.py` and caches left out."""
    return sum(
        not path.name.startswith(("__init__", "__pycache__", ".")) for path in folder.iterdir()
    )


def typed(files: Mapping[str, str]) -> float:
    """The share of function parameters that have a type, `self` and `cls` left out."""
    total = named = 0
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                counted = [argument for argument in every if argument.arg not in ("self", "cls")]
                total += len(counted)
                named += sum(argument.annotation is not None for argument in counted)
    return named / max(total, 1)


@dataclass(frozen=True)
class House:
    """What is measured of the package."""

    entries: dict[str, int]
    arrows: dict[tuple[str, str], int]
    circles: list[list[str]]
    typed: float
    lines: list[int]


def measure() -> House:
    """Measure the repository that this file belongs to."""
    files = sources(PACKAGE)
    folders = sorted({(ROOT / path).parent for path in files})
    return House(
        {folder.relative_to(ROOT).as_posix(): entries(folder) for folder in folders},
        arrows(files),
        circles(files),
        typed(files),
        sorted(
            text.count("\n") for path, text in files.items() if not path.endswith("__init__.py")
        ),
    )


def main() -> None:
    """Print the figures."""
    house = measure()
    for folder, count in house.entries.items():
        limit = MOST_ENTRIES_AT_THE_TOP if folder == PACKAGE else MOST_ENTRIES
        print(f"{folder}: {count} entries (at most {limit})")
    rooms = {room for pair in house.arrows for room in pair}
    upwards = sum(FLOOR[target] >= FLOOR[room] for room, target in house.arrows)
    print(
        f"rooms: {len(rooms)}, arrows: {len(house.arrows)}, arrows that point up: {upwards}, "
        f"circles: {len(house.circles)}"
    )
    print(f"typed parameters: {house.typed:.1%}")
    print(
        f"lines of a file: median {median(house.lines):.0f} (at most {MEDIAN_LINES}), most {house.lines[-1]} "
        f"(at most {MOST_LINES})"
    )


if __name__ == "__main__":
    main()

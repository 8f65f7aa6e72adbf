"""Measures the house: its floors, the arrows between its rooms, circles of files, and sizes.

python -m dev.house

A room is a folder or a file of nanochat/, an arrow is an import from one room in another, and a
circle is a group of files that import each other. FLOORS is the one list of what may import what.
tests/repository/test_architecture.py and dev/floorplan.py read it too.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "nanochat"
LATE_IMPORTS = ("import_module", "__import__")

# From the ground up. A room imports only rooms of lower floors.
FLOORS = (
    ("common",),
    ("data", "linear", "cache", "attention", "loss", "muon", "schedule"),
    ("context",),
    ("gpt", "model"),
    ("models",),
    ("platforms",),
    ("device", "tokenizer"),
    ("runtime", "generate"),
    ("prepare", "engine", "dataset", "report", "checkpoint_manager"),
    ("dataloader", "optim", "serve", "export"),
    ("evals",),
    ("train", "rl"),
    ("step", "planner"),
    ("meter",),
    ("run",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FOR_TASKS = ("common", "data", "evals.sandbox")  # what tasks/ may import

MOST_ENTRIES = 18  # files and folders in a folder
MOST_ENTRIES_AT_THE_TOP = 34  # the book and its appendices
MOST_LINES = 700
MEDIAN_LINES = 220


def room_of(path: str) -> str:
    """Return the room of a file: `data` for nanochat/data/bpe.py, `gpt` for nanochat/gpt.py."""
    return path.split("/")[1].removesuffix(".py")


@lru_cache(maxsize=2)
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a tree. They are kept for the next caller, since a walk takes long."""
    return tuple(ast.walk(tree))


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of every import, also inside functions.

    Relative imports are made absolute.
    """
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.split("/")[: -node.level]
                module = ".".join([*package, *module.split(".")]).rstrip(".")
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in LATE_IMPORTS:
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        yield node.lineno, argument.value


@cache
def imported_names(path: str, text: str) -> list[str]:
    """Return the dotted names that a file imports."""
    return [name for _, name in imports(path, ast.parse(text))]


def sources(*folders: str) -> dict[str, str]:
    """Return the text of every Python file below some folders of the repository, by path."""
    text_of: dict[str, str] = {}
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            text_of[path] = file.read_text(encoding="utf-8")
    return text_of


def imported_room(name: str) -> str:
    """Return the room that a dotted name is in, or "" if the name is not in the package."""
    package, _, inner = name.partition(".")
    return inner.split(".")[0] if package == PACKAGE else ""


def arrows(files: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Return the number of imports of one room by another: (importing, imported) -> count."""
    counts: dict[tuple[str, str], int] = {}
    for path, text in files.items():
        if path == f"{PACKAGE}/__init__.py":
            continue
        room = room_of(path)
        for name in imported_names(path, text):
            target = imported_room(name)
            if target not in ("", room):
                arrow = (room, target)
                counts[arrow] = counts.get(arrow, 0) + 1
    return counts


def module_of(path: str) -> str:
    """Return the dotted module name of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_files(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return, for each file, the files that it imports."""
    path_of = {module_of(path): path for path in files}
    targets: dict[str, set[str]] = {}
    for path, text in files.items():
        targets[path] = set()
        for name in imported_names(path, text):
            parent = name.rpartition(".")[0]  # `a.b.f` may be a function of a.b
            for module in (name, parent):
                target = path_of.get(module, path)
                if target != path:
                    targets[path].add(target)
    return targets


def circles(files: Mapping[str, str]) -> list[list[str]]:
    """Return the groups of files that import each other in a circle.

    There are none in a house that stands.
    """
    targets = imported_files(files)
    groups: list[list[str]] = []
    visited: set[str] = set()

    def visit(path: str, trail: list[str]) -> None:
        if path in trail:
            groups.append(trail[trail.index(path) :])
        elif path not in visited:
            for target in sorted(targets[path]):
                visit(target, [*trail, path])
            visited.add(path)

    for path in sorted(targets):
        visit(path, [])
    return groups


def entries(folder: Path) -> int:
    """Return the number of files and folders in a folder, without `__init__.py` and caches."""
    hidden = ("__init__", "__pycache__", ".")
    return sum(not path.name.startswith(hidden) for path in folder.iterdir())


@dataclass(frozen=True)
class House:
    """The measurements of the package."""

    arrows: dict[tuple[str, str], int]
    circles: list[list[str]]
    entries: dict[str, int]  # the number of entries of each folder
    median_lines: float  # the median number of lines of a file


def measure() -> House:
    """Return the measurements of the repository that this file belongs to."""
    files = sources(PACKAGE)
    folders = sorted({(ROOT / path).parent for path in files})
    entry_counts = {folder.relative_to(ROOT).as_posix(): entries(folder) for folder in folders}
    line_counts = [
        text.count("\n") for path, text in files.items() if not path.endswith("__init__.py")
    ]
    return House(arrows(files), circles(files), entry_counts, median(line_counts))


def main() -> None:
    """Print the measurements."""
    house = measure()
    rooms = {room for arrow in house.arrows for room in arrow}
    upwards = sum(FLOOR[target] >= FLOOR[room] for room, target in house.arrows)
    print(f"rooms: {len(rooms)}, arrows: {len(house.arrows)}, arrows that point up: {upwards}")
    print(f"circles: {len(house.circles)}")
    for folder, count in house.entries.items():
        limit = MOST_ENTRIES_AT_THE_TOP if folder == PACKAGE else MOST_ENTRIES
        print(f"{folder}: {count} entries (at most {limit})")
    print(f"lines of a file: median {house.median_lines:.0f} (at most {MEDIAN_LINES})")


if __name__ == "__main__":
    main()

"""What the project calls in torch_npu, with the values that it gives, and whether a release of torch_npu takes that."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.real_torch_npu import Package, Signature, literal

ROOT = Path(__file__).resolve().parent.parent.parent
# Files that call torch.npu by another name, since torch.cuda has the same functions.
MODULE_NAMES = {
    "nanochat/platforms/base.py": {"self.module"},
    "nanochat/platforms/ascend/platform.py": {"self.module"},
    "nanochat/runtime/profiling.py": {"self.module"},
}
CONSTRUCTORS = {"torch_npu.npu.Stream", "torch_npu.npu.Event"}  # their __new__ takes what the C type takes
TYPES = {"int": int, "SymInt": int, "float": (int, float), "bool": bool, "str": str}  # of a schema


@dataclass
class Use:
    """A name of torch_npu in a file; for a call, how many positional arguments, which keywords, and their values."""

    place: str
    name: str
    called: bool = False
    positional: int = 0
    keywords: set[str] = field(default_factory=set)
    open_ended: bool = False  # *args or a ** that is not a literal
    values: dict[int | str, list[object]] = field(default_factory=dict)  # by place or keyword: every value it may have


def values_of(node: ast.expr) -> list[object]:
    """The literals that an expression may be: both of `4 if short else 3`; none if it is computed."""
    if isinstance(node, ast.IfExp):
        return values_of(node.body) + values_of(node.orelse)
    found = literal(node)
    return [] if found is ... else [found]


class Reader(ast.NodeVisitor):
    """Collects the uses in one file."""

    def __init__(self, path: str, tree: ast.Module):
        self.path, self.uses = path, list[Use]()
        self.aliases = {name: "torch_npu.npu" for name in MODULE_NAMES.get(path, ())}
        self.literals: dict[str, dict[str, ast.expr]] = {}  # dictionaries that are given as **name
        for node in ast.walk(tree):
            self.bind(node)
        self.visit(tree)

    def bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch_npu":
                    self.aliases[alias.asname or "torch_npu"] = alias.name if alias.asname else "torch_npu"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch_npu" and not node.level:
            for alias in node.names:
                self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.value.keys):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                found = {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
                self.literals[node.targets[0].id] = found
            elif name := self.name_of(node.value):
                self.aliases[node.targets[0].id] = name

    def name_of(self, node: ast.AST) -> str:
        """torch.npu.x, torch_npu.x or an alias as torch_npu...; "" for everything else."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "torch_npu" if node.id == "torch_npu" else "")
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr == "npu":
                return "torch_npu.npu"
            if ast.unparse(node) in self.aliases:
                return self.aliases[ast.unparse(node)]
            base = self.name_of(node.value)
            return f"{base}.{node.attr}" if base else ""
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            constant = node.args[0] if node.args else None
            return constant.value if isinstance(constant, ast.Constant) and constant.value == "torch_npu" else ""
        return ""

    def visit_Call(self, node: ast.Call) -> None:
        if not (name := self.name_of(node.func)):
            self.generic_visit(node)
            return
        use = Use(f"{self.path}:{node.lineno}", name, True, len(node.args))
        use.values = {place: values_of(argument) for place, argument in enumerate(node.args)}
        for keyword in node.keywords:
            if keyword.arg:
                given = {keyword.arg: keyword.value}
            else:
                named = keyword.value.id if isinstance(keyword.value, ast.Name) else ""
                given = self.literals.get(named, {})
                use.open_ended |= named not in self.literals
            use.keywords |= set(given)
            use.values |= {word: values_of(value) for word, value in given.items()}
        use.open_ended |= any(isinstance(argument, ast.Starred) for argument in node.args)
        self.uses.append(use)
        for child in [*node.args, *node.keywords]:
            self.visit(child)
        if not isinstance(node.func, ast.Attribute | ast.Name):
            self.visit(node.func)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self.name_of(node):
            self.uses.append(Use(f"{self.path}:{node.lineno}", name))
        else:
            self.generic_visit(node)


def project_files() -> Iterator[Path]:
    yield ROOT / "check_npu.py"
    for folder in ("nanochat", "scripts", "tasks", "bench", "tools_npu"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def uses() -> list[Use]:
    found = []
    for path in project_files():
        name = path.relative_to(ROOT).as_posix()
        found += Reader(name, ast.parse(path.read_text(encoding="utf-8"))).uses
    return [use for use in found if use.name not in ("torch_npu", "torch_npu.npu")]


# --- whether a release takes it --------------------------------------------------------------------


def problem(use: Use, package: Package) -> str:
    """What is wrong with a use; "" if the package would take it."""
    found = package.find(use.name)
    if found is None:
        return f"{use.place}: {use.name} is not there"
    if use.called and found.signatures and use.name not in CONSTRUCTORS:
        why = [
            s.problem(use.positional, use.keywords, use.open_ended)
            or wrong_value(use, s, package.manuals.get(use.name.rpartition(".")[2], ""))
            for s in found.signatures
        ]
        if all(why):
            return f"{use.place}: {use.name} {why[0]}"
    return ""


def wrong_value(use: Use, signature: Signature, manual: str) -> str:
    """Why a value in a call is of the wrong type, or is not among those that the manual allows; "" if all are fine."""
    for place, values in use.values.items():
        named = [p for i, p in enumerate(signature.parameters) if place in (i, p.name)]
        for parameter, value in ((parameter, value) for parameter in named for value in values):
            wanted = TYPES.get(parameter.type.rstrip("?"))
            fits = wanted is None or (isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool))
            if value is not None and not fits:
                return f"wants {parameter.type} {parameter.name}, got {value!r}"
            allowed = allowed_values(parameter.name, manual)
            named_there = re.search(rf"(?<![A-Za-z_]){re.escape(str(value))}(?![A-Za-z_])", manual)
            if isinstance(value, str) and manual and not named_there:
                return f"{parameter.name}={value!r}: its manual has no such value"
            if allowed and isinstance(value, int) and value not in allowed:
                return f"{parameter.name}={value}: its manual allows {sorted(allowed)}"
    return ""


def allowed_values(argument: str, manual: str) -> set[int]:
    """The numbers that a manual explains one by one (`sparse_mode为3时`), without those that it calls unsupported."""
    found: set[int] = set()
    for line in manual.splitlines():
        explained = re.search(rf"^\s*{re.escape(argument)}(?:为|:.*支持取值|:.*支持配置值为)([\d、]+)", line)
        if explained and "均暂不支持" not in line:
            found |= {int(number) for number in re.findall(r"\d+", explained[1])}
    return found

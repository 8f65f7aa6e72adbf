"""Reads the published torch_npu from its wheel without importing it: its names, and the arguments that they take."""

import ast
import re
import warnings
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# Names that Python code does not define: types of the C module, and tensor types made in a loop.
FROM_C = {
    "torch_npu.npu": "BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor "
    "ShortTensor BFloat16Tensor",
}


# --- arguments -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    name: str
    required: bool
    keyword_only: bool
    default: object = None  # ... (Ellipsis) if it is not a literal
    type: str = ""  # as a schema declares it, such as `int[]?`; "" in Python code


@dataclass(frozen=True)
class Signature:
    parameters: tuple[Parameter, ...]
    any_positional: bool = False  # *args
    any_keyword: bool = False  # **kwargs

    def problem(self, positional: int, keywords: set[str], open_ended: bool = False) -> str:
        """Why a call with this many positional arguments and these keywords would be refused, or "" if it is fine."""
        by_place = [parameter for parameter in self.parameters if not parameter.keyword_only]
        if positional > len(by_place) and not self.any_positional:
            return f"takes {len(by_place)} positional arguments, got {positional}"
        unknown = keywords - {parameter.name for parameter in self.parameters}
        if unknown and not self.any_keyword:
            return f"has no argument {', '.join(sorted(unknown))}"
        given = {parameter.name for parameter in by_place[:positional]} | keywords
        missing = [p.name for p in self.parameters if p.required and p.name not in given]
        if missing and not open_ended:
            return f"needs {', '.join(missing)}"
        return ""

    def narrower_than(self, real: "Signature") -> str:
        """Why a call that this accepts might fail or differ with the real one, or "" if there is no such call."""
        mine = [p for p in self.parameters if not p.keyword_only]
        theirs = [p for p in real.parameters if not p.keyword_only]
        if real.any_positional and real.any_keyword:
            return ""
        for number, parameter in enumerate(mine):
            if number >= len(theirs) or theirs[number].name != parameter.name:
                other = theirs[number].name if number < len(theirs) else "nothing"
                return f"argument {number + 1} is {parameter.name}, the real one's {other}"
        known = {p.name: p for p in real.parameters}
        for parameter in self.parameters:
            if parameter.name not in known and not real.any_keyword:
                return f"the real one has no argument {parameter.name}"
            other = known.get(parameter.name)
            literal = other is not None and ... not in (parameter.default, other.default)
            if other and not (parameter.required or other.required) and literal and parameter.default != other.default:
                return f"{parameter.name}={parameter.default!r}, the real default is {other.default!r}"
        own = {p.name: p for p in self.parameters}
        for parameter in real.parameters:
            if parameter.required and (parameter.name not in own or not own[parameter.name].required):
                return f"the real one needs {parameter.name}"
        return ""


def literal(node: ast.expr | None) -> object:
    try:
        return ast.literal_eval(node) if node is not None else ...
    except ValueError:
        return ...


def signature_of(arguments: ast.arguments, method: bool = False) -> Signature:
    """The signature of a function's definition, without a method's self."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(by_place) - len(arguments.defaults)) + list(arguments.defaults)
    found = [Parameter(a.arg, d is None, False, literal(d)) for a, d in zip(by_place, defaults, strict=True)]
    found = found[1:] if method else found
    found += [Parameter(a.arg, d is None, True, literal(d))
              for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]  # fmt: skip
    return Signature(tuple(found), arguments.vararg is not None, arguments.kwarg is not None)


def signature_of_schema(schema: str) -> Signature:
    """The signature in a schema such as `name(Tensor self, float epsilon=1e-06, *, int? x=None) -> Tensor`."""
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    found, keyword_only = [], False
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", inside):
        declared, equals, default = part.strip().partition("=")
        if declared == "*":
            keyword_only = True
            continue
        value = {"None": None, "True": True, "False": False}.get(default, ...)
        if equals and value is ...:
            value = literal(ast.parse(default, mode="eval").body)
        kind, _, name = declared.strip().rpartition(" ")
        found.append(Parameter(name, not equals, keyword_only, value if equals else ..., kind))
    return Signature(tuple(found))


# --- the package -----------------------------------------------------------------------------------


@dataclass
class Definition:
    """What a name is: a function or operator with its arguments, a class with its methods, a module, or a value."""

    kind: str  # function | operator | class | module | value
    signatures: list[Signature] = field(default_factory=list)  # operators may have overloads
    methods: dict[str, Signature] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    module: str = ""
    attributes: frozenset[str] = frozenset()  # of a class


class Package:
    """A package `torch_npu`, in a wheel or in a folder like the emulator's stub."""

    def __init__(self, source: Path):
        self.archive = zipfile.ZipFile(source) if source.is_file() else None
        self.folder = source
        self.trees: dict[str, ast.Module | None] = {}
        self.bound: dict[str, tuple[dict[str, ast.stmt], list[str]]] = {}
        self.files = frozenset(self.archive.namelist()) if self.archive else frozenset(
            path.relative_to(source).as_posix() for path in source.rglob("*.*")
        )  # fmt: skip

    def read(self, name: str) -> str:
        if self.archive:
            return self.archive.read(name).decode("utf-8")
        return (self.folder / name).read_text(encoding="utf-8")

    def tree(self, module: str) -> ast.Module | None:
        """The syntax tree of a module, or None if the package has no such module."""
        if module not in self.trees:
            path = module.replace(".", "/")
            names = [name for name in (f"{path}/__init__.py", f"{path}.py") if name in self.files]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # escapes in their docstrings
                self.trees[module] = ast.parse(self.read(names[0])) if names else None
        return self.trees[module]

    def is_package(self, module: str) -> bool:
        return module.replace(".", "/") + "/__init__.py" in self.files

    @cached_property
    def operators(self) -> dict[str, list[Signature]]:
        """The operators that the package adds, from the `custom:` sections of its lists; overloads share a name."""
        found: dict[str, list[Signature]] = {}
        for name in sorted(self.files):
            if re.fullmatch(r"torch_npu/csrc/aten/npu_native_functions\w*\.yaml", name):
                part = re.search(r"^custom:\n(.*?)(?=^\w|\Z)", self.read(name), re.M | re.S)
                for schema in re.findall(r"^[\s-]*func: (\w.*)$", part[1] if part else "", re.M):
                    operator = re.match(r"\w+", schema)
                    if operator and "->" in schema:
                        found.setdefault(operator[0], []).append(signature_of_schema(schema))
        return found

    @cached_property
    def manuals(self) -> dict[str, str]:
        """What the package's own documentation says of each operator, argument by argument."""
        tree = self.tree("torch_npu._op_plugin_docs")
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree else []
        texts = [[literal(argument) for argument in call.args[:2]] for call in calls]
        return {text[0]: text[1] for text in texts if len(text) == 2 and all(isinstance(part, str) for part in text)}

    def find(self, name: str, depth: int = 0) -> Definition | None:
        """What a dotted name such as torch_npu.npu.synchronize stands for, or None if the package does not have it."""
        if depth > 12:
            return None
        if self.tree(name) is not None:
            return Definition("module", module=name)
        parent, _, last = name.rpartition(".")
        if not parent:
            return None
        if self.tree(parent) is None:
            owner = self.find(parent, depth + 1)
            if owner is None:
                return None
            if owner.kind == "module":
                return self.find(f"{owner.module}.{last}", depth + 1)
            return self._member(owner, last)
        return self._in_module(parent, last, depth)

    def _member(self, owner: Definition, name: str) -> Definition | None:
        if name in owner.methods:
            return Definition("function", [owner.methods[name]])
        if name in owner.attributes:
            return Definition("value")
        return Definition("value") if owner.kind == "value" else None

    def _names(self, module: str) -> tuple[dict[str, ast.stmt], list[str]]:
        """The names that a module binds, also inside `if` and `try`, and the modules that it imports * from."""
        if module not in self.bound:
            names: dict[str, ast.stmt] = {}
            stars: list[str] = []
            tree = self.tree(module)
            todo = list(tree.body) if tree else []
            while todo:
                node = todo.pop(0)
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names[node.name] = node
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names |= {target.id: node for target in targets if isinstance(target, ast.Name)}
                elif isinstance(node, ast.ImportFrom):
                    names |= {alias.asname or alias.name: node for alias in node.names if alias.name != "*"}
                    stars += [self._source(module, node)] if node.names[0].name == "*" else []
                elif isinstance(node, ast.If | ast.Try):
                    todo += [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
            self.bound[module] = names, stars
        return self.bound[module]

    def _in_module(self, module: str, name: str, depth: int) -> Definition | None:
        names, stars = self._names(module)
        node = names.get(name)
        if isinstance(node, ast.FunctionDef):
            return Definition("function", [signature_of(node.args)])
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        if isinstance(node, ast.ImportFrom):
            source = self._source(module, node)
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            ours = source.split(".")[0] == "torch_npu"
            return (self.find(f"{source}.{original}", depth + 1) if ours else None) or Definition("value")
        if node is not None:
            return Definition("value")
        for source in stars:
            brought = self.tree(source) is not None and self._exports(source, name)
            if brought and (found := self._in_module(source, name, depth + 1)):
                return found
        return self._dynamic(module, name)

    def _dynamic(self, module: str, name: str) -> Definition | None:
        """Names that are only made while the package loads."""
        if module == "torch_npu" and name in self.operators:
            return Definition("operator", self.operators[name])
        if name in FROM_C.get(module, "").split():
            return Definition("value")
        tree = self.tree(module)
        for node in tree.body if tree else []:
            if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
                words = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                if name in words:
                    return Definition("value")
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = module.split(".")
        base = base[: len(base) - node.level + (1 if self.is_package(module) else 0)]
        return ".".join([*base, *(node.module or "").split(".")]).rstrip(".")

    def _exports(self, module: str, name: str) -> bool:
        """Whether `from module import *` brings this name."""
        listed = self.all_of(module)
        return name in listed if listed else not name.startswith("_")

    def all_of(self, module: str) -> list[str]:
        """`__all__` of a module, including what is added to it."""
        tree = self.tree(module)
        found: list[str] = []
        for node in tree.body if tree else []:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AugAssign) and isinstance(target, ast.Name) and target.id == "__all__":
                value = literal(node.value)
                found += list(value) if isinstance(value, list | tuple) else []
        return found

    def _class(self, node: ast.ClassDef) -> Definition:
        methods = {
            item.name: signature_of(item.args, method=True) for item in node.body if isinstance(item, ast.FunctionDef)
        }
        attributes = frozenset(
            ast.unparse(target) for item in node.body if isinstance(item, ast.Assign) for target in item.targets
        )
        return Definition("class", [methods["__init__"]] if "__init__" in methods else [], methods,
                          tuple(ast.unparse(base) for base in node.bases), attributes=attributes)  # fmt: skip

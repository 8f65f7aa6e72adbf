"""The contract with the real torch_npu: every name and argument that the project or the emulator's stub uses is there.

The wheels come from the package index, are kept in the user's cache folder, and are read, never imported.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pytest

from nanochat.platforms import ascend_kernels as npu_kernels
from nanochat.platforms import ascend_profiler as npu_profiler
from tests.support.real_torch_npu import NoNetwork, Package, Signature, signature_of, signature_of_schema, wheel
from tools_npu import versions

ROOT = Path(__file__).resolve().parent.parent.parent
STUB = ROOT / "tests" / "emulated_npu" / "stub"
VERSIONS = ("2.7.1", "2.7.1.*", "2.13.0")  # the oldest supported release, its last patch, the newest known
STUB_MODULES = ("torch_npu", "torch_npu.npu", "torch_npu.profiler")
STUB_VERSIONS = VERSIONS[1:]  # the first 2.7.1 lacks what the stub has for its successors
# Files that call torch.npu by another name, since torch.cuda has the same functions.
MODULE_NAMES = {
    "nanochat/platforms/base.py": {"self.module"},
    "nanochat/platforms/ascend.py": {"self.module"},
    "nanochat/runtime/profiling.py": {"self.module"},
}
CONSTRUCTORS = {"torch_npu.npu.Stream", "torch_npu.npu.Event"}  # their __new__ takes what the C type takes


@lru_cache
def real(version: str) -> Package:
    return Package(wheel(version))


@pytest.fixture(params=VERSIONS)
def package(request: pytest.FixtureRequest) -> Package:
    try:
        return real(request.param)
    except NoNetwork as why:
        pytest.skip(f"torch_npu {request.param} could not be downloaded: {why}")


# --- what the project uses -------------------------------------------------------------------------


@dataclass
class Use:
    """A name of torch_npu in a file; for a call, how many positional arguments and which keywords."""

    place: str
    name: str
    called: bool = False
    positional: int = 0
    keywords: set[str] = field(default_factory=set)
    open_ended: bool = False  # *args or a ** that is not a literal


class Reader(ast.NodeVisitor):
    """Collects the uses in one file."""

    def __init__(self, path: str, tree: ast.Module):
        self.path, self.uses = path, list[Use]()
        self.aliases = {name: "torch_npu.npu" for name in MODULE_NAMES.get(path, ())}
        self.literals: dict[str, set[str]] = {}  # dictionaries that are given as **name
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
                keys = {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
                self.literals[node.targets[0].id] = keys
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
        if name := self.name_of(node.func):
            use = Use(f"{self.path}:{node.lineno}", name, True, len(node.args))
            for keyword in node.keywords:
                if keyword.arg:
                    use.keywords.add(keyword.arg)
                elif isinstance(keyword.value, ast.Name) and keyword.value.id in self.literals:
                    use.keywords |= self.literals[keyword.value.id]
                else:
                    use.open_ended = True
            use.open_ended |= any(isinstance(argument, ast.Starred) for argument in node.args)
            self.uses.append(use)
            for child in [*node.args, *node.keywords]:
                self.visit(child)
            if not isinstance(node.func, ast.Attribute | ast.Name):
                self.visit(node.func)
        else:
            self.generic_visit(node)

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


def problem(use: Use, package: Package) -> str:
    """What is wrong with a use; "" if the package would take it."""
    found = package.find(use.name)
    if found is None:
        return f"{use.place}: {use.name} is not there"
    if use.called and found.signatures and use.name not in CONSTRUCTORS:
        why = [s.problem(use.positional, use.keywords, use.open_ended) for s in found.signatures]
        if all(why):
            return f"{use.place}: {use.name} {why[0]}"
    return ""


@pytest.mark.contract
def test_what_the_project_uses_is_there_with_these_arguments(package: Package) -> None:
    found = [text for use in uses() if (text := problem(use, package))]
    assert not found, "\n".join(found)


@pytest.mark.contract
def test_operators_that_are_asked_for_by_name_are_there(package: Package) -> None:
    names = {name for operators in npu_kernels.NEEDS.values() for name in operators}
    assert [name for name in sorted(names) if package.find(f"torch_npu.{name}") is None] == []


@pytest.mark.contract
def test_the_profiler_leaves_the_files_and_columns_that_are_read(package: Package) -> None:
    names = (name for name in package.files if name.startswith("torch_npu/profiler/") and name.endswith(".py"))
    text = "\n".join(package.read(name) for name in names)
    files = {npu_profiler.OUTPUT, npu_profiler.TRACE, npu_profiler.STEPS, npu_profiler.KERNELS}
    wanted = {*files, *npu_profiler.STEP_COLUMNS, *npu_profiler.KERNEL_COLUMNS, "{}_{}_ascend_pt"}
    assert not [word for word in sorted(wanted) if f'"{word}"' not in text and f"'{word}'" not in text]


def test_the_uses_of_the_project_are_seen() -> None:
    names = {use.name for use in uses()}
    for name in ("npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul", "npu_fused_infer_attention_score"):
        assert f"torch_npu.{name}" in names
    for name in ("set_device", "mem_get_info", "synchronize", "get_soc_version", "is_available"):
        assert f"torch_npu.npu.{name}" in names
    assert {"torch_npu.npu.Event", "torch_npu.npu.max_memory_reserved", "torch_npu.profiler.profile"} <= names
    assert "torch_npu.profiler.ProfilerLevel.Level1" in names


# --- what the stub has -----------------------------------------------------------------------------


def stub_names(stub: Package) -> list[str]:
    return [f"{module}.{name}" for module in STUB_MODULES for name in stub.all_of(module)]


@pytest.mark.contract
@pytest.mark.parametrize("package", STUB_VERSIONS, indirect=True)
def test_what_the_stub_has_is_there_and_takes_no_less(package: Package) -> None:
    stub = Package(STUB)
    names = stub_names(stub)
    assert len(names) > 40
    found = []
    for name in names:
        mine, theirs = stub.find(name), package.find(name)
        assert mine is not None, f"the stub lists {name}, but has none"
        if theirs is None:
            found.append(f"{name} is not there")
        elif mine.kind == "function" and theirs.signatures:
            why = [mine.signatures[0].narrower_than(signature) for signature in theirs.signatures]
            found += [f"{name}: {why[0]}"] if all(why) else []
        elif mine.kind == "class" and theirs.kind == "class":
            found += class_problems(name, mine.methods, theirs.methods, c_type="_C." in str(theirs.bases))
    assert not found, "\n".join(found)


def class_problems(name: str, mine: dict[str, Signature], theirs: dict[str, Signature], c_type: bool) -> Iterator[str]:
    """Public methods of the stub that the real class lacks, or that take more there."""
    for method, signature in mine.items():
        if method.startswith("_"):
            continue
        if method in theirs:
            if why := signature.narrower_than(theirs[method]):
                yield f"{name}.{method}: {why}"
        elif not c_type and theirs:
            yield f"{name}.{method} is not there"


@pytest.mark.contract
def test_the_wheel_asks_for_the_torch_that_set_up_installs_with_it(package: Package) -> None:
    (name,) = [name for name in package.files if name.endswith(".dist-info/METADATA")]
    text = package.read(name)
    version, torch = (
        re.search(r"^Version: (.*)$", text, re.M),
        re.search(r"^Requires-Dist: torch ?==([\d.]+)", text, re.M),
    )
    assert version and torch and torch[1].rstrip(".") == versions.torch_for(version[1])


@pytest.mark.contract
def test_cann_tells_its_version_by_this_function(package: Package) -> None:
    assert package.find("torch_npu.npu.utils.get_cann_version") is not None


# --- the reader itself -----------------------------------------------------------------------------


@pytest.mark.contract
def test_every_public_name_of_the_real_package_is_resolved(package: Package) -> None:
    listed = package.all_of("torch_npu.npu")
    assert len(listed) > 90
    lost = [name for name in listed if package.find(f"torch_npu.npu.{name}") is None]
    assert lost == []
    assert len(package.operators) > 200


@pytest.mark.contract
def test_what_is_not_there_is_found(package: Package) -> None:
    for name in ("torch_npu.npu_flash", "torch_npu.npu.cudart", "torch_npu.npu.utils.nothing", "torch_npu.nothing.x"):
        assert package.find(name) is None
    bad = Use("x.py:1", "torch_npu.npu_fusion_attention", True, 5, {"attn_mask"})
    assert "has no argument attn_mask" in problem(bad, package)
    assert problem(Use("x.py:1", "torch_npu.npu_fusion_attention", True, 5, {"atten_mask"}), package) == ""
    assert "needs head_num, input_layout" in problem(Use("", "torch_npu.npu_fusion_attention", True, 3), package)
    assert "positional" in problem(Use("", "torch_npu.npu.set_device", True, 2), package)


def use_of(code: str) -> Use:
    (use,) = Reader("x.py", ast.parse(code)).uses
    return use


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("torch.npu.synchronize()", "torch_npu.npu.synchronize"),
        ("import torch_npu as t\nt.npu_rms_norm", "torch_npu.npu_rms_norm"),
        ("from torch_npu.npu import amp\namp.GradScaler", "torch_npu.npu.amp.GradScaler"),
        ("importlib.import_module('torch_npu').npu.is_available()", "torch_npu.npu.is_available"),
        ("n = torch.npu.amp\nn.GradScaler", "torch_npu.npu.amp.GradScaler"),
    ],
)
def test_names_are_seen_however_they_are_written(code: str, name: str) -> None:
    assert name in [use.name for use in Reader("x.py", ast.parse(code)).uses]


def test_keywords_of_a_dictionary_are_seen() -> None:
    use = use_of("h = {'a': 1, 'b': 2}\ntorch_npu.f(x, *y, c=3, **h)")
    assert (use.positional, use.keywords, use.open_ended) == (2, {"a", "b", "c"}, True)


def test_schemas_are_read() -> None:
    schema = (
        'npu_x(Tensor self, int[]? sizes=None, *, str layout="BSH", float s=1., SymInt[2] k=[1, 2]) -> (Tensor, Tensor)'
    )
    names = [(p.name, p.required, p.keyword_only, p.default) for p in signature_of_schema(schema).parameters]
    assert names == [
        ("self", True, False, ...), ("sizes", False, False, None), ("layout", False, True, "BSH"),
        ("s", False, True, 1.0), ("k", False, True, [1, 2]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mine", "real_one", "why"),
    [
        ("a, b=1", "a, b=1, c=2", ""),
        ("a", "a, b", "needs b"),
        ("a, c", "a, b=1, c=2", "argument 2 is c, the real one's b"),
        ("a, *, c=2", "a, b=1, c=2", ""),
        ("a, b=2", "a, b=1", "b=2, the real default is 1"),
        ("a, b", "a", "argument 2 is b, the real one's nothing"),
        ("a, *, z=1", "a", "no argument z"),
        ("a", "*args, **kwargs", ""),
    ],
)
def test_a_stub_that_takes_more_than_the_real_one_is_found(mine: str, real_one: str, why: str) -> None:
    def arguments(text: str) -> Signature:
        function = ast.parse(f"def f({text}): ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        return signature_of(function.args)

    found = arguments(mine).narrower_than(arguments(real_one))
    assert found == why if not why else why in found

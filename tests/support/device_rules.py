"""The rules of the device layer: who may name a vendor, and that no state hides in modules."""

import ast
import re
from collections.abc import Iterator

from dev.house import imports, nodes

# As a word of its own or as a part of an identifier, such as `gpu` in `gpu_attention`.
VENDOR = re.compile(r"(?<![a-z])(torch_npu|cuda|npus?|mps|nccl|hccl|gpus?|nvidia|ascend|flash)(?![a-z])", re.IGNORECASE)
MAY_NAME_A_VENDOR = ("nanochat/platforms/", "nanochat/device.py")
PUBLISHED = re.compile("num_gpus|nanochat_ascend")  # upstream's flag of chat_web, and our model type
DEVICE_NAMES = {"device_type", "backend", "type"}  # attributes that say which device this is
CHANGES = set("add append appendleft clear discard extend insert pop popitem popleft remove setdefault update".split())


def words_of(node: ast.AST) -> list[str]:
    """The identifiers, and the string, that a node of the tree itself has."""
    fields = (getattr(node, name, None) for name in ("id", "attr", "arg", "name", "asname", "value"))
    return [word for word in fields if isinstance(word, str)]


def check_vendors(path: str, tree: ast.Module) -> Iterator[str]:
    """Vendors are named in platforms/ and in the table of device.py; elsewhere only prose may name a vendor."""
    if path.startswith(MAY_NAME_A_VENDOR):
        return
    prose = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        words = [] if id(node) in prose else [PUBLISHED.sub("", word) for word in words_of(node)]
        for found in filter(None, map(VENDOR.search, words)):
            yield f"{path}:{getattr(node, 'lineno', 1)}: names a vendor ({found.group()}); ask compute.platform instead"
    for line, name in imports(path, tree):
        if found := VENDOR.search(name):
            yield f"{path}:{line}: imports {name}: names a vendor ({found.group()})"


def check_comparisons(path: str, tree: ast.Module) -> Iterator[str]:
    """No code asks which device this is: the platform has an attribute for what the code wants to know."""
    if path.startswith(MAY_NAME_A_VENDOR):
        return
    for node in nodes(tree):
        if isinstance(node, ast.Compare) and any(
            isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops
        ):
            for side in (node.left, *node.comparators):
                name = getattr(side, "attr", getattr(side, "id", ""))
                if name in DEVICE_NAMES and not (name == "type" and isinstance(side, ast.Name)):
                    yield f"{path}:{node.lineno}: compares {ast.unparse(side)}; ask compute.platform instead"


def mutable_names(tree: ast.Module) -> set[str]:
    """Variables of a module that hold a list, dict or set, or an object of a class of this module that can change."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    changeable = {one.name for one in classes if not any("frozen=True" in ast.unparse(d) for d in one.decorator_list)}
    names: set[str] = set()
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = node.value
        made = getattr(value.func, "id", getattr(value.func, "attr", "")) if isinstance(value, ast.Call) else ""
        holds = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        if holds or made in changeable | {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def check_state(path: str, tree: ast.Module) -> Iterator[str]:
    """No function changes a variable of its module: state lives in objects that are passed."""
    names = mutable_names(tree)

    def changed(target: ast.AST) -> str:
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        return target.id if isinstance(target, ast.Name) and target.id in names else ""

    for function in nodes(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function) if names else ():
            targets: list[ast.AST] = []
            if isinstance(node, ast.Assign | ast.Delete):
                targets = [target for target in node.targets if not isinstance(target, ast.Name)]
            elif isinstance(node, ast.AugAssign | ast.AnnAssign) and not isinstance(node.target, ast.Name):
                targets = [node.target]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                targets = [node.func.value]
            for name in filter(None, map(changed, targets)):
                yield f"{path}:{node.lineno}: changes {name}, a variable of the module; keep state in an object"

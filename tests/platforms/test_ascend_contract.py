"""The contract with the real torch_npu: every name and argument that the project or the emulator's stub uses is there.

The wheels come from the package index, are kept in the user's cache folder, and are read, never imported.
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from nanochat.platforms.ascend import chips as ascend_chips
from nanochat.platforms.ascend import kernels as npu_kernels
from nanochat.platforms.ascend import profiler as npu_profiler
from tests.support.real_torch_npu import Package, Signature, signature_of, signature_of_schema
from tests.support.remote_wheels import NoNetwork, text_of
from tests.support.torch_npu_uses import Reader, Use, allowed_values, problem, uses
from tools_npu import versions

ROOT = Path(__file__).resolve().parent.parent.parent
STUB = ROOT / "tests" / "emulated_npu" / "stub"
# The oldest supported release, and the last known patch of every minor up to the newest.
VERSIONS = (versions.OLDEST, *versions.LAST_PATCHES)
ASKED_FIRST = {"torch_npu.npu_fusion_attention_v3"}  # graphs_missing() asks whether a release has them
STUB_MODULES = ("torch_npu", "torch_npu.npu", "torch_npu.profiler")


@lru_cache
def real(version: str) -> Package:
    return Package(text_of(version))


@pytest.fixture(params=VERSIONS)
def package(request: pytest.FixtureRequest) -> Package:
    try:
        return real(request.param)
    except NoNetwork as why:
        pytest.skip(f"torch_npu {request.param} could not be downloaded: {why}")


def problems(found: list[Use], package: Package) -> list[str]:
    """What is wrong with uses, but for names that the project asks for first."""
    there = (use for use in found if use.name not in ASKED_FIRST or package.find(use.name))
    return [why for use in there if (why := problem(use, package))]


@pytest.mark.contract
def test_what_the_project_uses_is_there_with_these_arguments(package: Package) -> None:
    found = problems(uses(), package)
    assert not found, "\n".join(found)


@pytest.mark.contract
def test_operators_that_are_asked_for_by_name_are_there(package: Package) -> None:
    names = {name for operators in npu_kernels.NEEDS.values() for name in operators} | set(ascend_chips.OPERATORS_950)
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


# Wrong calls: the file, what is written there, and what is written instead.
KERNELS, FUSED = (
    "nanochat/platforms/ascend/kernels.py",
    "torch_npu.npu_fusion_attention(q, k, v, H, ",
)
MUTATIONS = {
    "the name of an operator": (KERNELS, "torch_npu.npu_fusion_attention(", "torch_npu.npu_flash_attention("),
    "the name of a function": (
        "nanochat/platforms/ascend/platform.py",
        "module.get_soc_version()",
        "module.get_soc_name()",
    ),
    "the name of a value": ("nanochat/platforms/ascend/profiler.py", "ProfilerLevel.Level1", "ProfilerLevel.Level9"),
    "a keyword": (
        KERNELS,
        '"atten_mask": self.causal_mask(q.device),',
        '"attn_mask": self.causal_mask(q.device),',
    ),
    "the spelling of a keyword": (KERNELS, '"pre_tockens": window', '"pre_tokens": window'),
    "an argument too few": (KERNELS, FUSED, "torch_npu.npu_fusion_attention(q, k, v, "),
    "a layout": (KERNELS, FUSED + '"BSND"', FUSED + '"BSDN"'),
    "a sparse mode": (KERNELS, '"sparse_mode": 4 if is_short else 3,', '"sparse_mode": 14 if is_short else 3,'),
    "the type of a value": (KERNELS, '"sparse_mode": 4 if is_short else 3,', '"sparse_mode": "4" if is_short else 3,'),
}


@pytest.mark.contract
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_call_that_is_made_wrong_is_found(mutation: str, package: Package) -> None:
    path, right, wrong = MUTATIONS[mutation]
    text = (ROOT / path).read_text(encoding="utf-8")
    assert right in text
    assert not problems(Reader(path, ast.parse(text)).uses, package)
    assert problems(Reader(path, ast.parse(text.replace(right, wrong, 1))).uses, package)


@pytest.mark.contract
def test_the_values_that_an_operator_allows_are_read(package: Package) -> None:
    assert {2, 3, 4} <= allowed_values("sparse_mode", package.manuals["npu_fusion_attention"]) <= set(range(10))
    allowed = allowed_values("sparse_mode", package.manuals["npu_fused_infer_attention_score"])
    assert {0, 1, 2, 3, 4} <= allowed and not allowed & {5, 6, 7, 8}


# --- what the stub has -----------------------------------------------------------------------------


def stub_names(stub: Package) -> list[str]:
    return [f"{module}.{name}" for module in STUB_MODULES for name in stub.all_of(module)]


@pytest.mark.contract
def test_what_the_stub_has_is_there_and_takes_no_less(package: Package) -> None:
    stub = Package(STUB)
    names = stub_names(stub)
    assert len(names) > 40
    found = []
    for name in names:
        mine, theirs = stub.find(name), package.find(name)
        assert mine is not None, f"the stub lists {name}, but has none"
        if theirs is None and name in ASKED_FIRST:
            continue
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

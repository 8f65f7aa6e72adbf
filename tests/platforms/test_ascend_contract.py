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
from tests.support.real_torch_npu import Package, Signature
from tests.support.remote_wheels import NoNetwork, text_of
from tests.support.torch_npu_uses import Reader, Use, problem, uses
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


@lru_cache
def project_uses() -> list[Use]:
    return uses()


def problems(found: list[Use], package: Package) -> list[str]:
    """What is wrong with uses, but for names that the project asks for first."""
    there = (use for use in found if use.name not in ASKED_FIRST or package.find(use.name))
    return [why for use in there if (why := problem(use, package))]


@pytest.mark.contract
def test_what_the_project_uses_is_there_with_these_arguments(package: Package) -> None:
    found = project_uses()
    seen = {"torch_npu.npu_fusion_attention", "torch_npu.npu.set_device", "torch_npu.profiler.profile"}
    assert seen <= {use.name for use in found}
    wrong = problems(found, package)
    assert not wrong, "\n".join(wrong)


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


WRONG = [
    "torch_npu.npu_flash_attention(q, k, v, 4, 'BSND')",
    "torch_npu.npu.get_soc_name()",
    "torch_npu.npu.set_device(0, 1)",
    "torch_npu.profiler.ProfilerLevel.Level9",
    "torch_npu.npu_fusion_attention(q, k, v, 'BSND')",
    "torch_npu.npu_fusion_attention(q, k, v, 4, 'BSDN')",
    "torch_npu.npu_fusion_attention(q, k, v, 4, 'BSND', attn_mask=mask)",
    "options = {'pre_tokens': 3}; torch_npu.npu_fusion_attention(q, k, v, 4, 'BSND', **options)",
    "torch_npu.npu_fusion_attention(q, k, v, 4, 'BSND', sparse_mode=14)",
    "torch_npu.npu_fusion_attention(q, k, v, 4, 'BSND', sparse_mode='4')",
]


@pytest.mark.contract
def test_wrong_calls_are_found(package: Package) -> None:
    right = "torch_npu.npu_fusion_attention(q, k, v, 4, 'BSND', atten_mask=mask, pre_tockens=3, sparse_mode=4)"
    assert not problems(Reader("x.py", ast.parse(right)).uses, package)
    for code in WRONG:
        assert problems(Reader("x.py", ast.parse(code)).uses, package), code


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
    version = re.search(r"^Version: (.*)$", text, re.M)
    torch = re.search(r"^Requires-Dist: torch ?==([\d.]+)", text, re.M)
    assert version and torch and torch[1].rstrip(".") == versions.torch_for(version[1])


@pytest.mark.contract
def test_cann_tells_its_version_by_this_function(package: Package) -> None:
    assert package.find("torch_npu.npu.utils.get_cann_version") is not None

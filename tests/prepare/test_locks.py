"""pyproject.toml and the locks agree, and no file of the tree names a package registry."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
LOCKS = {
    "base": "requirements.lock",
    "torch": "requirements-torch.lock",
    "npu": "requirements-npu.lock",
    "dev": "requirements-dev.lock",
    "clients": "requirements-clients.lock",
}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
SKIP = {".git", ".venv", "target", "node_modules", "wandb"}

# In pieces, so that this file does not name them either.
HOSTS = re.compile(
    r"|".join(
        re.escape(".".join(host.split()))
        for host in """
        pypi org|pythonhosted org|index crates io|static crates io|registry npmjs|download pytorch org|anaconda org
        tuna tsinghua|mirrors aliyun|mirrors ustc|mirrors tencent|mirrors cloud|mirrors huaweicloud|repo huaweicloud
        """.replace("\n", "|").split("|")
        if host.strip()
    )
)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def wanted(share: str) -> list[Requirement]:
    """The requirements of pyproject.toml for one of the locks."""
    settings = project()
    groups = settings["dependency-groups"]
    if share != "base":
        return [Requirement(line) for line in groups[share]]
    run_time = [line for line in settings["project"]["dependencies"] if Requirement(line).name != "torch"]
    return [Requirement(line) for line in [*run_time, *groups["build"]]]


def locked(share: str) -> list[Requirement]:
    lines = (ROOT / "locks" / LOCKS.get(share, f"requirements-{share}.lock")).read_text(encoding="utf-8").splitlines()
    return [Requirement(line.removesuffix("\\").strip()) for line in lines if not line.startswith(" ")]


def pins(share: str, python: str, machine: str) -> dict[str, str]:
    """The name and version of each package that a lock installs on one kind of Linux machine."""
    place = {
        "python_version": python,
        "python_full_version": f"{python}.4",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, str] = {}
    for line in locked(share):
        if line.marker is None or line.marker.evaluate(place):
            name = canonicalize_name(line.name)
            assert name not in found, f"{share}: two versions of {name} for Python {python}, {machine}"
            found[name] = str(line.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_locks_hold_what_the_project_asks_for(python: str, machine: str) -> None:
    for share, lock in LOCKS.items():
        found = pins(share, python, machine)
        for requirement in wanted(share):
            if requirement.marker and not requirement.marker.evaluate({"platform_machine": machine}):
                continue
            version = found.get(canonicalize_name(requirement.name))
            assert version and requirement.specifier.contains(version), f"{lock}: {requirement}, not {version}"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_locks_agree_with_each_other(python: str, machine: str) -> None:
    versions: dict[str, set[str]] = {}
    for share in LOCKS.keys() - {"clients"}:  # they stand in an environment of their own
        for name, version in pins(share, python, machine).items():
            versions.setdefault(name, set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_numpy_1_replaces_only_what_needs_numpy_2(python: str, machine: str) -> None:
    replaced, base = pins("numpy1", python, machine), {**pins("base", python, machine), **pins("npu", python, machine)}
    if python == "3.13":
        assert replaced == {}, "no torch_npu for an older CANN has a wheel for it"
        return
    assert replaced["numpy"].startswith("1.26."), "the only numpy 1 with wheels for Python 3.12"
    differ = {name for name, version in replaced.items() if base.get(name) != version}
    assert differ <= {"numpy", "pandas", "pyarrow", "scipy"} | ({"pytz"} if python == "3.10" else set())


def test_torch_comes_from_its_own_lock_only() -> None:
    for share in ("base", "npu", "dev"):
        names = {line.name for line in locked(share)}
        assert not [name for name in names if re.match(r"torch$|triton|nvidia-(?!ml-py)|cuda-", name)]


def test_the_extra_for_npus_names_what_its_lock_holds() -> None:
    extra = project()["project"]["optional-dependencies"]["npu"]
    assert extra[1:] == project()["dependency-groups"]["npu"] and Requirement(extra[0]).name == "torch_npu"


@pytest.mark.parametrize("lock", [*LOCKS.values(), "requirements-pairs.lock", "requirements-numpy1.lock"])
def test_every_pin_has_hashes_and_no_index_is_named(lock: str) -> None:
    blocks = re.split(r"\n(?=\S)", (ROOT / "locks" / lock).read_text(encoding="utf-8").strip())
    assert not [block for block in blocks if "==" not in block or "--hash=sha256:" not in block]
    assert not [block for block in blocks if re.search(r"://|--(extra-)?index|--find-links", block)]


def text_files() -> Iterator[Path]:
    folders = [ROOT]
    while folders:
        for entry in folders.pop().iterdir():
            if entry.is_dir() and entry.name not in SKIP and not entry.name.endswith("_cache"):
                folders.append(entry)
            elif entry.is_file() and entry.stat().st_size < 1 << 20 and entry.suffix not in (".pyc", ".so"):
                yield entry


def test_no_file_names_a_package_registry() -> None:
    named = []
    for file in text_files():
        for found in HOSTS.findall(file.read_text(encoding="utf-8", errors="replace")):
            named.append(f"{file.relative_to(ROOT)}: {found}")
    assert not named
    assert HOSTS.search("https://" + "py" + "pi.org/simple")

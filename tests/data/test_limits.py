"""Memory and CPUs as a container limits them, on trees of cgroup files of both versions."""

import os
from pathlib import Path

import pytest

from nanochat.data import limits

MIB = 1 << 20


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "groups")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_cgroups_there_is_no_limit() -> None:
    assert (limits.memory_left(), limits.memory_limit()) == (None, None)
    assert limits.cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("group", ["", "/docker/abc"])  # the namespace of the container, or a path of the host
def test_version_1_limits_memory_and_cores(root: Path, group: str) -> None:
    write(root, groups=f"5:cpu,cpuacct:{group or '/'}\n3:memory:{group or '/'}")
    memory = {"memory__limit_in_bytes": str(700 * MIB), "memory__usage_in_bytes": str(300 * MIB)}
    write(root / "memory", **memory, memory__stat=f"inactive_file 1\ntotal_inactive_file {100 * MIB}")
    write(root / "cpu", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert (limits.memory_left(), limits.memory_limit(), limits.cores()) == (500 * MIB, 700 * MIB, 1)


def test_version_2_counts_the_tightest_limit_up_to_the_root(root: Path) -> None:
    write(root, groups="0::/slice/job")
    stat = f"inactive_file {10 * MIB}"
    write(root / "slice/job", memory__max="max", memory__current="5", memory__stat=stat, cpu__max="max 100000")
    write(root / "slice", memory__max=str(90 * MIB), memory__current=str(50 * MIB), memory__stat=stat)
    write(root / "slice", cpu__max="70000 100000")
    assert (limits.memory_left(), limits.memory_limit(), limits.cores()) == (50 * MIB, 90 * MIB, 1)


@pytest.mark.parametrize("quota", ["-1", "max", ""])
def test_no_quota_leaves_all_cores(root: Path, quota: str) -> None:
    write(root, cpu__max=f"{quota} 100000")
    write(root / "cpu", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert limits.cores() == len(os.sched_getaffinity(0))

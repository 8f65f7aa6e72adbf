"""What the container of this process allows: memory and CPUs, by cgroup version 1 or 2."""

import math
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
GROUPS = Path("/proc/self/cgroup")


def cores() -> int:
    """Return how many CPU cores this process may use, by its affinity and its CPU quotas."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cpu_quotas()]
    return max(min([count, *quotas]), 1)


def memory_left() -> int | None:
    """Return the bytes that the limits of this process still allow, or None without a limit.

    Cached pages that can be given back count as left.
    """
    free_bytes = [
        max(limit - used + cached, 0)
        for folder in _folders("memory")
        if (limit := _first(folder, "memory.max", "memory.limit_in_bytes")) is not None
        and (used := _first(folder, "memory.current", "memory.usage_in_bytes")) is not None
        and (cached := _cached(folder)) is not None
    ]
    return min(free_bytes, default=None)


def memory_limit() -> int | None:
    """Return the smallest limit of the memory of this process in bytes, or None without one."""
    limits = [
        _first(folder, "memory.max", "memory.limit_in_bytes") for folder in _folders("memory")
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def _cpu_quotas() -> list[float]:
    """Return the numbers of cores that the CPU quotas of this process allow."""
    quotas = []
    for folder in _folders("cpu"):
        words = _text(folder / "cpu.max").split()  # version 2: quota and period, in microseconds
        if not words:
            words = _text(folder / "cpu.cfs_quota_us").split()
            words += _text(folder / "cpu.cfs_period_us").split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return quotas


def _folders(controller: str) -> list[Path]:
    """Return the folders with the limits of this process, from its own group to the outermost.

    In a container, /proc/self/cgroup may name a path that only the host has. The root of the mount
    is then the group of the container.
    """
    folders = [ROOT / controller, ROOT]
    for line in _text(GROUPS).splitlines():
        _, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        base = ROOT / controller if names else ROOT
        path = base / group.strip("/")
        while path not in (base, base.parent):
            folders.append(path)
            path = path.parent
    return folders


def _cached(folder: Path) -> int | None:
    """Return the bytes of cached pages of a group that can be given back, or None if unknown."""
    counts = {}
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            counts[name] = int(value)
    return counts.get("total_inactive_file", counts.get("inactive_file"))


def _first(folder: Path, *names: str) -> int | None:
    """Return the number in the first of these files that holds one, or None."""
    for name in names:
        text = _text(folder / name).strip()
        if text.isdigit():
            return int(text)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # this version of cgroups has no such file
        return ""

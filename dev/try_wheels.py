"""Tries the contract with torch_npu on every release in the package index, and says what changed.

python -m dev.try_wheels              # every release from 2.7 on: what the project calls, and what is new
python -m dev.try_wheels 2.14.0       # these only

It is meant for a nightly run. The exit code is 1 if a release would not accept a call of the
project, or if the index has a release that tools_npu/versions.py does not know. Only the text of
the wheels is read, about 3 MB each.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tests.support.real_torch_npu import Package
from tests.support.remote_wheels import NoNetwork, releases, text_of
from tests.support.torch_npu_uses import Use, problem, uses
from tools_npu import versions


def unlisted(names: Sequence[str]) -> list[str]:
    """Return the releases that tools_npu/versions.py does not know yet.

    They are newer than the last known patch of their minor version.
    """
    last_of_minor = {}
    for name in versions.LAST_PATCHES:
        last_of_minor[versions.release(name)[:2]] = versions.order(name)
    oldest = ((0,), 0)
    newer = []
    for name in names:
        minor = versions.release(name)[:2]
        if versions.order(name) > last_of_minor.get(minor, oldest):
            newer.append(name)
    return newer


def parameters(signatures: Iterable[Any]) -> set[str]:
    """Return the names of all parameters in some signatures."""
    return {parameter.name for signature in signatures for parameter in signature.parameters}


def changes(before: Package, after: Package, calls: Sequence[Use]) -> list[str]:
    """Return a line for each name in `calls` whose parameters differ between two releases."""
    lines = []
    for name in sorted({use.name for use in calls}):
        old, new = before.find(name), after.find(name)
        if old is None and new is None:
            continue
        if old is None:
            lines.append(f"{name} is new")
        elif new is None:
            lines.append(f"{name} is gone")
        elif old.signatures != new.signatures:
            old_names, new_names = parameters(old.signatures), parameters(new.signatures)
            added, gone = sorted(new_names - old_names), sorted(old_names - new_names)
            if added or gone:
                lines.append(f"{name}: new arguments {added}, gone {gone}")
            else:
                lines.append(f"{name}: other defaults")
    return lines


def main(requested: Sequence[str]) -> int:
    """Print a line for each release, and return the exit code."""
    try:
        published = releases()
    except NoNetwork as why:
        print(
            f"error: the package index cannot be read: {why}; check the network and `pip config list`",
            file=sys.stderr,
        )
        return 1
    supported = [name for name in published if versions.release(name)[:2] >= versions.TORCH_FLOOR]
    calls = uses()
    before: Package | None = None
    refusing = 0
    for name in requested or supported:
        package = Package(text_of(name))
        reasons = [why for use in calls if (why := problem(use, package))]
        refusing += bool(reasons)
        print(f"{name}: {'; '.join(reasons) or f'takes all {len(calls)} uses'}")
        for line in changes(before, package, calls) if before else []:
            print(f"    {line}")
        before = package
    new = unlisted(supported)
    if new:
        print(
            f"not in tools_npu/versions.py: {', '.join(new)}; add them to TABLE, NEWEST or LAST_PATCHES"
        )
    return 1 if refusing or new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

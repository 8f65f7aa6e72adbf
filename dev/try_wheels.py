"""Tries the contract with torch_npu on every release that the package index has, and says what changed.

python -m dev.try_wheels              # every release from 2.7 on: what the project calls, and what is new
python -m dev.try_wheels 2.14.0       # these only

Meant for a nightly run. The exit code is 1 if a release would not take a call of the project, or if the index has a
release that tools_npu/versions.py does not know. Only the text of the wheels is read, about 3 MB each.
"""

import sys
from collections.abc import Sequence

from tests.support.real_torch_npu import Package
from tests.support.remote_wheels import NoNetwork, releases, text_of
from tests.support.torch_npu_uses import Use, problem, uses
from tools_npu import versions


def known() -> set[str]:
    """Every release that the tables name."""
    return {row.torch_npu for row in versions.TABLE} | {versions.OLDEST, *versions.LAST_PATCHES}


def unknown(found: Sequence[str]) -> list[str]:
    """Releases newer than the last patch of their minor that the tables name."""
    last = {versions.release(name)[:2]: versions.order(name) for name in versions.LAST_PATCHES}
    return [
        name
        for name in found
        if versions.order(name) > last.get(versions.release(name)[:2], ((0,), 0))
    ]


def changes(before: Package, after: Package, calls: Sequence[Use]) -> list[str]:
    """Names that the project uses whose arguments are others in the next release."""
    said = []
    for name in sorted({use.name for use in calls}):
        old, new = before.find(name), after.find(name)
        if (old is None) != (new is None):
            said.append(f"{name} {'is new' if old is None else 'is gone'}")
        elif old and new and old.signatures != new.signatures:
            lists = [
                {p.name: p for s in one.signatures for p in s.parameters} for one in (old, new)
            ]
            added, gone = (sorted(set(lists[i]) - set(lists[1 - i])) for i in (1, 0))
            said.append(
                f"{name}: new arguments {added}, gone {gone}"
                if added or gone
                else f"{name}: other defaults"
            )
    return said


def main(asked: Sequence[str]) -> int:
    """Print a line for each release; returns the exit code."""
    try:
        found = [name for name in releases() if versions.release(name)[:2] >= versions.TORCH_FLOOR]
    except NoNetwork as why:
        print(
            f"error: the package index cannot be read: {why}; check the network and `pip config list`",
            file=sys.stderr,
        )
        return 1
    calls, before, bad = uses(), None, 0
    for name in asked or found:
        package = Package(text_of(name))
        wrong = [why for use in calls if (why := problem(use, package))]
        differs = changes(before, package, calls) if before else []
        print(
            f"{name}: {'; '.join(wrong) or f'takes all {len(calls)} uses'}"
            + "".join(f"\n    {line}" for line in differs)
        )
        before, bad = package, bad + bool(wrong)
    new = unknown(found)
    if new:
        print(
            f"not in tools_npu/versions.py: {', '.join(new)}; add them to TABLE, NEWEST or LAST_PATCHES"
        )
    return 1 if bad or new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs programs in every kind of sandbox that this machine can make: both tiers, as root and as a plain user."""

import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanochat.evals import sandbox

Run = Callable[..., sandbox.ProgramResult]
NOBODY = 65534
PYTHON = "/usr/bin/python3"  # one that nobody may start
# Who starts a sandbox, and in which tier. Root without CAP_SYS_ADMIN is root in a usual container.
KINDS = [f"{tier}, {who}" for tier in ("namespaces", "limits") for who in ("root", "bounded root", "nobody")]
# Both tiers, and where a test may choose, both users: enough for what does not hang on tier and user together.
CROSSED = ["namespaces, root" if os.getuid() == 0 else "namespaces, nobody", "limits, nobody"]


def start_as(who: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let nanochat.evals.sandbox start its supervisors as another user, or skip the test."""
    if os.getuid() != 0:
        if who != "nobody":
            pytest.skip("only root can be root")
        return
    if who == "root":
        return
    if not shutil.which("setpriv") or (who == "nobody" and not os.path.exists(PYTHON)):
        pytest.skip(f"needs setpriv and {PYTHON}")
    real, child = subprocess.Popen, Path(shutil.copy(sandbox._CHILD, folder))

    def start(command: list[str], **options: Any) -> subprocess.Popen:
        if who == "bounded root":
            before = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
            return real([*before, *command], **options)
        os.chown(options["cwd"], NOBODY, NOBODY)
        place = command.index(str(sandbox._CHILD))
        command = [PYTHON, *command[1:place], str(child), *command[place + 1 :]]
        return real(command, **options, user=NOBODY, group=NOBODY, extra_groups=[])

    monkeypatch.setattr(sandbox.subprocess, "Popen", start)


def sandboxed(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Give a function that runs programs in one of KINDS, or skip the test where the kernel does not allow it."""
    tier, who = kind.split(", ")
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        os.chmod(folder, 0o755)
        start_as(who, patch, Path(folder))
        sandbox.tier.cache_clear()
        sandbox._no_namespaces.cache_clear()
        if tier == "limits":
            patch.setattr(sandbox, "_no_namespaces", lambda: "switched off by a test")
        elif reason := sandbox._no_namespaces():
            pytest.skip(f"no namespaces here for {who}: {reason}")
        assert sandbox.tier(unsafe_exec=True) == tier
        yield lambda program, **options: sandbox.run_program(textwrap.dedent(program), unsafe_exec=True, **options)
    sandbox.tier.cache_clear()
    sandbox._no_namespaces.cache_clear()

"""Runs Python programs that a model wrote. Only HumanEval uses this; the chat never runs Python."""

import contextlib
import functools
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import UserError, log

_CHILD = Path(__file__).with_name("sandbox_child.py")
_TIMED_OUT = 124  # the exit code of the supervisor in sandbox_child.py
OUTPUT = 64 << 10  # bytes of output to keep
MEMORY = 512 << 20  # bytes of address space for a program


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended: whether it passed its last line, whether it ran out of time, and what it printed."""

    passed: bool
    timed_out: bool
    output: str


def _collect(process: subprocess.Popen[bytes], secret: bytes, end: float) -> tuple[bytes, bool]:
    """Read until the output or the time ends; return the first OUTPUT bytes, and whether the secret appeared."""
    assert process.stdout is not None
    kept, window, seen = b"", b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            block = os.read(process.stdout.fileno(), 1 << 16)
            if not block:
                break
            kept += block[: OUTPUT - len(kept)]
            window = window[-len(secret) :] + block
            seen = seen or secret in window
    return kept, seen


def _execute(program: str, seconds: float, memory: int, isolated: bool) -> ProgramResult:
    """Run a program under a supervisor in its own session, with an empty environment, in a temporary folder."""
    secret = secrets.token_hex(16).encode()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nanochat-exec-", ignore_cleanup_errors=True))
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(secret + b"\n" + program.encode("utf-8", "surrogatepass"))
        given.seek(0)
        folder = os.path.realpath(folder)  # the kernel's list of mounts names it without symbolic links
        wish = {"isolated": isolated, "seconds": seconds, "memory": memory, "root": folder, "parent": os.getpid()}
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(_CHILD), json.dumps(wish)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={},
                start_new_session=True,
            )
        )
        try:
            # The supervisor enforces `seconds`; the margin covers its start on a busy machine.
            kept, seen = _collect(process, secret, time.monotonic() + seconds + 10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    text = kept.replace(b"\n" + secret + b"\n", b"").decode("utf-8", "replace")
    return ProgramResult(seen and code == 0, code in (_TIMED_OUT, -signal.SIGKILL), text)


@functools.lru_cache(maxsize=1)
def _no_namespaces() -> str | None:
    """The reason why this machine cannot isolate a program, or None if it can. Tries once and remembers."""
    outcome = _execute("", seconds=10, memory=MEMORY, isolated=True)
    return None if outcome.passed else outcome.output.strip() or "the sandbox did not start"


@functools.lru_cache(maxsize=2)
def tier(unsafe_exec: bool = False) -> str:
    """The strongest sandbox of this machine, `namespaces` or `limits`; the first call logs which one it is.

    In `namespaces` a program has no network and no capabilities, sees no other process, and has no files but Python's
    own (read-only) and 16 MB of scratch space in memory; its CPU time, memory, file size and processes are limited.
    `limits` applies only those limits: the program can read the user's files and reach the network. So without
    `unsafe_exec` this function raises a UserError instead of returning `limits`.
    """
    if not sys.platform.startswith("linux"):
        raise UserError("running model-written code needs Linux: leave HumanEval out on this machine")
    reason = _no_namespaces()
    if reason is None:
        log("code execution: namespaces (no network, no files of this machine, limited time and memory)")
        return "namespaces"
    if not unsafe_exec:
        raise UserError(
            f"refusing to run model-written code: this machine cannot isolate it in namespaces ({reason}), so the code "
            "could read your files and reach the network. Leave HumanEval out, use a user or container that may "
            "create namespaces, or accept the risk with --unsafe-exec"
        )
    log(f"code execution: limits only, because of --unsafe-exec (no namespaces: {reason})")
    return "limits"


def run_program(program: str, seconds: float = 5.0, memory: int = MEMORY, unsafe_exec: bool = False) -> ProgramResult:
    """Run a Python program (standard library only) in the strongest sandbox. It passes if it runs to its last line.

    `seconds` limits both wall and CPU time; `memory` is the limit of the address space in bytes. A program that ends
    early has not passed, whether by an exception, a failed assert, `SystemExit`, `os._exit` or a signal.
    """
    return _execute(program, seconds, memory, isolated=tier(unsafe_exec) == "namespaces")

"""Run a Python program that a model wrote, for HumanEval only: the chat never runs Python."""

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
_TIMED_OUT = 124  # the supervisor's exit code, see execution_child.py
OUTPUT = 64 << 10  # bytes of output kept
MEMORY = 512 << 20  # bytes of address space


@dataclass(frozen=True)
class Outcome:
    """What became of a program: whether it ran to its last line, whether the clock stopped it, and what it printed."""

    passed: bool
    timed_out: bool
    output: str


def _collect(process: subprocess.Popen[bytes], secret: bytes, end: float) -> tuple[bytes, bool]:
    """Read until the end of output or of time: the first OUTPUT bytes, and whether the secret came by."""
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


def _execute(program: str, seconds: float, memory: int, isolated: bool) -> Outcome:
    """Start the supervisor in a session of its own, without environment, in a folder that is removed afterwards."""
    secret = secrets.token_hex(16).encode()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nanochat-exec-", ignore_cleanup_errors=True))
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(secret + b"\n" + program.encode("utf-8", "surrogatepass"))
        given.seek(0)
        folder = os.path.realpath(folder)  # as the kernel's list of mounts will name it
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
            # the supervisor keeps the time; the margin is for starting it and for a busy machine
            kept, seen = _collect(process, secret, time.monotonic() + seconds + 10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    text = kept.replace(b"\n" + secret + b"\n", b"").decode("utf-8", "replace")
    return Outcome(seen and code == 0, code in (_TIMED_OUT, -signal.SIGKILL), text)


@functools.lru_cache(maxsize=1)
def _no_namespaces() -> str | None:
    """Why a program cannot be isolated on this machine, found by trying it once; None if it can."""
    outcome = _execute("", seconds=10, memory=MEMORY, isolated=True)
    return None if outcome.passed else outcome.output.strip() or "the sandbox did not start"


@functools.lru_cache(maxsize=2)
def tier(unsafe_exec: bool = False) -> str:
    """The strongest sandbox that this machine has, `namespaces` or `limits`; says once which it is.

    `namespaces`: no network, no files but Python's own (read-only) and 16 MB of scratch in memory, no other process
    in sight, no capability; and limits. `limits`: CPU time, memory, file size and processes are bounded, but the
    program can read the user's files and reach the network, so it is refused with a UserError unless `unsafe_exec`.
    """
    if not sys.platform.startswith("linux"):
        raise UserError("running model-written code needs Linux; leave HumanEval out on this machine")
    reason = _no_namespaces()
    if reason is None:
        log("code execution: namespaces (no network, no files of this machine, limited time and memory)")
        return "namespaces"
    if not unsafe_exec:
        raise UserError(
            f"refusing to run model-written code: this machine gives no namespaces to isolate it ({reason}), so it "
            "could read your files and reach the network. Leave HumanEval out, run as a user or in a container that "
            "may create namespaces, or accept the risk with --unsafe-exec"
        )
    log(f"code execution: limits only, as --unsafe-exec asked (no namespaces: {reason})")
    return "limits"


def run_program(program: str, seconds: float = 5.0, memory: int = MEMORY, unsafe_exec: bool = False) -> Outcome:
    """Run a Python program (standard library only) in the strongest sandbox; it passes if its last line was reached.

    seconds: wall and CPU time. memory: bytes of address space. `SystemExit`, `os._exit`, an exception, a failed
    assert or a signal before the end count as not passed.
    """
    return _execute(program, seconds, memory, isolated=tier(unsafe_exec) == "namespaces")

"""Runs Python programs that a model wrote, for HumanEval only; the chat never runs Python."""

import contextlib
import errno
import functools
import itertools
import json
import os
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import UserError, log, tr, warn
from nanochat.data.library_words import in_words
from nanochat.evals.system_calls import filter_for

OUTPUT = 64 << 10  # the most bytes of a program's output to return
MEMORY = 512 << 20  # bytes of address space for a program
ENTRIES = 100  # the number of directory entries to read at a time while removing a folder
_CHILD = Path(__file__).with_name("sandbox_child.py")
_TIMED_OUT = 124  # exit codes of the supervisor in sandbox_child.py
_NOT_SET_UP = 125
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program: whether it ran to its last line or timed out, and its output."""

    passed: bool
    timed_out: bool
    output: str


def _collect(process: subprocess.Popen[bytes], end: float) -> bytes:
    """Read a program's output until it ends, and return its first 64 KiB.

    Reading stops once time.monotonic() reaches `end`.
    """
    assert process.stdout is not None
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            block = os.read(process.stdout.fileno(), 1 << 16)
            if not block:
                break
            output += block[: OUTPUT - len(output)]
    return output


def _remove(folder: str) -> None:
    """Remove the folder of a program that has ended, however deeply its folders are nested.

    Links are removed, not followed. If something cannot be removed, only warn, so that the
    evaluation continues.
    """
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        os.chmod(folder, 0o700)
        _empty(folder)
        os.rmdir(folder)
    except OSError as failure:
        warn(
            tr(
                "the folder of a program cannot be removed: {failure}. Delete {folder} yourself",
                failure=in_words(failure),
                folder=folder,
            )
        )


def _empty(folder: str) -> None:
    """Remove the contents of a folder, however deeply its folders are nested.

    At most two folders are open at a time, and no path is remembered on the way down. The way up is
    "..", which is safe because no program is left that could move a folder.
    """
    current = os.open(folder, _OPEN_FOLDER)
    depth = 0
    try:
        while True:
            subfolder = _remove_entries(current)
            if subfolder is None and depth == 0:
                return
            neighbour = os.open(subfolder or "..", _OPEN_FOLDER, dir_fd=current)
            os.close(current)
            current = neighbour
            depth += 1 if subfolder else -1
    finally:
        os.close(current)


def _remove_entries(folder: int) -> str | None:
    """Remove files and empty folders from an open folder, up to the first subfolder with content.

    Return the name of that subfolder, or None if the folder is now empty. `folder` is its file
    descriptor.
    """
    while entries := _first_entries(folder):
        for name, is_folder in entries:
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                continue
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError as failure:
                if failure.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                os.chmod(name, 0o700, dir_fd=folder)
                return name
    return None


def _first_entries(folder: int) -> list[tuple[str, bool]]:
    """Return up to 100 names in the open folder `folder`, and for each whether it is a folder."""
    with os.scandir(folder) as entries:
        first = list(itertools.islice(entries, ENTRIES))
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in first]


def _execute(
    program: str,
    seconds: float,
    memory: int,
    isolated: bool,
) -> tuple[int, str]:
    """Run a program, and return the supervisor's exit code (0: passed) and the program's output.

    The program has a session and a temporary folder of its own.
    """
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="nanochat-exec-")
        stack.callback(_remove, folder)
        program_file = stack.enter_context(tempfile.TemporaryFile())
        program_file.write(program.encode("utf-8", "surrogatepass"))
        program_file.seek(0)
        # The kernel's list of mounts gives the folder's path without symbolic links.
        folder = os.path.realpath(folder)
        settings = {
            "isolated": isolated,
            "seconds": seconds,
            "memory": memory,
            "root": folder,
            "parent": os.getpid(),
            "calls": filter_for(),
        }
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(_CHILD), json.dumps(settings)],
                stdin=program_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={},
                start_new_session=True,
            )
        )
        try:
            # The supervisor enforces `seconds`; the margin covers its start on a busy machine.
            output = _collect(process, time.monotonic() + seconds + 10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return code, output.decode("utf-8", "replace")


def _not_possible(isolated: bool) -> str | None:
    """Return the reason why this machine cannot run a program in a sandbox, or None if it can.

    `isolated` says whether the sandbox uses namespaces.
    """
    code, output = _execute("", seconds=10, memory=MEMORY, isolated=isolated)
    if code == 0:
        return None
    return output.strip() or tr("the sandbox did not start")


@functools.lru_cache(maxsize=1)
def _no_namespaces() -> str | None:
    """Return the reason why this machine cannot isolate a program in namespaces, or None if it can.

    The result of the first attempt is cached.
    """
    return _not_possible(isolated=True)


@functools.lru_cache(maxsize=2)
def tier(unsafe_exec: bool = False) -> str:
    """Return the strongest sandbox that this machine supports, "namespaces" or "limits".

    The result is logged once for each value of `unsafe_exec`. In both tiers, a program has no
    capabilities, no network, no second process or thread, no shared memory and no keys. If it is
    started as root, it becomes the user nobody. CPU time, memory and file size are limited.

    In "namespaces", the program sees no other process, and no files except /usr, /lib, Python's own
    (all read-only) and 16 MiB of scratch space in memory. In "limits", it can read only the same
    files and write only to its own folder if the kernel has Landlock; otherwise, it can read and
    write whatever its user may. Without `unsafe_exec`, this function therefore raises UserError
    instead of returning "limits". It also raises UserError if neither tier can be set up.

    The program and the tests that grade it share a process, so a program that is written to cheat
    can pass, for example with an object that equals everything, or by calling exit() of the C
    library.
    """
    if not sys.platform.startswith("linux"):
        raise UserError(
            tr("running model-written code needs Linux: leave HumanEval out on this machine")
        )
    reason = _no_namespaces()
    if reason is None:
        log(
            tr(
                "code execution: namespaces (no network, no files of this machine, limited "
                "time and memory)"
            )
        )
        return "namespaces"
    if not unsafe_exec:
        raise UserError(
            tr(
                "refusing to run model-written code: this machine cannot isolate it in "
                "namespaces ({reason}), so the code could read your files. Leave HumanEval "
                "out, use a user or container that may create namespaces, or accept the "
                "risk with --unsafe-exec",
                reason=reason,
            )
        )
    failure = _not_possible(isolated=False)
    if failure:
        raise UserError(
            tr(
                "refusing to run model-written code, even with --unsafe-exec: its rights "
                "cannot be taken away on this machine ({failure}). Leave HumanEval out, or "
                "run it as another user",
                failure=failure,
            )
        )
    log(
        tr(
            "code execution: limits only, because of --unsafe-exec (no namespaces: {reason})",
            reason=reason,
        )
    )
    return "limits"


def run_program(
    program: str,
    seconds: float = 5.0,
    memory: int = MEMORY,
    unsafe_exec: bool = False,
) -> ProgramResult:
    """Run a Python program in this machine's strongest sandbox, and return its result.

    Only the standard library is on the import path. The program passes if it runs to its last line,
    but not if it ends early, whether by an exception, a failed assert, `SystemExit`, `os._exit` or
    a signal. `seconds` limits both wall time and CPU time, and `memory` is the limit of the address
    space in bytes. Raises UserError if tier() does, or if the sandbox cannot be set up.
    """
    isolated = tier(unsafe_exec) == "namespaces"
    code, output = _execute(program, seconds, memory, isolated)
    if code == _NOT_SET_UP:
        raise UserError(
            tr(
                "the sandbox for model-written code could not be set up: {output}. Leave "
                "HumanEval out",
                output=output.strip(),
            )
        )
    return ProgramResult(code == 0, code in (_TIMED_OUT, -signal.SIGKILL), output)

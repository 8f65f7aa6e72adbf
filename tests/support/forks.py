"""Runs `python -m` commands in forks of a process that has imported torch: its import takes seconds of each process.

    code, out, err = forks().run(["scripts.base_train", "--depth=2"], folder, variables)

The process has imported nothing of this project, so `folder` decides whose code runs.
"""

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


class Forks:
    """The process that forks."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve())]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=tempfile.gettempdir(), **pipes)
        atexit.register(self._process.communicate)

    def run(self, words: list[str], folder: Path, variables: dict[str, str], typed: str = "") -> tuple[int, str, str]:
        """Run a module with its arguments, all the environment given, and `typed` as standard input.

        Returns its exit code, and what it printed to standard output and to standard error.
        """
        with tempfile.TemporaryDirectory() as outputs:
            code = self.code(self.start(words, folder, variables, Path(outputs), typed))
            out, err = ((Path(outputs) / name).read_text() for name in ("out", "err"))
            assert code is not None
            return code, out, err

    def start(self, words: list[str], folder: Path, variables: dict[str, str], outputs: Path, typed: str = "") -> int:
        """Like `run`, without waiting: returns the number of the process, which prints to `outputs`/out and /err."""
        (outputs / "in").write_text(typed)
        request = {"words": words, "folder": str(folder), "variables": variables, "outputs": str(outputs)}
        return int(self._ask(request))

    def code(self, child: int, wait: bool = True) -> int | None:
        """The exit code of a process that was started, once; None while it runs, unless this call is to wait."""
        answer = self._ask({"child": child, "options": 0 if wait else os.WNOHANG})
        return int(answer) if answer else None

    def _ask(self, request: dict[str, Any]) -> str:
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()


@functools.lru_cache
def forks() -> Forks:
    """One process for all tests of a process."""
    return Forks()


def run_module(words: list[str], folder: str, variables: dict[str, str], outputs: str) -> int:
    """Become the command, and return its exit code."""
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(os.path.join(outputs, name), os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.dup2(os.open(os.path.join(outputs, "in"), os.O_RDONLY), 0)
    sys.stdin = open(0)  # noqa: SIM115  # as long as the process
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:1] = [folder, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the edge of a process: who asked for it gets the traceback
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if "child" in request:
            ended, status = os.waitpid(request["child"], request["options"])
            print(os.waitstatus_to_exitcode(status) if ended else "", flush=True)
            continue
        child = os.fork()
        if child == 0:
            os._exit(run_module(**request))
        print(child, flush=True)


if __name__ == "__main__":
    main()

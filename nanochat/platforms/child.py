"""Runs untrusted programs in a process of their own, with limits on time and memory.

Such programs are chat templates and JSON schemas. Parent and child exchange lines of JSON. The
child runs this same file, which therefore imports nothing else from the package.
"""

import contextlib
import importlib.util
import json
import math
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

BYTES = 1 << 29  # memory limit of a child
START_SECONDS = 60.0  # for a child to start, even on a busy machine


# --- the parent ----------------------------------------------------------------------------------


class Child:
    """Answers questions with a script that runs in a child process.

    The script defines begin(setup), which returns a function that answers one question. The child
    starts with the first question, and ends with close() or with this object. If the parent is
    killed, the child ends once its current question is answered or has used up its time.
    """

    def __init__(self, script: Path, setup: Any):
        self._script = script
        self._setup = json.dumps(setup)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer to a question, or {"error": reason} if the script raises an exception.

        Returns None if the answer takes more than `seconds`, or if the child ends without one. The
        next question then starts another child. Raises RuntimeError if the child does not start.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):  # the process has ended
            process.stdin.write(json.dumps([seconds, question]) + "\n")
            process.stdin.flush()
            line = _line(process, seconds)
        if not line:
            self.close()
            return None
        return json.loads(line)

    def _start(self) -> "subprocess.Popen[str]":
        # -I: neither the current folder nor the environment can replace modules that the script
        # uses.
        command = [sys.executable, "-I", __file__, str(self._script)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self._setup + "\n")
            self._process.stdin.flush()
        if not _line(self._process, START_SECONDS):
            reason = f"within {START_SECONDS:.0f} seconds"
            with contextlib.suppress(subprocess.TimeoutExpired):
                reason = f"(exit code {self._process.wait(1)})"
            self.close()
            raise RuntimeError(f"{self._script} did not start {reason}")
        return self._process

    def close(self) -> None:
        """End the child process, if there is one. The next question starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __del__(self) -> None:
        self.close()


def _line(process: "subprocess.Popen[str]", seconds: float) -> str:
    """Return the next line that a process writes, or "" if it ends or does not write in time."""
    assert process.stdout is not None
    watch = select.poll()  # select() refuses file descriptors from 1,024 on, as busy servers have
    watch.register(process.stdout, select.POLLIN)
    return process.stdout.readline() if watch.poll(1000 * seconds) else ""


# --- the child -----------------------------------------------------------------------------------


def limit_time(seconds: float) -> None:
    """Limit this process to about `seconds` more seconds of processor time.

    If the parent has been killed, nothing else would end a computation that never finishes.
    """
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def main() -> None:
    """Answer the questions on standard input with the script named on the command line."""
    import resource

    # Ctrl-C is for the parent: when it exits, this process ends too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    spec = importlib.util.spec_from_file_location("script", sys.argv[1])
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    setup = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    answer: Any = None
    for line in sys.stdin:
        seconds, question = json.loads(line)
        limit_time(seconds)
        try:
            answer = answer or script.begin(setup)
            reply = answer(question)
        except Exception as failure:  # a process boundary: report the error to the parent
            reply = {"error": f"{type(failure).__name__}: {failure}"[:500]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

"""Runs someone else's program in a process of its own, with limits of time and memory.

Such programs are templates and JSON schemas. The parent and the child talk in lines of JSON. The
child runs this same file, which therefore imports nothing of the package.
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

BYTES = 1 << 29  # memory of a child
START_SECONDS = 60.0  # that a child may take to start on a busy machine


# --- the parent ----------------------------------------------------------------------------------


class Child:
    """Answers questions with a script that runs in a child process.

    The script has a function begin(setup), which returns a function that answers one question. The
    process starts with the first question, and it ends when this object or this process does.
    """

    def __init__(self, script: Path, setup: Any):
        self._script = script
        self._setup = json.dumps(setup)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer to a question, or {"error": reason} if the script raises an exception.

        None if the answer takes more than `seconds` or too much memory: the process has then been
        ended, and the next question starts another.
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
        # -I: neither the current folder nor the environment can put modules in the place of those
        # that the script uses.
        command = [sys.executable, "-I", __file__, str(self._script)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self._setup + "\n")
            self._process.stdin.flush()
        if not _line(self._process, START_SECONDS):
            self.close()
            raise RuntimeError(f"{self._script} did not start within {START_SECONDS:.0f} seconds")
        return self._process

    def close(self) -> None:
        """End the process; the next question starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __del__(self) -> None:
        self.close()


def _line(process: "subprocess.Popen[str]", seconds: float) -> str:
    """Return the next line of a process; empty if it ends or does not write one in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else ""


# --- the child -----------------------------------------------------------------------------------


def limit_time(seconds: float) -> None:
    """Let this process use so many more seconds of a processor, beside those that it has used.

    The parent may have been killed, and then nobody else ends a question without an end.
    """
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def main() -> None:
    """Answer questions with the script that the command line names, until standard input ends."""
    import resource

    # Ctrl-C goes to the parent, whose end ends this process.
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
        except (
            Exception,
            RecursionError,
        ) as failure:  # the edge of a process: the parent hears of it
            reply = {"error": f"{type(failure).__name__}: {failure}"[:500]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

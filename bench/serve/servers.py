"""Starts the servers that are compared, each on one thread, and counts their CPU seconds."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.processes import ROOT, environment, last_lines
from bench.serve.model import Files
from nanochat.common import UserError

START_SECONDS = 180
SLOTS = 32  # of llama.cpp's server: as many as chats
SLOT_TOKENS = 512
TICKS = os.sysconf("SC_CLK_TCK")  # per second, in which the system counts CPU time
OUR_ADDRESS = r"http://127\.0\.0\.1:(\d+)(?:.|\n)*Ctrl-C"


@dataclass(frozen=True)
class Server:
    """A running server: its port, its process, the name of its model, and fields of requests."""

    name: str
    port: int
    pid: int
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def pause(self) -> None:
        """Stop the server while others have their turn: polling would take time from them."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the paused server run."""
        os.kill(self.pid, signal.SIGCONT)

    def cpu_clock(self) -> float:
        """Return the CPU seconds of the process alone, which need no ticks to pass.

        The number of the clock is that of clock_getcpuclockid(3) on Linux.
        """
        return time.clock_gettime((~self.pid << 3) | 2)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process and of all its descendants."""
        total = 0.0
        for pid in family(self.pid):
            with contextlib.suppress(OSError):
                total += stat_seconds(Path(f"/proc/{pid}/stat").read_text())
        return total


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for parent in pids:  # the list grows while it is read
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                children = (thread / "children").read_text()
                pids += map(int, children.split())
    return pids


def stat_seconds(line: str) -> float:
    """Return the CPU seconds in a line of /proc/PID/stat, with those of ended children."""
    fields = line.rpartition(")")[2].split()  # the command before may hold spaces
    return sum(map(int, fields[11:15])) / TICKS


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], pattern: str, log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server; give its process, and the pattern's first group once the output matches.

    The output goes to `log`. Raises UserError with its last lines if the server ends before that.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=output
        )
    deadline = time.monotonic() + START_SECONDS
    try:
        while time.monotonic() < deadline and process.poll() is None:
            match = re.search(pattern, log.read_text(errors="replace"))
            if match:
                yield process, match[1]
                return
            time.sleep(0.1)
        words = last_lines(log.read_text(errors="replace"))
        raise UserError(f"the server of {name} did not start; its last lines:\n  {words}")
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server, which may be paused."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def ours(files: Files, *flags: str) -> Iterator[Server]:
    """Run our server, as a user starts it, with more flags of scripts.chat_web."""
    command = [sys.executable, "-m", "scripts.chat_web", "--headless", "--port=0"]
    command += [f"--model={files.folder}", *flags]
    with running("ours", command, OUR_ADDRESS, files.log("ours")) as (process, port):
        yield Server("ours", int(port), process.pid, files.folder.name, {"ignore_eos": True})


@contextlib.contextmanager
def transformers(files: Files) -> Iterator[Server]:
    """Run `transformers serve` with continuous batching."""
    port = free_port()
    program = "from transformers.cli.transformers import main; main()"
    command = [
        *(sys.executable, "-c", program, "serve", str(files.folder)),
        "--continuous-batching",
        "--device=cpu",
        "--dtype=bfloat16",
        f"--port={port}",
    ]
    pattern = r"(Application startup complete)"
    with running("transformers", command, pattern, files.log("transformers")) as (process, _):
        yield Server("transformers", port, process.pid, str(files.folder))


@contextlib.contextmanager
def llama_cpp(files: Files) -> Iterator[Server]:
    """Run llama.cpp's server in bf16, its faster number format."""
    task = {"path": str(files.gguf), "slots": SLOTS, "length": SLOT_TOKENS}
    command = [sys.executable, "-m", "bench.serve.llama_side", json.dumps(task)]
    pattern = r"listening on http://127\.0\.0\.1:(\d+)"
    with running("llama-cpp", command, pattern, files.log("llama-cpp")) as (process, port):
        yield Server("llama-cpp", int(port), process.pid, "model", {"ignore_eos": True})

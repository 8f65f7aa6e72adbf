"""Starts the servers that are compared, each on one thread, and counts the CPU seconds of their processes."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serve.model import Files
from nanochat.common import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS = 180
TICKS = os.sysconf("SC_CLK_TCK")  # per second, in which the system counts CPU time
PACKAGES = {"transformers": ("transformers", "uvicorn", "fastapi"), "llama-cpp": ("xllamacpp",)}
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
    "NANOCHAT_DEVICE": "cpu",
}


@dataclass(frozen=True)
class Side:
    """A running server: its port, its process, the name of its model, and fields that its requests need."""

    name: str
    port: int
    pid: int
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def check_installed(against: Sequence[str]) -> None:
    """UserError (code 2) that names the first package that a peer needs and that is not there."""
    for peer in against:
        for package in PACKAGES.get(peer, ()):
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"{peer} needs {package}: run `{sys.executable} -m pip install {package}`",
                    exit_code=2,
                )


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def stat_seconds(line: str) -> float:
    """CPU seconds of a process and of its children that have ended, from a line of /proc/PID/stat."""
    fields = line.rpartition(")")[2].split()  # a command may hold spaces
    return sum(map(int, fields[11:15])) / TICKS


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of all its descendants."""
    total = 0.0
    for each in family(pid):
        with contextlib.suppress(OSError):
            total += stat_seconds(Path(f"/proc/{each}/stat").read_text())
    return total


def pause(pid: int) -> None:
    """Stop a server that waits for its turn: one that polls would take time from the others."""
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Let a paused server run."""
    os.kill(pid, signal.SIGCONT)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], says: str, **more: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server; gives its process and what the first group of the pattern `says` found in its output. UserError
    with its last lines if it ends before that."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **ONE_THREAD, **more}, stdout=log, stderr=log
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while time.monotonic() < deadline and process.poll() is None:
                if found := re.search(says, Path(log.name).read_text(errors="replace")):
                    yield process, found[1]
                    return
                time.sleep(0.1)
            tail = "\n  ".join(Path(log.name).read_text(errors="replace").splitlines()[-5:])
            raise UserError(f"the server of {name} did not start; its last lines:\n  {tail}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                resume(process.pid)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def ours(files: Files) -> Iterator[Side]:
    """Our server, as a user starts it."""
    command = [
        sys.executable,
        "-m",
        "scripts.chat_web",
        "--headless",
        "--port=0",
        f"--model={files.folder}",
    ]
    with running("ours", command, r"http://127\.0\.0\.1:(\d+)(?:.|\n)*Ctrl-C") as (process, port):
        yield Side("ours", int(port), process.pid, files.folder.name, {"ignore_eos": True})


@contextlib.contextmanager
def transformers(files: Files) -> Iterator[Side]:
    """`transformers serve` with continuous batching."""
    port = free_port()
    command = [
        sys.executable,
        "-c",
        "from transformers.cli.transformers import main; main()",
        "serve",
        str(files.folder),
        "--continuous-batching",
        "--device=cpu",
        "--dtype=bfloat16",
        f"--port={port}",
    ]
    with running("transformers", command, r"(Application startup complete)") as (process, _):
        yield Side("transformers", port, process.pid, str(files.folder))


@contextlib.contextmanager
def llama_cpp(files: Files, dtype: str, chats: int) -> Iterator[Side]:
    """llama.cpp's server with the GGUF file of a number format, with as many slots as there are chats."""
    task = {"path": str(files.gguf[dtype]), "slots": chats, "length": 512}
    command = [sys.executable, "-m", "bench.serve.llama_side", json.dumps(task)]
    with running("llama-cpp", command, r"listening on http://127\.0\.0\.1:(\d+)") as (
        process,
        port,
    ):
        yield Side(f"llama-cpp {dtype}", int(port), process.pid, "model", {"ignore_eos": True})

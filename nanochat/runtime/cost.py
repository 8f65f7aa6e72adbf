"""Measures the wall time, CPU time and memory of a command and all its processes, for the report.

python -m nanochat.runtime.cost NAME -- COMMAND ...    # runs COMMAND and adds its costs to report/stages.json
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from nanochat.common import UserError, base_dir, read_json, write_json

EVERY_SECONDS = 0.5  # between samples of memory, at least
SHARE = 0.005  # of the time that samples may take: the kernel walks all pages of a process for each
WRITE_SECONDS = 5.0  # between updates of the file, so that a kill loses little


def stages_file() -> Path:
    """The file with the costs of all stages."""
    return base_dir() / "report" / "stages.json"


def read_stages() -> dict[str, dict[str, float]]:
    """The costs of each stage, in the order of their first runs: minutes, cpu_minutes, memory_gb and runs."""
    return read_json(stages_file()) if stages_file().exists() else {}


def _descendants(root: int) -> list[int]:
    """A process, its children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def _cost(pids: list[int]) -> tuple[int, dict[int, float]]:
    """The memory of these processes in bytes, and the CPU seconds of each. PSS counts shared memory only once."""
    memory, seconds, tick = 0, {}, os.sysconf("SC_CLK_TCK")
    for pid in pids:
        with contextlib.suppress(
            OSError, ValueError, IndexError
        ):  # a process may end at any moment
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds[pid] = (int(fields[11]) + int(fields[12])) / tick
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
            memory += 1024 * int(line.split()[1])
    return memory, seconds


def _ended_children() -> float:
    """CPU seconds of all children that have ended, including those too brief to be sampled, and their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(name: str, command: list[str]) -> int:
    """Run a command and return its exit code; meanwhile forward signals to the command and update its costs on disk."""
    before = read_stages().get(name, {})
    start, others = time.monotonic(), _ended_children()
    try:
        process = subprocess.Popen(command)
    except OSError as failure:
        raise UserError(
            f"{command[0]} cannot be run: {failure.strerror}. Check the name of the command.",
            exit_code=127,
        ) from failure

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal also sends Ctrl-C to the command itself
    peak, seconds, written = 0, {}, start

    def write() -> None:
        stages = read_stages()
        stages[name] = {
            "minutes": before.get("minutes", 0.0) + (time.monotonic() - start) / 60,
            "cpu_minutes": before.get("cpu_minutes", 0.0)
            + max(sum(seconds.values()), _ended_children() - others) / 60,
            "memory_gb": max(before.get("memory_gb", 0.0), peak / 1e9),
            "runs": before.get("runs", 0) + 1,
        }
        write_json(stages_file(), stages)

    if Path("/proc/self/smaps_rollup").exists():
        while process.poll() is None:
            sampling = time.thread_time()
            memory, cpu = _cost(_descendants(process.pid))
            peak, seconds = max(peak, memory), {**seconds, **cpu}
            if time.monotonic() - written > WRITE_SECONDS:
                written = time.monotonic()
                write()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(EVERY_SECONDS, (time.thread_time() - sampling) / SHARE))
    code = process.wait()
    write()
    return code


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) < 3 or words[1] != "--":
        raise UserError("usage: python -m nanochat.runtime.cost NAME -- COMMAND ...", exit_code=2)
    code = measure(words[0], words[2:])
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(mistake.exit_code)

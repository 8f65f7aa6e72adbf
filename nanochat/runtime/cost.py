"""Measures the wall time, CPU time and memory that a command and its child processes use.

python -m nanochat.runtime.cost NAME -- COMMAND ...

This runs COMMAND and adds its costs to report/stages.json, which the report reads.
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

from nanochat.common import UserError, base_dir, read_json, tr, write_json
from nanochat.data.library_words import os_problem

EVERY_SECONDS = 0.5  # the shortest time between two samples
# The largest share of a long run's time to spend on samples, each of which walks all pages.
SHARE = 0.005
WRITE_SECONDS = 5.0  # the time between updates of the file, so that a kill loses little


def stages_file() -> Path:
    """Return the path of report/stages.json, which holds the costs of all stages."""
    return base_dir() / "report" / "stages.json"


def read_stages() -> dict[str, dict[str, float]]:
    """Return a dict from each stage to its minutes, cpu_minutes, memory_gb and runs.

    Stages come in the order in which they first ran. If there is no file, the dict is empty.
    """
    path = stages_file()
    return read_json(path) if path.exists() else {}


def _stat_fields(pid: str) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the command's name, from the state on."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()


def _descendants(root: int) -> list[int]:
    """Return the IDs of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int(_stat_fields(path.name)[1])
                children.setdefault(parent, []).append(int(path.name))
    descendants = []
    unvisited = [root]
    while unvisited:
        pid = unvisited.pop()
        descendants.append(pid)
        unvisited += children.get(pid, [])
    return descendants


def _cost(pids: list[int]) -> tuple[int, dict[int, float]]:
    """Return the total memory of processes in bytes, and a dict from their IDs to CPU seconds.

    Memory is measured as PSS, which divides shared memory among the processes that share it.
    Values that cannot be read, such as those of processes that have ended, are left out.
    """
    memory = 0
    cpu_seconds = {}
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    for pid in pids:
        # A process may end at any moment.
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat_fields(str(pid))
            user_ticks = int(fields[11])
            system_ticks = int(fields[12])
            cpu_seconds[pid] = (user_ticks + system_ticks) / ticks_per_second
            memory += _pss(pid)
    return memory, cpu_seconds


def _pss(pid: int) -> int:
    """Return the PSS of a process in bytes: its own memory, and its share of shared memory."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise ValueError("smaps_rollup has no Pss")


def _ended_children() -> float:
    """Return the CPU seconds of all descendants that have ended and been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class _Costs:
    """Measures one run of a stage, and combines its costs with those of earlier runs."""

    def __init__(self, name: str):
        self.name = name
        self._earlier = read_stages().get(name, {})
        self._start = time.monotonic()
        self._ended_before = _ended_children()
        self._peak_memory = 0
        self._cpu_seconds: dict[int, float] = {}  # process ID -> its CPU time

    def sample(self, pid: int) -> None:
        """Measure the memory and the CPU time of a process and its descendants."""
        memory, cpu_seconds = _cost(_descendants(pid))
        self._peak_memory = max(self._peak_memory, memory)
        self._cpu_seconds |= cpu_seconds

    def write(self) -> None:
        """Write the stage's total times and peak memory, over all runs, to report/stages.json."""
        seconds = time.monotonic() - self._start
        ended_seconds = _ended_children() - self._ended_before
        cpu_seconds = max(sum(self._cpu_seconds.values()), ended_seconds)
        memory_gb = self._peak_memory / 1e9
        earlier = {"minutes": 0.0, "cpu_minutes": 0.0, "memory_gb": 0.0, "runs": 0, **self._earlier}
        stages = read_stages()
        stages[self.name] = {
            "minutes": earlier["minutes"] + seconds / 60,
            "cpu_minutes": earlier["cpu_minutes"] + cpu_seconds / 60,
            "memory_gb": max(earlier["memory_gb"], memory_gb),
            "runs": earlier["runs"] + 1,
        }
        write_json(stages_file(), stages)


def measure(name: str, command: list[str]) -> int:
    """Run a command, add its costs to stages.json, and return its exit code (-N after signal N).

    The costs are written at the end and, on Linux, regularly until then. SIGTERM and SIGUSR1 are
    forwarded to the command. Raises UserError (exit code 127) if the command cannot be started.
    """
    costs = _Costs(name)
    try:
        process = subprocess.Popen(command)
    except OSError as failure:
        raise UserError(
            tr(
                "{command} cannot be run: {problem}. Check the name of the command.",
                command=command[0],
                problem=os_problem(failure),
            ),
            exit_code=127,
        ) from failure

    def forward(signal_number: int, _: FrameType | None) -> None:
        process.send_signal(signal_number)

    for signal_number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signal_number, forward)
    # A terminal also sends Ctrl-C to the command itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if Path("/proc/self/smaps_rollup").exists():
        _sample_until_end(process, costs)
    code = process.wait()
    costs.write()
    return code


def _sample_until_end(process: subprocess.Popen[bytes], costs: _Costs) -> None:
    """Sample a process and write its costs regularly until it ends.

    The intervals at most double, so that a command that ends soon is sampled several times.
    """
    start = time.monotonic()
    written_at = start
    while process.poll() is None:
        sampling_start = time.thread_time()
        costs.sample(process.pid)
        if time.monotonic() - written_at > WRITE_SECONDS:
            written_at = time.monotonic()
            costs.write()
        sampling_seconds = time.thread_time() - sampling_start
        with contextlib.suppress(subprocess.TimeoutExpired):
            elapsed = time.monotonic() - start
            process.wait(max(EVERY_SECONDS, min(elapsed, sampling_seconds / SHARE)))


def main(words: list[str]) -> int:
    """Measure the command in `words`, and return its exit code, or 128 + N if signal N ended it.

    Raises UserError (exit code 2) if the words are not NAME -- COMMAND.
    """
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

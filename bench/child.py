"""The end of a benchmark that runs in a process of its own: takes a task and answers requests.

Tasks, requests and answers are lines of JSON. Only the standard library is imported here: in such a
process `nanochat` may be another checkout's package.
"""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def task() -> dict[str, Any]:
    """Return the task that the parent gave as the first argument."""
    return json.loads(sys.argv[1])


def answers() -> Callable[[Any], None]:
    """Return a function that answers the parent; other output of this process goes to stderr.

    From now on, this process ends when its parent does, so that no killed benchmark trains on.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: Any) -> None:
        print(json.dumps(content), file=stream, flush=True)

    return answer


def _end_with(parent: int) -> None:
    """End this process soon after its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def requests() -> Iterator[Any]:
    """Yield the requests of the parent until it closes its end."""
    for line in sys.stdin:
        yield json.loads(line)


def time_steps(step: Callable[..., float], batches: Iterable[Any]) -> dict[str, Any]:
    """Train on each batch; return the CPU seconds and loss of each step, and the peak memory."""
    seconds = []
    losses = []
    for batch in batches:
        start = time.process_time()
        loss = step(*batch)
        seconds.append(time.process_time() - start)
        losses.append(loss)
    return {"seconds": seconds, "losses": losses, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    if sys.platform == "linux":  # getrusage counts the memory of the parent process there too
        return memory_of(os.getpid(), "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_of(pid: int, field: str) -> int:
    """Return a field of a Linux process's status in bytes: VmRSS, or VmHWM for its peak."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of some work, and the CPU seconds that it takes over all threads."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the CPU seconds that some work takes over all threads of this process."""
    return timed(work)[1]

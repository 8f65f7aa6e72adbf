"""Send tasks to worker processes as lines of JSON, and collect their answers."""

import contextlib
import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.common import UserError, tr
from nanochat.data.limits import cores

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_PROCESSES = 32  # by default, since each process holds a few hundred MB
BYTES_THAT_PAY = 8_000_000  # reading fewer bytes of shards is faster than starting a process for it
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # not passed on, as a worker is not a rank
Message = dict[str, Any]
Say = Callable[[Message], None]


# --- the parent ----------------------------------------------------------------------------------


def processes_for(
    size: int,
    tasks: int,
    requested: int | None,
) -> int:
    """Return the number of processes to use for tasks that read `size` bytes of shards.

    This is `requested`, or by default as many as save time (0 if none does), but at most one per
    task.
    """
    worthwhile = min(cores(), MOST_PROCESSES, size // BYTES_THAT_PAY)
    return min(requested or worthwhile, tasks)


def work(
    module: str,
    setup: Mapping[str, Any],
    tasks: Sequence[Mapping[str, Any]],
    processes: int,
    keep: Sequence[int] = (),
) -> Generator[tuple[int, Message], None, None]:
    """Run tasks in worker processes, yielding (task index, message) for each message they send.

    The processes run `python -m MODULE` for the given `module`, which calls serve(), and inherit
    the file descriptors in `keep`. The last message of a task has the key "result". A UserError or
    an OSError of a task is raised here too, and any other exception becomes a RuntimeError. Raises
    UserError if a process ends early, for example because it was killed. Closing the iterator ends
    the processes, which also end when this process ends.
    """
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
    for task_number in range(len(tasks)):
        pending.put(task_number)
    workers: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []

    def drive(process: subprocess.Popen[str]) -> None:
        """Give tasks to one process until no task is left or one fails."""
        to_send = [setup]
        while True:
            try:
                task_number = pending.get_nowait()
            except queue.Empty:
                return
            _send(process, [*to_send, tasks[task_number]])
            to_send = []
            message = Message()
            while "result" not in message and "raised" not in message:
                message = _receive(process)
                answers.put((task_number, message))
            if "raised" in message:
                return

    try:
        for _ in range(min(processes, len(tasks))):
            process = _start(module, keep)
            workers.append(process)
            thread = threading.Thread(target=drive, args=(process,), daemon=True)
            threads.append(thread)
            thread.start()
        unfinished = len(tasks)
        while unfinished:
            task_number, message = answers.get()
            if "raised" in message:
                raise _failure(message, tasks[task_number])
            if "result" in message:
                unfinished -= 1
            yield task_number, message
    finally:
        _end(workers, threads)


def _start(module: str, keep: Sequence[int]) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    for name in RANK_VARIABLES:
        environment.pop(name, None)
    python_path = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    return subprocess.Popen(
        [sys.executable, "-m", module],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        pass_fds=tuple(keep),
    )


def _send(process: subprocess.Popen[str], messages: Sequence[Mapping[str, Any]]) -> None:
    lines = [json.dumps(message) for message in messages]
    # A broken pipe means that the process has ended, which reading will show.
    with contextlib.suppress(BrokenPipeError):
        print(*lines, sep="\n", file=process.stdin, flush=True)


def _receive(process: subprocess.Popen[str]) -> Message:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        return {"raised": "end", "code": process.wait()}
    return json.loads(line)


def _end(processes: Sequence[subprocess.Popen[str]], threads: Sequence[threading.Thread]) -> None:
    for process in processes:
        process.kill()
        process.wait()
    for thread in threads:
        thread.join()
    for process in processes:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _failure(message: Message, task: Mapping[str, Any]) -> BaseException:
    """Return the exception to raise for a task that a process did not finish."""
    kind = message["raised"]
    name = task.get("name", "a task")
    if kind == "UserError":
        return UserError(message["text"], message["code"])
    if kind == "OSError":
        return OSError(message["errno"], message["text"], message["filename"])
    if kind == "end":
        code = message["code"]
        if code == -signal.SIGKILL:
            ending = tr(
                "was killed by signal {signal}, perhaps because memory ran out", signal=-code
            )
        elif code < 0:
            ending = tr("was killed by signal {signal}", signal=-code)
        else:
            ending = tr("ended with code {code}", code=code)
        return UserError(
            tr(
                "the process that worked on {name} {ending}. Finished work is kept: type "
                "the same command again to resume; if it fails again, use fewer processes: "
                "python -m nanochat.prepare -w N",
                name=name,
                ending=ending,
            )
        )
    return RuntimeError(f"a process that worked on {name} failed:\n{message['text']}")


# --- the workers ---------------------------------------------------------------------------------


def serve(begin: Callable[[Message], Callable[[Message, Say], Message]]) -> None:
    """Run the tasks that arrive on standard input until it closes, and send back their results.

    `begin(setup)` returns the function that runs a task and returns its result. That function may
    send further messages to the parent by calling its second argument.
    """
    with contextlib.suppress(ValueError):
        # Ctrl-C reaches the parent as well, which ends this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Messages are written to the real standard output; anything printed goes to standard error.
    wire = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        # The parent has no more tasks or has died. In both cases no unfinished task may be
        # completed.
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()

    def say(message: Message) -> None:
        print(json.dumps(message), file=wire, flush=True)

    do_task = begin(json.loads(lines.get()))
    while True:
        task = json.loads(lines.get())
        try:
            say({"result": do_task(task, say)})
        except UserError as mistake:
            say({"raised": "UserError", "text": str(mistake), "code": mistake.exit_code})
        except OSError as failure:
            filename = None if failure.filename is None else str(failure.filename)
            say(
                {
                    "raised": "OSError",
                    "errno": failure.errno or errno.EIO,
                    "text": failure.strerror or str(failure),
                    "filename": filename,
                }
            )
        except Exception:  # a process boundary: the parent raises an error with this text
            say({"raised": "Exception", "text": traceback.format_exc()})
